"""Inputs of every implementation of the head, and what they share: the shard, the tiles, the sums over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_dapo.plan.memory import Tiles, head_tiles


@dataclass(frozen=True)
class VocabShard:
    """This rank's real columns [first_column, first_column + num_columns) of the vocabulary."""

    first_column: int
    num_columns: int
    vocab_size: int
    temperature: float
    group: dist.ProcessGroup | None


@dataclass(frozen=True)
class HeadInputs:
    """hidden [P, h], weight [rows, h] of this rank, targets [P] in the whole vocabulary."""

    hidden: torch.Tensor
    weight: torch.Tensor
    targets: torch.Tensor
    shard: VocabShard
    tiles: Tiles

    @property
    def own_column(self) -> torch.Tensor:
        """[P] column of each target counted from the shard's first; outside [0, num_columns) if another rank owns it."""
        return self.targets - self.shard.first_column

    def token_tiles(self) -> Iterator[slice]:
        return _slices(self.hidden.size(0), self.tiles.tokens)

    def column_tiles(self) -> Iterator[slice]:
        return _slices(self.shard.num_columns, self.tiles.columns)


@dataclass(frozen=True)
class KeptLogits:
    """Logits of a training pass for its backward pass, which then multiplies nothing again.

    In 16 bits each is relative to the largest of its token in its group of columns: rounding changes a probability by
    2^-12 of the distance to that largest logit, and at a large distance there is little probability to change.
    """

    values: torch.Tensor  # [P, columns]; raw products by torch, divided by the temperature by Triton
    largest: torch.Tensor | None = None  # [P, groups of columns] fp32, what to add to `values`; None: nothing


@dataclass(frozen=True)
class Upstream:
    """Results of the forward pass and gradients of its outputs, each [P].

    The gradients (None: unused) are divided by the temperature, so that they are those of the raw products.
    """

    entropy: torch.Tensor
    # log Z is maxima + log_totals. Their sum would lose the small one to rounding if logits are large.
    maxima: torch.Tensor
    log_totals: torch.Tensor
    to_logprobs: torch.Tensor | None
    to_entropy: torch.Tensor | None
    needs_hidden: bool
    needs_weight: bool
    kept: KeptLogits | None = None
    # The fp32 sum of the weight's gradients over micro-batches [rows, h]: the gradient is added there and not returned.
    main_grad: torch.Tensor | None = None


Gradients = tuple["torch.Tensor | None", "torch.Tensor | None"]


def _slices(total: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, total)) for start in range(0, total, step))


def choose_tiles(
    num_tokens: int,
    num_columns: int,
    device: torch.device,
    chunk_tokens: int | None,
    chunk_columns: int | None,
    num_models: int = 1,
) -> Tiles:
    """Return the requested tiles, or those that suit the device. ValueError for a request below 1.

    `num_models`: models whose logits of a tile are in memory together.
    """
    for name, requested in (("chunk_tokens", chunk_tokens), ("chunk_columns", chunk_columns)):
        if requested is not None and requested < 1:
            raise ValueError(f"logprobs: {name} {requested} must be at least 1")
    return head_tiles(num_tokens, num_columns, device.type == "cpu", chunk_tokens, chunk_columns, num_models)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type of sums over factors of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def product_dtype(hidden: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    """Return the type of the factors of the matrix products."""
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    # Tensor cores give the fp32 sums of bf16 factors. A CPU rounds them to bf16, so its factors are widened.
    return dtype if hidden.is_cuda else accumulation_dtype(dtype)


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return left @ right with sums and result in fp32, or fp64 for fp64 factors."""
    if left.dtype in (torch.float32, torch.float64):
        return torch.mm(left, right)
    return torch.mm(left, right, out_dtype=torch.float32)


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add left @ right to `total`, accumulated in the type of `total`."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif not left.is_cuda:
        total.add_(torch.mm(left, right))
    else:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)


def set_product(result: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Set `result` to left @ right, summed in fp32 or fp64 and rounded once."""
    if left.dtype == result.dtype:
        torch.mm(left, right, out=result)
    else:
        result.copy_(torch.mm(left, right))


def rebase(sums: torch.Tensor, shift: torch.Tensor) -> None:
    """Turn (sum exp, sum exp * logit) relative to one maximum into those relative to a larger one; `shift` [P] is the
    old maximum less the new one, at most 0."""
    factor = shift.exp()
    sums[1].addcmul_(sums[0], shift).mul_(factor)
    sums[0].mul_(factor)


def combine(maxima: torch.Tensor, sums: torch.Tensor, shard: VocabShard) -> tuple[torch.Tensor, ...]:
    """Return (logprobs, entropy, maxima, log of sum exp relative to them), each [P], from the sums of all ranks.
    Overwrites its arguments."""
    if shard.group is not None:
        local_maxima = maxima.clone()
        # Two collectives: sums of different ranks can be added only once they are relative to the same maximum.
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=shard.group)
        rebase(sums, local_maxima - maxima)
        dist.all_reduce(sums, group=shard.group)
    total, weighted, target = sums
    log_total = total.log()
    # Rounding may leave a log-probability a last bit above 0, which downstream would read as a probability above 1.
    logprobs = (target - maxima).sub_(log_total).clamp_(max=0.0)
    entropy = (log_total - weighted / total).clamp_(min=0.0)
    return logprobs, entropy, maxima, log_total
