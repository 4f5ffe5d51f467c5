"""A generalized KL of two models a token, from their hidden states, in one pass over the vocabulary and no logits kept.

With p the reference's and s the actor's probabilities, d = log p - log s, and weights q proportional to (weighing
model's probability)^gamma, taken as constants:

    weighted_mse  = 1/2 (sum q d^2 - (sum q d)^2)          d / d z_k = -q_k (d_k - sum q d)
    cross_entropy = - sum p log s                          d / d z_k = s_k - p_k

where z are the actor's logits; nothing flows into the reference. Their weighted sum is the decoupled form of a KL:
cross_entropy by itself has the gradient of KL(p || s); weighted_mse by itself, with gamma 1 and the actor's own weights, that of
KL(s || p).

One pass is enough because the sums can be taken of u = logit - running maximum in place of log-probabilities, with
x = u of the reference - u of the actor: T_i = sum exp(gamma u) x^i, which move to larger maxima as powers of a sum do;
a constant in d drops out of the variance. Over a tensor-parallel group: one all-reduce of both maxima, one of six sums.
"""

from __future__ import annotations

# The generalized KL of the loss (algorithm.gkl, arXiv 2503.08038).
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from megatron_dapo.ops.lm_head import chunked
from megatron_dapo.ops.lm_head.inputs import HeadInputs, Upstream, accumulation_dtype, choose_tiles
from megatron_dapo.ops.logprob import shard_of

REFERENCE, ACTOR = 0, 1
WEIGHING_MODELS = {"reference": REFERENCE, "actor": ACTOR}
# Rows of the sums: T0, T1, T2, sum of the reference's and of the actor's exponentials, sum exp(u reference) * u actor.
_T0, _T1, _T2, _Z_REFERENCE, _Z_ACTOR, _CROSS = range(6)


@dataclass(frozen=True)
class Divergence:
    """Both terms, [P] and at least 0, differentiable in the actor's hidden states and weight."""

    weighted_mse: torch.Tensor
    cross_entropy: torch.Tensor


def vocab_parallel_divergence(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    reference_hidden: torch.Tensor,
    reference_weight: torch.Tensor,
    *,
    vocab_size: int,
    gamma: float = 1.0,
    weigh_by: str = "reference",
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    chunk_tokens: int | None = None,
    chunk_columns: int | None = None,
) -> Divergence:
    """Compute both terms for hidden [P, h] and weight [rows, h] of the actor, and the reference's [P, h'] and [rows, h'],
    whose rows are of the same words.

    gamma: at least 0; 0 weighs all words alike. weigh_by: "reference" or "actor", whose probabilities the weights are.
    temperature, vocab_size, group, chunks: as in `vocab_parallel_logprobs`. The gradient of `hidden` is this rank's partial sum.
    ValueError for shapes that do not fit, an unknown `weigh_by`, a gamma below 0.
    """
    if weigh_by not in WEIGHING_MODELS:
        raise ValueError(f"divergence: weigh_by {weigh_by!r} is none of {', '.join(WEIGHING_MODELS)}")
    if not gamma >= 0:
        raise ValueError(f"divergence: gamma {gamma} must be at least 0")
    reference, actor = paired_heads(
        (hidden, weight), (reference_hidden, reference_weight), vocab_size, temperature, group, (chunk_tokens, chunk_columns)
    )
    pair = _Pair(reference, actor, WEIGHING_MODELS[weigh_by], float(gamma))
    return Divergence(*_Divergence.apply(hidden, weight, pair))


def paired_heads(
    actor: tuple[torch.Tensor, torch.Tensor],
    reference: tuple[torch.Tensor, torch.Tensor],
    vocab_size: int,
    temperature: float,
    group: dist.ProcessGroup | None,
    chunks: tuple[int | None, int | None],
) -> tuple[HeadInputs, HeadInputs]:
    """Return the inputs of the reference's and of the actor's head, each given as (hidden [P, h], weight [rows, h]), in
    common tiles. `chunks`: tokens and columns of a tile. ValueError if the two do not fit each other."""
    (hidden, weight), (reference_hidden, reference_weight) = actor, reference
    if reference_weight.size(0) != weight.size(0) or reference_hidden.size(0) != hidden.size(0):
        raise ValueError(
            f"divergence: the actor has {hidden.size(0)} tokens and {weight.size(0)} rows, "
            f"the reference {reference_hidden.size(0)} and {reference_weight.size(0)}; they must be the same"
        )
    targets = torch.zeros(hidden.size(0), dtype=torch.int64, device=hidden.device)
    shard = shard_of(hidden, weight, targets, temperature, vocab_size, group)
    shard_of(reference_hidden, reference_weight, targets, temperature, vocab_size, group)
    tiles = choose_tiles(hidden.size(0), shard.num_columns, hidden.device, *chunks, num_models=2)
    return (
        HeadInputs(reference_hidden.detach(), reference_weight.detach(), targets, shard, tiles),
        HeadInputs(hidden, weight, targets, shard, tiles),
    )


@dataclass(frozen=True)
class _Pair:
    """Both models' heads, the model whose probabilities are the weights, and their power."""

    reference: HeadInputs
    actor: HeadInputs
    weighing: int
    gamma: float


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, pair: _Pair) -> tuple[torch.Tensor, torch.Tensor]:
        maxima, sums = sums_over_ranks(*_sums(pair), pair.actor.shard.group, partial(_rebase, pair=pair))
        mean = sums[_T1] / sums[_T0]
        weighted_mse = (0.5 * (sums[_T2] / sums[_T0] - mean.square())).clamp_(min=0.0)
        cross_entropy = sums[_Z_ACTOR].log() - sums[_CROSS] / sums[_Z_REFERENCE]
        ctx.save_for_backward(hidden, weight, pair.reference.hidden, pair.reference.weight, maxima, sums, mean)
        ctx.recipe = pair.actor.targets, pair.actor.shard, pair.actor.tiles, pair.weighing, pair.gamma
        ctx.set_materialize_grads(False)
        return weighted_mse, cross_entropy.clamp_(min=0.0)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, to_mse: torch.Tensor | None, to_cross: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        if to_mse is None and to_cross is None:
            return None, None, None
        hidden, weight, reference_hidden, reference_weight, maxima, sums, mean = ctx.saved_tensors
        targets, shard, tiles, weighing, gamma = ctx.recipe
        reference = HeadInputs(reference_hidden, reference_weight, targets, shard, tiles)
        pair = _Pair(reference, HeadInputs(hidden, weight, targets, shard, tiles), weighing, gamma)
        zero = torch.zeros_like(mean)
        token_sums = _TokenSums(
            maxima, sums, mean, *(zero if to is None else to / shard.temperature for to in (to_mse, to_cross))
        )
        upstream = Upstream(mean, maxima[ACTOR], zero, None, None, *ctx.needs_input_grad[:2])
        gradients = chunked.gradients(
            pair.actor, upstream, tile_gradients=_DivergenceGradients(pair, token_sums, upstream)
        )
        return *gradients, None


def _sums(pair: _Pair) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute maxima [2, P] and sums [6, P] over this rank's columns."""
    actor, num_tokens = pair.actor, pair.actor.hidden.size(0)
    dtype = accumulation_dtype(torch.promote_types(actor.hidden.dtype, actor.weight.dtype))
    maxima = actor.hidden.new_full((2, num_tokens), torch.finfo(torch.float32).min, dtype=dtype)
    sums, sources = maxima.new_zeros(6, num_tokens), (chunked.TileLogits(pair.reference), chunked.TileLogits(actor))
    for columns in actor.column_tiles() if num_tokens else ():
        for source in sources:
            source.enter(columns)
        for tokens in actor.token_tiles():
            logits = pair_logits(sources, tokens, actor.shard.temperature)
            # One pass: the sums so far move to the larger maxima, see the module's docstring.
            largest = torch.maximum(maxima[:, tokens], torch.stack([tile.amax(dim=1) for tile in logits]))
            _rebase(sums[:, tokens], maxima[:, tokens] - largest, pair)
            maxima[:, tokens] = largest
            sums[:, tokens] += _sums_of_tile(logits, largest, pair)
    return maxima, sums


def pair_logits(sources: Sequence[chunked.TileLogits], tokens: slice, temperature: float) -> list[torch.Tensor]:
    """Return the scaled logits [c, n] of each source for these tokens and the entered columns."""
    return [chunked.scaled(source.logits(tokens), temperature) for source in sources]


def _sums_of_tile(logits: list[torch.Tensor], maxima: torch.Tensor, pair: _Pair) -> torch.Tensor:
    """Compute the sums [6, c] relative to `maxima` [2, c]; overwrites the logits."""
    u = [tile.sub_(largest[:, None]) for tile, largest in zip(logits, maxima, strict=True)]
    exponentials = [tile.exp() for tile in u]
    weights, x = _weights(u, exponentials, pair), u[REFERENCE] - u[ACTOR]
    weighted = weights * x
    return torch.stack(
        [
            weights.sum(dim=1),
            weighted.sum(dim=1),
            weighted.mul_(x).sum(dim=1),
            exponentials[REFERENCE].sum(dim=1),
            exponentials[ACTOR].sum(dim=1),
            exponentials[REFERENCE].mul(u[ACTOR]).sum(dim=1),
        ]
    )


def _weights(u: list[torch.Tensor], exponentials: list[torch.Tensor], pair: _Pair) -> torch.Tensor:
    return exponentials[pair.weighing] if pair.gamma == 1.0 else (pair.gamma * u[pair.weighing]).exp_()


def _rebase(sums: torch.Tensor, shift: torch.Tensor, pair: _Pair) -> None:
    """Turn sums [6, c] relative to old maxima into sums relative to larger ones; `shift` [2, c]: old less new."""
    factor, apart = shift.exp(), shift[REFERENCE] - shift[ACTOR]
    of_weights = (pair.gamma * shift[pair.weighing]).exp()
    t0, t1, t2 = sums[_T0].clone(), sums[_T1].clone(), sums[_T2]
    # Powers of a sum, T_i of x + apart. No tile was seen yet if t0 is 0: its shift is that of the least number.
    sums[_T2] = (t2 + 2.0 * apart * t1 + apart.square() * t0).mul_(of_weights).where(t0 > 0, 0.0)
    sums[_T1] = (t1 + apart * t0).mul_(of_weights).where(t0 > 0, 0.0)
    sums[_T0] *= of_weights
    sums[_CROSS] += shift[ACTOR] * sums[_Z_REFERENCE]
    for row, model in ((_CROSS, REFERENCE), (_Z_REFERENCE, REFERENCE), (_Z_ACTOR, ACTOR)):
        sums[row] *= factor[model]


def sums_over_ranks(
    maxima: torch.Tensor,
    sums: torch.Tensor,
    group: dist.ProcessGroup | None,
    rebase: Callable[[torch.Tensor, torch.Tensor], None],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the maxima and, relative to them, the sums of a tensor-parallel group, in place.

    `rebase(sums, shift)` turns sums relative to old maxima into sums relative to new ones; `shift`: old less new.
    """
    if group is not None:
        own = maxima.clone()
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
        rebase(sums, own - maxima)
        dist.all_reduce(sums, group=group)
    return maxima, sums


@dataclass(frozen=True)
class _TokenSums:
    """Sums of the forward pass, and the gradients of both results divided by the temperature."""

    maxima: torch.Tensor  # [2, P]
    sums: torch.Tensor  # [6, P]
    mean: torch.Tensor  # [P] of x under the weights
    to_mse: torch.Tensor  # [P]
    to_cross: torch.Tensor  # [P]


class PairGradients(chunked.TileGradients):
    """Gradients of the actor's raw products from the logits of two models, tile by tile."""

    def __init__(self, reference: HeadInputs, actor: HeadInputs, upstream: Upstream) -> None:
        super().__init__(actor, upstream)
        self._reference, self._entered = chunked.TileLogits(reference), slice(0, 0)

    def logits(self, source: chunked.TileLogits, tokens: slice, columns: slice) -> list[torch.Tensor]:
        """Return the scaled logits [c, n] of the reference and of the actor, whose source is given."""
        if self._entered != columns:  # `chunked.gradients` only enters the actor's rows
            self._reference.enter(columns)
            self._entered = columns
        return pair_logits((self._reference, source), tokens, self._temperature)


class _DivergenceGradients(PairGradients):
    def __init__(self, pair: _Pair, token_sums: _TokenSums, upstream: Upstream) -> None:
        super().__init__(pair.reference, pair.actor, upstream)
        self._pair, self._token_sums = pair, token_sums

    def of(self, source: chunked.TileLogits, tokens: slice, columns: slice) -> torch.Tensor:
        logits = self.logits(source, tokens, columns)
        u = [tile.sub_(largest[tokens, None]) for tile, largest in zip(logits, self._token_sums.maxima, strict=True)]
        exponentials, sums = [tile.exp() for tile in u], self._token_sums.sums[:, tokens]
        to_mse, to_cross = self._token_sums.to_mse[tokens], self._token_sums.to_cross[tokens]
        weights = _weights(u, exponentials, self._pair).mul((-to_mse / sums[_T0])[:, None])
        gradient = u[REFERENCE].sub_(u[ACTOR]).sub_(self._token_sums.mean[tokens, None]).mul_(weights)
        gradient.addcmul_(exponentials[ACTOR], (to_cross / sums[_Z_ACTOR])[:, None])
        return gradient.addcmul_(exponentials[REFERENCE], (-to_cross / sums[_Z_REFERENCE])[:, None])
