"""Dynamic sampling: train only on groups that disagree (arXiv 2503.14476, Eq 11), and the cost of doing so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_dapo.hooks import load_hook, named
from megatron_dapo.types import FilterDecision, Group


@dataclass(frozen=True)
class GroupFilter:
    """Keeps a group iff accuracy_min < mean accuracy < accuracy_max, both exclusive.

    The accuracy is the verifier's 0/1, never the shaped reward: the rewards of an all-correct group with length
    penalties differ, but teach nothing except brevity.
    """

    accuracy_min: float = 0.0
    accuracy_max: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.accuracy_min < self.accuracy_max <= 1.0:
            raise ValueError(
                f"group filter keeps accuracies in ({self.accuracy_min}, {self.accuracy_max}): need 0 <= min < max <= 1"
            )

    def decide(self, accuracies: Sequence[float]) -> FilterDecision:
        """Return the decision on one group's accuracies [G]: "kept", or "all_wrong" / "all_right" at or beyond the lower / upper bound."""
        assert len(accuracies) > 0, "a group without a response has no accuracy"
        mean = sum(accuracies) / len(accuracies)
        if mean <= self.accuracy_min:
            return "all_wrong"
        return "all_right" if mean >= self.accuracy_max else "kept"


class FunctionFilter:
    """Keeps the groups for which a user's function returns True (rollout.group_filter)."""

    def __init__(self, path: str) -> None:
        """Import the function. Raise ValueError if that fails."""
        self._path = path
        self._function = load_hook(path, "rollout.group_filter")

    def decide(self, group: Group) -> FilterDecision:
        """Return "kept", or why not: "all_wrong", "all_right" or "rejected". Raise HookError if the function fails."""
        with named(self._path, "rollout.group_filter"):
            if bool(self._function(group)):
                return "kept"
        accuracies = {sample.score.accuracy > 0 for sample in group.samples}
        return "rejected" if len(accuracies) > 1 else "all_right" if True in accuracies else "all_wrong"


def wasted_fraction(pass_rate: float, group_size: int) -> float:
    """Return the share of a prompt's groups that are all right or all wrong: p^G + (1 - p)^G."""
    if not 0.0 <= pass_rate <= 1.0:
        raise ValueError(f"pass rate {pass_rate} is not a probability")
    return pass_rate**group_size + (1.0 - pass_rate) ** group_size
