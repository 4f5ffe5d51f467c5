"""Priority of prompts by their scores so far: an upper confidence bound, as in the prompt pool of T-PPO's code."""

from __future__ import annotations

import math
from collections.abc import Sequence

MEMORY = 100  # newest scores of a prompt that count
EXPLORATION = 0.25


def ucb_priority(
    scores: Sequence[float],
    num_scores: int,
    step: int,
    *,
    memory: int = MEMORY,
    exploration: float = EXPLORATION,
) -> float:
    """Return 1 - |mean score| + exploration * sqrt(ln step / num_scores).

    The priority is highest for prompts with mixed outcomes or few scores, and infinite for one without a score, so that
    it comes first.

    Args:
        scores: scores of the prompt's responses, in [-1, 1], oldest first; the last `memory` count.
        num_scores: number of scores ever; at least len(scores), because older ones may be forgotten.
        step: training step, from 1.
    """
    if step < 1:
        raise ValueError(f"prompt priority: step = {step}, steps count from 1")
    if num_scores < len(scores):
        raise ValueError(f"prompt priority: {len(scores)} scores were given, but num_scores = {num_scores}")
    if not scores:
        return math.inf
    recent = scores[-memory:]
    if max(map(abs, recent)) > 1:
        raise ValueError(f"prompt priority: scores span {min(recent)}..{max(recent)}, they must be within [-1, 1]")
    mean = sum(recent) / len(recent)
    return 1.0 - abs(mean) + exploration * math.sqrt(math.log(step) / num_scores)
