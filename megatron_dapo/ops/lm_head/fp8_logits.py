"""The head with its logits from FP8 products: quantized tile by tile, multiplied by Transformer Engine, by torch's
scaled_mm if that is not installed, and on a CPU in fp32 from the same quantized values.

Forward and the repetition in the backward pass use the same FP8 logits, so the probabilities agree. The two products of
the backward pass stay in the model's type: gradients of logits span more magnitudes than e4m3 has, and most would round
to zero. They are the gradients of the unquantized values, as if rounding had the derivative 1.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch

from megatron_dapo.ops.fp8 import BLOCK, Quantized, quantize_hidden, quantize_weight
from megatron_dapo.ops.lm_head import chunked
from megatron_dapo.ops.lm_head.compat import FP8_BLOCKS, import_failure, transformer_engine_obstacle
from megatron_dapo.ops.lm_head.inputs import Gradients, HeadInputs, KeptLogits, Tiles, Upstream

TRANSFORMER_ENGINE, SCALED_MM, EMULATED = "Transformer Engine", "torch scaled_mm", "emulated in fp32"
MIN_CAPABILITY = (9, 0)
_FUSED = "megatron_dapo.ops.lm_head.fused"
MIN_CUDA = (12, 9)  # cuBLAS multiplies with blocks of scales from here on


# A backend has three methods: `hidden` of [c, width] and `weight` of [n, width], n a multiple of 128, quantize in its own
# format; `logits` multiplies the two into a new fp32 tensor of at least [c, n].


class Emulated:
    """Products in fp32 of the values that FP8 would multiply."""

    def hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        return quantize_hidden(hidden).widened()

    def weight(self, rows: torch.Tensor) -> torch.Tensor:
        return quantize_weight(rows).widened()

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return hidden @ weight.t()


class ScaledMatmul:
    """Products by torch.nn.functional.scaled_mm."""

    def hidden(self, hidden: torch.Tensor) -> Quantized:
        quantized = quantize_hidden(_padded(hidden))
        # cuBLAS reads the scales of tokens column by column.
        return replace(quantized, scales=quantized.scales.t().contiguous().t())

    def weight(self, rows: torch.Tensor) -> Quantized:
        quantized = quantize_weight(rows)
        # It reads the scales of a weight in groups of 4 along the hidden size.
        missing = -quantized.scales.size(1) % 4
        return replace(quantized, scales=torch.nn.functional.pad(quantized.scales, (0, missing)).t())

    def logits(self, hidden: Quantized, weight: Quantized) -> torch.Tensor:
        functional = torch.nn.functional
        return functional.scaled_mm(
            hidden.values,
            weight.values.t(),
            hidden.scales,
            functional.ScalingType.BlockWise1x128,
            weight.scales,
            functional.ScalingType.BlockWise128x128,
            output_dtype=torch.float32,
        )


class TransformerEngine:
    """Products by Transformer Engine, with its quantizer."""

    def __init__(self) -> None:
        tensors = importlib.import_module("transformer_engine.pytorch.tensor.float8_blockwise_tensor")
        extensions = importlib.import_module("transformer_engine.pytorch.cpp_extensions")
        e4m3 = importlib.import_module("transformer_engine_torch").DType.kFloat8E4M3
        # Scales are powers of two whatever its environment switch says: trainer and rollout have one rule.
        self._quantizers = {
            dimensions: tensors.Float8BlockQuantizer(
                e4m3, rowwise=True, columnwise=False, force_pow_2_scales=True, block_scaling_dim=dimensions
            )
            for dimensions in (1, 2)
        }
        self._multiply = extensions.general_gemm

    def hidden(self, hidden: torch.Tensor) -> Any:
        return self._quantizers[1](_padded(hidden))

    def weight(self, rows: torch.Tensor) -> Any:
        return self._quantizers[2](rows.contiguous())

    def logits(self, hidden: Any, weight: Any) -> torch.Tensor:
        # "TN": its first factor is the transposed one, so the weight comes first.
        return self._multiply(weight, hidden, out_dtype=torch.float32, layout="TN")[0]


def _padded(hidden: torch.Tensor) -> torch.Tensor:
    """Append rows of zeros up to a multiple of 128, which the products need."""
    return torch.nn.functional.pad(hidden, (0, 0, 0, -hidden.size(0) % BLOCK)).contiguous()


_BACKENDS: dict[str, type[Any]] = {TRANSFORMER_ENGINE: TransformerEngine, SCALED_MM: ScaledMatmul, EMULATED: Emulated}


def backend_name(device: torch.device) -> str:
    """Return the backend for this device, by what is installed."""
    if device.type == "cpu":
        return EMULATED
    return SCALED_MM if find_spec("transformer_engine") is None else TRANSFORMER_ENGINE


def obstacle(device: torch.device, dtype: torch.dtype, width: int, rows: int) -> str | None:
    """Return the reason why FP8 cannot run here, None if it can. A Transformer Engine that is installed and broken is a
    reason: no other backend silently takes its place."""
    for name, size in (("the hidden size", width), ("this rank's rows of the output matrix", rows)):
        if size % BLOCK:
            return f"{name}, {size}, must be a multiple of {BLOCK}, the block that shares a scale"
    if dtype == torch.float64:
        return "the inputs are fp64; chunked and reference take them as they are"
    backend = backend_name(device)
    if backend == EMULATED:
        return None
    return _hardware_obstacle(device) or (
        _scaled_mm_obstacle() if backend == SCALED_MM else transformer_engine_obstacle(FP8_BLOCKS)
    )


def _hardware_obstacle(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"the device is {device.type}; FP8 products need a CUDA device (on a CPU they are emulated)"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} is below 9.0, the first with FP8 in blocks"
    return None


def _scaled_mm_obstacle() -> str | None:
    if not hasattr(torch.nn.functional, "scaled_mm"):
        return f"Transformer Engine is not installed and torch {torch.__version__} has no scaled_mm (2.10 has)"
    cuda = tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])
    if cuda < MIN_CUDA:
        return f"Transformer Engine is not installed and torch was built with CUDA {torch.version.cuda}, below 12.9"
    return None


class Fp8Logits(chunked.TileLogits):
    """Logits of quantized values: hidden states are quantized once, a tile of the weight when it is entered."""

    def __init__(self, inputs: HeadInputs) -> None:
        super().__init__(inputs)
        self._backend: Any = _BACKENDS[backend_name(inputs.hidden.device)]()
        self._hidden = {part.start: self._backend.hidden(inputs.hidden[part]) for part in inputs.token_tiles()}
        self._weight: Any = None
        if inputs.hidden.device.type == "cuda" and import_failure(_FUSED) is None:
            # A tile lies in the device's memory: reading it once, not once an operation, is half of the time.
            self.accumulate = importlib.import_module(_FUSED).accumulate

    def enter(self, columns: slice) -> None:
        super().enter(columns)
        whole_blocks = slice(columns.start, columns.stop + -columns.stop % BLOCK)
        self._weight = self._backend.weight(self._inputs.weight[whole_blocks])

    def logits(self, tokens: slice) -> torch.Tensor:
        logits = self._backend.logits(self._hidden[tokens.start], self._weight)
        return logits[: tokens.stop - tokens.start, : self._rows.size(0)]


def _in_blocks(inputs: HeadInputs) -> HeadInputs:
    """Widen the tiles to whole blocks of columns, which share their scales."""
    columns = inputs.tiles.columns + -inputs.tiles.columns % BLOCK
    return replace(inputs, tiles=Tiles(inputs.tiles.tokens, columns))


room = chunked.room


def sums(inputs: HeadInputs, kept: KeptLogits | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the sums of `lm_head`."""
    inputs = _in_blocks(inputs)
    maxima, totals = chunked.sums(inputs, kept, Fp8Logits(inputs))
    # A conversion that saturates makes 448 of infinity: 0 * infinity puts a NaN in its place.
    totals[0].add_(inputs.hidden.abs().amax(dim=1).mul(0.0))
    return maxima, totals


def gradients(inputs: HeadInputs, upstream: Upstream) -> Gradients:
    """Compute the gradients of `lm_head`."""
    inputs = _in_blocks(inputs)
    return chunked.gradients(inputs, upstream, Fp8Logits(inputs))
