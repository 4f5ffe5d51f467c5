"""The recurrence y_t = x_t + c_t y_{t+1} over a long stream, without a Python loop over its tokens.

The stream is cut into tiles that fit a cache, from the last to the first, and a tile into lanes of consecutive tokens:

    lane k:  y_t = (sum inside the lane) + (product of c from t to the lane's end) * y at the head of lane k + 1

All lanes of a tile walk together, one vector operation a column; the heads are again such a recurrence, short enough
for log2(lanes) doublings. c_t = 0 ends a sequence, so a stream of sequences of any lengths needs no padding, and
c_t = 1 with x_t = 0 carries y over a token. Sums with 0 and products with 1 are exact, hence so is a sum of one reward.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

LANE_LENGTH = 64
MAX_LANES = 4096


@torch.no_grad()
def reverse_linear_scan(
    outputs: torch.Tensor, fill: Callable[[int, int, torch.Tensor, torch.Tensor], None]
) -> torch.Tensor:
    """Fill `outputs` [P] with y of y_t = x_t + c_t y_{t+1}, y_P = 0, and return it.

    `fill(start, stop, inputs, decays)` writes x and c of tokens start..stop - 1 into the two [stop - start], which are
    in the dtype of `outputs`: they never stand in memory for the whole stream. c must lie in [0, 1]. A not-a-number
    spreads over everything before it: check first.
    """
    num_tokens, size = outputs.numel(), LANE_LENGTH * MAX_LANES
    carry = outputs.new_zeros(1)
    tile: _Tile | None = None
    for start in reversed(range(0, num_tokens, size)):
        stop = min(start + size, num_tokens)
        if tile is None or tile.num_tokens != stop - start:
            tile = _Tile(stop - start, outputs)
        fill(start, stop, tile.inputs[: stop - start], tile.decays[: stop - start])
        tile.scan(carry, outputs[start:stop])
        carry = outputs[start : start + 1]
    return outputs


class _Tile:
    """Buffers of a tile, used again for the next: memory fresh from the system costs more than the arithmetic."""

    def __init__(self, num_tokens: int, like: torch.Tensor) -> None:
        # A short stream gets as many columns as lanes, or it would be walked token by token.
        columns = min(LANE_LENGTH, max(1, math.isqrt(num_tokens)))
        lanes = -(-num_tokens // columns)
        self.num_tokens = num_tokens
        # What lies behind the last token stays as it is here and changes nothing.
        self.inputs, self.decays = like.new_zeros(lanes * columns), like.new_ones(lanes * columns)
        # Columns are contiguous: a step of all lanes reads and writes neighboring memory.
        self._sums, self._products = like.new_empty(columns, lanes), like.new_empty(columns, lanes)
        self._sum_columns, self._product_columns = self._sums.unbind(0), self._products.unbind(0)

    def scan(self, carry: torch.Tensor, outputs: torch.Tensor) -> None:
        """y [n] of the inputs and decays of this tile, with y_n = `carry` [1]."""
        columns, lanes = self._sums.shape
        self._sums.copy_(self.inputs.view(lanes, columns).t())
        self._products.copy_(self.decays.view(lanes, columns).t())
        self._walk()
        heads = torch.cat([self._sums[0], carry]), torch.cat([self._products[0], torch.zeros_like(carry)])
        self._sums.addcmul_(self._products, _scan_by_doubling(*heads)[1:])
        if lanes * columns == self.num_tokens:
            outputs.view(lanes, columns).copy_(self._sums.t())
        else:
            outputs.copy_(self._sums.t().reshape(-1)[: self.num_tokens])

    def _walk(self) -> None:
        sums, products = self._sum_columns, self._product_columns
        for column in range(len(sums) - 2, -1, -1):
            sums[column].addcmul_(products[column], sums[column + 1])
            products[column].mul_(products[column + 1])


def _scan_by_doubling(inputs: torch.Tensor, decays: torch.Tensor) -> torch.Tensor:
    """y [n] in ceil(log2 n) vector steps: after step j every entry covers 2^j entries from itself on."""
    span = 1
    while span < inputs.numel():
        inputs = torch.cat([torch.addcmul(inputs[:-span], decays[:-span], inputs[span:]), inputs[-span:]])
        decays = torch.cat([decays[:-span] * decays[span:], decays[-span:]])
        span *= 2
    return inputs
