"""Which implementation of the head runs, by one rule, and why.

`auto` is `chunked`. `reference` runs where it is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_dapo.ops.head import chunked
from megatron_dapo.ops.head.problem import Kernels

AUTO, REFERENCE, CHUNKED = "auto", "reference", "chunked"
_KERNELS = {CHUNKED: Kernels(chunked.sums, chunked.gradients)}
IMPLEMENTATIONS = (REFERENCE, *_KERNELS)


@dataclass(frozen=True)
class Choice:
    """`name` computes the head, because of `reason`."""

    name: str
    reason: str


def choose(asked: str, hidden: torch.Tensor, weight: torch.Tensor) -> Choice:
    """ValueError for a name that does not exist."""
    if asked == AUTO:
        return Choice(CHUNKED, "runs everywhere")
    if asked not in IMPLEMENTATIONS:
        raise ValueError(f"log-prob head: no implementation {asked!r}; there are {AUTO}, {', '.join(IMPLEMENTATIONS)}")
    return Choice(asked, "asked for")


def kernels_of(name: str) -> Kernels:
    return _KERNELS[name]
