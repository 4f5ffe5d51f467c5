"""The divergence of a student from a teacher over the whole vocabulary, from their hidden states, and no logits kept.

With p the teacher's and s the student's probabilities, z the student's logits and m = beta p + (1 - beta) s:

    forward   KL(p || s)                                          d / d z_k = s_k - p_k
    reverse   KL(s || p)                                          d / d z_k = s_k (log(s_k / p_k) - KL(s || p))
    js        beta KL(p || m) + (1 - beta) KL(s || m)             d / d z_k = (1 - beta) s_k (log(s_k / m_k) - KL(s || m))

js is the generalized Jensen-Shannon divergence of GKD (arXiv 2306.13649, Eq 1). Nothing flows into the teacher.

Each pass over the vocabulary computes a tile of both models' logits and drops it. forward and reverse take one pass for
the value, with sums relative to running maxima, and one for the gradients. js takes one more for the value: a
mixture needs both normalizers first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from megatron_dapo.ops.divergence import PairGradients, pair_logits, paired_heads, sums_over_ranks
from megatron_dapo.ops.lm_head import chunked
from megatron_dapo.ops.lm_head.inputs import HeadInputs, Upstream, accumulation_dtype

TEACHER, STUDENT = 0, 1
DIVERGENCES = ("forward", "reverse", "js")
# exp(80) is finite in fp32. A word whose probabilities differ by more has none in one of the two models.
_LOG_RATIO_LIMIT = 80.0


def vocab_parallel_distillation(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor,
    *,
    vocab_size: int,
    divergence: str = "reverse",
    beta: float = 0.5,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    chunk_tokens: int | None = None,
    chunk_columns: int | None = None,
) -> torch.Tensor:
    """Return the divergence of each token, [P] and at least 0, for hidden [P, h] and weight [rows, h] of the student, and
    the teacher's [P, h'] and [rows, h'], whose rows are of the same words.

    divergence: one of DIVERGENCES. beta: the teacher's share of the mixture, above 0 and below 1, for js. temperature: of both
    models. vocab_size, group, chunks: as in `vocab_parallel_logprobs`. The gradient of `hidden` is this rank's partial sum.
    ValueError for shapes that do not fit, an unknown divergence, a beta out of its range.
    """
    if divergence not in DIVERGENCES:
        raise ValueError(f"distillation: divergence {divergence!r} is none of {', '.join(DIVERGENCES)}")
    if divergence == "js" and not 0 < beta < 1:
        raise ValueError(f"distillation: beta {beta} must be above 0 and below 1; the ends are forward and reverse")
    teacher, student = paired_heads(
        (hidden, weight), (teacher_hidden, teacher_weight), vocab_size, temperature, group, (chunk_tokens, chunk_columns)
    )
    distilled: torch.Tensor = _Distillation.apply(hidden, weight, _Pair(teacher, student, divergence, float(beta)))
    return distilled


@dataclass(frozen=True)
class _Pair:
    """Both models' heads, and the divergence between them."""

    teacher: HeadInputs
    student: HeadInputs
    divergence: str
    beta: float

    @property
    def weighing(self) -> int:
        """Return the model whose expectation the divergence is."""
        return TEACHER if self.divergence == "forward" else STUDENT

    def tiles(self) -> Iterator[tuple[slice, list[torch.Tensor]]]:
        """Yield the tokens of each tile and both models' scaled logits in it."""
        sources = chunked.TileLogits(self.teacher), chunked.TileLogits(self.student)
        for columns in self.student.column_tiles() if self.student.hidden.size(0) else ():
            for source in sources:
                source.enter(columns)
            for tokens in self.student.token_tiles():
                yield tokens, pair_logits(sources, tokens, self.student.shard.temperature)


class _Distillation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, pair: _Pair) -> torch.Tensor:
        maxima, totals = sums_over_ranks(*_sums(pair), pair.student.shard.group, partial(_rebase, pair=pair))
        log_z, center = totals[:2].log(), totals[2] / totals[pair.weighing]
        if pair.divergence == "forward":
            value = center - log_z[TEACHER] + log_z[STUDENT]
        elif pair.divergence == "reverse":
            center = value = -center - log_z[STUDENT] + log_z[TEACHER]
        else:
            of_teacher, center = _mixture_sums(pair, maxima, log_z)
            value = pair.beta * of_teacher + (1 - pair.beta) * center
        ctx.save_for_backward(hidden, weight, pair.teacher.hidden, pair.teacher.weight, maxima, log_z, center)
        ctx.recipe = pair.student.targets, pair.student.shard, pair.student.tiles, pair.divergence, pair.beta
        return value.clamp(min=0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, teacher_hidden, teacher_weight, maxima, log_z, center = ctx.saved_tensors
        targets, shard, tiles, divergence, beta = ctx.recipe
        teacher = HeadInputs(teacher_hidden, teacher_weight, targets, shard, tiles)
        pair = _Pair(teacher, HeadInputs(hidden, weight, targets, shard, tiles), divergence, beta)
        scale = upstream.to(maxima.dtype) / shard.temperature
        wanted = Upstream(center, maxima[STUDENT], log_z[STUDENT], None, None, *ctx.needs_input_grad[:2])
        of_tiles = _Gradients(pair, wanted, maxima, log_z, center, scale)
        return *chunked.gradients(pair.student, wanted, tile_gradients=of_tiles), None


def _sums(pair: _Pair) -> tuple[torch.Tensor, torch.Tensor]:
    """Return maxima [2, P] and, relative to them, the sums [3, P] over this rank's columns: of exp(u) of teacher and student,
    and of exp(u of the weighing model) (u of the teacher - u of the student), u = logit - maximum."""
    hidden = pair.student.hidden
    dtype = accumulation_dtype(torch.promote_types(hidden.dtype, pair.student.weight.dtype))
    # The least finite number, not -inf: -inf less -inf is NaN when a rank's shard has no column.
    maxima = hidden.new_full((2, hidden.size(0)), torch.finfo(torch.float32).min, dtype=dtype)
    sums = maxima.new_zeros(3, hidden.size(0))
    for tokens, logits in pair.tiles():
        largest = torch.maximum(maxima[:, tokens], torch.stack([tile.amax(dim=1) for tile in logits]))
        _rebase(sums[:, tokens], maxima[:, tokens] - largest, pair)
        maxima[:, tokens] = largest
        u = [tile.sub_(maximum[:, None]) for tile, maximum in zip(logits, largest, strict=True)]
        if pair.divergence == "js":
            for row, tile in enumerate(u):
                sums[row, tokens] += tile.exp_().sum(dim=1)
            continue
        other, weighing = 1 - pair.weighing, pair.weighing
        exponentials = u[weighing].exp()
        sums[weighing, tokens] += exponentials.sum(dim=1)
        sign = 1.0 if weighing == TEACHER else -1.0
        difference = u[weighing].sub_(u[other]).mul_(exponentials)
        sums[2, tokens] += sign * difference.sum(dim=1)
        sums[other, tokens] += u[other].exp_().sum(dim=1)
    return maxima, sums


def _rebase(sums: torch.Tensor, shift: torch.Tensor, pair: _Pair) -> None:
    """Turn sums [3, c] relative to old maxima into sums relative to larger ones; `shift` [2, c]: old less new."""
    factor, apart = shift.exp(), shift[TEACHER] - shift[STUDENT]
    # Before the first tile the shift is that of the least number, and times a sum of 0 it may be NaN.
    crossed = torch.where(sums[pair.weighing] > 0, sums[2] + apart * sums[pair.weighing], 0.0)
    sums[2] = crossed * factor[pair.weighing]
    sums[:2] *= factor


def _log_probabilities(logits: list[torch.Tensor], maxima: torch.Tensor, log_z: torch.Tensor) -> list[torch.Tensor]:
    """Turn both models' logits [c, n] into log-probs, in place."""
    # One after the other: the sum of the two constants would round away the small one if logits are large.
    return [
        tile.sub_(largest[:, None]).sub_(total[:, None])
        for tile, largest, total in zip(logits, maxima, log_z, strict=True)
    ]


def _log_ratio_to_mixture(log_p: torch.Tensor, log_s: torch.Tensor, beta: float) -> torch.Tensor:
    """Return log(s / m), m = beta p + (1 - beta) s, in the memory of `log_p`."""
    # log(s / m) = -log(1 + beta (p / s - 1)) keeps the digits if s and p are close.
    ratio = log_p.sub_(log_s).clamp_(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
    return ratio.expm1_().mul_(beta).log1p_().neg_()


def _mixture_sums(pair: _Pair, maxima: torch.Tensor, log_z: torch.Tensor) -> torch.Tensor:
    """Return KL(p || m) and KL(s || m), [2, P], by a second pass over the vocabulary."""
    sums = torch.zeros_like(maxima)
    for tokens, logits in pair.tiles():
        log_p, log_s = _log_probabilities(logits, maxima[:, tokens], log_z[:, tokens])
        p = log_p.exp()
        of_teacher = _log_ratio_to_mixture(log_s.clone(), log_p, 1 - pair.beta)
        sums[TEACHER, tokens] += of_teacher.mul_(p).sum(dim=1)
        del of_teacher, p
        of_student = _log_ratio_to_mixture(log_p, log_s, pair.beta)
        sums[STUDENT, tokens] += of_student.mul_(log_s.exp_()).sum(dim=1)
    if pair.student.shard.group is not None:
        dist.all_reduce(sums, group=pair.student.shard.group)
    return sums


class _Gradients(PairGradients):
    """Gradients of the student's raw products, tile by tile."""

    def __init__(
        self,
        pair: _Pair,
        wanted: Upstream,
        maxima: torch.Tensor,
        log_z: torch.Tensor,
        center: torch.Tensor,
        scale: torch.Tensor,
    ) -> None:
        """`center` [P]: mean under the student of what multiplies its probabilities. `scale` [P]: of the divergence's
        gradient."""
        super().__init__(pair.teacher, pair.student, wanted)
        self._pair, self._maxima, self._log_z = pair, maxima, log_z
        self._center, self._scale = center, scale

    def of(self, source: chunked.TileLogits, tokens: slice, columns: slice) -> torch.Tensor:
        """See `TileGradients`."""
        logits, pair = self.logits(source, tokens, columns), self._pair
        log_p, log_s = _log_probabilities(logits, self._maxima[:, tokens], self._log_z[:, tokens])
        center, scale = self._center[tokens, None], self._scale[tokens, None]
        if pair.divergence == "forward":
            return log_s.exp_().sub_(log_p.exp_()).mul_(scale)
        if pair.divergence == "reverse":
            factor = log_p.neg_().add_(log_s)
        else:
            factor, scale = _log_ratio_to_mixture(log_p, log_s, pair.beta), (1 - pair.beta) * scale
        return factor.sub_(center).mul_(log_s.exp_()).mul_(scale)


def align_rows(weight: torch.Tensor, num_rows: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return rows [num_rows, h] of words rank * num_rows and on, given this rank's rows of a vocabulary that the group's
    ranks share by another number of rows; zeros after its end. Collective over the group.

    Models of one tokenizer may pad their vocabularies differently.
    """
    if weight.size(0) == num_rows:
        return weight
    rank, num_ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    aligned, first = weight.new_zeros(num_rows, weight.size(1)), rank * num_rows
    for source in range(num_ranks):
        part = weight if source == rank else torch.empty_like(weight)
        if group is not None:
            dist.broadcast(part, src=dist.get_global_rank(group, source), group=group)
        start = source * weight.size(0)
        low, high = max(start, first), min(start + weight.size(0), first + num_rows)
        if low < high:
            aligned[low - first : high - first] = part[low - start : high - start]
    return aligned
