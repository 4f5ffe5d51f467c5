"""Drawing one token a row: counter-based random numbers and inverse-CDF sampling, as pure tensor functions.

B rows, V vocabulary entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

# Constants of the splitmix64 generator (Steele, Lea, Flood 2014) as signed 64-bit integers.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def signed_seed(seed: int) -> int:
    """Any Python integer as the signed 64-bit integer with the same low 64 bits."""
    low = seed & 0xFFFFFFFFFFFFFFFF
    return low - (1 << 64) if low >= 1 << 63 else low


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64 (the built-in one copies the sign)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The finalizer of splitmix64: a bijection of 64-bit integers whose output bits all depend on all input bits."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def uniforms(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Uniform numbers in [0, 1), one per (seed, position), the same on every device and in every batch.

    seeds, positions: int64 [B]; result float32 [B] with 24 random bits. The seed is mixed before the position is added,
    so that neighboring seeds do not share shifted streams.
    """
    bits = _mix(_mix(seeds) + (positions + 1) * _GAMMA)
    return _shift_right(bits, 40).to(torch.float32) * 2.0**-24


@dataclass(frozen=True)
class RowSampling:
    """Sampling parameters of B rows as tensors [B], with what any of them needs, so that a tick skips the rest."""

    temperature: torch.Tensor  # float32, 0 is greedy
    top_p: torch.Tensor  # float32
    top_k: torch.Tensor  # int64, 0: off
    any_scaled: bool  # a temperature other than 1
    any_greedy: bool
    any_restricted: bool  # top_p < 1 or top_k > 0
    # bool: their supports are recorded, and their log-probs renormalized over them; None: no row's
    recorded: torch.Tensor | None = None

    @classmethod
    def of(
        cls, temperature: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor, recorded: torch.Tensor | None = None
    ) -> RowSampling:
        return cls(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            any_scaled=bool((temperature != 1).any()),
            any_greedy=bool((temperature == 0).any()),
            any_restricted=bool(((top_p < 1) | (top_k > 0)).any()),
            recorded=recorded if recorded is not None and bool(recorded.any()) else None,
        )


def _restrict(logprobs: torch.Tensor, rows: RowSampling) -> torch.Tensor:
    """Probabilities [B, V] with everything outside top-k, then outside the nucleus of what is left, set to 0 (not
    renormalized).

    The nucleus is the smallest set of most likely tokens whose mass reaches top_p; the most likely token always stays.
    """
    # Stable: equal probabilities keep the order of their token ids, on every device.
    probabilities, order = logprobs.exp().sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logprobs.shape[-1], device=logprobs.device)
    top_k = torch.where(rows.top_k > 0, rows.top_k, logprobs.shape[-1])
    probabilities = probabilities.masked_fill(rank >= top_k[:, None], 0.0)
    mass_before = probabilities.cumsum(-1) - probabilities
    nucleus = rows.top_p[:, None] * probabilities.sum(-1, keepdim=True)
    # Comparing "mass before" keeps the token that crosses top_p; rows with top_p = 1 keep all despite rounding.
    outside = (mass_before >= nucleus) & (rows.top_p < 1)[:, None]
    probabilities = probabilities.masked_fill(outside, 0.0)
    return torch.zeros_like(logprobs).scatter_(-1, order, probabilities)


def _invert_cdf(probabilities: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The first token whose cumulative mass exceeds uniform x total. probabilities [B, V] need not sum to 1; result
    int64 [B].
    """
    cumulative = probabilities.cumsum(-1)
    total = cumulative[:, -1:]
    # Strictly below the total, so that the token found has a positive probability.
    target = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1)


class Draw(NamedTuple):
    """One token for each of B rows."""

    tokens: torch.Tensor  # int64 [B]
    logprobs: torch.Tensor  # float32 [B]
    support: torch.Tensor | None = None  # bool [B, V]: tokens that a recorded row could have drawn; None: no row is recorded


def draw(logits: torch.Tensor, rows: RowSampling, uniform: torch.Tensor) -> Draw:
    """Draw one token a row from logits [B, V] by uniform [B] in [0, 1).

    Its log-probability is log softmax(logits / temperature)[token] over the whole vocabulary, or over the row's support
    if that is recorded. A greedy row (temperature 0) takes the most likely token and reports its log-probability at
    temperature 1.
    """
    logits = logits.float()
    if rows.any_scaled:  # 1.0 in place of a greedy row's 0
        logits = logits / torch.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]
    logprobs = torch.log_softmax(logits, dim=-1)
    probabilities = _restrict(logprobs, rows) if rows.any_restricted else logprobs.exp()
    # A NaN row would find index V; the caller detects it by its log-probability.
    tokens = _invert_cdf(probabilities, uniform).clamp_(max=logits.shape[-1] - 1)
    if rows.any_greedy:
        tokens = torch.where(rows.temperature == 0, logprobs.argmax(-1), tokens)
    drawn = logprobs.gather(-1, tokens[:, None]).squeeze(-1)
    if rows.recorded is None:
        return Draw(tokens, drawn)
    # A probability that underflows is never drawn, so it is not in the support.
    support = (probabilities > 0) & rows.recorded[:, None]
    inside = logprobs.masked_fill(~support, float("-inf")).logsumexp(-1)
    return Draw(tokens, torch.where(rows.recorded, drawn - inside, drawn).clamp_(max=0.0), support)
