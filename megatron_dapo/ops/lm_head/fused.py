"""The head by Triton's kernels: no logits in memory forward; backward, tiles of their gradients in the model's type and
two matrix products a tile.

The products of the backward pass are the library's (cuBLAS), with fp32 sums and fp32 accumulation over the tiles.
Nothing here waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton

from megatron_dapo.ops.lm_head import chunked, fused_kernels
from megatron_dapo.ops.lm_head.inputs import Gradients, HeadInputs, Tiles, Upstream, product_dtype, rebase

PROGRAMS_A_PROCESSOR = 8  # forward programs for each multiprocessor: the last round of them is never mostly empty
# Blocks of the weight's rows that programs share while they go through the tokens: 32 MiB at a hidden size of 4,096, of a
# cache of 50.
COLUMN_BLOCKS_A_GROUP = 16
# Gradients of logits that live at a time in the backward pass: 128 MiB in 16 bits.
GRADIENT_TILE = Tiles(tokens=8192, columns=8192)


@dataclass(frozen=True)
class Blocks:
    """Shape of a program's tile and how it is compiled."""

    tokens: int
    columns: int
    width: int
    num_warps: int
    num_stages: int

    def arguments(self, precision: str) -> dict[str, int | str | bool]:
        compiled = {} if fused_kernels.IS_INTERPRETED else {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return {
            "BLOCK_TOKENS": self.tokens,
            "BLOCK_COLUMNS": self.columns,
            "BLOCK_WIDTH": self.width,
            "PRECISION": precision,
            "WIDEN": fused_kernels.IS_INTERPRETED,
            **compiled,
        }


# By bytes of an element and whether the device has Hopper's shared memory (227 KiB; Ampere's least is 99 KiB). A stage
# holds (tokens + columns) * width elements.
_BLOCKS = {
    (2, True): Blocks(256, 128, 64, num_warps=8, num_stages=3),
    (2, False): Blocks(128, 128, 32, num_warps=8, num_stages=3),
    (4, True): Blocks(64, 64, 32, num_warps=4, num_stages=3),
    (4, False): Blocks(64, 64, 32, num_warps=4, num_stages=2),
}
_INTERPRETED_BLOCKS = Blocks(16, 32, 32, num_warps=1, num_stages=1)


def sums(inputs: HeadInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the sums of `lm_head`; `triton` has tiles of its own."""
    hidden, weight = _factors(inputs)
    num_tokens, num_columns = hidden.size(0), inputs.shard.num_columns
    blocks = _blocks(hidden)
    num_splits, columns_a_split = _splits(num_tokens, num_columns, blocks, hidden.device)
    maxima = hidden.new_empty(num_splits, num_tokens, dtype=torch.float32)
    partial = hidden.new_empty(3, num_splits, num_tokens, dtype=torch.float32)
    if not num_tokens or not num_columns:
        return maxima.new_full((num_tokens,), torch.finfo(torch.float32).min), maxima.new_zeros(3, num_tokens)
    with torch.cuda.device_of(hidden):
        fused_kernels.partial_sums[num_splits, triton.cdiv(num_tokens, blocks.tokens)](
            hidden,
            weight,
            inputs.own_column,
            maxima,
            partial,
            num_tokens,
            num_columns,
            hidden.size(1),
            columns_a_split,
            hidden.stride(0),
            weight.stride(0),
            1.0 / inputs.shard.temperature,
            **blocks.arguments(_precision(hidden)),
        )
    largest = maxima.amax(dim=0)
    rebase(partial, maxima - largest)
    return largest, partial.sum(dim=1)


def _factors(inputs: HeadInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return hidden states and weight in one type, elements of a row adjacent."""
    dtype = torch.promote_types(inputs.hidden.dtype, inputs.weight.dtype)
    hidden, weight = (
        # Only the rows' stride is an argument of the kernels.
        matrix if matrix.stride(1) == 1 else matrix.contiguous()
        for matrix in (inputs.hidden.to(dtype), inputs.weight.to(dtype))
    )
    return hidden, weight


def _blocks(factor: torch.Tensor) -> Blocks:
    if fused_kernels.IS_INTERPRETED:
        return _INTERPRETED_BLOCKS
    return _BLOCKS[factor.element_size(), torch.cuda.get_device_capability(factor.device) in ((9, 0), (10, 0), (10, 3))]


def _precision(factor: torch.Tensor) -> str:
    # Tensor cores would take 10 bits of an fp32 factor.
    return "ieee" if factor.dtype == torch.float32 else "tf32"


def _splits(num_tokens: int, num_columns: int, blocks: Blocks, device: torch.device) -> tuple[int, int]:
    """Return how many parts the columns are split into, each a program for every block of tokens, and columns a part."""
    processors = 2 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count
    num_tiles = max(1, triton.cdiv(num_columns, blocks.columns))
    wanted = triton.cdiv(PROGRAMS_A_PROCESSOR * processors, max(1, triton.cdiv(num_tokens, blocks.tokens)))
    tiles_a_split = triton.cdiv(num_tiles, min(wanted, num_tiles))
    return triton.cdiv(num_tiles, tiles_a_split), tiles_a_split * blocks.columns


def accumulate(
    maxima: torch.Tensor, totals: torch.Tensor, products: torch.Tensor, column: torch.Tensor, temperature: float
) -> None:
    """`chunked.accumulate` for fp32 products, reading the tile once."""
    num_tokens, num_columns = products.shape
    of_tile, sums_of_tile = torch.empty_like(maxima), maxima.new_empty(3, num_tokens)
    block_tokens, block_columns = (16, 32) if fused_kernels.IS_INTERPRETED else (4, 1024)
    with torch.cuda.device_of(products):
        fused_kernels.sums_of_logits[(triton.cdiv(num_tokens, block_tokens),)](
            products,
            column,
            of_tile,
            sums_of_tile,
            num_tokens,
            num_columns,
            products.stride(0),
            1.0 / temperature,
            BLOCK_TOKENS=block_tokens,
            BLOCK_COLUMNS=block_columns,
        )
    largest = torch.maximum(maxima, of_tile)
    rebase(totals, maxima - largest)
    rebase(sums_of_tile, of_tile - largest)
    totals.add_(sums_of_tile)
    maxima.copy_(largest)


def gradients(inputs: HeadInputs, upstream: Upstream) -> Gradients:
    """Compute the gradients of `lm_head`."""
    tiles = inputs.tiles if fused_kernels.IS_INTERPRETED else GRADIENT_TILE
    inputs = replace(inputs, tiles=tiles)
    return chunked.gradients(inputs, upstream, tile_gradients=FusedTileGradients(inputs, upstream))


class FusedTileGradients(chunked.TileGradients):
    """Gradients of raw products by a kernel, one tile after the other in the same memory."""

    def __init__(self, inputs: HeadInputs, upstream: Upstream) -> None:
        super().__init__(inputs, upstream)
        self._inputs, self._hidden_weight = inputs, _factors(inputs)
        self._has_slope = upstream.to_entropy is not None
        zero = torch.zeros_like(upstream.maxima)
        to_logprobs = zero if upstream.to_logprobs is None else upstream.to_logprobs.float()
        to_entropy = zero if upstream.to_entropy is None else upstream.to_entropy.float()
        self._vectors = (
            upstream.maxima,
            (-upstream.log_totals).exp(),
            -to_logprobs - to_entropy * (upstream.entropy - upstream.log_totals),
            -to_entropy,
            to_logprobs,
        )
        largest = (
            min(inputs.tiles.tokens, inputs.hidden.size(0)),
            min(inputs.tiles.columns, inputs.shard.num_columns),
        )
        self._buffer = self._hidden_weight[0].new_empty(largest)
        self._dtype = product_dtype(inputs.hidden, inputs.weight)

    def of(self, source: chunked.TileLogits, tokens: slice, columns: slice) -> torch.Tensor:
        """Return [c, n] in the type of the products that follow."""
        hidden, weight = self._hidden_weight[0][tokens], self._hidden_weight[1][columns]
        num_tokens, num_columns, blocks = hidden.size(0), weight.size(0), _blocks(hidden)
        buffer = self._buffer[:num_tokens, :num_columns]
        column_blocks = triton.cdiv(num_columns, blocks.columns)
        num_groups = triton.cdiv(column_blocks, COLUMN_BLOCKS_A_GROUP)
        grid = triton.cdiv(column_blocks, num_groups), triton.cdiv(num_tokens, blocks.tokens), num_groups
        with torch.cuda.device_of(hidden):
            fused_kernels.logit_gradients[grid](
                hidden,
                weight,
                self._column[tokens] - columns.start,
                *(vector[tokens] for vector in self._vectors),
                buffer,
                num_tokens,
                num_columns,
                hidden.size(1),
                hidden.stride(0),
                weight.stride(0),
                buffer.stride(0),
                1.0 / self._inputs.shard.temperature,
                **blocks.arguments(_precision(hidden)),
                HAS_SLOPE=self._has_slope,
            )
        return buffer.to(self._dtype)
