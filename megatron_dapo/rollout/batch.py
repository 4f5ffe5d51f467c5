"""One collection's result: the batch for one train step, and the progress reported on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal

import numpy as np

from megatron_dapo.engines.base import PrefixReuse
from megatron_dapo.rollout.serialization import group_from_json, group_to_json
from megatron_dapo.rollout.statistics import CollectStatistics, statistics_from_json
from megatron_dapo.types import Group, TrainSample

Exhaustion = Literal["", "rounds", "prompts"]


@dataclass(frozen=True)
class RolloutBatch:
    """Groups for one train step, in the order they were started; with training.stream, those of one of its mini-batches.

    Only rank 0 collects. The other ranks have `samples`, `should_stop`, `is_last` and `generation_step`.
    """

    groups: tuple[Group, ...]
    statistics: CollectStatistics
    exhausted: Exhaustion = ""  # reason for fewer groups than requested
    should_stop: bool = False  # data is exhausted: save a checkpoint and end
    training_version: int = 0  # the policy version these groups train; no token is further behind it than allowed
    is_last: bool = True  # False: a part that is trained while the rest of its batch is generated
    num_before: int = 0  # groups in earlier parts of the batch
    filtered: tuple[Group, ...] = ()  # a few of those that were left out, for the records; not in a checkpoint
    # Circumstances of its collection, by which batches are not compared.
    generation_step: int = field(default=0, compare=False)  # rounds of generation begun when the batch was full
    seconds: float = field(default=0.0, compare=False)  # spent collecting it, during training or not, including pauses
    prefix_reuse: PrefixReuse = PrefixReuse()  # total since the previous batch
    # Fields of a train sample for teachers, by the index of a sequence.
    of_teachers: Mapping[int, Mapping[str, np.ndarray]] = field(default_factory=dict, compare=False)
    # By server, the sum of log pi - log pi_teacher and tokens.
    taught: Mapping[str, tuple[float, int]] = field(default_factory=dict, compare=False)
    samples: Sequence[TrainSample] = ()  # this rank's share, numbers included


def joined(parts: Sequence[RolloutBatch]) -> RolloutBatch:
    """Return the batch whose parts these are; its statistics are those of the last part."""
    return replace(
        parts[-1],
        groups=tuple(group for part in parts for group in part.groups),
        num_before=0,
        seconds=sum(part.seconds for part in parts),
        prefix_reuse=sum((part.prefix_reuse for part in parts[1:]), parts[0].prefix_reuse),
        of_teachers=_joined_fields(parts),
        taught={
            name: (sum(part.taught[name][0] for part in parts), sum(part.taught[name][1] for part in parts))
            for name in parts[0].taught
        },
        samples=joined_samples([part.samples for part in parts]),
    )


def _joined_fields(parts: Sequence[RolloutBatch]) -> dict[int, Mapping[str, np.ndarray]]:
    starts = accumulate((len(part.samples) for part in parts), initial=0)
    return {start + index: found for start, part in zip(starts, parts) for index, found in part.of_teachers.items()}


def joined_samples(parts: Sequence[Sequence[TrainSample]]) -> list[TrainSample]:
    """Return the samples of all parts; their groups are numbered through."""
    found: list[TrainSample] = []
    for samples in parts:
        start = 1 + max((one.group_index for one in found), default=-1)
        found += [replace(one, group_index=start + one.group_index) for one in samples]
    return found


@dataclass(frozen=True)
class CollectProgress:
    """Progress of a collection, reported after every poll."""

    num_accepted: int  # groups ready for the batch, carried-over ones included
    num_groups: int  # groups requested
    num_in_flight: int
    num_filtered: int
    num_responses: int  # finished since the collection began
    num_tokens: int  # generated since the collection began, of responses that came back


class CollectionExhausted(RuntimeError):
    """The batch could not be filled and rollout.on_exhausted is "error".

    Nothing is lost: the next call or a checkpoint still has every group.
    """

    is_final = True  # another attempt would have no more prompts


def batch_to_json(batch: RolloutBatch) -> dict[str, Any]:
    """Return `batch` as values for `serialization.split_state`."""
    return {
        "groups": [group_to_json(group) for group in batch.groups],
        "statistics": asdict(batch.statistics),
        "exhausted": batch.exhausted,
        "training_version": batch.training_version,
    }


def batch_from_json(value: Mapping[str, Any]) -> RolloutBatch:
    """Invert `batch_to_json`."""
    groups = tuple(group_from_json(group) for group in value["groups"])
    statistics = statistics_from_json(value["statistics"])
    return RolloutBatch(groups, statistics, value["exhausted"], training_version=value["training_version"])
