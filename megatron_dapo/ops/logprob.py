"""Log-probability and entropy of given tokens straight from hidden states, without the [tokens, vocabulary] logits.

With logits z_j = (hidden . weight_j) / temperature over the V real columns, and Z = sum_j exp z_j:

    logprob = z_target - log Z                    d logprob / d z_j = [j = target] - p_j
    entropy = log Z - sum_j p_j z_j               d entropy / d z_j = -p_j (log p_j + entropy)

The logits are taken in tiles of tokens x columns, so at most one tile of them lives at a time, and the backward pass
computes each tile again from `hidden` and `weight` (kept anyway) and three saved numbers a token, unless there is room to
keep them all: that saves one of four matrix products. The vocabulary may be
sharded over a tensor-parallel group: per call, forward does one all-reduce of the maxima and one of the stacked (sum
exp, sum exp * logit, target logit), both of [tokens] size; backward does none, because the gradient of `hidden` is left
as this rank's partial sum.

Padded vocabulary columns are cut off before the matrix product, so they are in no sum and their gradient is exactly
zero. `megatron_dapo.ops.lm_head.select` chooses the implementation.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from megatron_dapo.ops.lm_head import reference
from megatron_dapo.ops.lm_head.inputs import HeadInputs, Upstream, VocabShard, choose_tiles, combine
from megatron_dapo.ops.lm_head.select import REFERENCE, HeadSpec, choose, kernels_of


def vocab_parallel_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    implementation: str = "auto",
    chunk_tokens: int | None = None,
    chunk_columns: int | None = None,
    keep_bytes: int = 0,
    adds_to_main_grad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-prob of `targets` and the entropy of the whole distribution, both [P] and differentiable.

    hidden: [P, h], the same on every rank of `group`. weight: [V_padded / ranks, h], this rank's rows of the output
    matrix, rows in rank order. targets: [P] int64 in [0, vocab_size). vocab_size: the true V; columns from V on are
    padding. group: ranks over which the rows are sharded, None for one shard. implementation: a name of
    `lm_head.select.IMPLEMENTATIONS` or "auto". chunk_tokens, chunk_columns: tokens and columns whose logits live at a
    time; None: by the device's cache or memory. `triton` chooses its own tiles. keep_bytes: most memory that this call may
    hold until its backward pass for logits, which then need not be computed again. adds_to_main_grad: add the weight's
    gradient to its fp32 `main_grad`, if it has one, as megatron-core's layers with fused accumulation do: autograd gets
    a tensor without meaning and `grad_added_to_main_grad` says so, hence nothing but an embedding of the same weight
    (`zero_out_wgrad`) may give it another gradient. `reference` has neither.
    Sums run in fp32 (fp64 for fp64 inputs) and the results have that type. The gradient of `hidden` is this rank's
    partial sum over its columns: the caller reduces it over `group`. Every rank gets the same values bit for bit.
    Values that are not finite come out as values that are not finite, in their token's row.
    Raises ValueError for shapes that do not fit, a temperature that is not positive, an implementation that cannot run
    here and, on a CPU, targets outside the vocabulary; on an accelerator the check would stall the stream, and such
    a token's log-prob is NaN instead.
    """
    shard = shard_of(hidden, weight, targets, temperature, vocab_size, group)
    tiles = choose_tiles(hidden.size(0), shard.num_columns, hidden.device, chunk_tokens, chunk_columns)
    inputs = HeadInputs(hidden, weight, targets, shard, tiles)
    name = choose(implementation, HeadSpec.of(hidden, weight)).name
    if name == REFERENCE:
        logprobs, entropy = reference.logprobs_and_entropy(inputs)
        return _nan_outside_vocabulary(logprobs, targets, vocab_size), entropy
    return _Head.apply(hidden, weight, inputs, kernels_of(name), keep_bytes, adds_to_main_grad)


def shard_of(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    vocab_size: int,
    group: dist.ProcessGroup | None,
) -> VocabShard:
    """Return this rank's shard of the vocabulary. ValueError if the arguments of a head do not fit each other."""
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
    return VocabShard(first, min(max(vocab_size - first, 0), rows), vocab_size, float(temperature), group)


def _nan_outside_vocabulary(logprobs: torch.Tensor, targets: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Set NaN if the target is outside the vocabulary."""
    # On a CPU such targets were refused by `shard_of`; on a device that check would wait for the stream.
    if targets.device.type == "cpu":
        return logprobs
    return logprobs.masked_fill((targets < 0) | (targets >= vocab_size), float("nan"))


class _Head(torch.autograd.Function):
    """The common part of the implementations: sums over ranks forward, saved tensors, the temperature backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        inputs: HeadInputs,
        kernels: ModuleType,
        keep_bytes: int,
        adds_to_main_grad: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kept = kernels.room(inputs, keep_bytes) if keep_bytes and any(ctx.needs_input_grad) else None
        maxima, totals = kernels.sums(inputs, kept)
        logprobs, entropy, maxima, log_totals = combine(maxima, totals, inputs.shard)
        ctx.save_for_backward(hidden, weight, inputs.targets, entropy, maxima, log_totals)
        ctx.shard, ctx.tiles, ctx.kernels, ctx.kept = inputs.shard, inputs.tiles, kernels, kept
        is_added = adds_to_main_grad and ctx.needs_input_grad[1]
        # The parameter itself: what is saved for the backward pass comes back without its attributes.
        ctx.parameter, ctx.main_grad = weight, main_grad_of(weight, maxima.dtype) if is_added else None
        # An unused entropy then costs nothing in the backward pass: its gradient is None, not zeros.
        ctx.set_materialize_grads(False)
        return _nan_outside_vocabulary(logprobs, inputs.targets, inputs.shard.vocab_size), entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        if grad_logprobs is None and grad_entropy is None:
            return (None,) * 6
        hidden, weight, targets, entropy, maxima, log_totals = ctx.saved_tensors
        inputs = HeadInputs(hidden, weight, targets, ctx.shard, ctx.tiles)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        upstream = Upstream(
            entropy,
            maxima,
            log_totals,
            to_logprobs=over_temperature(grad_logprobs, ctx.shard),
            to_entropy=over_temperature(grad_entropy, ctx.shard),
            needs_hidden=needs_hidden,
            needs_weight=needs_weight,
            kept=ctx.kept,
            main_grad=ctx.main_grad,
        )
        ctx.kept = None  # overwritten: another backward pass over this graph computes the logits again
        to_hidden, to_weight = ctx.kernels.gradients(inputs, upstream)
        if ctx.main_grad is not None:
            to_weight = gradient_beside_main_grad(ctx.parameter)
        return to_hidden, to_weight, None, None, None, None


def main_grad_of(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the tensor that sums the weight's gradients over micro-batches, if it has the type of the head's sums."""
    main_grad = getattr(weight, "main_grad", None)
    return main_grad if main_grad is not None and main_grad.dtype == dtype else None


def gradient_beside_main_grad(weight: torch.Tensor) -> torch.Tensor | None:
    """Return what autograd gets for a weight whose gradient is in its `main_grad`: megatron-core's hook wants a tensor of its
    shape and ignores it."""
    if getattr(
        weight, "zero_out_wgrad", False
    ):  # the hook adds what comes from the embedding, so nothing may be added to it
        return None
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return torch.empty_like(weight)


def over_temperature(gradient: torch.Tensor | None, shard: VocabShard) -> torch.Tensor | None:
    return None if gradient is None else gradient / shard.temperature
