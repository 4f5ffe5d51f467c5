"""Number of parameters of LoRA adapters on a rank, exactly as in `checkpoints.layouts.lora`."""

from __future__ import annotations

from collections.abc import Collection
from math import prod

from megatron_dapo.config.model_schema import ParallelConfig
from megatron_dapo.config.schema import Config
from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.models.lora import ADAPTED, FUSED, WEIGHT, adapter_shapes, matrix_name
from megatron_dapo.models.placement import (
    CutColumns,
    Interleaved,
    LayerPart,
    PerExpert,
    Placement,
    Shapes,
    Stack,
    Whole,
    local_shape,
)
from megatron_dapo.plan.memory.parameters import RankParameters, layers_of_stage, num_parameters


def rank_adapters(config: Config, architecture: ModelArchitecture, stage: int = 0) -> RankParameters:
    """Return the elements of adapters on each rank of a pipeline stage."""
    lora, parallel = config.model.lora, config.parallel
    dense = of_experts = 0
    stage_layers = layers_of_stage(architecture, parallel, stage)
    for parts, layers in architecture.kinds_of_layers.items():
        count = len(layers & stage_layers)
        for part in parts if count else ():
            outside, inside = _part_adapters(part, parallel, lora.targets or ADAPTED)
            dense, of_experts = dense + count * outside, of_experts + count * inside
    return RankParameters(lora.rank * dense, lora.rank * of_experts, 0)


def _part_adapters(part: LayerPart, parallel: ParallelConfig, targets: Collection[str]) -> tuple[int, int]:
    """Return the elements of rank-1 adapters of a layer's part on each rank, outside and inside experts."""
    dense, of_experts, shapes = 0, 0, part.shapes()
    for placement in part.megatron():
        if isinstance(placement, PerExpert):
            prefix = placement.name.format(0)
            one = {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}
            cut = parallel.etp_size or parallel.tp_size
            inside = sum(_adapter(each, one, cut, targets) for each in placement.placements)
            of_experts += placement.num_experts // parallel.ep_size * inside
        else:
            dense += _adapter(placement, shapes, parallel.tp_size, targets)
    return dense, of_experts


def _adapter(placement: Placement, shapes: Shapes, count: int, targets: Collection[str]) -> int:
    """Return the elements of the rank-1 adapter of a buffer that is cut over `count` ranks."""
    assert isinstance(placement, Whole | Stack | Interleaved | CutColumns), "an engine's buffers have no adapters"
    fused = FUSED.get(matrix_name(placement.local), ())
    adapted = {name for name in _tensors(placement) if name.endswith(WEIGHT)}
    adapted = {name for name in adapted if matrix_name(name) in fused and matrix_name(name) in targets}
    if not adapted or not placement.local.endswith(WEIGHT):
        return 0
    # A fused buffer has a row of B for each of its rows, with an adapter or without.
    rows, columns = local_shape(placement, shapes, count)
    return len(adapted) * columns + rows


def _tensors(placement: Whole | Stack | Interleaved | CutColumns) -> list[str]:
    if isinstance(placement, Whole):
        return [placement.name]
    if isinstance(placement, CutColumns):
        return [placement.columns.name]
    return [rows.name for rows in (placement.parts if isinstance(placement, Stack) else placement.unit)]


def policy_parameters(config: Config, architecture: ModelArchitecture) -> int:
    """Return the number of unique trained parameters of the policy: its own, or those of its adapters."""
    lora = config.model.lora
    if not lora.rank:
        return num_parameters(architecture)
    return sum(map(prod, adapter_shapes(architecture.shapes(), lora.rank, lora.targets).values()))
