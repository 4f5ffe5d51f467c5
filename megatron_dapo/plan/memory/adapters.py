"""Number of parameters of LoRA adapters on a rank, exactly as in `checkpoints.layouts.lora`."""

from __future__ import annotations

from math import prod

from megatron_dapo.config.schema import Config
from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.models.lora import COLUMN_PARALLEL, FUSED, WEIGHT, adapter_shapes
from megatron_dapo.plan.memory.parameters import (
    RankParameters,
    layers_of_stage,
    num_parameters,
)

_EXPERTS = ".experts."


def rank_adapters(config: Config, architecture: ModelArchitecture, stage: int = 0) -> RankParameters:
    """Return the elements of adapters on each rank of a pipeline stage."""
    dense = of_experts = 0
    stage_layers = layers_of_stage(architecture, config.parallel, stage)
    for layers in architecture.kinds_of_layers.values():
        if count := len(layers & stage_layers):
            each, each_of_experts = _layer_adapters(config, architecture.layer_shapes(min(layers)))
            dense, of_experts = dense + count * each, of_experts + count * each_of_experts
    return RankParameters(dense, of_experts, 0)


def _layer_adapters(config: Config, shapes: dict[str, tuple[int, ...]]) -> tuple[int, int]:
    """Return the elements of one layer's adapters outside and inside experts."""
    lora, p = config.model.lora, config.parallel
    dense = of_experts = 0
    for layer, names in FUSED.items():
        column_parallel = layer in COLUMN_PARALLEL
        for parent in dict.fromkeys(name.rpartition(".")[0] for name in _matrices(shapes, names)):
            fused = [shapes[f"{parent}.{name}{WEIGHT}"] for name in names]
            adapted = [shape for name, shape in zip(names, fused) if name in lora.targets]
            is_expert = _EXPERTS in parent
            cut = (p.etp_size or p.tp_size) if is_expert else p.tp_size
            down = sum(shape[1] for shape in adapted) // (1 if column_parallel else cut)
            # A fused layer has a row of B for each of its rows, with an adapter or without.
            up = sum(shape[0] for shape in fused) // (cut if column_parallel else 1) if adapted else 0
            if is_expert:
                of_experts += lora.rank * (down + up)
            else:
                dense += lora.rank * (down + up)
    return dense, of_experts // p.ep_size


def _matrices(shapes: dict[str, tuple[int, ...]], names: tuple[str, ...]) -> list[str]:
    return [name.removesuffix(WEIGHT) for name in shapes if name.removesuffix(WEIGHT).endswith(tuple(f".{each}" for each in names))]


def policy_parameters(config: Config, architecture: ModelArchitecture) -> int:
    """Return the number of unique trained parameters of the policy: its own, or those of its adapters."""
    lora = config.model.lora
    if not lora.rank:
        return num_parameters(architecture)
    return sum(map(prod, adapter_shapes(architecture.shapes(), lora.rank, lora.targets).values()))
