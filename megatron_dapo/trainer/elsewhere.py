"""What a rank has in the place of a model that other ranks hold, and of the engines that the policy's ranks have.

Each stands where the thing itself would and does what a bystander does: nothing, or the bystander's part of a
collective over the whole world.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from megatron_dapo.parallel.rank0_commands import Rank0Commands
from megatron_dapo.trainer.actor_learner import LearnerCounters, LearnResult
from megatron_dapo.trainer.critic_learner import CriticCounters
from megatron_dapo.trainer.driven_engine import Engines
from megatron_dapo.trainer.response_tokens import receive_response_tokens
from megatron_dapo.types import Completion, GenerationRequest, TrainSample

Result = TypeVar("Result")


class RemotePolicy:
    """The policy's learner on the critic's ranks. Its counters are what the policy's ranks tell."""

    def __init__(self) -> None:
        self.counters = LearnerCounters()

    def learn(self, samples: Sequence[TrainSample], train_step: int, mismatch_gate: float | None = None) -> LearnResult:
        """Nothing: what the policy learned is told afterwards."""
        return LearnResult({}, 0)

    def observe(
        self, samples: Sequence[TrainSample], train_step: int, mismatch_gate: float | None = None
    ) -> LearnResult:
        """Nothing, like `learn`."""
        return LearnResult({}, 0)

    def response_logprobs(self, samples: Sequence[TrainSample]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """See `PolicyLearner.response_logprobs`."""
        policy = receive_response_tokens(samples)
        return policy, receive_response_tokens(samples)

    def compare(self, samples: Sequence[TrainSample], temperature: float) -> dict[str, float]:
        raise AssertionError("servers are compared with the policy on its own ranks")


class RemoteCritic:
    """The critic's learner on the policy's ranks. Its counters are what the critic's ranks tell."""

    def __init__(self) -> None:
        self.counters = CriticCounters()

    def values(self, samples: Sequence[TrainSample]) -> list[torch.Tensor]:
        """See `CriticLearner.values`."""
        return receive_response_tokens(samples)

    def learn(self, samples: Sequence[TrainSample], train_step: int) -> dict[str, float]:
        """Nothing: what the critic learned is told afterwards."""
        return {}


class NoEngine:
    """`CollectiveEngine` and `Publisher` on a rank without an engine."""

    policy_version = -1
    num_unfinished = 0

    def __init__(self, commands: Rank0Commands) -> None:
        self._commands = commands

    def run_on_rank0(self, body: Callable[[], Result]) -> Result | None:
        """Wait for rank 0 like the ranks with engines; its commands need nothing of this one."""
        return self._commands.run_on_rank0(body)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        raise AssertionError("rank 0 submits")

    def poll(self) -> list[Completion]:
        raise AssertionError("rank 0 polls")

    def abort(self) -> list[Completion]:
        raise AssertionError("rank 0 aborts")

    def publish(self, version: int) -> None:
        """Weights go from the policy's ranks to theirs."""


def without_engines(commands: Rank0Commands) -> Engines:
    """The engines of a rank that has none."""
    nothing = NoEngine(commands)
    return Engines(nothing, nothing)
