"""Log-probability and entropy under top-p and top-k sampling: of the distribution renormalized over each token's support.

With S the ids that a token was drawn from, and logits z_j = (hidden . weight_j) / temperature:

    logprob = z_target - log sum_{j in S} exp z_j      d logprob / d z_j = [j = target] - q_j,   0 outside S
    entropy = - sum_{j in S} q_j log q_j               d entropy / d z_j = -q_j (log q_j + entropy)

where q is the sampled distribution. Only the columns that some token's support contains are multiplied: their rows of the weight are
gathered once, the head's tiles go through them, and logits outside a token's own support are masked. Memory: the gathered
rows, in the backward pass their gradient in fp32, both at most tokens x K rows, usually a few percent of the vocabulary.
Over a tensor-parallel group each rank gathers the ids of its shard; the sums over ranks are those of the whole head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from megatron_dapo.ops.lm_head import chunked
from megatron_dapo.ops.lm_head.inputs import HeadInputs, Upstream, VocabShard, choose_tiles, combine
from megatron_dapo.ops.logprob import (
    gradient_beside_main_grad,
    main_grad_of,
    over_temperature,
    shard_of,
    vocab_parallel_logprobs,
)

# Logits outside the support: exp is 0, and products of it with counts and with 0 stay finite in fp32, unlike those of -inf.
_OUTSIDE = -1e30


@dataclass(frozen=True)
class Restriction:
    """The supports of P tokens, as this rank's gathered columns."""

    columns: torch.Tensor  # [U] int64, ascending: rows of this rank's weight that some support contains
    places: torch.Tensor  # [P, K] int64: each id's index in `columns`; U if it is another rank's or filler
    targets: torch.Tensor  # [P] int64: the target's index in `columns`; -1 if it is another rank's
    is_supported: torch.Tensor  # [P] bool: the support contains the target


def restriction_of(support: torch.Tensor, targets: torch.Tensor, shard: VocabShard) -> Restriction:
    """Return this rank's part of the supports [P, K], filled with negative numbers, of `targets` [P]."""
    own = support.long() - shard.first_column
    is_own = (own >= 0) & (own < shard.num_columns) & (support >= 0)
    columns = torch.unique(own[is_own])
    places = torch.searchsorted(columns, own).masked_fill_(~is_own, columns.numel())
    is_target = support == targets[:, None]
    target_places = torch.where(is_target & is_own, places, -1).amax(dim=1)
    return Restriction(columns, places, target_places, is_target.any(dim=1))


def sampled_logprobs(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, support: torch.Tensor | None, **settings: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-prob of `targets` and the entropy, both [P] and differentiable, of the distribution that each was
    sampled from.

    support: [P, K] int32, the ids of each token's support, then negative numbers, the same on all tensor-parallel ranks. A row
    without an id, and None, stand for the whole vocabulary. settings: those of `vocab_parallel_logprobs`, which computes
    the rows of the whole vocabulary; the others have plain products, whatever the implementation. The log-prob of a
    target outside its support is NaN.
    """
    if support is None:
        return vocab_parallel_logprobs(hidden, weight, targets, **settings)
    is_recorded = support[:, 0] >= 0
    if bool(is_recorded.all()):
        return _restricted_logprobs(hidden, weight, targets, support, **settings)
    parts, order = [], []
    for rows, sampled in ((is_recorded, support), (~is_recorded, None)):
        index = rows.nonzero()[:, 0]
        inputs = hidden.index_select(0, index), weight, targets.index_select(0, index)
        parts.append(sampled_logprobs(*inputs, None if sampled is None else sampled.index_select(0, index), **settings))
        order.append(index)
    place = torch.cat(order).argsort()
    logprobs, entropy = (torch.cat(values).index_select(0, place) for values in zip(*parts, strict=True))
    return logprobs, entropy


def _restricted_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    support: torch.Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    chunk_tokens: int | None = None,
    chunk_columns: int | None = None,
    adds_to_main_grad: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    shard = shard_of(hidden, weight, targets, temperature, vocab_size, group)
    restriction = restriction_of(support, targets, shard)
    logprobs, entropy = _Restricted.apply(
        hidden, weight, restriction, shard, (chunk_tokens, chunk_columns), adds_to_main_grad
    )
    return logprobs.masked_fill(~restriction.is_supported, float("nan")), entropy


class _MaskedLogits(chunked.TileLogits):
    """Logits of gathered columns, masked outside each token's support."""

    def __init__(self, inputs: HeadInputs, places: torch.Tensor) -> None:
        super().__init__(inputs)
        self._places, self._columns = places, slice(0, 0)

    def enter(self, columns: slice) -> None:
        super().enter(columns)
        self._columns = columns

    def logits(self, tokens: slice) -> torch.Tensor:
        logits, columns = super().logits(tokens), self._columns
        num_columns = columns.stop - columns.start
        place = self._places[tokens] - columns.start
        # Ids of other tiles go to one more column, which is cut off: selecting would wait for the device.
        place = place.where((place >= 0) & (place < num_columns), num_columns)
        outside = torch.ones(logits.size(0), num_columns + 1, dtype=torch.bool, device=logits.device)
        outside.scatter_(1, place, False)
        return logits.masked_fill_(outside[:, :-1], _OUTSIDE)


class _Restricted(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        restriction: Restriction,
        shard: VocabShard,
        chunks: tuple[int | None, int | None],
        adds_to_main_grad: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = _gathered(hidden, weight, restriction, shard, chunks)
        sums = chunked.sums(inputs, None, _MaskedLogits(inputs, restriction.places))
        logprobs, entropy, maxima, log_totals = combine(*sums, shard)
        ctx.save_for_backward(hidden, weight, entropy, maxima, log_totals)
        is_added = adds_to_main_grad and ctx.needs_input_grad[1]
        # The parameter itself: what is saved for the backward pass comes back without its attributes.
        ctx.recipe = restriction, shard, chunks, weight, main_grad_of(weight, maxima.dtype) if is_added else None
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, to_logprobs: torch.Tensor | None, to_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        if to_logprobs is None and to_entropy is None:
            return (None,) * 6
        hidden, weight, entropy, maxima, log_totals = ctx.saved_tensors
        restriction, shard, chunks, parameter, main_grad = ctx.recipe
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        inputs = _gathered(hidden, weight, restriction, shard, chunks)
        upstream = Upstream(
            entropy,
            maxima,
            log_totals,
            to_logprobs=over_temperature(to_logprobs, shard),
            to_entropy=over_temperature(to_entropy, shard),
            needs_hidden=needs_hidden,
            needs_weight=needs_weight,
            main_grad=torch.zeros_like(inputs.weight, dtype=maxima.dtype) if needs_weight else None,
        )
        to_hidden, _ = chunked.gradients(inputs, upstream, _MaskedLogits(inputs, restriction.places))
        to_weight = None
        if main_grad is not None and upstream.main_grad is not None:
            # Each row is added once, so the sum does not depend on the order.
            main_grad.index_add_(0, restriction.columns, upstream.main_grad)
            to_weight = gradient_beside_main_grad(parameter)
        elif upstream.main_grad is not None:
            to_weight = torch.zeros_like(weight)
            to_weight.index_copy_(0, restriction.columns, upstream.main_grad.to(weight.dtype))
        return to_hidden, to_weight, None, None, None, None


def _gathered(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    restriction: Restriction,
    shard: VocabShard,
    chunks: tuple[int | None, int | None],
) -> HeadInputs:
    """Return the head's inputs for the gathered columns only."""
    num_columns = restriction.columns.numel()
    tiles = choose_tiles(hidden.size(0), num_columns, hidden.device, *chunks)
    gathered = VocabShard(0, num_columns, num_columns, shard.temperature, shard.group)
    return HeadInputs(hidden, weight.index_select(0, restriction.columns), restriction.targets, gathered, tiles)
