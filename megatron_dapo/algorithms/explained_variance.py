"""Share of the returns' variance that a critic explains, from sums that add up over micro-batches and ranks.

    EV = 1 - Var(G - V) / Var(G)     over trained tokens

EV is 1 for a perfect critic, 0 for one no better than a constant, and negative for a worse one. With one outcome per
response, all its tokens have the same return, which is easy to predict at the end and hard at the start. Therefore EV
is also computed for the first, middle and last tenth of each response.
"""

from __future__ import annotations

import torch

from megatron_dapo.algorithms.gae import trained_tokens
from megatron_dapo.algorithms.segments import MetricSums

# A tenth of n trained tokens is ceil(n / 10) of them: at least one, so the parts of a short response overlap.
PARTS = ("all", "first_decile", "middle_decile", "last_decile")


def explained_variance_sums(
    values: torch.Tensor, returns: torch.Tensor, loss_mask: torch.Tensor, lengths: torch.Tensor
) -> MetricSums:
    """Sums of whole responses, by "<part>/<moment>": `values`, `returns`, `loss_mask` [P] packed, `lengths` [S] as in `gae.ValueInputs`."""
    tokens = trained_tokens(loss_mask, lengths)
    value, target = tokens.take(values.detach()).double(), tokens.take(returns.detach()).double()
    sums: dict[str, torch.Tensor] = {}
    maxima: dict[str, torch.Tensor] = {}
    for part, inside in _parts(tokens.lengths).items():
        part_sums, part_maxima = _moments(value[inside], target[inside])
        sums |= {f"{part}/{what}": number for what, number in part_sums.items()}
        maxima |= {f"{part}/{what}": number for what, number in part_maxima.items()}
    return MetricSums(sums, maxima)


def _parts(num_trained: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return part -> [M] bool, for consecutive responses with `num_trained` [S] trained tokens."""
    starts = num_trained.cumsum(0) - num_trained
    position = torch.arange(int(num_trained.sum()), device=num_trained.device)
    position = position - starts.repeat_interleave(num_trained)
    tenth = (num_trained + 9) // 10
    first = {
        "first_decile": torch.zeros_like(num_trained),
        "middle_decile": (num_trained - tenth) // 2,
        "last_decile": num_trained - tenth,
    }
    inside = {"all": torch.ones_like(position, dtype=torch.bool)}
    for part, start in first.items():
        low, high = start.repeat_interleave(num_trained), (start + tenth).repeat_interleave(num_trained)
        inside[part] = (position >= low) & (position < high)
    return inside


def _moments(value: torch.Tensor, target: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    error = target - value
    lowest = torch.full((1,), -torch.inf, dtype=torch.float64, device=value.device)
    sums = {
        "num_tokens": torch.ones_like(value).sum(),
        "return": target.sum(),
        "return_square": target.square().sum(),
        "error": error.sum(),
        "error_square": error.square().sum(),
    }
    maxima = {"return": torch.cat([target, lowest]).max(), "negative_return": torch.cat([-target, lowest]).max()}
    return sums, maxima


def explained_variance(total: MetricSums) -> dict[str, float]:
    """Part -> EV, from globally combined sums. A part without tokens, or whose returns are all equal, is left out."""
    result = {}
    for part in PARTS:
        spread = float(total.maxima[f"{part}/return"] + total.maxima[f"{part}/negative_return"])
        if spread > 0:
            result[part] = 1.0 - _variance(total, part, "error") / _variance(total, part, "return")
    return result


def _variance(total: MetricSums, part: str, what: str) -> float:
    num_tokens = float(total.sums[f"{part}/num_tokens"])
    mean = float(total.sums[f"{part}/{what}"]) / num_tokens
    return max(float(total.sums[f"{part}/{what}_square"]) / num_tokens - mean**2, 0.0)
