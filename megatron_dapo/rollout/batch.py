"""One collection's result: the batch for one train step, and the progress reported on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from megatron_dapo.engines.base import PrefixReuse
from megatron_dapo.rollout.serialization import group_from_json, group_to_json
from megatron_dapo.rollout.statistics import CollectStatistics, statistics_from_json
from megatron_dapo.types import Group, TrainSample

Exhaustion = Literal["", "rounds", "prompts"]


@dataclass(frozen=True)
class RolloutBatch:
    """Groups for one train step, in the order they were started.

    Only rank 0 collects. The other ranks have `samples`, `should_stop` and `generation_step`.
    """

    groups: tuple[Group, ...]
    statistics: CollectStatistics
    exhausted: Exhaustion = ""  # why there are fewer groups than requested
    should_stop: bool = False  # data is exhausted: save a checkpoint and end
    training_version: int = 0  # the policy version these groups train; no token is further behind it than allowed
    filtered: tuple[Group, ...] = ()  # a few of those that were left out, for the records; not in a checkpoint
    # Circumstances of its collection, by which batches are not compared.
    generation_step: int = field(default=0, compare=False)  # rounds of generation begun when the batch was full
    seconds: float = field(default=0.0, compare=False)  # spent collecting it, during training or not, including pauses
    prefix_reuse: PrefixReuse = PrefixReuse()  # since the previous batch
    samples: Sequence[TrainSample] = ()  # with the numbers of this rank's share


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
