"""The head by Triton's kernels: no logits in memory forward; backward, tiles of their gradients in the model's type and
two matrix products a tile.

The products of the backward pass are the library's (cuBLAS), with fp32 sums and fp32 accumulation over the tiles.
Nothing here waits for the device. Blocks are fixed; `fused_tuned` measures which are the fastest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import triton

from megatron_dapo.ops.lm_head import chunked, fused_kernels
from megatron_dapo.ops.lm_head.inputs import Gradients, HeadInputs, KeptLogits, Tiles, Upstream, product_dtype, rebase
from megatron_dapo.plan.memory import KEPT_GROUP, kept_logit_bytes

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
    has_tma: bool = False
    is_flattened: bool = False  # forward kernel only; the backward one has one tile per program

    def meta(self) -> dict[str, int | bool]:
        """Return them as arguments of a kernel."""
        return {
            "BLOCK_TOKENS": self.tokens,
            "BLOCK_COLUMNS": self.columns,
            "BLOCK_WIDTH": self.width,
            "TMA": self.has_tma,
            "FLATTEN": self.is_flattened,
        }


# By bytes of an element and whether the device has Hopper's shared memory (227 KiB; Ampere's least is 99 KiB). A stage
# holds (tokens + columns) * width elements.
_BLOCKS = {
    (2, True): Blocks(256, 128, 64, num_warps=8, num_stages=3),
    (2, False): Blocks(128, 128, 32, num_warps=8, num_stages=3),
    (4, True): Blocks(64, 64, 32, num_warps=4, num_stages=3),
    (4, False): Blocks(64, 64, 32, num_warps=4, num_stages=2),
}
INTERPRETED_BLOCKS = Blocks(16, 64, 32, num_warps=1, num_stages=1)
# Uses of a kernel with products: sums, sums and kept logits, gradients of a tile.
Use = Literal["sums", "kept", "gradients"]
ChooseBlocks = Callable[[Use, torch.Tensor, torch.Tensor], Blocks]  # arguments: a use, hidden states and a weight


def fixed_blocks(use: Use, hidden: torch.Tensor, weight: torch.Tensor) -> Blocks:
    """Return the blocks for every use of factors of this type on this device."""
    if fused_kernels.IS_INTERPRETED:
        return INTERPRETED_BLOCKS
    return _BLOCKS[hidden.element_size(), is_hopper(hidden.device)]


def is_hopper(device: torch.device) -> bool:
    """Return True for Hopper's shared memory and tensor memory accelerator, which data center Blackwells have too."""
    return torch.cuda.get_device_capability(device) in ((9, 0), (10, 0), (10, 3))


def room(inputs: HeadInputs, most_bytes: int) -> KeptLogits | None:
    """Return memory for the logits of all tokens and columns, in fp16 unless the model is in fp32; None if it takes more
    than `most_bytes`."""
    hidden, num_tokens, num_columns = inputs.hidden, inputs.hidden.size(0), inputs.shard.num_columns
    is_fp32 = torch.promote_types(hidden.dtype, inputs.weight.dtype) == torch.float32
    dtype = torch.float32 if is_fp32 else torch.float16
    if kept_logit_bytes(num_tokens, num_columns, dtype.itemsize, is_grouped=True) > most_bytes:
        return None
    groups = hidden.new_empty(num_tokens, triton.cdiv(num_columns, KEPT_GROUP), dtype=torch.float32)
    return KeptLogits(hidden.new_empty(num_tokens, num_columns, dtype=dtype), groups)


def sums(
    inputs: HeadInputs, kept: KeptLogits | None = None, choose: ChooseBlocks = fixed_blocks
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the sums of `lm_head`; `triton` chooses its own tiles."""
    hidden, weight = _factors(inputs)
    num_tokens, num_columns = hidden.size(0), inputs.shard.num_columns
    if not num_tokens or not num_columns:
        maxima = hidden.new_full((num_tokens,), torch.finfo(torch.float32).min, dtype=torch.float32)
        return maxima, maxima.new_zeros(3, num_tokens)
    blocks = choose("sums" if kept is None else "kept", hidden, weight)
    maxima, partial = launch_sums(
        hidden, weight, inputs.own_column, num_columns, inputs.shard.temperature, kept, blocks
    )
    largest = maxima.amax(dim=0)
    rebase(partial, maxima - largest)
    return largest, partial.sum(dim=1)


def launch_sums(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    own_column: torch.Tensor,
    num_columns: int,
    temperature: float,
    kept: KeptLogits | None,
    blocks: Blocks,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return maxima [splits, P] and sums [3, splits, P] of the splits of the columns."""
    num_tokens = hidden.size(0)
    num_splits, columns_a_split = _splits(num_tokens, num_columns, blocks, hidden.device)
    maxima = hidden.new_empty(num_splits, num_tokens, dtype=torch.float32)
    partial = hidden.new_empty(3, num_splits, num_tokens, dtype=torch.float32)
    # Without KEEP the kernel touches neither of what stands in their places.
    values, largest = (maxima, maxima) if kept is None else (kept.values, kept.largest)
    assert largest is not None
    _prepare(blocks)
    with torch.cuda.device_of(hidden):
        fused_kernels.partial_sums[num_splits, triton.cdiv(num_tokens, blocks.tokens)](
            hidden,
            weight,
            own_column,
            maxima,
            partial,
            values,
            largest,
            num_tokens,
            num_columns,
            hidden.size(1),
            columns_a_split,
            hidden.stride(0),
            weight.stride(0),
            values.stride(0),
            largest.stride(0),
            1.0 / temperature,
            **blocks.meta(),
            **_compilation(blocks, hidden),
            KEEP=kept is not None,
            GROUP=KEPT_GROUP,
        )
    return maxima, partial


def _prepare(blocks: Blocks) -> None:
    if blocks.has_tma:
        # Descriptions of matrices lie in separate memory. Each thread has its own allocator, and autograd has threads.
        triton.set_allocator(lambda size, alignment, stream: torch.empty(size, device="cuda", dtype=torch.int8))


def _compilation(blocks: Blocks, factor: torch.Tensor) -> dict[str, int | str | bool]:
    # Tensor cores would take 10 bits of an fp32 factor.
    precision = "ieee" if factor.dtype == torch.float32 else "tf32"
    products: dict[str, int | str | bool] = {"PRECISION": precision, "WIDEN": fused_kernels.IS_INTERPRETED}
    if fused_kernels.IS_INTERPRETED:
        return products
    return {**products, "num_warps": blocks.num_warps, "num_stages": blocks.num_stages}


def _factors(inputs: HeadInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return hidden states and weight in one type, elements of a row adjacent."""
    dtype = torch.promote_types(inputs.hidden.dtype, inputs.weight.dtype)
    hidden, weight = (
        # Only the rows' stride is an argument of the kernels.
        matrix if matrix.stride(1) == 1 else matrix.contiguous()
        for matrix in (inputs.hidden.to(dtype), inputs.weight.to(dtype))
    )
    return hidden, weight


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


def gradients(inputs: HeadInputs, upstream: Upstream, choose: ChooseBlocks = fixed_blocks) -> Gradients:
    """Compute the gradients of `lm_head`."""
    # Tiles begin where groups of kept logits do.
    tiles = Tiles(inputs.tiles.tokens, max(inputs.tiles.columns // KEPT_GROUP, 1) * KEPT_GROUP)
    inputs = replace(inputs, tiles=tiles if fused_kernels.IS_INTERPRETED else GRADIENT_TILE)
    return chunked.gradients(inputs, upstream, tile_gradients=FusedTileGradients(inputs, upstream, choose))


class FusedTileGradients(chunked.TileGradients):
    """Gradients of raw products by a kernel, one tile after the other in the same memory."""

    def __init__(self, inputs: HeadInputs, upstream: Upstream, choose: ChooseBlocks) -> None:
        super().__init__(inputs, upstream)
        self._inputs, self._hidden_weight = inputs, _factors(inputs)
        self._choose = choose
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
        buffer = self._buffer[: hidden.size(0), : weight.size(0)]
        of_tile = (
            self._column[tokens] - columns.start,
            *(vector[tokens] for vector in self._vectors),
            buffer,
            *buffer.shape,
        )
        if self._upstream.kept is None:
            blocks = self._choose("gradients", *self._hidden_weight)
            launch_gradients(hidden, weight, of_tile, self._temperature, self._has_slope, blocks)
        else:
            self._turn_kept(self._upstream.kept, tokens, columns, of_tile)
        return buffer.to(self._dtype)

    def _turn_kept(self, kept: KeptLogits, tokens: slice, columns: slice, of_tile: tuple[Any, ...]) -> None:
        assert kept.largest is not None
        values, largest = kept.values[tokens, columns], kept.largest[tokens, columns.start // KEPT_GROUP :]
        *arrays, buffer, num_tokens, num_columns = of_tile
        block_tokens = 16 if fused_kernels.IS_INTERPRETED else 32
        grid = triton.cdiv(num_columns, KEPT_GROUP), triton.cdiv(num_tokens, block_tokens)
        with torch.cuda.device_of(values):
            fused_kernels.gradients_of_kept[grid](
                values,
                largest,
                *arrays,
                buffer,
                num_tokens,
                num_columns,
                values.stride(0),
                largest.stride(0),
                buffer.stride(0),
                BLOCK_TOKENS=block_tokens,
                GROUP=KEPT_GROUP,
                HAS_SLOPE=self._has_slope,
            )


def launch_gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    of_tile: tuple[Any, ...],  # arguments of `logit_gradients`, from target_columns to num_columns
    temperature: float,
    has_slope: bool,
    blocks: Blocks,
) -> None:
    """Write the gradients of one tile of raw products."""
    *_, buffer, num_tokens, num_columns = of_tile
    column_blocks = triton.cdiv(num_columns, blocks.columns)
    num_groups = triton.cdiv(column_blocks, COLUMN_BLOCKS_A_GROUP)
    grid = triton.cdiv(column_blocks, num_groups), triton.cdiv(num_tokens, blocks.tokens), num_groups
    meta = {name: value for name, value in blocks.meta().items() if name != "FLATTEN"}
    _prepare(blocks)
    with torch.cuda.device_of(hidden):
        fused_kernels.logit_gradients[grid](
            hidden,
            weight,
            *of_tile,
            hidden.size(1),
            hidden.stride(0),
            weight.stride(0),
            buffer.stride(0),
            1.0 / temperature,
            **meta,
            **_compilation(blocks, hidden),
            HAS_SLOPE=has_slope,
        )
