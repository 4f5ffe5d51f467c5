"""How repetitive a response is: n-grams, a loop at its end, compressibility. Metrics, not rewards."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TailLoop:
    """The response ends in `repeats` copies of its last `period` tokens; 0, 0 where it does not loop."""

    period: int
    repeats: int


@dataclass(frozen=True)
class Repetition:
    """Of one response."""

    ngram: float  # 0: no n-gram twice, towards 1: nearly all are copies
    tail_loop: TailLoop
    zlib_ratio: float  # compressed / raw bytes of the token ids; low is repetitive, a very short response is above 1


def ngram_repetition(token_ids: Sequence[int], n: int = 20) -> float:
    """1 - distinct n-grams / n-grams; 0 for fewer than n tokens."""
    total = len(token_ids) - n + 1
    if total <= 0:
        return 0.0
    return 1.0 - len({tuple(token_ids[start : start + n]) for start in range(total)}) / total


def _matching_tail(token_ids: Sequence[int], period: int) -> int:
    """How many tokens at the end equal the token `period` before them."""
    matched = 0
    for position in range(len(token_ids) - 1, period - 1, -1):
        if token_ids[position] != token_ids[position - period]:
            break
        matched += 1
    return matched


def tail_loop(token_ids: Sequence[int], min_repeats: int = 3, max_period: int = 256) -> TailLoop:
    """The loop that covers most of the end of the response, the shortest period among equals."""
    best = TailLoop(0, 0)
    for period in range(1, min(max_period, len(token_ids) // min_repeats) + 1):
        # A multiple of the best period that fits into what that covers, covers no more: skipping it keeps long loops
        # linear.
        if best.period and period % best.period == 0 and period <= best.period * best.repeats:
            continue
        repeats = _matching_tail(token_ids, period) // period + 1
        if repeats >= min_repeats and repeats * period > best.repeats * best.period:
            best = TailLoop(period, repeats)
    return best


def zlib_ratio(token_ids: Sequence[int]) -> float:
    """Compressed / raw size of the ids as 32-bit words; 1 for an empty response."""
    raw = array("i", token_ids).tobytes()
    return len(zlib.compress(raw, 6)) / len(raw) if raw else 1.0


def repetition(token_ids: Sequence[int], n: int = 20) -> Repetition:
    """All three metrics of one response's token ids."""
    return Repetition(ngram_repetition(token_ids, n), tail_loop(token_ids), zlib_ratio(token_ids))
