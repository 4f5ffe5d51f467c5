"""Repetition in a response: n-grams, a loop at its end, compressibility. Metrics, not rewards."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that no token is multiplied away


@dataclass(frozen=True)
class TailLoop:
    """The response ends in `repeats` copies of its last `period` tokens; 0, 0 where it does not loop."""

    period: int
    repeats: int


@dataclass(frozen=True)
class Repetition:
    """Repetition metrics of one response."""

    ngram: float  # 0: no n-gram twice, towards 1: nearly all are copies
    tail_loop: TailLoop
    zlib_ratio: float  # compressed / raw bytes of the token ids; low is repetitive, a very short response is above 1


def ngram_repetition(token_ids: Sequence[int], n: int = 20) -> float:
    """1 - distinct n-grams / n-grams; 0 for fewer than n tokens. Exact."""
    total = len(token_ids) - n + 1
    if total <= 0:
        return 0.0
    tokens = np.asarray(token_ids, dtype=np.int64)
    hashes = np.zeros(total, dtype=np.uint64)
    for offset in range(n):
        hashes = hashes * _HASH_FACTOR + tokens[offset : offset + total].view(np.uint64)
    # Different hashes mean different n-grams, so only n-grams that share a hash have to be compared.
    _, inverse, counts = np.unique(hashes, return_inverse=True, return_counts=True)
    num_single = int((counts == 1).sum())
    if num_single == total:
        return 0.0
    shared = np.lib.stride_tricks.sliding_window_view(tokens, n)[counts[inverse] > 1]
    raw, width = shared.tobytes(), n * tokens.itemsize
    num_distinct = num_single + len({raw[start : start + width] for start in range(0, len(raw), width)})
    return 1.0 - num_distinct / total


def _matching_tail(token_ids: Sequence[int], period: int) -> int:
    """Count the tokens at the end that equal the token `period` before them."""
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
    raw = np.asarray(token_ids, dtype=np.int32).tobytes()
    return len(zlib.compress(raw, 6)) / len(raw) if raw else 1.0


def repetition(token_ids: Sequence[int], n: int = 20) -> Repetition:
    """All three metrics of one response's token ids."""
    return Repetition(ngram_repetition(token_ids, n), tail_loop(token_ids), zlib_ratio(token_ids))
