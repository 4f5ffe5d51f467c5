"""Log-probability and entropy of given tokens straight from hidden states, without the [tokens, vocabulary] logits.

With logits z_j = (hidden . weight_j) / temperature over the V real columns, and Z = sum_j exp z_j:

    logprob = z_target - log Z                    d logprob / d z_j = [j = target] - p_j
    entropy = log Z - sum_j p_j z_j               d entropy / d z_j = -p_j (log p_j + entropy)

Tokens are taken in chunks, so at most one chunk of logits lives at a time, and the backward pass computes each chunk
again from `hidden` and `weight` (kept anyway) and two saved numbers a token. The vocabulary may be sharded over a
tensor-parallel group: per call, forward does one all-reduce of the maxima and one of the stacked (sum exp, sum exp *
logit, target logit), both of [tokens] size; backward does none, because the gradient of `hidden` is left as this rank's
partial sum.

Padded vocabulary columns are cut off before the matrix product, so they are in no sum and their gradient is exactly
zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

# Logits that live at a time. On a CPU a chunk should stay in the last-level cache; an accelerator wants large products.
CHUNK_BYTES = {"cpu": 4 << 20}
DEFAULT_CHUNK_BYTES = 64 << 20
# Below this many rows the matrix products are bound by reading the weight (measured at V = 32,000 on a CPU: 8 rows 2.4x
# slower).
MIN_CHUNK_TOKENS = 128


def vocab_parallel_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    chunk_tokens: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of `targets` and entropy of the whole distribution, both [P] and differentiable.

    hidden: [P, h], the same on every rank of `group`. weight: [V_padded / ranks, h], this rank's rows of the output
    matrix, rows in rank order. targets: [P] int64 in [0, vocab_size). vocab_size: the true V; columns from V on are
    padding. group: ranks over which the rows are sharded, None for one shard. chunk_tokens: tokens whose logits live at
    a time; None takes as many as fit CHUNK_BYTES, at least MIN_CHUNK_TOKENS.
    Sums run in fp32 (fp64 for fp64 inputs) and the results have that type. The gradient of `hidden` is this rank's
    partial sum over its columns: the caller reduces it over `group`. Every rank gets the same values bit for bit.
    Raises ValueError for shapes that do not fit, a temperature that is not positive and, on a CPU, targets outside the
    vocabulary; on an accelerator, where the check would stall the stream, such a token's log-prob is NaN instead.
    """
    shard = _check(hidden, weight, targets, temperature, vocab_size, group)
    chunk = _chunk_tokens(chunk_tokens, shard.num_columns, hidden)
    return _VocabParallelLogprobs.apply(hidden, weight, targets, shard, chunk)


@dataclass(frozen=True)
class _Shard:
    """This rank's real columns [first_column, first_column + num_columns) of the vocabulary."""

    first_column: int
    num_columns: int
    vocab_size: int
    temperature: float
    group: dist.ProcessGroup | None


def _check(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    vocab_size: int,
    group: dist.ProcessGroup | None,
) -> _Shard:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.size(1) != weight.size(1) or targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"logprobs: hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, targets {tuple(targets.shape)} "
            "do not fit; expected [P, h], [V, h] and [P]"
        )
    if not temperature > 0:
        raise ValueError(
            f"logprobs: temperature {temperature} must be positive; "
            "greedy sampling has no log-probabilities to train on"
        )
    num_ranks = 1 if group is None else dist.get_world_size(group)
    rank = 0 if group is None else dist.get_rank(group)
    rows = weight.size(0)
    if not 0 < vocab_size <= rows * num_ranks:
        raise ValueError(
            f"logprobs: vocab_size {vocab_size} is not in [1, {rows} rows x {num_ranks} ranks = {rows * num_ranks}]"
        )
    if targets.device.type == "cpu" and targets.numel():
        low, high = (int(value) for value in torch.aminmax(targets))
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"logprobs: targets span [{low}, {high}], outside the vocabulary [0, {vocab_size}); is this the "
                "model's tokenizer?"
            )
    first = rank * rows
    return _Shard(first, min(max(vocab_size - first, 0), rows), vocab_size, float(temperature), group)


def _chunk_tokens(asked: int | None, num_columns: int, hidden: torch.Tensor) -> int:
    if asked is not None:
        if asked < 1:
            raise ValueError(f"logprobs: chunk_tokens {asked} must be at least 1")
        return asked
    budget = CHUNK_BYTES.get(hidden.device.type, DEFAULT_CHUNK_BYTES)
    return max(MIN_CHUNK_TOKENS, budget // (max(num_columns, 1) * 4))


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _product_dtype(hidden: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    """Type of the factors of the matrix products. Tensor cores take bf16 factors into fp32 sums; a CPU needs fp32
    factors for that."""
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    return dtype if hidden.is_cuda else _accumulation_dtype(dtype)


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left @ right with sums and result in fp32, or fp64 for fp64 factors."""
    if left.dtype in (torch.float32, torch.float64):
        return torch.mm(left, right)
    return torch.mm(left, right, out_dtype=torch.float32)


def _chunk_logits(hidden: torch.Tensor, columns: torch.Tensor, temperature: float) -> torch.Tensor:
    """Logits [c, n] of one chunk over this rank's real columns."""
    logits = _product(hidden, columns)
    return logits if temperature == 1.0 else logits.div_(temperature)


def _own_targets(targets: torch.Tensor, shard: _Shard) -> tuple[torch.Tensor, torch.Tensor]:
    """Column of each target within the shard, clamped to be a valid index, and whether it is really there."""
    column = targets - shard.first_column
    owned = (column >= 0) & (column < shard.num_columns)
    return column.clamp_(0, max(shard.num_columns - 1, 0)), owned


class _VocabParallelLogprobs(torch.autograd.Function):
    """See the module docstring for the formulas; chunks are views, so nothing but logits is allocated per chunk."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, shard: _Shard, chunk: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sums = _local_sums(hidden, weight, targets, shard, chunk)
        logprobs, log_z, entropy = _combine(*sums, shard)
        if targets.device.type != "cpu":
            logprobs.masked_fill_((targets < 0) | (targets >= shard.vocab_size), float("nan"))
        ctx.save_for_backward(hidden, weight, targets, log_z, entropy)
        ctx.shard, ctx.chunk = shard, chunk
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, targets, log_z, entropy = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        if grad_logprobs is None and grad_entropy is None:
            return None, None, None, None, None
        shard, dtype = ctx.shard, _product_dtype(hidden, weight)
        rows = weight[: shard.num_columns].to(dtype)
        columns, (column, owned) = rows.t(), _own_targets(targets, shard)
        grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=log_z.dtype) if needs_weight else None
        for start in range(0, hidden.size(0) if shard.num_columns else 0, ctx.chunk):
            part = slice(start, start + ctx.chunk)
            chunk_hidden = hidden[part].to(dtype)
            log_p = _chunk_logits(chunk_hidden, columns, shard.temperature).sub_(log_z[part, None])
            grad = _grad_logits(
                log_p, entropy[part], _part(grad_logprobs, part), _part(grad_entropy, part), column[part], owned[part]
            )
            grad = (grad if shard.temperature == 1.0 else grad.div_(shard.temperature)).to(dtype)
            if grad_hidden is not None:
                grad_hidden[part] = _product(grad, rows)
            if grad_weight is not None:
                _add_product(grad_weight[: shard.num_columns], grad.t(), chunk_hidden)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def _part(values: torch.Tensor | None, part: slice) -> torch.Tensor | None:
    return None if values is None else values[part]


def _local_sums(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, shard: _Shard, chunk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Maxima [P] over this rank's columns, and [3, P]: sum exp and sum exp * logit, both of logits relative to that
    maximum, and the target's logit as it is (0 where another rank owns it)."""
    num_tokens, dtype = hidden.size(0), _product_dtype(hidden, weight)
    maxima = hidden.new_full((num_tokens,), torch.finfo(torch.float32).min, dtype=_accumulation_dtype(dtype))
    sums = maxima.new_zeros(3, num_tokens)
    if not shard.num_columns:
        return maxima, sums
    columns, (column, owned) = weight[: shard.num_columns].to(dtype).t(), _own_targets(targets, shard)
    for start in range(0, num_tokens, chunk):
        part = slice(start, start + chunk)
        logits = _chunk_logits(hidden[part].to(dtype), columns, shard.temperature)
        sums[2, part] = logits.gather(1, column[part, None])[:, 0].where(owned[part], 0.0)
        maxima[part] = logits.amax(dim=1)
        logits.sub_(maxima[part, None])
        exponentials = logits.exp()
        sums[0, part] = exponentials.sum(dim=1)
        sums[1, part] = logits.mul_(exponentials).sum(dim=1)
    return maxima, sums


def _combine(
    maxima: torch.Tensor, sums: torch.Tensor, shard: _Shard
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logprobs, log Z, entropy), each [P], from this rank's sums and the other ranks'."""
    if shard.group is not None:
        local_maxima = maxima.clone()
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=shard.group)
        _rebase(sums, local_maxima - maxima)
        dist.all_reduce(sums, group=shard.group)
    total, weighted, target = sums
    log_total = total.log()
    # Rounding may leave a log-probability a last bit above 0, which downstream would read as a probability above 1.
    logprobs = (target - maxima).sub_(log_total).clamp_(max=0.0)
    entropy = (log_total - weighted / total).clamp_(min=0.0)
    return logprobs, maxima + log_total, entropy


def _rebase(sums: torch.Tensor, shift: torch.Tensor) -> None:
    """Turn sums relative to the local maximum into sums relative to the global one; `shift` [P] is local minus global,
    at most 0."""
    factor = shift.exp()
    sums[1].addcmul_(sums[0], shift).mul_(factor)
    sums[0].mul_(factor)


def _grad_logits(
    log_p: torch.Tensor,
    entropy: torch.Tensor,
    grad_logprobs: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    column: torch.Tensor,
    owned: torch.Tensor,
) -> torch.Tensor:
    """Gradient [c, n] of the (temperature-scaled) logits; overwrites `log_p`."""
    if grad_entropy is None:
        assert grad_logprobs is not None, "called without any gradient"
        grad = log_p.exp_().mul_(-grad_logprobs[:, None])
    else:
        p = log_p.exp()
        factor = log_p.add_(entropy[:, None]).mul_(grad_entropy[:, None])
        grad = (factor if grad_logprobs is None else factor.add_(grad_logprobs[:, None])).mul_(p).neg_()
    if grad_logprobs is not None:
        grad.scatter_add_(1, column[:, None], grad_logprobs.where(owned, 0.0)[:, None])
    return grad


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """total += left @ right, accumulated in the type of `total`."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total.add_(_product(left, right))
