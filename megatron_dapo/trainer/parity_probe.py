"""Are the weights that are served those that are trained? Log-probs of fixed prompts, trainer against every server.

Checksums prove that bytes arrived; this proves that both sides mean the same by them (names, rotary settings, scaling,
kernels). At the first update it is a gate, later a meter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from megatron_dapo.parallel.collectives import broadcast_json
from megatron_dapo.trainer.driven_engine import ServedModels
from megatron_dapo.types import TrainSample

logger = logging.getLogger(__name__)

# Samples with an engine's log-probs -> the mismatch metrics, on every rank.
Compare = Callable[[Sequence[TrainSample]], dict[str, float]]
# One log-prob for every token but the first, at temperature 1.
PromptLogprobs = Callable[[Sequence[int]], Sequence[float]]


class ParityError(RuntimeError):
    """A server's log-probs are not those of the trainer's weights."""


class ParityProbe:
    """Compares a server with the trainer on fixed token sequences of at least two tokens each. Collective."""

    def __init__(
        self,
        sequences: Sequence[Sequence[int]],
        compare: Compare,
        gate: float,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """`gate`: largest mean |difference| in nats. There must be a sequence for every data-parallel rank. `group`: the
        ranks that hold the policy (None: all there are)."""
        short = [index for index, tokens in enumerate(sequences) if len(tokens) < 2]
        if short or not sequences:
            raise ValueError(
                f"parity probe: sequences {short[:4]} have fewer than 2 tokens; nothing is predicted in them"
            )
        self._sequences = [list(tokens) for tokens in sequences]
        self._compare = compare
        self._gate = gate
        self._group = group

    def check(self, server: str, prompt_logprobs: PromptLogprobs | None) -> dict[str, float]:
        """The mismatch with one server; `prompt_logprobs` asks it, on rank 0 (None elsewhere).

        Raises ParityError on every rank where the mean |difference| is above the gate or not a number.
        """
        asked = None if prompt_logprobs is None else [list(prompt_logprobs(tokens)) for tokens in self._sequences]
        served = broadcast_json(asked, group=self._group)
        samples = [_sample(*pair) for pair in enumerate(zip(self._sequences, served, strict=True))]
        metrics = self._mismatch(server, samples)
        gap, worst = metrics["mismatch/abs_logprob_diff_mean"], metrics["mismatch/abs_logprob_diff_max"]
        logger.info("parity with %s on %d prompts: mean |d log-prob| %.3g, max %.3g", server, len(served), gap, worst)
        if not gap <= self._gate:
            raise ParityError(
                f"{server} does not serve the trainer's model: mean |log-prob difference| {gap:.3g} nats on "
                f"{len(served)} fixed prompts, mismatch.step0_max_mean_abs (sglang.fp8_step0_max_mean_abs where activations are rounded to FP8) allows {self._gate:.3g}. The bytes arrived "
                "(checksums are equal): compare the two sides' config.json, precision and kernels"
            )
        return metrics

    def _mismatch(self, server: str, samples: Sequence[TrainSample]) -> dict[str, float]:
        return self._compare(samples)


class RoundedParityProbe(ParityProbe):
    """A server that holds quantized weights is held against a trainer with the same ones; what the rounding itself does is
    told beside it."""

    def __init__(
        self,
        sequences: Sequence[Sequence[int]],
        compare: Compare,
        gate: float,
        as_served: Callable[[], AbstractContextManager[None]],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """`as_served`: inside it the trainer's weights are those of the servers. Collective."""
        super().__init__(sequences, compare, gate, group)
        self._as_served = as_served

    def _mismatch(self, server: str, samples: Sequence[TrainSample]) -> dict[str, float]:
        trained = self._compare(samples)
        logger.info(
            "%s serves quantized weights: mean |d log-prob| %.3g, max %.3g against the trained ones on %d prompts",
            server,
            trained["mismatch/abs_logprob_diff_mean"],
            trained["mismatch/abs_logprob_diff_max"],
            len(samples),
        )
        with self._as_served():
            return self._compare(samples)


class Parity:
    """The probe of all servers: after the first update of this process, then every `interval` train steps (0: never
    again)."""

    def __init__(self, probe: ParityProbe, served: ServedModels, interval: int) -> None:
        self._probe = probe
        self._served = served
        self._interval = interval
        self._is_first = True

    def is_due(self, train_step: int) -> bool:
        """Whether to check after the update of this train step."""
        return self._is_first or self._interval > 0 and train_step % self._interval == 0

    def check(self) -> None:
        """Compare every server. Collective; raises ParityError."""
        self._is_first = False
        for server in range(self._served.num_servers):
            self._probe.check(f"server {server}", self._served.prompt_logprobs(server))


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
        prompt_length=1,
        loss_mask=torch.ones(len(logprobs)),
        advantages=torch.zeros(len(logprobs)),
        rollout_logprobs=torch.tensor(logprobs, dtype=torch.float32),
    )


def sequences_to_probe(
    prompts: Sequence[Sequence[int]] | None, count: int, group: dist.ProcessGroup | None = None
) -> list[list[int]]:
    """`count` token sequences of at least two tokens from rank 0's prompts, repeated where there are fewer, on every
    rank of the group."""
    chosen: list[list[int]] = []
    if prompts is not None:
        usable = [list(prompt) for prompt in prompts if len(prompt) > 1][:count]
        chosen = [usable[index % len(usable)] for index in range(count)] if usable else []
    return broadcast_json(chosen if prompts is not None else None, group=group)
