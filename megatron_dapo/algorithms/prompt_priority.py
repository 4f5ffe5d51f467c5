"""Priority of prompts by their scores so far: an upper confidence bound (the prompt pool of T-PPO's code)."""

from __future__ import annotations

import math
from collections.abc import Sequence

MEMORY = 100  # scores of a prompt that count, the newest
EXPLORATION = 0.25


def ucb_priority(
    scores: Sequence[float],
    num_scores: int,
    step: int,
    *,
    memory: int = MEMORY,
    exploration: float = EXPLORATION,
) -> float:
    """1 - |mean score| + exploration * sqrt(ln step / num_scores): highest where outcomes are mixed or little is known.

    Args:
        scores: of the prompt's responses, in [-1, 1], oldest first; the last `memory` count.
        num_scores: how many there ever were; at least len(scores), as older ones may be forgotten.
        step: of training, from 1.

    Infinite for a prompt without a score: it comes first.
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
