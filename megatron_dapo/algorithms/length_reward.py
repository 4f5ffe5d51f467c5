"""Penalties on whole responses: soft overlong punishment (arXiv 2503.14476, 3.4), and a penalty on improbable text.

The alternative is reward.overlong_filter: a truncated response whose loss is masked never feels its penalty.
"""

from __future__ import annotations

import torch


def soft_overlong_penalty(
    response_lengths: torch.Tensor, max_length: int, cache_length: int, factor: float = 1.0
) -> torch.Tensor:
    """Return the soft overlong punishment (Eq 13), float64 [S], to be ADDED to the verifier's reward.

    0 up to max_length - cache_length, then linearly down to -factor at `max_length`, and -factor beyond it (never
    lower). `max_length` is the hard limit of generation: "16384 with a cache of 4096" in the paper means max_length
    20480, so that the penalty starts at 16384.
    """
    if not 0 < cache_length <= max_length:
        raise ValueError(
            f"soft overlong punishment: cache_length {cache_length} must be in [1, max_length = {max_length}]; "
            "the penalty starts at max_length - cache_length"
        )
    if factor < 0:
        raise ValueError(f"soft overlong punishment: factor {factor} would reward length; use a factor of at least 0")
    excess = response_lengths.to(torch.float64) - (max_length - cache_length)
    return -factor * (excess / cache_length).clamp(0.0, 1.0)


def soft_perplexity_penalty(
    mean_nll: torch.Tensor, start: float, end: float, factor: float = 1.0, low_start: float = 0.0, low_end: float = 0.0
) -> torch.Tensor:
    """Return a soft penalty on the perplexity exp(`mean_nll`), float64 [S], to be ADDED to the verifier's reward.

    It is 0 up to `start`, then falls linearly to -factor at `end` (both in nats per token, like `mean_nll` [S]), and
    never lower. If low_start > 0, the same applies below it, in full at low_end: repetitive text is too probable. Raise
    ValueError if the bounds are out of order.
    """
    if not 0.0 <= start < end or (low_start > 0 and not 0.0 <= low_end < low_start <= start) or factor < 0:
        raise ValueError(
            f"soft perplexity penalty: want low_end {low_end} < low_start {low_start} <= start {start} < end {end} and "
            f"factor {factor} of at least 0"
        )
    nll = mean_nll.to(torch.float64)
    share = ((nll - start) / (end - start)).clamp(0.0, 1.0)
    if low_start > 0:
        share = share + ((low_start - nll) / (low_start - low_end)).clamp(0.0, 1.0)
    return -factor * share
