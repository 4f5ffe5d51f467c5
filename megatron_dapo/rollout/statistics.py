"""Statistics of one collection: responses generated, groups kept, and the others by reason."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

from megatron_dapo.types import Completion, Group, num_distinct

KEPT: Final = "kept"  # the filter decision on a group that is trained
UNSCORED: Final = "unscored"  # decision on a group with a lost score


@dataclass(frozen=True)
class LengthSummary:
    """Response lengths in tokens."""

    num_responses: int = 0
    mean: float = 0.0
    max: int = 0

    @classmethod
    def of(cls, lengths: list[int]) -> LengthSummary:
        """Summarize `lengths`; zeros for none."""
        return cls(len(lengths), sum(lengths) / len(lengths), max(lengths)) if lengths else cls()


@dataclass(frozen=True)
class WindowSummary:
    """One collection of windows (T-PPO)."""

    num_windows: int = 0  # responses worked on
    num_finished: int = 0  # responses that ended
    windows_per_finished: float = 0.0  # mean, at the window length of the run
    num_waiting: int = 0  # responses in the pool afterwards: unfinished, or not yet started of begun groups
    num_continued: int = 0  # responses worked on that had earlier windows
    num_prefix_tokens: int = 0  # response tokens of those earlier windows: context that the engine was sent again

    @property
    def finished_share(self) -> float:
        """Share of the windows in which their response ended."""
        return self.num_finished / max(1, self.num_windows)

    @property
    def continued_share(self) -> float:
        """Share of the windows that continue an earlier one."""
        return self.num_continued / max(1, self.num_windows)


@dataclass(frozen=True)
class CollectStatistics:
    """Statistics of one call of `Collector.collect`. Rates are over everything generated, before the filter.

    With windows, counts of responses, lengths, outcomes and scores cover only responses that finished in the
    collection; in a run's first steps those are the short ones.
    """

    num_started: int  # groups sent to the engine
    filter_decisions: Mapping[str, int]  # scored groups by the filter's decision: kept, all_right, all_wrong, rejected, unscored
    num_aborted: int  # groups given up unfinished; their prompts were queued again
    num_stale: int  # buffered groups that had become too stale; their prompts were queued again
    num_unfinished: int  # groups that the next collection continues
    num_continued: int  # responses continued after tokens they already had
    num_begun_earlier: int  # groups of the batch that were begun in an earlier collection
    num_buffered: int  # kept groups that stay in the buffer
    num_tokens: int  # response tokens generated in this collection
    num_kept_tokens: int  # response tokens of kept groups, earlier ones included
    num_discarded_tokens: int  # response tokens thrown away unscored or too stale, earlier ones included
    num_responses: int  # complete ones, of groups that were scored
    num_truncated: int
    num_duplicates: int  # responses equal to an earlier one of their group
    mean_accuracy: float
    mean_reward: float
    outcomes: Mapping[str, int]  # the verifier's outcomes
    kept_lengths: LengthSummary
    dropped_lengths: LengthSummary  # filtered groups
    aborted_lengths: LengthSummary  # groups that were given up, as far as they got
    windows: WindowSummary | None = None  # None without windows
    prompts: Mapping[str, float] = field(default_factory=dict)  # counts of the choice of prompts, see `PromptSource`
    # By source: groups, kept, responses, correct.
    sources: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    num_lost: int = 0  # aborted groups with an episode whose environment was lost
    num_left_out: int = 0  # lost episodes without which their groups are trained


def statistics_from_json(value: Mapping[str, Any]) -> CollectStatistics:
    """Invert `dataclasses.asdict` of the statistics."""
    lengths = ("kept_lengths", "dropped_lengths", "aborted_lengths")
    windows = WindowSummary(**value["windows"]) if value["windows"] is not None else None
    parts = {name: LengthSummary(**value[name]) for name in lengths}
    return CollectStatistics(**{**value, **parts, "windows": windows})


@dataclass
class StatisticsBuilder:
    """Accumulates statistics while a collection runs."""

    num_started: int = 0
    num_aborted: int = 0
    num_lost: int = 0
    num_left_out: int = 0
    num_stale: int = 0
    num_continued: int = 0
    num_tokens: int = 0  # generated
    num_discarded_tokens: int = 0
    filter_decisions: Counter[str] = field(default_factory=lambda: Counter(kept=0, all_right=0, all_wrong=0))
    outcomes: Counter[str] = field(default_factory=Counter)
    num_truncated: int = 0
    num_duplicates: int = 0
    accuracies: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # keyed by source
    rewards: list[float] = field(default_factory=list)
    lengths: dict[str, list[int]] = field(default_factory=lambda: {"kept": [], "dropped": [], "aborted": []})
    windows: WindowSummary | None = None
    sources: dict[str, Counter[str]] = field(default_factory=dict)

    def add_scored(self, group: Group, decision: str) -> None:
        """Count one scored group. Responses that continue in a later window are counted when they end."""
        self.filter_decisions[decision] += 1
        finished = [sample for sample in group.samples if sample.window.is_finished]
        completions = [sample.completion for sample in finished]
        self.lengths["kept" if decision == KEPT else "dropped"] += [completion.num_sampled for completion in completions]
        self.num_truncated += sum(completion.is_truncated for completion in completions)
        self.num_duplicates += len(completions) - num_distinct(completions)
        self.outcomes.update(sample.score.outcome for sample in finished)
        self.accuracies[group.prompt.source] += [sample.score.accuracy for sample in finished]
        self.rewards += [sample.reward for sample in finished]
        if group.prompt.source:
            counts = {"groups": 1, "kept": int(decision == KEPT), "responses": len(finished)}
            self.sources.setdefault(group.prompt.source, Counter()).update(counts)

    def add_aborted(self, completions: Iterable[Completion]) -> None:
        """Count one group given up, with the tokens it had."""
        self.num_aborted += 1
        lengths = [completion.num_sampled for completion in completions]
        self.lengths["aborted"] += lengths
        self.num_discarded_tokens += sum(lengths)

    def add_left_out(self, completions: Sequence[Completion]) -> None:
        """Count lost episodes of a group that continues without them."""
        self.num_left_out += len(completions)
        self.num_discarded_tokens += sum(completion.num_sampled for completion in completions)

    def add_stale(self, group: Group) -> None:
        """Count one buffered group dropped for its age."""
        self.num_stale += 1
        self.num_discarded_tokens += sum(sample.completion.num_sampled for sample in group.samples)

    @property
    def num_scored_responses(self) -> int:
        """Finished responses of scored groups."""
        return len(self.lengths["kept"]) + len(self.lengths["dropped"])

    def build(
        self,
        *,
        num_begun_earlier: int = 0,
        num_buffered: int = 0,
        num_unfinished: int = 0,
        prompts: Mapping[str, float] | None = None,
    ) -> CollectStatistics:
        """Return the statistics of everything counted so far."""
        num_responses = max(1, self.num_scored_responses)
        # Counts that both classes have under one name.
        names = {entry.name for entry in fields(CollectStatistics)}
        counts: dict[str, Any] = {name: value for name, value in vars(self).items() if name in names}
        # Convert to plain dictionaries, because dataclasses.asdict would count the pairs of a Counter.
        counts |= {"filter_decisions": dict(self.filter_decisions), "outcomes": dict(sorted(self.outcomes.items()))}
        # fsum rounds once, so that sums do not depend on the order in which groups ended.
        correct = {name: math.fsum(accuracies) for name, accuracies in self.accuracies.items()}
        counts["sources"] = {name: {**found, "correct": correct[name]} for name, found in sorted(self.sources.items())}
        counts |= {f"{group}_lengths": LengthSummary.of(lengths) for group, lengths in self.lengths.items()}
        return CollectStatistics(
            **counts,
            num_unfinished=num_unfinished,
            num_begun_earlier=num_begun_earlier,
            num_buffered=num_buffered,
            prompts=dict(prompts or {}),
            num_kept_tokens=sum(self.lengths["kept"]),
            num_responses=self.num_scored_responses,
            mean_accuracy=math.fsum(accuracy for one in self.accuracies.values() for accuracy in one) / num_responses,
            mean_reward=math.fsum(self.rewards) / num_responses,
        )
