"""Parity of the served model with the trained one: log-probs of fixed prompts, from the trainer and from every server.

Checksums prove that bytes arrived; this proves that both sides interpret them alike (names, rotary settings, scaling,
kernels). After the first weight sync the check is a gate, later only a measurement.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

from megatron_dapo.parallel.coordination import Coordination
from megatron_dapo.precision import RECIPES, recipe_name
from megatron_dapo.trainer.context import RunContext
from megatron_dapo.types import Prompt, TrainSample

if TYPE_CHECKING:
    from megatron_dapo.engines.sglang.cluster import SglangEngines
    from megatron_dapo.trainer.connect_engines import Engines
    from megatron_dapo.trainer.learner import Learner

logger = logging.getLogger(__name__)

NUM_PROMPTS = 8


class ParityError(RuntimeError):
    """Raised if a server's log-probs do not match the trainer's weights."""

    is_final = True  # the configuration causes it


class Parity:
    """Compares servers with the trainer on fixed token sequences of at least two tokens each: after this process's first
    weight sync, then every `interval` train steps (0: never again). Collective.

    Args:
        sequences: at least one for every data-parallel rank.
        learner: computes the trainer's side; see `Learner.compare`.
        gate: largest allowed mean |difference| in nats.
        as_served: inside it, the trainer's weights have the servers' quantized values. None if servers hold the trained
            weights. Collective.
        coordination: the ranks that hold the policy.
        servers: those that `check_all` compares.
    """

    def __init__(
        self,
        sequences: Sequence[Sequence[int]],
        learner: Learner,
        gate: float,
        as_served: Callable[[], AbstractContextManager[None]] | None = None,
        coordination: Coordination | None = None,
        servers: SglangEngines | None = None,
        interval: int = 0,
    ) -> None:
        short = [index for index, tokens in enumerate(sequences) if len(tokens) < 2]
        if short or not sequences:
            raise ValueError(
                f"parity probe: sequences {short[:4]} have fewer than 2 tokens; nothing is predicted in them"
            )
        self._sequences = [list(tokens) for tokens in sequences]
        self._learner = learner
        self._gate = gate
        self._as_served = as_served
        self._coordination = coordination or Coordination()
        self._servers = servers
        self._interval = interval
        self._is_first = True

    def is_due(self, train_step: int) -> bool:
        """Return True if servers are due for a check after this train step's weight sync."""
        return self._is_first or self._interval > 0 and train_step % self._interval == 0

    def check_all(self) -> None:
        """Compare every server; raises ParityError."""
        assert self._servers is not None, "build_parity names the servers"
        self._is_first = False
        for server in range(self._servers.num_servers):
            self.check(f"server {server}", self._servers.prompt_logprobs(server))

    def check(
        self, server: str, prompt_logprobs: Callable[[Sequence[int]], Sequence[float]] | None
    ) -> dict[str, float]:
        """Return the mismatch with one server. `prompt_logprobs`: on rank 0 (None on others), the server's log-probs of
        all tokens but the first, at temperature 1.

        Raises ParityError on every rank if the mean |difference| is above the gate or not a number.
        """
        answers = None if prompt_logprobs is None else [list(prompt_logprobs(tokens)) for tokens in self._sequences]
        served = self._coordination.broadcast(answers)
        samples = [_sample(*pair) for pair in enumerate(zip(self._sequences, served, strict=True))]
        metrics = self._mismatch(server, samples)
        gap, worst = metrics["mismatch/abs_logprob_diff_mean"], metrics["mismatch/abs_logprob_diff_max"]
        logger.info("parity with %s on %d prompts: mean |d log-prob| %.3g, max %.3g", server, len(served), gap, worst)
        # Not `gap > gate`, because NaN must be rejected too.
        if not gap <= self._gate:
            raise ParityError(
                f"{server} does not serve the trainer's model: mean |log-prob difference| {gap:.3g} nats on "
                f"{len(served)} fixed prompts, mismatch.step0_max_mean_abs (sglang.fp8_step0_max_mean_abs if activations "
                f"are rounded to FP8) allows {self._gate:.3g}. The bytes arrived (checksums are equal): compare the two "
                "sides' config.json, precision and kernels"
            )
        return metrics

    def _mismatch(self, server: str, samples: Sequence[TrainSample]) -> dict[str, float]:
        # Servers compute prompt log-probs at temperature 1, whatever the rollout's is.
        trained = self._learner.compare(samples, 1.0)
        if self._as_served is None:
            return trained
        logger.info(
            "%s serves quantized weights: mean |d log-prob| %.3g, max %.3g against the trained ones on %d prompts",
            server,
            trained["mismatch/abs_logprob_diff_mean"],
            trained["mismatch/abs_logprob_diff_max"],
            len(samples),
        )
        with self._as_served():
            return self._learner.compare(samples, 1.0)


def build_parity(
    context: RunContext, engines: Engines, prompts: Sequence[Prompt] | None, learner: Learner
) -> Parity | None:
    """Return the probe of the run's servers; None without servers. `prompts`: on rank 0.

    Collective over the policy's ranks.
    """
    if engines.servers is None:
        return None
    config, topology = context.config, context.topology
    assert topology.policy.coordination is not None, "ranks with servers hold the policy"
    coordination = topology.policy.coordination
    token_ids = None if prompts is None else [prompt.token_ids for prompt in prompts]
    # Use at least one for every data-parallel rank, so that no policy replica goes unchecked.
    sequences = sequences_to_probe(token_ids, max(NUM_PROMPTS, topology.policy_layout.data), coordination)
    gate = config.mismatch.step0_max_mean_abs
    # FP8 servers on GPUs and an FP8 trainer also round activations, each in its own way.
    computes_in_fp8 = RECIPES[recipe_name(config.precision.recipe, config.model.dtype)].is_fp8
    if engines.as_served is not None and (torch.cuda.is_available() or computes_in_fp8):
        gate = config.mismatch_gate
    interval = config.sglang.parity_interval
    return Parity(sequences, learner, gate, engines.as_served, coordination, engines.servers, interval)


def _sample(index: int, pair: tuple[list[int], list[float]]) -> TrainSample:
    tokens, logprobs = pair
    if len(logprobs) != len(tokens) - 1:
        raise ParityError(
            f"the server gave {len(logprobs)} log-probs for {len(tokens)} tokens; {len(tokens) - 1} follow the first"
        )
    return TrainSample(
        sample_id=f"parity/{index}",
        group_index=index,
        tokens=torch.tensor(tokens),
        prompt_length=1,  # a server gives log-probs of all tokens but the first
        loss_mask=torch.ones(len(logprobs)),
        advantages=torch.zeros(len(logprobs)),
        rollout_logprobs=torch.tensor(logprobs, dtype=torch.float32),
    )


def sequences_to_probe(
    prompts: Sequence[Sequence[int]] | None, count: int, coordination: Coordination | None = None
) -> list[list[int]]:
    """Return `count` token sequences of at least two tokens from rank 0's prompts, repeated if there are fewer.

    The same on every rank; empty if no prompt is long enough.
    """
    chosen: list[list[int]] = []
    if prompts is not None:
        usable = [list(prompt) for prompt in prompts if len(prompt) > 1][:count]
        chosen = [usable[index % len(usable)] for index in range(count)] if usable else []
    return (coordination or Coordination()).broadcast(chosen if prompts is not None else None)
