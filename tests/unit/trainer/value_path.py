"""Samples, and a critic and a policy that give known numbers, for the tests of the value path."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from megatron_dapo.algorithms.objective import PolicyObjective
from megatron_dapo.config import Config, config_from_dict
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.trainer.actor_learner import PolicyLearner
from megatron_dapo.trainer.critic_learner import CriticLearner
from megatron_dapo.trainer.offload import DeviceModels
from megatron_dapo.trainer.recorder import Phases
from megatron_dapo.trainer.updater import add_sums


@dataclass
class Result:
    metrics: dict[str, float]
    grad_norm: float = 1.0
    applied: bool = True


@dataclass
class Outputs:
    logprobs: torch.Tensor
    entropy: torch.Tensor


@dataclass
class FakeCritic:
    """The value of a position is a tenth of the token id there, plus one for every step made."""

    num_steps: int = 0
    applies: bool = True
    grad_norm: float = 1.0
    learning_rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    trained: list[list[str]] = field(default_factory=list)
    layout: ParallelLayout = field(default_factory=lambda: ParallelLayout(1))
    architecture: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(attention_parity=0))
    rank: int = 0
    replays_routing: bool = False
    reads_supports: bool = False

    def finish_steps(self) -> None:
        """The weights are whole."""

    def forward_values(self, micro_batches):
        return [micro_batch.token_ids.float() / 10 + self.num_steps for micro_batch in micro_batches]

    def train_step(self, micro_batches, loss_fn, learning_rate):
        totals: dict[str, float] = {}
        loss = 0.0
        for index, values in enumerate(self.forward_values(micro_batches)):
            part, metrics = loss_fn(micro_batches[index], values, index)
            loss += float(part)
            add_sums(totals, {name: float(value) for name, value in metrics.items()})
        self.losses.append(loss)
        self.learning_rates.append(learning_rate)
        self.trained.append([name for micro_batch in micro_batches for name in micro_batch.sample_ids])
        self.num_steps += self.applies
        return Result(totals, self.grad_norm, self.applies)


class FakePolicy:
    """A policy that gives every token the log-prob -1 - `steps made` * `pull`; records the requests."""

    layout, rank, part = ParallelLayout(1), 0, SimpleNamespace(group=None)
    architecture, replays_routing, reads_supports = SimpleNamespace(attention_parity=0), False, False

    def __init__(self, pull: float = 0.0) -> None:
        self._pull = pull
        self.num_steps = 0
        self.calls: list[str] = []
        self.ratios: list[float] = []  # mean of each step
        self.learning_rates: list[float] = []

    def finish_steps(self) -> None:
        """The weights are whole."""

    def copy_weights(self):
        return self.num_steps

    @contextmanager
    def with_weights(self, weights):
        current, self.num_steps = self.num_steps, weights
        yield
        self.num_steps = current

    def forward_logprobs(self, micro_batches, temperature):
        self.calls.append("logprobs")
        return [self._outputs(micro_batch.num_tokens) for micro_batch in micro_batches]

    def _outputs(self, num_tokens: int) -> Outputs:
        return Outputs(torch.full((num_tokens,), -1.0 - self.num_steps * self._pull), torch.zeros(num_tokens))

    def train_step(self, micro_batches, loss_fn, temperature, learning_rate):
        self.calls.append("train")
        totals: dict[str, Any] = {}
        for index, micro_batch in enumerate(micro_batches):
            _, metrics = loss_fn(micro_batch, self._outputs(micro_batch.num_tokens), index)
            add_sums(totals, metrics)
        totals = {name: float(value) for name, value in totals.items()}
        self.ratios.append(totals["ratio_sum"] / totals["num_tokens"])
        self.num_steps += 1
        self.learning_rates.append(learning_rate)
        return Result(totals)


def make_config(**sections: dict[str, Any]) -> Config:
    """A configuration whose mini-batches hold everything, in the order of the rollout batch."""
    tree: dict[str, Any] = {
        "model": {"path": "m"},
        "data": {"train_paths": ["t"]},
        "run": {"total_steps": 10},
        "rollout": {"group_size": 2, "max_response_tokens": 8},
        "training": {"mini_batch_prompts": 64, "micro_batch_tokens": 64, "shuffle": False},
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": 0},
        "critic": {"loss": "squared", "optimizer": {"learning_rate": 1e-2, "warmup_steps": 2}},
        "advantage_estimation": {"whiten": False},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    return config_from_dict(tree)


def make_critic_learner(critic: FakeCritic, config: Config | None = None) -> CriticLearner:
    return CriticLearner(critic, config or make_config())


def make_policy_learner(policy: FakePolicy, config: Config, reference: FakePolicy | None = None) -> PolicyLearner:
    phases = Phases()
    return PolicyLearner(policy, reference, PolicyObjective(config.algorithm), config, phases, DeviceModels({}, phases))
