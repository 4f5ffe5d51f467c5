"""Groups as JSON values and back, exactly: floats keep every bit (Python writes the shortest digits that read back the
same).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from megatron_dapo.types import Completion, Group, Prompt, Score, ScoredSample, VersionRange, Window


def group_to_json(group: Group) -> dict[str, Any]:
    """`group` as JSON-serializable dictionaries and lists. Tokens are handed on, not copied: there may be millions."""
    return {
        "group_id": group.group_id,
        "prompt": asdict(group.prompt),
        "samples": tuple(_sample_to_json(sample) for sample in group.samples),
        "policy_version": group.policy_version,
        "generation_step": group.generation_step,
    }


def _sample_to_json(sample: ScoredSample) -> dict[str, Any]:
    return {
        "sample_id": sample.sample_id,
        "completion": completion_to_json(sample.completion),
        "text": sample.text,
        "score": asdict(sample.score),
        "reward_parts": dict(sample.reward_parts),
        "window": asdict(sample.window),
    }


def group_from_json(value: Mapping[str, Any]) -> Group:
    """The group `group_to_json` was given. KeyError or TypeError where the value is something else."""
    return Group(
        group_id=value["group_id"],
        prompt=_prompt(value["prompt"]),
        samples=tuple(_sample(sample) for sample in value["samples"]),
        policy_version=value["policy_version"],
        generation_step=value["generation_step"],
    )


def _prompt(value: Mapping[str, Any]) -> Prompt:
    return Prompt(**{**value, "messages": tuple(value["messages"]), "token_ids": tuple(value["token_ids"])})


def _sample(value: Mapping[str, Any]) -> ScoredSample:
    return ScoredSample(
        sample_id=value["sample_id"],
        completion=completion_from_json(value["completion"]),
        text=value["text"],
        score=Score(**value["score"]),
        reward_parts=dict(value["reward_parts"]),
        window=Window(**value.get("window", {})),  # states written before there were windows
    )


def completion_to_json(completion: Completion) -> dict[str, Any]:
    """`completion` as JSON-serializable dictionaries and lists."""
    return {**vars(completion), "versions": tuple(asdict(version) for version in completion.versions)}


def completion_from_json(value: Mapping[str, Any]) -> Completion:
    """The completion `completion_to_json` was given."""
    return Completion(
        request_id=value["request_id"],
        token_ids=tuple(value["token_ids"]),
        logprobs=tuple(value["logprobs"]),
        finish_reason=value["finish_reason"],
        versions=tuple(VersionRange(**version) for version in value["versions"]),
    )
