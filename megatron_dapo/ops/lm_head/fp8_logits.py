"""The head with its logits from FP8 products: quantized tile by tile, multiplied by Transformer Engine, by torch's
scaled_mm where that is not installed, and on a CPU in fp32 from the same quantized values.

Forward and the backward pass's repetition use the same FP8 logits, so the probabilities agree. The two products of
the backward pass stay in the model's type: gradients of logits span more magnitudes than e4m3 has, and most would round
to zero. They are those of hidden states and weight as they are, as if rounding had the derivative 1.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, Protocol

import torch

from megatron_dapo.ops.fp8 import BLOCK, Quantized, quantize_hidden, quantize_weight
from megatron_dapo.ops.lm_head import chunked
from megatron_dapo.ops.lm_head.compat import import_failure
from megatron_dapo.ops.lm_head.inputs import Gradients, HeadInputs, Tiles, Upstream

TRANSFORMER_ENGINE, SCALED_MM, EMULATED = "Transformer Engine", "torch scaled_mm", "emulated in fp32"
LEAST_CAPABILITY = (9, 0)
_FUSED = "megatron_dapo.ops.lm_head.fused"
LEAST_CUDA = (12, 9)  # cuBLAS multiplies with blocks of scales from here on


class Multiplier(Protocol):
    """One way of multiplying quantized values. What it makes of hidden states and weight is its own affair."""

    def hidden(self, hidden: torch.Tensor) -> Any:
        """Of [c, width]."""

    def weight(self, rows: torch.Tensor) -> Any:
        """Of [n, width], n a multiple of 128."""

    def logits(self, hidden: Any, weight: Any) -> torch.Tensor:
        """A new fp32 tensor of at least [c, n]."""


class Emulated:
    """The products of the very values that FP8 multiplies, in fp32."""

    def hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        return quantize_hidden(hidden).widened()

    def weight(self, rows: torch.Tensor) -> torch.Tensor:
        return quantize_weight(rows).widened()

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return hidden @ weight.t()


class ScaledMatmul:
    """torch.nn.functional.scaled_mm, which wants the scales of tokens with tokens adjacent, and those of the weight
    padded to a multiple of 4 along the hidden size."""

    def hidden(self, hidden: torch.Tensor) -> Quantized:
        quantized = quantize_hidden(_padded(hidden))
        return replace(quantized, scales=quantized.scales.t().contiguous().t())

    def weight(self, rows: torch.Tensor) -> Quantized:
        quantized = quantize_weight(rows)
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
    """Transformer Engine's quantizer and product. Its switch for scales that are no powers of two is not read: trainer
    and rollout have one rule."""

    def __init__(self) -> None:
        tensors = importlib.import_module("transformer_engine.pytorch.tensor.float8_blockwise_tensor")
        extensions = importlib.import_module("transformer_engine.pytorch.cpp_extensions")
        e4m3 = importlib.import_module("transformer_engine_torch").DType.kFloat8E4M3
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
        return self._multiply(weight, hidden, out_dtype=torch.float32, layout="TN")[0]


def _padded(hidden: torch.Tensor) -> torch.Tensor:
    """With rows of zeros up to a multiple of 128, which the products' rows have to be."""
    return torch.nn.functional.pad(hidden, (0, 0, 0, -hidden.size(0) % BLOCK)).contiguous()


_MULTIPLIERS: dict[str, Callable[[], Multiplier]] = {
    TRANSFORMER_ENGINE: TransformerEngine,
    SCALED_MM: ScaledMatmul,
    EMULATED: Emulated,
}


def multiplier_name(device: torch.device) -> str:
    """Which one serves this device: what is installed decides, never what happens to work."""
    if device.type == "cpu":
        return EMULATED
    return SCALED_MM if find_spec("transformer_engine") is None else TRANSFORMER_ENGINE


def obstacle(device: torch.device, dtype: torch.dtype, width: int, rows: int) -> str | None:
    """What is in the way of FP8 here, None for nothing. A Transformer Engine that is installed and does not work is in
    the way: its place is not taken silently."""
    for what, size in (("the hidden size", width), ("this rank's rows of the output matrix", rows)):
        if size % BLOCK:
            return f"{what}, {size}, must be a multiple of {BLOCK}, the block that shares a scale"
    if dtype == torch.float64:
        return "the inputs are fp64; chunked and reference take them as they are"
    return _OBSTACLES[multiplier_name(device)](device)


def _in_the_way_of_hardware(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"the device is {device.type}; FP8 products need a CUDA device (on a CPU they are emulated)"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} is below 9.0, the first with FP8 in blocks"
    return None


def _in_the_way_of_scaled_mm(device: torch.device) -> str | None:
    in_hardware = _in_the_way_of_hardware(device)
    if in_hardware is not None:
        return in_hardware
    if not hasattr(torch.nn.functional, "scaled_mm"):
        return f"Transformer Engine is not installed and torch {torch.__version__} has no scaled_mm (2.10 has)"
    cuda = tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])
    if cuda < LEAST_CUDA:
        return f"Transformer Engine is not installed and torch was built with CUDA {torch.version.cuda}, below 12.9"
    return None


def _in_the_way_of_transformer_engine(device: torch.device) -> str | None:
    in_hardware = _in_the_way_of_hardware(device)
    if in_hardware is not None:
        return in_hardware
    try:
        engine = importlib.import_module("transformer_engine.pytorch")
        available, reason = engine.is_fp8_block_scaling_available(return_reason=True)
    except Exception as error:  # noqa: BLE001
        return f"Transformer Engine is installed and does not work: {type(error).__name__}: {error}"
    return None if available else f"Transformer Engine says: {reason}"


_OBSTACLES: dict[str, Callable[[torch.device], str | None]] = {
    EMULATED: lambda device: None,
    SCALED_MM: _in_the_way_of_scaled_mm,
    TRANSFORMER_ENGINE: _in_the_way_of_transformer_engine,
}


class Fp8Logits(chunked.WideLogits):
    """Logits of quantized values; hidden states are quantized once, a tile of the weight when it is entered."""

    def __init__(self, inputs: HeadInputs) -> None:
        super().__init__(inputs)
        self._multiplier = _MULTIPLIERS[multiplier_name(inputs.hidden.device)]()
        self._hidden = {part.start: self._multiplier.hidden(inputs.hidden[part]) for part in inputs.token_tiles()}
        self._weight: Any = None

    def enter(self, columns: slice) -> None:
        super().enter(columns)
        whole_blocks = slice(columns.start, columns.stop + -columns.stop % BLOCK)
        self._weight = self._multiplier.weight(self._inputs.weight[whole_blocks])

    def logits(self, tokens: slice) -> torch.Tensor:
        logits = self._multiplier.logits(self._hidden[tokens.start], self._weight)
        return logits[: tokens.stop - tokens.start, : self._rows.size(0)]


def _in_blocks(inputs: HeadInputs) -> HeadInputs:
    """With tiles of whole blocks of columns, which share their scales."""
    columns = inputs.tiles.columns + -inputs.tiles.columns % BLOCK
    return replace(inputs, tiles=Tiles(inputs.tiles.tokens, columns))


def _take_tile(device: torch.device) -> chunked.TakeTile:
    """On a device the tiles lie in its memory, and reading them once rather than once a step is half of the time."""
    if device.type != "cuda" or import_failure(_FUSED) is not None:
        return chunked.take_tile
    return importlib.import_module(_FUSED).take_tile


def sums(inputs: HeadInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Kernels.sums`."""
    maxima, totals = chunked.sums(_in_blocks(inputs), Fp8Logits, _take_tile(inputs.hidden.device))
    # Conversions that saturate would make 448 of infinity.
    totals[0].add_(inputs.hidden.abs().amax(dim=1).mul(0.0))
    return maxima, totals


def gradients(inputs: HeadInputs, upstream: Upstream) -> Gradients:
    """See `Kernels.gradients`."""
    return chunked.gradients(_in_blocks(inputs), upstream, Fp8Logits)
