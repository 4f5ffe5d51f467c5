"""What a collection gives: the batch for one train step, and what is told of it on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from megatron_dapo.rollout.group_json import group_from_json, group_to_json
from megatron_dapo.rollout.statistics import CollectStatistics, statistics_from_json
from megatron_dapo.types import Group

Exhaustion = Literal["", "rounds", "prompts"]


@dataclass(frozen=True)
class RolloutBatch:
    """Groups for one train step, in the order they were started."""

    groups: tuple[Group, ...]
    statistics: CollectStatistics
    exhausted: Exhaustion = ""  # why there are fewer groups than asked for
    should_stop: bool = False  # nothing more to train on: save a checkpoint and end
    training_version: int = 0  # the policy version these groups train; no token is further behind it than allowed


@dataclass(frozen=True)
class CollectProgress:
    """Handed to the progress callback after every poll."""

    num_accepted: int  # groups ready for the batch, carried-over ones included
    num_groups: int  # groups asked for
    num_in_flight: int
    num_filtered: int
    num_responses: int  # finished since the collection began
    num_tokens: int  # generated since the collection began, of responses that came back


class CollectionExhausted(RuntimeError):
    """on_exhausted = "error": the batch could not be filled. Nothing is lost: what there is stays for the next call or
    in a checkpoint.
    """


def batch_to_json(batch: RolloutBatch) -> dict[str, Any]:
    """`batch` as JSON-serializable dictionaries and lists."""
    return {
        "groups": [group_to_json(group) for group in batch.groups],
        "statistics": asdict(batch.statistics),
        "exhausted": batch.exhausted,
        "training_version": batch.training_version,
    }


def batch_from_json(value: Mapping[str, Any]) -> RolloutBatch:
    """The batch `batch_to_json` was given."""
    groups = tuple(group_from_json(group) for group in value["groups"])
    statistics = statistics_from_json(value["statistics"])
    return RolloutBatch(groups, statistics, value["exhausted"], training_version=value["training_version"])
