"""Precision of the linear layers: a recipe's implementation here, megatron-core's fields for it, and scaling state.

With CUDA, megatron-core enters Transformer Engine's FP8 context around each layer. Without CUDA, our
layers (`layers`) emulate `fp8_blockwise` in fp32 from the values that FP8 would multiply; the other FP8 recipes have no
emulation. A requested recipe that cannot run fails with the reason; it is never replaced by another.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from megatron_dapo.config.model_schema import PrecisionConfig
from megatron_dapo.ops.lm_head.compat import FP8, FP8_BLOCKS, transformer_engine_obstacle
from megatron_dapo.precision import FP8_BLOCKWISE, FP8_CURRENT, FP8_DELAYED, RECIPES, recipe_name

TRANSFORMER_ENGINE, EMULATED, TORCH = "Transformer Engine", "emulation in fp32", "torch"

# megatron-core's fields for each FP8 recipe. A gradient with one scale per tensor needs the range of e5m2 ("hybrid");
# with block scales e4m3 is wide enough.
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


def is_fp8(precision: PrecisionConfig) -> bool:
    """Return True if linear layers compute in FP8."""
    return bool(precision.recipe) and RECIPES[precision.recipe].is_fp8


def has_fp8(precision: PrecisionConfig, layer: int, num_layers: int) -> bool:
    """Return True if `layer` of the model computes in FP8."""
    first, last = precision.num_layers_at_start_in_bf16, num_layers - precision.num_layers_at_end_in_bf16
    return is_fp8(precision) and first <= layer < last


def precision_fields(precision: PrecisionConfig) -> dict[str, Any]:
    """Return the fields of TransformerConfig that make megatron-core compute the recipe with Transformer Engine."""
    if not is_fp8(precision):
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
    """The backend `name` that computes linear layers by `recipe`, and the reason for it."""

    recipe: str
    name: str
    reason: str


def linear_backend(precision: PrecisionConfig, dtype: str) -> LinearBackend:
    """Return the backend for linear layers here, for a model in `dtype`. Raise ValueError with the reason if none can
    run."""
    recipe = recipe_name(precision.recipe, dtype)
    if not RECIPES[recipe].is_fp8:
        library = TRANSFORMER_ENGINE if _has_cuda() and _has_transformer_engine() else TORCH
        return LinearBackend(recipe, library, "requested" if precision.recipe else f"the model is in {dtype}")
    obstacle = _obstacle_on_a_device(recipe) if _has_cuda() else _obstacle_on_a_cpu(precision)
    if obstacle is not None:
        raise ValueError(f"precision: {recipe} cannot run here: {obstacle}")
    if _has_cuda():
        return LinearBackend(recipe, TRANSFORMER_ENGINE, "requested, and Transformer Engine says that it is available")
    return LinearBackend(recipe, EMULATED, "requested; there is no CUDA device")


def _has_cuda() -> bool:
    return torch.cuda.is_available()


def _has_transformer_engine() -> bool:
    return importlib.util.find_spec("transformer_engine") is not None


def _obstacle_on_a_cpu(precision: PrecisionConfig) -> str | None:
    if precision.recipe != FP8_BLOCKWISE:
        return f"there is no CUDA device, and only {FP8_BLOCKWISE} is emulated"
    if precision.fp8_param:
        return "there is no CUDA device, and weights held as FP8 (fp8_param) are not emulated"
    return None


def _obstacle_on_a_device(recipe: str) -> str | None:
    if not _has_transformer_engine():
        return "Transformer Engine is not installed (pip install --no-build-isolation 'transformer-engine[pytorch]')"
    if recipe != FP8_BLOCKWISE:
        return transformer_engine_obstacle(FP8)
    try:
        return transformer_engine_obstacle(FP8_BLOCKS) or _other_block_rounding()
    except Exception as error:  # noqa: BLE001
        return f"Transformer Engine is installed and does not work: {type(error).__name__}: {error}"


def _other_block_rounding() -> str | None:
    """Return why Transformer Engine's blocks differ from those of `ops.fp8`; None if they do not."""
    # It reads its rule for scales from the environment at import.
    recipe = importlib.import_module("transformer_engine.common.recipe").Float8BlockScaling()
    rules = (recipe.fp8_quant_fwd_inp, recipe.fp8_quant_fwd_weight, recipe.fp8_quant_bwd_grad)
    if not all(rule.power_2_scale for rule in rules):
        return (
            "NVTE_FP8_BLOCK_SCALING_FP32_SCALES is set, so that scales are no powers of two, which the weight sync and the "
            "log-prob head need; unset it"
        )
    if getattr(recipe, "backward_override", None) is not None:
        return "NVTE_BACKWARD_OVERRIDE is set, so that the backward pass is another recipe's; unset it"
    return None


# ---- state of Transformer Engine's delayed scaling: every FP8 module's scales and the maxima they come from
# Other recipes have no state. A pass without training must leave it unchanged, or computing log-probs would affect the
# next training pass. A checkpoint must contain it, or a resumed run would start with scales of 1.

DIRECTIONS = ("scaling_fwd", "scaling_bwd")
SCALES_PER_PRODUCT = 3  # forward: for input, weight and output
NEW = {"scale": 1.0, "amax_history": 0.0}  # state of a module that has not computed yet


def scales(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Return live tensors by "{chunk}.{path of the module}.{direction}.{scale or amax_history}"; none for other recipes."""
    return {
        f"{path}.{direction}.{name}": getattr(state, name)
        for path, module in _modules(chunks)
        for direction in DIRECTIONS
        if (state := module.fp8_meta.get(direction)) is not None
        for name in NEW
        if hasattr(state, name)
    }


@contextmanager
def keeping_scales(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Restore every scale and history at the end; those created inside are reset."""
    before = {name: tensor.clone() for name, tensor in scales(chunks).items()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, tensor in scales(chunks).items():
                if name in before:
                    tensor.copy_(before[name])
                else:
                    tensor.fill_(NEW[name.rpartition(".")[2]])


def load_scales(chunks: Sequence[torch.nn.Module], tensors: Mapping[str, torch.Tensor], recipe: Any) -> None:
    """Restore the tensors of `scales`. `recipe`: Transformer Engine's, for modules that have not computed yet. Raise
    ValueError if the modules differ."""
    for path, module in _modules(chunks):
        forward = tensors.get(f"{path}.{DIRECTIONS[0]}.scale")
        if forward is not None and not any(direction in module.fp8_meta for direction in DIRECTIONS):
            # A module learns its number of products in its first pass and has no state before that.
            module.fp8_meta["num_gemms"] = forward.numel() // SCALES_PER_PRODUCT
            module.init_fp8_meta_tensors(recipe)
    here = scales(chunks)
    if set(here) != set(tensors):
        difference = sorted(set(here) ^ set(tensors))
        raise ValueError(f"state: scales of FP8 modules differ from the saved ones, first at {difference[0]!r}")
    with torch.no_grad():
        for name, tensor in here.items():
            tensor.copy_(tensors[name])


def _modules(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, Any]]:
    for index, chunk in enumerate(chunks):
        for path, module in chunk.named_modules():
            if isinstance(getattr(module, "fp8_meta", None), dict):
                yield f"{index}.{path}", module
