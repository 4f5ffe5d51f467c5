"""From a recipe of precision to what computes it: Transformer Engine through megatron-core, or the emulation of FP8.

With CUDA, megatron-core enters Transformer Engine's FP8 context around each layer. Without, `fp8_blockwise` is computed
by the own layers (`fp8_layers`) in fp32 from the values that FP8 would multiply; the other recipes have no emulation.
What is asked for and cannot run is an error that says what is in its way; nothing is ever taken in its place.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from megatron_dapo.precision import BY_DTYPE, FP8_BLOCKWISE, FP8_CURRENT, FP8_DELAYED, RECIPES, recipe_name

TRANSFORMER_ENGINE, EMULATED, TORCH = "Transformer Engine", "emulation in fp32", "torch"

# megatron-core's fields of each FP8 recipe. Blocks need no wider range for gradients; one scale a tensor does.
_FIELDS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        FP8_BLOCKWISE: {"fp8": "e4m3", "fp8_recipe": "blockwise"},
        FP8_CURRENT: {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
        FP8_DELAYED: {
            "fp8": "hybrid",
            "fp8_recipe": "delayed",
            "fp8_amax_history_len": 1024,
            "fp8_amax_compute_algo": "max",
        },
    }
)


@dataclass(frozen=True)
class Precision:
    """`recipe`: a name of `megatron_dapo.precision.RECIPES`, or "" for the one of the model's type. `bf16_*_layers`:
    layers that stay in the model's type under FP8. `fp8_param`: weights are kept as FP8 beside fp32 main params."""

    recipe: str = BY_DTYPE
    num_layers_at_start_in_bf16: int = 0
    num_layers_at_end_in_bf16: int = 0
    fp8_param: bool = False

    def __post_init__(self) -> None:
        kept = max(self.num_layers_at_start_in_bf16, self.num_layers_at_end_in_bf16)
        if min(self.num_layers_at_start_in_bf16, self.num_layers_at_end_in_bf16) < 0:
            raise ValueError(
                f"precision: num_layers_at_start_in_bf16 {self.num_layers_at_start_in_bf16} and num_layers_at_end_in_bf16 {self.num_layers_at_end_in_bf16} "
                "must be at least 0"
            )
        if not self.is_fp8 and (kept or self.fp8_param):
            raise ValueError(
                f"precision: layers in bf16 ({kept}) and fp8_param ({self.fp8_param}) are of FP8 recipes, but "
                f"the recipe is {self.recipe!r}"
            )
        if self.recipe == FP8_DELAYED and kept:
            raise ValueError(f"precision: {FP8_DELAYED} knows no layers in bf16 ({kept}); use {FP8_BLOCKWISE}")

    @property
    def is_fp8(self) -> bool:
        return self.recipe in RECIPES and RECIPES[self.recipe].is_fp8

    def has_fp8(self, layer: int, num_layers: int) -> bool:
        """Whether that layer of the model computes in FP8."""
        return self.is_fp8 and self.num_layers_at_start_in_bf16 <= layer < num_layers - self.num_layers_at_end_in_bf16


def precision_fields(precision: Precision) -> dict[str, Any]:
    """Fields of TransformerConfig with which megatron-core has Transformer Engine compute the recipe."""
    if not precision.is_fp8:
        return {}
    first, last = precision.num_layers_at_start_in_bf16, precision.num_layers_at_end_in_bf16
    kept = {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": first, "num_layers_at_end_in_bf16": last}
    return {
        **_FIELDS[precision.recipe],
        **(kept if first or last else {}),
        **({"fp8_param": True} if precision.fp8_param else {}),
    }


@dataclass(frozen=True)
class LinearBackend:
    """`name` multiplies in the linear layers, by `recipe`, because of `reason`."""

    recipe: str
    name: str
    reason: str


def linear_backend(precision: Precision, dtype: str) -> LinearBackend:
    """What multiplies here. ValueError with what is in the way of what is asked for."""
    recipe = recipe_name(precision.recipe, dtype)
    if not RECIPES[recipe].is_fp8:
        library = TRANSFORMER_ENGINE if _has_cuda() and _has_transformer_engine() else TORCH
        return LinearBackend(recipe, library, "asked for" if precision.recipe else f"the model is in {dtype}")
    obstacle = _obstacle_on_a_device(recipe) if _has_cuda() else _obstacle_on_a_cpu(precision)
    if obstacle is not None:
        raise ValueError(f"precision: {recipe} cannot run here: {obstacle}")
    if _has_cuda():
        return LinearBackend(recipe, TRANSFORMER_ENGINE, "asked for, and Transformer Engine says that it is available")
    return LinearBackend(recipe, EMULATED, "asked for; there is no CUDA device")


def _has_cuda() -> bool:
    return torch.cuda.is_available()


def _has_transformer_engine() -> bool:
    return importlib.util.find_spec("transformer_engine") is not None


def _obstacle_on_a_cpu(precision: Precision) -> str | None:
    if precision.recipe != FP8_BLOCKWISE:
        return f"there is no CUDA device, and only {FP8_BLOCKWISE} is emulated"
    if precision.fp8_param:
        return "there is no CUDA device, and weights held as FP8 (fp8_param) are not emulated"
    return None


def _obstacle_on_a_device(recipe: str) -> str | None:
    if not _has_transformer_engine():
        return "Transformer Engine is not installed (pip install --no-build-isolation 'transformer-engine[pytorch]')"
    try:
        engine = importlib.import_module("transformer_engine.pytorch")
        available, reason = getattr(engine, _ASKED[recipe])(return_reason=True)
        rounding = _OTHER_ROUNDING[recipe]()
    except Exception as error:  # noqa: BLE001
        return f"Transformer Engine is installed and does not work: {type(error).__name__}: {error}"
    return rounding if available else f"Transformer Engine says: {reason}"


def _other_rounding_of_blocks() -> str | None:
    """Transformer Engine reads its rule for scales from the environment when it is imported; `ops.fp8` knows one."""
    recipe = importlib.import_module("transformer_engine.common.recipe").Float8BlockScaling()
    rules = (recipe.fp8_quant_fwd_inp, recipe.fp8_quant_fwd_weight, recipe.fp8_quant_bwd_grad)
    if not all(rule.power_2_scale for rule in rules):
        return (
            "NVTE_FP8_BLOCK_SCALING_FP32_SCALES is set, so that scales are no powers of two, which the bridge and the "
            "log-prob head take; unset it"
        )
    if getattr(recipe, "backward_override", None) is not None:
        return "NVTE_BACKWARD_OVERRIDE is set, so that the backward pass is another recipe's; unset it"
    return None


_ASKED = {
    FP8_BLOCKWISE: "is_fp8_block_scaling_available",
    FP8_CURRENT: "is_fp8_available",
    FP8_DELAYED: "is_fp8_available",
}
_OTHER_ROUNDING: dict[str, Callable[[], str | None]] = {
    FP8_BLOCKWISE: _other_rounding_of_blocks,
    FP8_CURRENT: lambda: None,
    FP8_DELAYED: lambda: None,
}
