"""The head by Triton's kernels with the blocks that were the fastest on this device.

The first call for a hidden size and a number of columns compiles every candidate and measures it at TOKENS tokens; a
candidate takes about a second to compile. Triton's cache (`TRITON_CACHE_DIR`, by default `~/.triton/cache`) keeps the choice, until the kernels,
the candidates, Triton or the device change. Token counts differ from one micro-batch to the next and have no say.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import lru_cache

import torch
import triton
import triton.testing
from triton.compiler.errors import CompilationError
from triton.runtime.cache import get_cache_manager
from triton.runtime.errors import OutOfResources, PTXASError

from megatron_dapo.ops.lm_head import fused, fused_kernels
from megatron_dapo.ops.lm_head.fused import Blocks, Use, room
from megatron_dapo.ops.lm_head.inputs import Gradients, HeadInputs, KeptLogits, Tiles, Upstream, VocabShard

__all__ = ["gradients", "room", "sums"]

logger = logging.getLogger(__name__)

TOKENS = 8192
COLUMNS = 1 << 15  # limit: a whole weight may not fit next to a model
TMA_BYTES = 16  # address and distance of rows are multiples of it
# For 16-bit factors. Those that `fused` has come first, so that nothing is slower than there.
CANDIDATES = (
    Blocks(256, 128, 64, num_warps=8, num_stages=3),
    Blocks(128, 128, 32, num_warps=8, num_stages=3),
    Blocks(128, 128, 64, num_warps=8, num_stages=3),
    Blocks(128, 256, 64, num_warps=8, num_stages=3),
    Blocks(128, 256, 64, num_warps=8, num_stages=3, has_tma=True, is_flattened=True),
    Blocks(256, 128, 64, num_warps=8, num_stages=3, has_tma=True, is_flattened=True),
    Blocks(256, 128, 64, num_warps=8, num_stages=4, has_tma=True),
    Blocks(128, 128, 64, num_warps=4, num_stages=4, has_tma=True, is_flattened=True),
)
FILE = "head.json"


def sums(inputs: HeadInputs, kept: KeptLogits | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the sums of `lm_head`."""
    return fused.sums(inputs, kept, fastest_blocks)


def gradients(inputs: HeadInputs, upstream: Upstream) -> Gradients:
    """Compute the gradients of `lm_head`."""
    return fused.gradients(inputs, upstream, fastest_blocks)


def fastest_blocks(use: Use, hidden: torch.Tensor, weight: torch.Tensor) -> Blocks:
    """Return the fastest blocks for factors like these."""
    has_tma = allows_tma(hidden, weight)
    if fused_kernels.IS_INTERPRETED:  # the interpreter has nothing to measure
        return INTERPRETED_BLOCKS if has_tma else fused.fixed_blocks(use, hidden, weight)
    if hidden.dtype == torch.float32:
        return fused.fixed_blocks(use, hidden, weight)
    has_tma = has_tma and fused.is_hopper(hidden.device)
    return _fastest(use, hidden.device, hidden.dtype, hidden.size(1), min(weight.size(0), COLUMNS), has_tma)


INTERPRETED_BLOCKS = Blocks(16, 64, 32, num_warps=1, num_stages=1, has_tma=True, is_flattened=True)


def allows_tma(*factors: torch.Tensor) -> bool:
    """Return True if the tensor memory accelerator can copy rows of all factors."""
    return all(
        factor.data_ptr() % TMA_BYTES == 0 and factor.stride(0) * factor.element_size() % TMA_BYTES == 0
        for factor in factors
    )


@lru_cache(maxsize=64)
def _fastest(use: Use, device: torch.device, dtype: torch.dtype, width: int, num_columns: int, has_tma: bool) -> Blocks:
    candidates = [blocks for blocks in CANDIDATES if has_tma or not blocks.has_tma]
    problem = [use, torch.cuda.get_device_name(device), str(dtype), width, num_columns, TOKENS]
    kernel = fused_kernels.logit_gradients if use == "gradients" else fused_kernels.partial_sums
    source = [triton.__version__, kernel.cache_key, [asdict(blocks) for blocks in candidates]]
    cache = get_cache_manager(hashlib.sha256(json.dumps([problem, source]).encode()).hexdigest())
    path = cache.get_file(FILE)
    if path is None:
        logger.info("log-prob head, %s: measuring %d shapes of a program", use, len(candidates))
        work = _work(use, device, dtype, width, num_columns)
        milliseconds = [_milliseconds(work, blocks) for blocks in candidates]
        cache.put(json.dumps(milliseconds), FILE, binary=False)
    else:
        with open(path, encoding="utf-8") as stream:
            milliseconds = json.load(stream)
    fastest = min(range(len(candidates)), key=milliseconds.__getitem__)
    logger.info("log-prob head, %s: %s, %.2f ms", use, candidates[fastest], milliseconds[fastest])
    return candidates[fastest]


def _work(
    use: Use, device: torch.device, dtype: torch.dtype, width: int, num_columns: int
) -> Callable[[Blocks], object]:
    """Return what a candidate is measured with."""
    # Zeros draw less power, and a device runs faster on less.
    hidden, weight = (torch.randn(rows, width, device=device, dtype=dtype) for rows in (TOKENS, num_columns))
    column, of_token = torch.zeros(TOKENS, dtype=torch.int64, device=device), torch.zeros(TOKENS, device=device)
    if use != "gradients":
        inputs = HeadInputs(hidden, weight, column, VocabShard(0, num_columns, num_columns, 1.0, None), Tiles(1, 1))
        kept = room(inputs, sys.maxsize) if use == "kept" else None
        return lambda blocks: fused.launch_sums(hidden, weight, column, num_columns, 1.0, kept, blocks)
    weight = weight[: fused.GRADIENT_TILE.columns]
    tile = hidden.new_empty(TOKENS, weight.size(0))
    of_tile = (column, *(of_token,) * 5, tile, *tile.shape)
    return lambda blocks: fused.launch_gradients(hidden, weight, of_tile, 1.0, True, blocks)


def _milliseconds(work: Callable[[Blocks], object], blocks: Blocks) -> float:
    """Return the median time, or infinity if the device or the compiler cannot have these blocks."""
    try:
        found = float(triton.testing.do_bench(lambda: work(blocks), return_mode="median"))
    except (OutOfResources, PTXASError, CompilationError) as error:
        logger.info("%s: %s", blocks, str(error).splitlines()[0])
        return math.inf
    logger.info("%s: %.2f ms", blocks, found)
    return found
