"""Scoring of complete groups, many at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_dapo.rollout.continuation import OpenGroup
from megatron_dapo.rollout.scoring import SampleScorer, UnscoredSample
from megatron_dapo.types import Group, ScoredSample

KEPT = "kept"


def score_groups(scorer: SampleScorer, complete: Sequence[OpenGroup], group_size: int, serving: int) -> Iterator[Group]:
    """Score groups of `group_size` responses, in the given order. `serving`: the version of a group without a token."""
    scored = scorer.score(
        [
            UnscoredSample(f"{group.group_id}/{index}", group.prompt, group.completions[index])
            for group in complete
            for index in range(group_size)
        ]
    )
    for group in complete:
        yield _group(group, tuple(scored[f"{group.group_id}/{index}"] for index in range(group_size)), serving)


def _group(group: OpenGroup, samples: tuple[ScoredSample, ...], serving: int) -> Group:
    versions = [version.version for sample in samples for version in sample.completion.versions]
    return Group(
        group_id=group.group_id,
        prompt=group.prompt,
        samples=samples,
        policy_version=min(versions, default=serving),
        generation_step=group.generation_step,
    )
