"""Generation seen from the loop: rank 0 collects and turns groups into samples, every rank ends up with the same samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron_dapo.data.sample_tensors import from_tensors, to_tensors
from megatron_dapo.engines.base import CollectiveEngine, PrefixReuse
from megatron_dapo.parallel.collectives import broadcast_tensors
from megatron_dapo.parallel.coordination import Coordination
from megatron_dapo.rollout.async_collector import AsyncCollector
from megatron_dapo.rollout.batch import RolloutBatch
from megatron_dapo.trainer.train_samples import TrainSamples, with_staleness
from megatron_dapo.types import Group, TrainSample

BuildSamples = Callable[[Sequence[Group]], TrainSamples]


@dataclass(frozen=True)
class CollectedBatch:
    """What one collection gives every rank. What is not broadcast, from `rollout` on, is rank 0's alone."""

    samples: list[TrainSample]
    should_stop: bool
    generation_step: int
    rollout: RolloutBatch | None
    advantage_metrics: dict[str, float]
    generation_seconds: float = 0.0  # collecting took, beside training or not
    prefix_reuse: PrefixReuse = field(default_factory=PrefixReuse)  # since the batch before


class RolloutPhase:
    """Drives the engines of all ranks. `rollout` exists on rank 0."""

    def __init__(
        self,
        engine: CollectiveEngine,
        rollout: AsyncCollector | None,
        build: BuildSamples,
        coordination: Coordination,
        rest: Callable[[], None] | None = None,
    ) -> None:
        """`rest`: gives the engines' memory to the trainer."""
        self._engine = engine
        self._rollout = rollout
        self._build = build
        self._coordination = coordination
        self._rest = rest
        self._prefix_reuse = PrefixReuse()  # rank 0: up to the last batch

    def collect(self, num_groups: int) -> CollectedBatch:
        """The next rollout batch, the same samples on every rank."""
        rollout = self._engine.run_on_rank0(lambda: self._collect(num_groups))
        if self._rest is not None:
            self._rest()
        if rollout is None:
            return self._receive()
        built = self._build(rollout.groups)
        samples = with_staleness(built.samples, rollout.groups, rollout.training_version)
        description, tensors = to_tensors(samples)
        assert self._rollout is not None, "rank 0 drives and has the collector"
        facts = {"should_stop": rollout.should_stop, "generation_step": self._rollout.generation_step}
        self._coordination.broadcast({"description": description, **facts})
        broadcast_tensors(tensors)
        reuse, self._prefix_reuse = self._engine.prefix_reuse - self._prefix_reuse, self._engine.prefix_reuse
        return CollectedBatch(
            list(samples),
            rollout=rollout,
            advantage_metrics=built.metrics,
            generation_seconds=self._rollout.generation_seconds,
            prefix_reuse=reuse,
            **facts,
        )

    def _collect(self, num_groups: int) -> RolloutBatch:
        assert self._rollout is not None, "rank 0 drives and has the collector"
        return self._rollout.next_batch(num_groups)

    def _receive(self) -> CollectedBatch:
        header = self._coordination.broadcast(None)
        samples = from_tensors(
            header["description"], {name: part.cpu() for name, part in broadcast_tensors(None).items()}
        )
        return CollectedBatch(
            samples, header["should_stop"], header["generation_step"], rollout=None, advantage_metrics={}
        )
