"""Generation as the loop sees it: rank 0 collects scored groups, and every rank ends up with the same train samples.

Every rank knows each sample's length, group, reward, mask and ages: counts, advantages and plans are made of those. Tokens
and log-probs, 8 bytes a token, stay on the ranks that pack them, and the routing on those of them that train the policy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megatron_dapo.data.sample_tensors import critic_context_from_json
from megatron_dapo.engines.base import PrefixReuse
from megatron_dapo.engines.sglang.servers import ServersFailed
from megatron_dapo.parallel.collectives import broadcast_tensors
from megatron_dapo.parallel.coordination import Coordination
from megatron_dapo.parallel.rank0_commands import CommandFailed
from megatron_dapo.reshard.pieces import pieces
from megatron_dapo.rollout.batch import RolloutBatch
from megatron_dapo.types import CriticContext, Group, ScoredSample, TrainSample
from megatron_dapo.watch.signals import Stopped

if TYPE_CHECKING:
    from megatron_dapo.rollout.async_collector import AsyncCollector
    from megatron_dapo.trainer.build_engines import Engines


# Samples of a batch, without their numbers -> indices of those that this rank will pack, and that its policy will.
Share = Callable[[Sequence[TrainSample]], tuple[Collection[int], Collection[int]]]


@dataclass(frozen=True)
class TrainBatch:
    """One rollout batch on every rank, with the numbers of its share. The fields from `rollout` on are known to rank 0 only.

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
        is_sampling: bool = True,
    ) -> None:
        """`collector`: on rank 0. `filter_overlong`: truncated responses lose their loss mask. `is_sampling`: batches come of
        the engines."""
        self._engines = engines
        self._collector = collector
        self._coordination = coordination
        self._filter_overlong = filter_overlong
        self._sleeps_after_batch = is_sampling
        self._prefix_reuse = PrefixReuse()  # rank 0: up to the last batch

    def generate(self, num_groups: int, share: Share) -> TrainBatch:
        """Return the next rollout batch, the same samples on every rank. The verifiers score responses as they finish.

        A signal, and an error of the collection itself, end it on all ranks together, which can then save.

        Collective. Engines on the trainer's devices sleep afterwards, until the next weight sync. Tokens and log-probs
        pass every rank in chunks, and it keeps those of the samples that `share` names, see `header_of`.
        """
        collected = self._engines.engine.run_on_rank0(lambda: self._collect(num_groups))
        if (end := self._agree_on_end(collected)) is not None:
            return end  # engines stay as they are: the same signal may have reached them
        if self._sleeps_after_batch:
            self.sleep()
        if not isinstance(collected, RolloutBatch):
            return self._receive(share)
        release_freed_memory()
        return self._send(collected, share)

    def sleep(self) -> None:
        """Let engines on the trainer's devices release their memory until the next weight sync. Collective."""
        if self._engines.servers is not None:
            self._engines.servers.sleep()

    def _collect(self, num_groups: int) -> RolloutBatch | Exception:
        assert self._collector is not None, "rank 0 has the collector"
        try:
            return self._collector.next_batch(num_groups)
        except (CommandFailed, ServersFailed, TimeoutError):
            raise  # all ranks know of the first two; behind the last one they may not hear each other
        except Exception as end:  # of a verifier, say: what was collected is whole, and all ranks can save
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

    def _send(self, batch: RolloutBatch, share: Share) -> TrainBatch:
        assert self._collector is not None, "rank 0 has the collector"
        facts = describe_samples(batch.groups, batch.training_version, filter_overlong=self._filter_overlong)
        header = {"should_stop": batch.should_stop, "generation_step": self._collector.generation_step}
        self._coordination.broadcast({"samples": facts, **header})
        samples = [header_of(fact) for fact in facts]
        kept, _ = share(samples)
        pairs = [(group, sample) for group in batch.groups for sample in group.samples]
        for chunk in _chunks(samples) if self._coordination.size > 1 else ():
            parts = [numbers_of(*pairs[index]) for index in chunk]
            names = sorted({name for part in parts for name in part})
            broadcast_tensors(
                {name: torch.cat([one[name].flatten() for one in parts if name in one]) for name in names}
            )
        reuse, self._prefix_reuse = (
            self._engines.engine.prefix_reuse - self._prefix_reuse,
            self._engines.engine.prefix_reuse,
        )
        return TrainBatch(
            [replace(one, **numbers_of(*pairs[i])) if i in kept else one for i, one in enumerate(samples)],
            rollout=batch,
            generation_seconds=self._collector.generation_seconds,
            prefix_reuse=reuse,
            **header,
        )

    def _receive(self, share: Share) -> TrainBatch:
        header = self._coordination.broadcast(None)
        samples = [header_of(fact) for fact in header["samples"]]
        kept, kept_by_policy = share(samples)
        keepers = {"tokens": kept, "rollout_logprobs": kept, "routing": kept_by_policy}
        for chunk in _chunks(samples):
            # NCCL broadcasts on the device; packing and advantages happen on the host.
            for name, numbers in broadcast_tensors(None).items():
                having = [index for index in chunk if getattr(samples[index], name) is not None]
                shapes = [getattr(samples[index], name).shape for index in having]
                parts = numbers.cpu().split([shape.numel() for shape in shapes])
                for index, shape, part in zip(having, shapes, parts, strict=True):
                    if index in keepers[name]:  # a copy: a view would keep the chunk
                        samples[index] = replace(samples[index], **{name: part.clone().view(shape)})
        return TrainBatch(samples, header["should_stop"], header["generation_step"])


def release_freed_memory() -> None:
    """Return what the allocator holds without need to the system: the buffers of thousands of answers lie between tokens."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc's
        trim(0)


_CHUNK_BYTES = 1 << 26  # what a rank holds for a moment of the other ranks' samples


def _chunks(samples: Sequence[TrainSample]) -> Iterator[range]:
    """Yield the indices of samples that travel together, at least one and about _CHUNK_BYTES."""
    for piece in pieces([_num_bytes(sample) for sample in samples], _CHUNK_BYTES):
        yield range(len(samples))[piece]


def _num_bytes(sample: TrainSample) -> int:
    return 8 * sample.num_tokens + (0 if sample.routing is None else sample.routing.nbytes)


class _Rank0Failed(RuntimeError):
    """The error of a collection as the other ranks raise it."""

    is_consequence = True


class NothingTrained(RuntimeError):
    """The data ended before the first train step."""

    is_final = True  # another attempt has the same data


def nothing_trained(batch: TrainBatch, samples: Path) -> Exception:
    """Return the error of a run whose first batch is empty; on rank 0 it says why and what to do. `samples`: file of responses."""
    if batch.rollout is None:
        return _Rank0Failed("no train step was made: rank 0 says why")
    statistics = batch.rollout.statistics
    decisions = ", ".join(f"{count} {name}" for name, count in statistics.filter_decisions.items())
    outcomes = ", ".join(f"{count} {name}" for name, count in sorted(statistics.outcomes.items()))
    return NothingTrained(
        f"no train step was made: of {sum(statistics.filter_decisions.values())} groups none could be trained "
        f"({decisions}; {statistics.num_responses} responses: {outcomes}; {statistics.num_truncated} truncated). Where all responses "
        f"to a prompt score alike there is nothing to learn: read some in {samples}, then mend reward.verifier or the answer format "
        "that the prompts ask for if right answers are not recognized, else take easier or harder prompts, raise "
        "rollout.max_response_tokens or rollout.group_size, or more data (data.max_epochs)"
    )


def build_train_samples(
    groups: Sequence[Group], training_version: int, *, filter_overlong: bool = False
) -> list[TrainSample]:
    """Return the samples of complete groups, in their order, without advantages.

    The loss is over the tokens of a response's window. With `filter_overlong` truncated responses keep their reward, for
    their group's statistics, and lose their loss mask, so their tokens leave every denominator. `training_version`: the
    policy version that is trained, for the age of each token.
    """
    facts = describe_samples(groups, training_version, filter_overlong=filter_overlong)
    return with_numbers([header_of(fact) for fact in facts], groups)


def with_numbers(samples: Sequence[TrainSample], groups: Sequence[Group]) -> list[TrainSample]:
    """Return the samples of `groups`, in their order, with tokens and log-probs, whichever of them had theirs."""
    pairs = [(group, sample) for group in groups for sample in group.samples]
    return [replace(one, **numbers_of(*pair)) for one, pair in zip(samples, pairs, strict=True)]


def numbers_of(group: Group, sample: ScoredSample) -> dict[str, torch.Tensor]:
    """Return tokens, prompt and response, the response's log-probs, and the routing if it is replayed; the latter two share
    the completion's memory."""
    prompt, completion = np.asarray(group.prompt.token_ids, np.int32), sample.completion
    assert completion.num_tokens == len(completion.logprobs), (
        f"sample {sample.sample_id}: {completion.num_tokens} response tokens but {len(completion.logprobs)} log-probs"
    )
    return {
        "tokens": torch.from_numpy(np.concatenate((prompt, completion.token_ids))),
        "rollout_logprobs": torch.from_numpy(completion.logprobs),
        **({} if completion.routing is None else {"routing": torch.from_numpy(completion.routing)}),
    }


def describe_samples(
    groups: Sequence[Group], training_version: int, *, filter_overlong: bool = False
) -> list[dict[str, Any]]:
    """Return all facts of the samples of `groups` but their numbers, JSON-serializable; see `build_train_samples`."""
    return [
        {
            "sample_id": sample.sample_id,
            "group_index": index,
            "num_tokens": len(group.prompt.token_ids) + sample.completion.num_tokens,
            "prompt_length": len(group.prompt.token_ids),
            "first_trained": _first_trained(sample, filter_overlong),
            "ages": [
                [run.end - run.start, training_version - run.version]
                for run in sample.completion.versions
                if run.end > run.start
            ],
            "critic_context": asdict(CriticContext(sample.reward, sample.score.accuracy > 0, sample.window)),
            "routing": _routing_fact(sample.completion.routing),
        }
        for index, group in enumerate(groups)
        for sample in group.samples
    ]


def _first_trained(sample: ScoredSample, filter_overlong: bool) -> int:
    """Return the first response token of the loss: the window's, or none where the filter takes all."""
    if filter_overlong and sample.window.is_finished and sample.completion.is_truncated:
        return sample.completion.num_tokens
    return sample.window.start  # the tokens before it were trained in the steps of earlier windows


def header_of(fact: Mapping[str, Any]) -> TrainSample:
    """Return a sample that is known but for its numbers: tokens, log-probs and routing have their shapes, but no memory.

    They lie on the meta device, so that using them is an error.
    """
    num_tokens = fact["num_tokens"]
    num_response = num_tokens - fact["prompt_length"]
    return TrainSample(
        sample_id=fact["sample_id"],
        group_index=fact["group_index"],
        tokens=torch.empty(num_tokens, dtype=torch.int32, device="meta"),
        prompt_length=fact["prompt_length"],
        loss_mask=_loss_mask(num_response, fact["first_trained"]),
        advantages=torch.zeros(1).expand(num_response),  # estimated by every rank
        rollout_logprobs=torch.empty(num_response, device="meta"),
        staleness=_staleness(fact["ages"]),
        critic_context=critic_context_from_json(fact["critic_context"]),
        routing=None if fact["routing"] is None else _routing_header(**fact["routing"]),
    )


def _routing_fact(routing: np.ndarray | None) -> dict[str, Any] | None:
    return None if routing is None else {"shape": routing.shape, "bits": 8 * routing.itemsize}


def _routing_header(shape: Sequence[int], bits: int) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=torch.uint8 if bits == 8 else torch.int16, device="meta")


def _loss_mask(num_response: int, first_trained: int) -> torch.Tensor:
    if not first_trained:
        return torch.ones(1).expand(num_response)  # one number in memory
    return (torch.arange(num_response) >= first_trained).float()


def _staleness(ages: Sequence[Sequence[int]]) -> torch.Tensor | None:
    """Return the age of each token from runs of (length, age); None where all are 0."""
    if not any(age for _, age in ages):
        return None
    lengths, values = torch.tensor(ages).T
    return values.float().repeat_interleave(lengths) if len(ages) > 1 else values.float().expand(int(lengths))
