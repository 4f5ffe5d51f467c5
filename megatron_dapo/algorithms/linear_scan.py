"""The recurrence y_t = x_t + c_t y_{t+1} over a long stream, without a Python loop over its tokens.

The stream is cut into tiles that fit a cache, from the last to the first, and a tile into lanes of consecutive tokens:

    lane k:  y_t = (sum inside the lane) + (product of c from t to the lane's end) * y at the head of lane k + 1

All lanes of a tile walk together, one vector operation a column; the heads are again such a recurrence, short enough
for log2(lanes) doublings. c_t = 0 ends a sequence, so a stream of sequences of any lengths needs no padding, and
c_t = 1 with x_t = 0 carries y over a token. Sums with 0 and products with 1 are exact, hence so is a sum of one reward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

LANE_LENGTH = 64
MAX_LANES = 4096


@torch.no_grad()
def reverse_linear_scan(
    outputs: torch.Tensor, terms: Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]
) -> torch.Tensor:
    """Fill `outputs` [P] with y of y_t = x_t + c_t y_{t+1}, y_P = 0, and return it.

    `terms(start, stop)` gives x and c of tokens start..stop - 1, [stop - start] each, in the dtype of `outputs`. They
    are made a tile at a time and never stand in memory for the whole stream. c must lie in [0, 1]. A not-a-number
    spreads over everything before it: check first.
    """
    carry = outputs.new_zeros(1)
    tile = LANE_LENGTH * MAX_LANES
    for start in reversed(range(0, outputs.numel(), tile)):
        stop = min(start + tile, outputs.numel())
        outputs[start:stop] = _scan_tile(*terms(start, stop), carry)
        carry = outputs[start : start + 1]
    return outputs


def _scan_tile(inputs: torch.Tensor, decays: torch.Tensor, carry: torch.Tensor) -> torch.Tensor:
    """y [n] of one tile, with y_n = `carry` [1]."""
    assert inputs.shape == decays.shape, f"{tuple(inputs.shape)} inputs, {tuple(decays.shape)} decays"
    # Columns are contiguous: a step of all lanes reads and writes neighbouring memory.
    sums, products = _lanes(inputs, 0.0), _lanes(decays, 1.0)
    sum_columns, product_columns = sums.unbind(0), products.unbind(0)
    for column in range(len(sum_columns) - 2, -1, -1):
        sum_columns[column].addcmul_(product_columns[column], sum_columns[column + 1])
        product_columns[column].mul_(product_columns[column + 1])
    heads = _scan_by_doubling(torch.cat([sums[0], carry]), torch.cat([products[0], torch.zeros_like(carry)]))
    sums.addcmul_(products, heads[1:])
    return sums.t().reshape(-1)[: inputs.numel()]


def _lanes(stream: torch.Tensor, filler: float) -> torch.Tensor:
    """[columns, lanes] copy of `stream` [n], filled up behind its end."""
    # A short stream gets as many columns as lanes, or it would be walked token by token.
    columns = min(LANE_LENGTH, max(1, int(stream.numel() ** 0.5)))
    missing = -stream.numel() % columns
    padded = torch.nn.functional.pad(stream, (0, missing), value=filler) if missing else stream
    # clone, not contiguous: a single column or lane would come back as a view of the caller's tensor.
    return padded.view(-1, columns).t().clone(memory_format=torch.contiguous_format)


def _scan_by_doubling(inputs: torch.Tensor, decays: torch.Tensor) -> torch.Tensor:
    """y [n] in ceil(log2 n) vector steps: after step j every entry covers 2^j entries from itself on."""
    span = 1
    while span < inputs.numel():
        inputs = torch.cat([inputs[:-span] + decays[:-span] * inputs[span:], inputs[-span:]])
        decays = torch.cat([decays[:-span] * decays[span:], decays[-span:]])
        span *= 2
    return inputs
