"""The recurrence y_t = x_t + c_t y_{t+1} over a long stream, without a Python loop over its tokens.

Tiles of the stream that fit a cache are processed from last to first. A tile is cut into lanes of consecutive tokens:

    lane k:  y_t = (sum inside the lane) + (product of c from t to the lane's end) * y at the head of lane k + 1

All lanes of a tile advance together, with one vector operation per column. The lane heads form the same recurrence,
short enough for log2(lanes) doublings. c_t = 0 ends a sequence, so sequences of any lengths need no padding;
c_t = 1 with x_t = 0 carries y over a token. Adding 0 and multiplying by 1 are exact, and so is a sum of one reward.
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

    `fill(start, stop, inputs, decays)` writes x and c of tokens start..stop - 1 into two buffers [stop - start] in the
    dtype of `outputs`, so x and c are never in memory for the whole stream. c must lie in [0, 1]. A NaN spreads to
    everything before it: check for NaN first.
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
    """Buffers of a tile, reused for the next one: fresh memory from the system costs more than the arithmetic."""

    def __init__(self, num_tokens: int, like: torch.Tensor) -> None:
        # Give a short stream as many columns as lanes; otherwise the scan would go token by token.
        columns = min(LANE_LENGTH, max(1, math.isqrt(num_tokens)))
        lanes = -(-num_tokens // columns)
        self.num_tokens = num_tokens
        # Slots after the last token keep these values and have no effect.
        self.inputs, self.decays = like.new_zeros(lanes * columns), like.new_ones(lanes * columns)
        # Columns are contiguous, so one step of all lanes accesses adjacent memory.
        self._sums, self._products = like.new_empty(columns, lanes), like.new_empty(columns, lanes)
        self._sum_columns, self._product_columns = self._sums.unbind(0), self._products.unbind(0)

    def scan(self, carry: torch.Tensor, outputs: torch.Tensor) -> None:
        """Write y [n] for this tile's inputs and decays to `outputs`, with y_n = `carry` [1]."""
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
    """Return y [n] in ceil(log2 n) vector steps: after step j each entry covers 2^j entries, starting with itself."""
    span = 1
    while span < inputs.numel():
        inputs = torch.cat([torch.addcmul(inputs[:-span], decays[:-span], inputs[span:]), inputs[-span:]])
        decays = torch.cat([decays[:-span] * decays[span:], decays[-span:]])
        span *= 2
    return inputs
