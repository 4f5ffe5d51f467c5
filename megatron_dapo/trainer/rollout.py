"""Generation as the loop sees it: rank 0 collects scored groups, and every rank ends up with the same train samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from megatron_dapo.data.sample_tensors import from_tensors, to_tensors
from megatron_dapo.engines.base import PrefixReuse
from megatron_dapo.engines.sglang.client import EngineError
from megatron_dapo.engines.sglang.engine import RequestGivenUp
from megatron_dapo.parallel.collectives import broadcast_tensors
from megatron_dapo.parallel.coordination import Coordination
from megatron_dapo.recovery.signals import Stopped
from megatron_dapo.rollout.batch import CollectionExhausted, RolloutBatch
from megatron_dapo.types import Completion, CriticContext, Group, ScoredSample, TrainSample

if TYPE_CHECKING:
    from megatron_dapo.rollout.async_collector import AsyncCollector
    from megatron_dapo.trainer.build_engines import Engines


@dataclass(frozen=True)
class TrainBatch:
    """One rollout batch on every rank. The fields from `rollout` on are known to rank 0 only.

    A batch that was interrupted or failed has no samples.
    """

    samples: list[TrainSample]
    should_stop: bool
    generation_step: int
    is_interrupted: bool = False  # a signal stopped the collection
    error: Exception | None = None  # it failed; nothing it collected is lost
    rollout: RolloutBatch | None = None
    generation_seconds: float = 0.0  # how long collecting took, beside training or not
    prefix_reuse: PrefixReuse = field(default_factory=PrefixReuse)  # since the batch before


class Rollout:
    """Generates with the engines of all ranks."""

    def __init__(
        self,
        engines: Engines,
        collector: AsyncCollector | None,
        coordination: Coordination,
        *,
        filter_overlong: bool,
    ) -> None:
        """`collector`: on rank 0. `filter_overlong`: truncated responses lose their loss mask."""
        self._engines = engines
        self._collector = collector
        self._coordination = coordination
        self._filter_overlong = filter_overlong
        self._prefix_reuse = PrefixReuse()  # rank 0: up to the last batch

    def generate(self, num_groups: int) -> TrainBatch:
        """Return the next rollout batch, the same samples on every rank. The verifiers score responses as they finish.

        A signal, and an error of the collection itself, end it on all ranks together, which can then save.

        Collective. Engines on the trainer's devices sleep afterwards, until the next weight sync.
        """
        collected = self._engines.engine.run_on_rank0(lambda: self._collect(num_groups))
        if (end := self._agree_on_end(collected)) is not None:
            return end  # engines stay as they are: the same signal may have reached them
        if self._engines.servers is not None:
            self._engines.servers.sleep()
        return self._send(collected) if isinstance(collected, RolloutBatch) else self._receive()

    def _collect(self, num_groups: int) -> RolloutBatch | Exception:
        assert self._collector is not None, "rank 0 has the collector"
        try:
            return self._collector.next_batch(num_groups)
        except (Stopped, CollectionExhausted, RequestGivenUp, EngineError) as end:
            return end

    def _agree_on_end(self, collected: RolloutBatch | Exception | None) -> TrainBatch | None:
        """Return the batch of a collection that ended early, on every rank; None where it did not."""
        facts = None
        if self._collector is not None:
            ended = isinstance(collected, Exception) and {
                "interrupted": isinstance(collected, Stopped),
                "message": f"rollout rank 0 stopped: {type(collected).__name__}: {collected}",
                "generation_step": self._collector.generation_step,
            }
            facts = {"ended": ended or None}
        ended = self._coordination.broadcast(facts)["ended"]
        if ended is None:
            return None
        error = collected if isinstance(collected, Exception) else _Rank0Failed(ended["message"])
        interrupted = ended["interrupted"]
        return TrainBatch([], False, ended["generation_step"], interrupted, None if interrupted else error)

    def _send(self, batch: RolloutBatch) -> TrainBatch:
        assert self._collector is not None, "rank 0 has the collector"
        samples = build_train_samples(batch.groups, batch.training_version, filter_overlong=self._filter_overlong)
        # A few flat tensors and one JSON header: broadcasting samples one by one would take thousands of collectives.
        description, tensors = to_tensors(samples)
        facts = {"should_stop": batch.should_stop, "generation_step": self._collector.generation_step}
        self._coordination.broadcast({"description": description, **facts})
        broadcast_tensors(tensors)
        reuse, self._prefix_reuse = (
            self._engines.engine.prefix_reuse - self._prefix_reuse,
            self._engines.engine.prefix_reuse,
        )
        return TrainBatch(
            samples,
            rollout=batch,
            generation_seconds=self._collector.generation_seconds,
            prefix_reuse=reuse,
            **facts,
        )

    def _receive(self) -> TrainBatch:
        header = self._coordination.broadcast(None)
        # NCCL broadcasts on the device; packing and advantages happen on the host.
        tensors = {name: tensor.cpu() for name, tensor in broadcast_tensors(None).items()}
        return TrainBatch(
            from_tensors(header["description"], tensors), header["should_stop"], header["generation_step"]
        )


class _Rank0Failed(RuntimeError):
    """The error of a collection as the other ranks raise it."""

    is_consequence = True


def build_train_samples(
    groups: Sequence[Group], training_version: int, *, filter_overlong: bool = False
) -> list[TrainSample]:
    """Return the samples of complete groups, in their order, without advantages.

    The loss is over the tokens of a response's window. With `filter_overlong` truncated responses keep their reward, for
    their group's statistics, and lose their loss mask, so their tokens leave every denominator. `training_version`: the
    policy version that is trained, for the age of each token.
    """
    return [
        _train_sample(group, index, sample, training_version, filter_overlong)
        for index, group in enumerate(groups)
        for sample in group.samples
    ]


def _train_sample(
    group: Group, group_index: int, sample: ScoredSample, training_version: int, filter_overlong: bool
) -> TrainSample:
    completion, window = sample.completion, sample.window
    num_response = len(completion.token_ids)
    assert num_response == len(completion.logprobs), (
        f"sample {sample.sample_id}: {num_response} response tokens but {len(completion.logprobs)} log-probs"
    )
    loss_mask = torch.ones(num_response)
    loss_mask[: window.start] = 0.0  # trained in the steps of earlier windows
    if filter_overlong and window.is_finished and completion.is_truncated:
        loss_mask.zero_()
    return TrainSample(
        sample_id=sample.sample_id,
        group_index=group_index,
        tokens=torch.tensor([*group.prompt.token_ids, *completion.token_ids], dtype=torch.int64),
        prompt_length=len(group.prompt.token_ids),
        loss_mask=loss_mask,
        advantages=torch.zeros(num_response),  # estimated by every rank after the broadcast
        rollout_logprobs=torch.tensor(completion.logprobs, dtype=torch.float32),
        staleness=_staleness(completion, training_version),
        critic_context=CriticContext(sample.reward, sample.score.accuracy > 0, window),
    )


def _staleness(completion: Completion, training_version: int) -> torch.Tensor:
    staleness = torch.zeros(len(completion.token_ids))
    for run in completion.versions:
        staleness[run.start : run.end] = training_version - run.version
    return staleness
