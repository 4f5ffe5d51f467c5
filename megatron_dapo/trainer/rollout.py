"""The loop's view of generation: rank 0 collects scored groups, and every rank gets the same train samples.

Every rank knows the header of all samples. Tokens and log-probs, 8 bytes per token, stay only on the ranks that pack
them, routing, supports and what teachers read only on those of these ranks that train the policy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megatron_dapo.engines.base import PrefixReuse
from megatron_dapo.engines.sglang.servers import ServersFailed
from megatron_dapo.parallel.collectives import broadcast_tensors
from megatron_dapo.parallel.coordination import Coordination
from megatron_dapo.parallel.rank0_commands import CommandFailed
from megatron_dapo.reshard.pieces import pieces
from megatron_dapo.rollout.batch import RolloutBatch
from megatron_dapo.rollout.statistics import StatisticsBuilder
from megatron_dapo.trainer.batch_header import header_of, numbers_at, samples_of, sequences_of
from megatron_dapo.types import TrainSample
from megatron_dapo.watch.signals import Stopped

if TYPE_CHECKING:
    from megatron_dapo.data.teacher_prompts import TeacherPrompts
    from megatron_dapo.rollout.async_collector import AsyncCollector
    from megatron_dapo.trainer.connect_engines import Engines
    from megatron_dapo.trainer.teacher_servers import TeacherServers


# Samples of a batch, without their numbers -> indices of those that this rank packs, and those that its policy packs.
Share = Callable[[Sequence[TrainSample]], tuple[Collection[int], Collection[int]]]


class CollectionEnded(Exception):
    """Raised on all ranks when a collection ends without a batch. Nothing that it collected is lost."""

    def __init__(self, generation_step: int, error: Exception | None) -> None:
        """`error`: this rank's description of the failure; None if a signal ended the collection."""
        super().__init__(str(error or "stopped by a signal"))
        self.generation_step, self.error = generation_step, error


class Rollout:
    """Generates with the engines of all ranks."""

    def __init__(
        self,
        engines: Engines,
        collector: AsyncCollector | None,
        coordination: Coordination,
        *,
        filter_overlong: bool,
        rewards_turns: bool = False,
        teachers: TeacherServers | None = None,
        teacher_prompts: TeacherPrompts | None = None,
    ) -> None:
        """`collector`: rank 0 only. `filter_overlong`: truncated responses lose their loss mask. `rewards_turns`: see
        `header_of`. `teachers`: those that are servers, and `teacher_prompts`: what teachers read; rank 0 only."""
        self._engines = engines
        self._collector = collector
        self._coordination = coordination
        self._filter_overlong = filter_overlong
        self._rewards_turns = rewards_turns
        self._teachers, self._teacher_prompts = teachers, teacher_prompts
        self._prefix_reuse = PrefixReuse()  # rank 0: total up to the last batch
        self._busy_s = 0.0  # rank 0: the servers' total at the last call of `busy_seconds`

    def generate(self, num_groups: int, share: Share, part_size: int = 0) -> RolloutBatch:
        """Return the next rollout batch, or its next part of `part_size` groups, the same samples on every rank. The
        verifiers score responses as they finish.

        On a signal or an error of the collection itself, raises CollectionEnded on all ranks together, so that they can
        save.

        Collective. Engines on the trainer's devices then sleep until the next weight sync. Tokens and log-probs reach
        every rank in chunks, and a rank keeps only those of the samples that `share` names; see `batch_header`.
        """
        collected = self._engines.engine.run_on_rank0(lambda: self._with_teachers(self._collect(num_groups, part_size)))
        facts = self._agree(collected)  # If this raises, engines stay untouched: the same signal may have reached them.
        self.sleep()
        if not isinstance(collected, RolloutBatch):
            return RolloutBatch((), StatisticsBuilder().build(), samples=self._receive(share), **facts)
        release_freed_memory()
        reuse = self._engines.engine.prefix_reuse
        since, self._prefix_reuse = reuse - self._prefix_reuse, reuse
        return replace(collected, samples=self._send(collected, share), prefix_reuse=since)

    def busy_seconds(self) -> float | None:
        """Return the seconds in which the servers had a request since the last call. On rank 0; None without servers."""
        if self._engines.servers is None:
            return None
        total = self._engines.servers.busy_s
        since, self._busy_s = total - self._busy_s, total
        return since

    def sleep(self) -> None:
        """Let engines on the trainer's devices release their memory until the next weight sync. Collective."""
        if self._engines.servers is not None:
            self._engines.servers.sleep()

    def _collect(self, num_groups: int, part_size: int) -> RolloutBatch | Exception:
        assert self._collector is not None, "rank 0 has the collector"
        try:
            return self._collector.next_batch(num_groups, part_size)
        except (CommandFailed, ServersFailed, TimeoutError):
            raise  # all ranks know of the first two; after the last one, ranks may be unreachable
        except Exception as end:  # such as a verifier's: the collected state is consistent, and all ranks can save
            return end

    def _with_teachers(self, collected: RolloutBatch | Exception) -> RolloutBatch | Exception:
        """Return a batch with what teachers read and servers teach. An error of theirs ends the run: its checkpoint has the
        batch's prompts."""
        if self._teacher_prompts is None or not isinstance(collected, RolloutBatch):
            return collected
        sequences, found = sequences_of(collected.groups), dict[int, dict[str, np.ndarray]]()
        prompts = {group.group_id: self._teacher_prompts.numbers(group.prompt) for group in collected.groups}
        for index, (group, _, _) in enumerate(sequences):
            if (numbers := prompts[group.group_id]) is not None:
                found.setdefault(index, {})["teacher_prompts"] = numbers
        if self._teachers is None:
            return replace(collected, of_teachers=found)
        for index, gain in self._teachers.gains(sequences).items():
            found.setdefault(index, {})["teacher_gains"] = gain
        return replace(collected, of_teachers=found, taught=self._teachers.taught)

    def _agree(self, collected: RolloutBatch | Exception | None) -> dict[str, Any]:
        """Return the batch's "should_stop", "is_last" and "generation_step" on every rank. CollectionEnded without one."""
        facts = None
        if self._collector is not None:
            is_error = isinstance(collected, Exception)
            facts = {
                "generation_step": self._collector.generation_step,
                "should_stop": isinstance(collected, RolloutBatch) and collected.should_stop,
                "is_last": not isinstance(collected, RolloutBatch) or collected.is_last,
                "is_interrupted": isinstance(collected, Stopped),
                "error": f"rollout rank 0 stopped: {type(collected).__name__}: {collected}" if is_error else "",
            }
        facts = self._coordination.broadcast(facts)
        is_interrupted, message = facts.pop("is_interrupted"), facts.pop("error")
        if message:
            error = collected if isinstance(collected, Exception) else _Rank0Failed(message)
            raise CollectionEnded(facts["generation_step"], None if is_interrupted else error)
        return facts

    def _send(self, batch: RolloutBatch, share: Share) -> list[TrainSample]:
        header = header_of(
            batch.groups,
            batch.training_version,
            filter_overlong=self._filter_overlong,
            rewards_turns=self._rewards_turns,
            of_teachers=batch.of_teachers,
        )
        samples = samples_of(header)
        kept, _ = share(samples)
        sequences, found = sequences_of(batch.groups), batch.of_teachers
        if self._coordination.size > 1:
            broadcast_tensors(header)
            for chunk in _chunks(samples):
                parts = [numbers_at(sequences, index, found) for index in chunk]
                names = sorted({name for part in parts for name in part})
                broadcast_tensors(
                    {name: torch.cat([part[name].flatten() for part in parts if name in part]) for name in names}
                )
        return [
            replace(one, **numbers_at(sequences, i, found)) if i in kept else one for i, one in enumerate(samples)
        ]

    def _receive(self, share: Share) -> list[TrainSample]:
        samples = samples_of(broadcast_tensors(None))
        kept, kept_by_policy = share(samples)
        keepers = {"tokens": kept, "rollout_logprobs": kept}
        keepers |= dict.fromkeys(("routing", "support", "teacher_gains", "teacher_prompts"), kept_by_policy)
        for chunk in _chunks(samples):
            # NCCL broadcasts on the device; packing and advantages happen on the host.
            for name, numbers in broadcast_tensors(None).items():
                having = [index for index in chunk if getattr(samples[index], name) is not None]
                shapes = [getattr(samples[index], name).shape for index in having]
                parts = numbers.cpu().split([shape.numel() for shape in shapes])
                for index, shape, part in zip(having, shapes, parts, strict=True):
                    if index in keepers[name]:  # copy, because a view would keep the chunk
                        samples[index] = replace(samples[index], **{name: part.clone().view(shape)})
        return samples


def release_freed_memory() -> None:
    """Return the allocator's free memory to the system: buffers of thousands of answers lie scattered among tokens."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc's
        trim(0)


_CHUNK_BYTES = 1 << 26  # bytes of other ranks' samples that a rank holds briefly


def _chunks(samples: Sequence[TrainSample]) -> Iterator[range]:
    """Yield the indices of samples to send together: at least one, and about _CHUNK_BYTES."""
    for piece in pieces([_num_bytes(sample) for sample in samples], _CHUNK_BYTES):
        yield range(len(samples))[piece]


def _num_bytes(sample: TrainSample) -> int:
    records = (sample.routing, sample.support, sample.teacher_prompts)
    return 8 * sample.num_tokens + sum(record.nbytes for record in records if record is not None)


class _Rank0Failed(RuntimeError):
    """A collection's error on rank 0, as the other ranks raise it."""

    is_consequence = True


class NothingTrained(RuntimeError):
    """The data ended before the first train step."""

    is_final = True  # another attempt would have the same data


def nothing_trained(batch: RolloutBatch, samples: Path | None) -> Exception:
    """Return the error for a run whose first batch is empty; on rank 0 it says why and what to do.

    `samples`: the file of responses; None on other ranks.
    """
    if samples is None:
        return _Rank0Failed("no train step was made: rank 0 says why")
    statistics = batch.statistics
    decisions = ", ".join(f"{count} {name}" for name, count in statistics.filter_decisions.items())
    outcomes = ", ".join(f"{count} {name}" for name, count in sorted(statistics.outcomes.items()))
    return NothingTrained(
        f"no train step was made: of {sum(statistics.filter_decisions.values())} groups none could be trained "
        f"({decisions}; {statistics.num_responses} responses: {outcomes}; {statistics.num_truncated} truncated). If all "
        f"responses to a prompt score alike, there is nothing to learn. Read some in {samples}. If correct answers are not "
        "recognized, fix reward.verifier or the answer format that the prompts ask for; otherwise take easier or harder prompts "
        "or more data (data.max_epochs), or raise rollout.max_response_tokens or rollout.group_size"
    )
