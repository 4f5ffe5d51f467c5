"""Repetition in a response: n-grams, a loop at its end, compressibility. Metrics, not rewards."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that no token is multiplied away


@dataclass(frozen=True)
class TailLoop:
    """A loop: the response ends in `repeats` copies of its last `period` tokens; 0, 0 if it does not loop."""

    period: int
    repeats: int


def ngram_repetition(token_ids: Sequence[int] | np.ndarray, n: int = 20) -> float:
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


def _matching_tail(tokens: np.ndarray, period: int) -> int:
    """Count the tokens at the end that equal the token `period` before them."""
    width = 64  # few responses loop; only those are scanned in full
    while True:
        start = max(period, len(tokens) - width)
        differs = np.flatnonzero(tokens[start:] != tokens[start - period : len(tokens) - period])
        if len(differs):
            return len(tokens) - start - int(differs[-1]) - 1
        if start == period:
            return len(tokens) - period
        width *= 8


def tail_loop(token_ids: Sequence[int] | np.ndarray, min_repeats: int = 3, max_period: int = 256) -> TailLoop:
    """The loop that covers most of the end of the response, the shortest period among equals."""
    best, tokens = TailLoop(0, 0), np.asarray(token_ids)
    for period in range(1, min(max_period, len(token_ids) // min_repeats) + 1):
        # A multiple of the best period that fits into what that covers, covers no more: skipping it keeps long loops
        # linear.
        if best.period and period % best.period == 0 and period <= best.period * best.repeats:
            continue
        repeats = _matching_tail(tokens, period) // period + 1
        if repeats >= min_repeats and repeats * period > best.repeats * best.period:
            best = TailLoop(period, repeats)
    return best


def zlib_ratio(token_ids: Sequence[int] | np.ndarray) -> float:
    """Compressed / raw size of the ids as 32-bit words; 1 for an empty response."""
    raw = np.asarray(token_ids, dtype=np.int32).tobytes()
    return len(zlib.compress(raw, 6)) / len(raw) if raw else 1.0


def repetition_numbers(token_ids: Sequence[int] | np.ndarray, n: int = 20) -> tuple[float, int, int, float]:
    """Return n-gram repetition, period and repeats of the loop at the end, and zlib ratio of one response's token ids."""
    loop = tail_loop(token_ids)
    return ngram_repetition(token_ids, n), loop.period, loop.repeats, zlib_ratio(token_ids)
