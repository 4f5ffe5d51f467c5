"""Complete groups judged: scored, and kept or dropped by the verdict on their accuracies (dynamic sampling)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megatron_dapo.rollout.continuation import OpenGroup
from megatron_dapo.rollout.scoring import SampleScorer, UnscoredSample
from megatron_dapo.types import Group, ScoredSample

KEPT = "kept"

# Accuracies of one group (0 or 1 each, never shaped rewards) -> "kept" or the reason it is dropped.
GroupVerdict = Callable[[Sequence[float]], str]


def keep_every_group(accuracies: Sequence[float]) -> str:
    """The verdict without dynamic sampling."""
    return KEPT


@dataclass(frozen=True)
class GroupJudge:
    """Scores groups of `group_size` responses, many at a time, and gives the verdict on each."""

    scorer: SampleScorer
    verdict: GroupVerdict
    group_size: int

    def judge(self, complete: Sequence[OpenGroup], serving: int) -> Iterator[tuple[Group, str]]:
        """Groups with their verdicts, in the given order. `serving`: the version of a group without a token."""
        scored = self.scorer.score(
            [
                UnscoredSample(f"{group.group_id}/{index}", group.prompt, group.completions[index])
                for group in complete
                for index in range(self.group_size)
            ]
        )
        for flight in complete:
            samples = tuple(scored[f"{flight.group_id}/{index}"] for index in range(self.group_size))
            yield _group(flight, samples, serving), self.verdict([sample.score.accuracy for sample in samples])


def _group(flight: OpenGroup, samples: tuple[ScoredSample, ...], serving: int) -> Group:
    versions = [version.version for sample in samples for version in sample.completion.versions]
    return Group(
        group_id=flight.group_id,
        prompt=flight.prompt,
        samples=samples,
        policy_version=min(versions, default=serving),
        generation_step=flight.generation_step,
    )
