"""The implementation that each operation of the actor uses here, with the reason, read from its layer specification."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType
from typing import Any

import megatron.core.optimizer as megatron_optimizer
import torch
from megatron.core.optimizer import clip_grads
from megatron.core.transformer import transformer_block
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron_dapo.megatron.gated_delta import GatedDeltaNet
from megatron_dapo.megatron.layer_spec import block_spec, class_of, submodules_of
from megatron_dapo.megatron.model_config import GPTConfig, uses_transformer_engine
from megatron_dapo.megatron.precision import is_fp8, linear_backend
from megatron_dapo.ops.gated_delta import gated_delta_rule
from megatron_dapo.ops.lm_head.select import AUTO, HeadSpec, choose
from megatron_dapo.plan.memory import VOCABULARY_MULTIPLE
from megatron_dapo.precision import RECIPES

# Top-level package -> library name in the table.
_OWNERS = {
    "transformer_engine": "Transformer Engine",
    "transformer_engine_torch": "Transformer Engine",
    "apex": "NVIDIA apex",
    "amp_C": "NVIDIA apex",
    "torch": "torch",
    "megatron": "megatron-core",
    "megatron_dapo": "own",
}
_TRANSFORMER_ENGINE_IN_MEGATRON = "megatron.core.extensions.transformer_engine"


@dataclass(frozen=True)
class Implementation:
    """The implementation `name` of operation `op`, and the reason for it."""

    op: str
    name: str
    reason: str


def implementations(config: GPTConfig, head: str = AUTO) -> tuple[Implementation, ...]:
    """Return the table for a model of this configuration with the log-prob head `head` (a name or "auto"). Needs no process
    group and builds no module. Raise ValueError for a requested implementation that cannot run here."""
    spec = block_spec(config, range(config.num_layers))
    is_block = isinstance(spec, TransformerBlockSubmodules)
    layer = _attending_layer(spec.layer_specs) if is_block else spec
    final_norm = spec.layer_norm if is_block else transformer_block.LayerNormImpl
    attention = layer.submodules.self_attention.submodules
    into = attention.linear_kv_up_proj if config.multi_latent_attention else attention.linear_qkv  # its norm may be fused
    why = _reason_of_layers()
    fused = "megatron-core takes Transformer Engine's, else apex's, else torch's: the first that can be imported, or apex's on request"
    return (
        Implementation("layers", _names(layer.module, into, attention.linear_proj), why),
        *_precision(config),
        Implementation("mlp", _names(*_mlp_modules(layer)), why),
        Implementation(
            "attention",
            _names(layer.submodules.self_attention, attention.core_attention),
            why if config.attention_implementation == "auto" else "requested: torch's flash attention",
        ),
        *_gated_delta(config),
        Implementation("rms norm", _names(final_norm, into, attention.q_layernorm), why),
        Implementation("optimizer", _names(megatron_optimizer.Adam), fused),
        Implementation("gradient norm", _names(clip_grads.l2_norm_impl), fused),
        _log_prob_head(config, head),
    )


def _attending_layer(specs: Sequence[ModuleSpec]) -> ModuleSpec:
    """Return the last layer with attention, which every model has."""
    return next(spec for spec in reversed(specs) if class_of(spec.submodules.self_attention) is not GatedDeltaNet)


def _gated_delta(config: GPTConfig) -> Iterator[Implementation]:
    if config.linear_attention_freq is not None:
        yield Implementation("gated delta net", _names(GatedDeltaNet, gated_delta_rule), "there is no other")


def _precision(config: GPTConfig) -> Iterator[Implementation]:
    """Yield the rows for the linear layers' recipe, its implementation, and their weights."""
    precision, count = config.precision, config.num_layers
    chosen = linear_backend(precision, config.dtype_name)
    yield Implementation("precision", chosen.recipe, chosen.reason)
    left = count - config.num_fp8_layers
    kept = f"; {left} of {count} layers in {config.dtype_name}" if is_fp8(precision) and left else ""
    yield Implementation("linear products", chosen.name, RECIPES[chosen.recipe].products + kept)
    if is_fp8(precision):
        held = (
            "FP8, next to fp32 main params"
            if precision.fp8_param
            else f"{config.dtype_name}, quantized for each product"
        )
        yield Implementation("fp8 weights", held, "fp8_param" if precision.fp8_param else "no fp8_param")


def describe(rows: Iterable[Implementation]) -> str:
    """Format the table as lines for a log."""
    return "\n".join(f"  {row.op:<15} {row.name}  ({row.reason})" for row in rows)


def _log_prob_head(config: GPTConfig, head: str) -> Implementation:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = choose(head, HeadSpec(device, config.params_dtype, config.hidden_size, VOCABULARY_MULTIPLE))
    return Implementation("log-prob head", f"own {chosen.name}", chosen.reason)


def _reason_of_layers() -> str:
    if uses_transformer_engine():
        return "Transformer Engine is installed and there is a CUDA device"
    return "Transformer Engine is not installed" if torch.cuda.is_available() else "there is no CUDA device"


def _mlp_modules(layer: ModuleSpec) -> tuple[Any, ...]:
    mlp = layer.submodules.mlp
    parts = submodules_of(mlp)
    experts = getattr(parts, "experts", None)
    if experts is not None:
        return mlp, experts
    return mlp, parts.linear_fc1, parts.linear_fc2


def _names(*parts: Any) -> str:
    """Name the library and the class or function of each part, leaving out identities."""
    kinds = [class_of(part) for part in parts]
    unique = dict.fromkeys(kind for kind in kinds if kind is not None and kind is not IdentityOp)
    return ", ".join(f"{_owner(kind)} {_short(kind)}" for kind in unique)


def _short(kind: Any) -> str:
    # A compiled function's qualified name is made up by its binding.
    names = ("__name__",) if isinstance(kind, BuiltinFunctionType) else ("__qualname__", "__name__")
    return next((found for name in names if (found := getattr(kind, name, None))), None) or repr(kind)


def _owner(kind: Any) -> str:
    module = getattr(kind, "__module__", None) or ""
    if module == _TRANSFORMER_ENGINE_IN_MEGATRON:
        return _OWNERS["transformer_engine"]
    return _OWNERS.get(module.split(".")[0], module)
