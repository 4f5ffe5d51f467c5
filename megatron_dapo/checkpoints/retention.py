"""Chooses which checkpoints a run keeps, from their steps.

It keeps the newest ones (`last`), those whose step is a multiple of `every`, the one with the best evaluation, and
always the newest of all. Each checkpoint's counters include the evaluations, so a resumed run knows the best one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class KeepPolicy:
    last: int = 1  # newest valid ones
    every: int = 0  # keep every multiple of this many steps forever; 0: none
    best: str = ""  # evaluation metric whose best checkpoint is kept; "": none
    best_is: str = "higher"  # "higher" or "lower"


def steps_to_delete(
    policy: KeepPolicy,
    newest: int,
    steps: Mapping[int, bool],
    evaluations: Mapping[str, Mapping[str, float]],
) -> list[int]:
    """Return the steps whose checkpoints to delete, newest first.

    A broken checkpoint does not count among the `last`, and is deleted once that many valid ones are newer.

    Args:
        newest: the step that was just saved, which stays.
        steps: step -> True if its checkpoint is complete.
        evaluations: step, as text -> metrics.
    """
    best = best_step(policy, [step for step, is_whole in steps.items() if is_whole], evaluations)
    doomed, kept = [], 0
    for step in sorted(steps, reverse=True):
        if kept >= policy.last and step != newest:
            is_multiple = policy.every > 0 and step % policy.every == 0
            stays = steps[step] and (step == best or is_multiple)
            doomed += [] if stays else [step]
        elif step == newest or steps[step]:
            kept += 1
    return doomed


def best_step(policy: KeepPolicy, steps: Sequence[int], evaluations: Mapping[str, Mapping[str, float]]) -> int | None:
    """Return the step with the best evaluation, the newest among equals; None if none of `steps` was evaluated."""
    sign = 1 if policy.best_is == "higher" else -1
    values = {step: evaluations.get(str(step), {}).get(policy.best, math.nan) for step in steps}
    ranked = [(sign * value, step) for step, value in values.items() if not math.isnan(value)]
    return max(ranked)[1] if ranked else None


def most_checkpoints(policy: KeepPolicy, interval: int, total_steps: int) -> int:
    """Return the most checkpoints on disk at a time, including the one being written.

    interval: train steps between two; 0: only at the end of a run and on a signal.
    """
    gap = max(interval, 1)
    # While the last one is written: the newest before it, and multiples of `every` that are older than those.
    oldest = (total_steps - 1) // gap * gap - (policy.last - 1) * gap
    older = max(0, oldest - 1) // policy.every if policy.every else 0
    num_saves = max(1, math.ceil(total_steps / gap))
    return min(policy.last + 1 + older + bool(policy.best), num_saves)
