"""Attention with sinks (arXiv:2309.17453, as in gpt-oss): each head has a learned logit in the denominator of its softmax."""

from __future__ import annotations

import torch


def softmax_with_sinks(scores: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Return the fp32 softmax of scores [..., heads, L, S] with the sinks [heads] in its denominator; it adds up to less than 1."""
    column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), dim=-1).softmax(dim=-1, dtype=torch.float32)[..., :-1]


def attend_with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    """Attend: query [n, heads, L, d], key and value [n, groups, S, d] -> [n, heads, L, d]. `mask` [n or 1, 1, L, S]: visible keys;
    None: causal, L = S. `scale` None: 1 / sqrt(d)."""
    if mask is None:
        mask = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
    key, value = (part.repeat_interleave(query.size(1) // part.size(1), dim=1) for part in (key, value))
    scores = query @ key.transpose(-1, -2) * (query.size(-1) ** -0.5 if scale is None else scale)
    return softmax_with_sinks(scores.masked_fill(~mask, -torch.inf), sinks).type_as(value) @ value
