"""The head in tiles of tokens x vocabulary columns, in plain torch: any device, any type.

Forward keeps a running maximum and two running sums a token, rebased when a tile raises the maximum. Backward computes
each tile of logits again and adds its two products to the gradients, which are accumulated in fp32 however many tiles
there are and whatever the type of the model. Columns are the outer loop: a tile of 16-bit weights is widened once for
all tokens, and its gradient is complete, and narrow again, before the next tile begins.
"""

from __future__ import annotations

import torch

from megatron_dapo.ops.lm_head.inputs import (
    Gradients,
    HeadInputs,
    KeptLogits,
    Upstream,
    accumulation_dtype,
    add_product,
    product,
    product_dtype,
    rebase,
    set_product,
)
from megatron_dapo.plan.memory import kept_logit_bytes


class TileLogits:
    """Logits of one tile after the other, by torch's matrix product of the model's own values.

    `rows` and `tokens` are the factors of the backward pass. A subclass computes the logits in another way.
    """

    def __init__(self, inputs: HeadInputs) -> None:
        self._inputs = inputs
        self._dtype = product_dtype(inputs.hidden, inputs.weight)
        self._rows = inputs.weight[:0]
        self.accumulate = accumulate  # a subclass may have a kernel for it

    def enter(self, columns: slice) -> None:
        """Prepare the weight's rows of these columns for the calls that follow."""
        self._rows = self._inputs.weight[columns].to(self._dtype)

    def logits(self, tokens: slice) -> torch.Tensor:
        """Return a new tensor [c, n], fp32 or fp64: hidden . weight of these tokens and the entered columns."""
        return product(self.tokens(tokens), self._rows.t())

    def rows(self) -> torch.Tensor:
        """Return the entered rows of the weight [n, h], in the type of the products."""
        return self._rows

    def tokens(self, tokens: slice) -> torch.Tensor:
        """Return hidden states [c, h], in the type of the products."""
        return self._inputs.hidden[tokens].to(self._dtype)


def accumulate(
    maxima: torch.Tensor, totals: torch.Tensor, products: torch.Tensor, column: torch.Tensor, temperature: float
) -> None:
    """Take one tile of `products` [c, n], which it overwrites, into the running maxima [c] and totals [3, c].
    `column` [c]: the target's column counted from the tile's first."""
    logits = scaled(products, temperature)
    index, owned = _within(column, logits.size(1))
    totals[2] += logits.gather(1, index[:, None])[:, 0].where(owned, 0.0)
    largest = torch.maximum(maxima, logits.amax(dim=1))
    rebase(totals, maxima - largest)
    maxima.copy_(largest)
    # Relative to the new maximum: exp overflows no more, and the terms fit the rebased totals.
    exponentials = logits.sub_(largest[:, None]).exp()
    totals[0] += exponentials.sum(dim=1)
    totals[1] += logits.mul_(exponentials).sum(dim=1)


def room(inputs: HeadInputs, most_bytes: int) -> KeptLogits | None:
    """Return memory for the products of all tokens and columns as they are, None if it takes more than `most_bytes`."""
    dtype = accumulation_dtype(torch.promote_types(inputs.hidden.dtype, inputs.weight.dtype))
    num_tokens, num_columns = inputs.hidden.size(0), inputs.shard.num_columns
    if kept_logit_bytes(num_tokens, num_columns, dtype.itemsize, is_grouped=False) > most_bytes:
        return None
    return KeptLogits(inputs.hidden.new_empty(num_tokens, num_columns, dtype=dtype))


def sums(
    inputs: HeadInputs, kept: KeptLogits | None = None, source: TileLogits | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the sums of `lm_head`, from the logits of `source`."""
    source = source or TileLogits(inputs)
    num_tokens = inputs.hidden.size(0)
    dtype = accumulation_dtype(torch.promote_types(inputs.hidden.dtype, inputs.weight.dtype))
    # The least finite number, not -inf: -inf less -inf is NaN when a rank's shard has no column.
    maxima = inputs.hidden.new_full((num_tokens,), torch.finfo(torch.float32).min, dtype=dtype)
    totals, column = maxima.new_zeros(3, num_tokens), inputs.own_column
    for columns in inputs.column_tiles() if num_tokens else ():
        source.enter(columns)
        for tokens in inputs.token_tiles():
            products, in_tile = source.logits(tokens), column[tokens] - columns.start
            if kept is not None:
                kept.values[tokens, columns] = products
            source.accumulate(maxima[tokens], totals[:, tokens], products, in_tile, inputs.shard.temperature)
    return maxima, totals


def scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Divide the logits by the temperature in place."""
    return logits if temperature == 1.0 else logits.div_(temperature)


def _within(column: torch.Tensor, num_columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each target's column clamped to a valid index, and whether it was one."""
    return column.clamp(0, num_columns - 1), (column >= 0) & (column < num_columns)


class TileGradients:
    """Gradients of raw products, tile by tile: the tile's logits, kept or computed again, turned into their gradient."""

    def __init__(self, inputs: HeadInputs, upstream: Upstream) -> None:
        self._temperature, self._upstream = inputs.shard.temperature, upstream
        self._column = inputs.own_column

    def of(self, source: TileLogits, tokens: slice, columns: slice) -> torch.Tensor:
        """Return [c, n] for these tokens and the entered columns; the next call may overwrite it."""
        kept = self._upstream.kept
        products = source.logits(tokens) if kept is None else kept.values[tokens, columns]
        logits = scaled(products, self._temperature)
        return logit_gradients(logits, self._upstream, tokens, self._column[tokens] - columns.start)


def gradients(
    inputs: HeadInputs,
    upstream: Upstream,
    source: TileLogits | None = None,
    tile_gradients: TileGradients | None = None,
) -> Gradients:
    """Compute the gradients of `lm_head`, from the tiles of `source` and `tile_gradients`."""
    source, tile_gradients = source or TileLogits(inputs), tile_gradients or TileGradients(inputs, upstream)
    hidden, weight, dtype = inputs.hidden, inputs.weight, upstream.maxima.dtype
    to_hidden = torch.zeros_like(hidden, dtype=dtype) if upstream.needs_hidden else None
    main_grad = upstream.main_grad
    to_weight = torch.empty_like(weight) if upstream.needs_weight and main_grad is None else None
    # The product of all tokens at once is summed in fp32 inside and rounded once, as a sum over tiles of tokens would be.
    is_one_product = 0 < hidden.size(0) <= inputs.tiles.tokens
    for columns in inputs.column_tiles():
        source.enter(columns)
        if main_grad is not None:
            to_rows: torch.Tensor | None = main_grad[columns]
        else:
            to_rows = None if is_one_product else _accumulator(to_weight, columns, dtype)
        for tokens in inputs.token_tiles():
            grad = tile_gradients.of(source, tokens, columns).to(source.rows().dtype)
            if to_hidden is not None:
                add_product(to_hidden[tokens], grad, source.rows())
            if to_rows is not None:
                add_product(to_rows, grad.t(), source.tokens(tokens))
            elif to_weight is not None:
                set_product(to_weight[columns], grad.t(), source.tokens(tokens))
        if to_weight is not None and to_rows is not None and to_weight.dtype != dtype:
            to_weight[columns] = to_rows
    if to_weight is not None:
        # Rows of the padded vocabulary are in no sum.
        to_weight[inputs.shard.num_columns :].zero_()
    return None if to_hidden is None else to_hidden.to(hidden.dtype), to_weight


def _accumulator(to_weight: torch.Tensor | None, columns: slice, dtype: torch.dtype) -> torch.Tensor | None:
    """Return zeros [n, h] of the accumulation type: the gradient's own rows if they have that type."""
    if to_weight is None:
        return None
    rows = to_weight[columns]
    return rows.zero_() if rows.dtype == dtype else torch.zeros_like(rows, dtype=dtype)


def logit_gradients(logits: torch.Tensor, upstream: Upstream, tokens: slice, column: torch.Tensor) -> torch.Tensor:
    """Return the gradient [c, n] of one tile of raw products from its scaled logits, which are overwritten."""
    # p = exp(logit - maximum) / total: the totals and the entropy go into factors a token, at no pass over the tile.
    relative, log_total = logits.sub_(upstream.maxima[tokens, None]), upstream.log_totals[tokens]
    to_logprobs = None if upstream.to_logprobs is None else upstream.to_logprobs[tokens]
    if upstream.to_entropy is None:
        assert to_logprobs is not None, "called without any gradient"
        grad = relative.exp_().mul_((-to_logprobs * (-log_total).exp())[:, None])
    else:
        to_entropy, one_over_total = upstream.to_entropy[tokens], (-log_total).exp()
        constant = to_entropy * (upstream.entropy[tokens] - log_total)
        constant = constant if to_logprobs is None else constant + to_logprobs
        exponentials = relative.exp()
        grad = relative.mul_((-to_entropy * one_over_total)[:, None]).sub_((constant * one_over_total)[:, None])
        grad = grad.mul_(exponentials)
    if to_logprobs is not None:
        index, owned = _within(column, logits.size(1))
        grad.scatter_add_(1, index[:, None], to_logprobs.where(owned, 0.0)[:, None])
    return grad
