"""Number of parameters on a rank, exactly as in `checkpoints.layouts.megatron`, and the ranks that share optimizer
state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from megatron_dapo.config.model_schema import ParallelConfig
from megatron_dapo.models.activations import FP32
from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.models.placement import LayerPart, PerExpert, num_elements
from megatron_dapo.models.stages import layers_of_chunk
from megatron_dapo.rounding import round_up

VOCABULARY_MULTIPLE = 128  # Megatron-core pads the vocabulary to a multiple of this times the tensor-parallel size
ITEM_SIZES: Mapping[str, int] = MappingProxyType({"float32": 4, "bfloat16": 2})
NUM_MOMENTS = 2


def padded_vocabulary(vocab_size: int, tensor_parallel: int) -> int:
    """Return the rows of the embedding over all tensor-parallel ranks; Megatron pads it with zero rows."""
    return round_up(vocab_size, VOCABULARY_MULTIPLE * tensor_parallel)


@dataclass(frozen=True)
class RankParameters:
    """Number of parameters on a rank; `experts` are replicated over different ranks than the rest."""

    dense: int  # attention, dense MLPs, norms, routers, a value head
    experts: int
    vocabulary: int  # embedding and output matrix, with padding

    @property
    def total(self) -> int:
        return self.dense + self.experts + self.vocabulary


def layers_of_stage(architecture: ModelArchitecture, parallel: ParallelConfig, stage: int) -> frozenset[int]:
    """Return the layers of a pipeline stage; an even share for sizes that do not divide them, which a rule refuses."""
    ends = parallel.first_stage_layers, parallel.last_stage_layers
    return _layers_of_stage(architecture.num_layers, parallel.pp_size, parallel.vpp_size, stage, *ends)


@lru_cache(maxsize=4096)
def _layers_of_stage(num_layers: int, stages: int, chunks: int, stage: int, first: int, last: int) -> frozenset[int]:
    try:
        ranges = [layers_of_chunk(num_layers, stages, chunks, stage, chunk, first, last) for chunk in range(chunks)]
    except ValueError:
        return frozenset(range(num_layers // stages))
    return frozenset(layer for layers in ranges for layer in layers)


def rank_parameters(
    architecture: ModelArchitecture, parallel: ParallelConfig, stage: int = 0, has_value_head: bool = False
) -> RankParameters:
    """Return the elements on each rank of a pipeline stage."""
    tensor, hidden, is_last = parallel.tp_size, architecture.hidden_size, stage == parallel.pp_size - 1
    dense = experts = 0
    for parts, count in _kinds_of_stage(architecture, parallel, stage):
        for part in parts:
            outside, inside = _part_parameters(part, *_cut(parallel))
            dense, experts = dense + count * outside, experts + count * inside
    rows = padded_vocabulary(architecture.vocab_size, tensor) // tensor
    # A tied model has a second copy of the embedding if the last stage is not the first; a value head replaces the
    # output matrix.
    has_output = is_last and not has_value_head and (stage > 0 or not architecture.tie_word_embeddings)
    outside = hidden * is_last + (hidden + 1) * (is_last and has_value_head)
    return RankParameters(dense + outside, experts, ((stage == 0) + has_output) * rows * hidden)


def attention_parameters(architecture: ModelArchitecture, parallel: ParallelConfig, stage: int) -> int:
    """Return the elements of all attention of a pipeline stage, with its norms, on each rank."""
    kinds = _kinds_of_stage(architecture, parallel, stage)
    return sum(count * _part_parameters(parts[0], *_cut(parallel))[0] for parts, count in kinds)


def never_trained(architecture: ModelArchitecture, parallel: ParallelConfig, stage: int) -> int:
    """Return the elements of a pipeline stage that no run trains, on each rank."""
    kinds = _kinds_of_stage(architecture, parallel, stage)
    return sum(count * sum(part.never_trained for part in parts) for parts, count in kinds)


def float32_parameters(architecture: ModelArchitecture, parallel: ParallelConfig, stage: int) -> int:
    """Return the elements of a pipeline stage, on each rank, that are fp32 in a model of any type."""
    kinds = _kinds_of_stage(architecture, parallel, stage)
    return sum(count * sum(_part_float32(part, parallel.tp_size) for part in parts) for parts, count in kinds)


@lru_cache(maxsize=4096)
def _part_float32(part: LayerPart, tensor: int) -> int:
    return num_elements((each for each in part.megatron() if part.is_float32(each)), part.shapes(), tensor)


def _kinds_of_stage(
    architecture: ModelArchitecture, parallel: ParallelConfig, stage: int
) -> Iterator[tuple[tuple[LayerPart, ...], int]]:
    """Yield the parts of each kind of layer, and the number of such layers in the stage."""
    layers = layers_of_stage(architecture, parallel, stage)
    for parts, everywhere in architecture.kinds_of_layers.items():
        yield parts, len(layers & everywhere)


def _cut(parallel: ParallelConfig) -> tuple[int, int, int]:
    return parallel.tp_size, parallel.ep_size, parallel.etp_size or parallel.tp_size


@lru_cache(maxsize=4096)
def _part_parameters(part: LayerPart, tensor: int, expert: int, expert_tensor: int) -> tuple[int, int]:
    """Return the elements of a layer's part on each rank: those outside its experts, and those inside."""
    shapes, placements, experts = part.shapes(), list(part.megatron()), 0
    for placement in placements:
        if isinstance(placement, PerExpert):
            prefix = placement.name.format(0)
            one = {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}
            inside = num_elements(placement.placements, one, expert_tensor)
            experts += placement.num_experts // expert * inside
    return num_elements(placements, shapes, tensor), experts


def num_parameters(architecture: ModelArchitecture, has_value_head: bool = False) -> int:
    """Return the number of unique parameters of the whole model, without padding."""
    held = rank_parameters(architecture, ParallelConfig(), has_value_head=has_value_head)
    padding = padded_vocabulary(architecture.vocab_size, 1) - architecture.vocab_size
    matrices = 1 if architecture.tie_word_embeddings or has_value_head else 2
    return held.total - matrices * padding * architecture.hidden_size


def checkpoint_bytes(architecture: ModelArchitecture, dtype: str, has_value_head: bool = False) -> int:
    """Return the unique bytes of a model in a checkpoint: weights, fp32 main params (none for fp32 weights) and
    moments."""
    main_param = FP32 if dtype != "float32" else 0
    return num_parameters(architecture, has_value_head) * (ITEM_SIZES[dtype] + main_param + NUM_MOMENTS * FP32)


def optimizer_share(parallel: ParallelConfig, held: RankParameters, processes: int) -> int:
    """Return the elements whose main params and moments a rank keeps."""
    return own_share(parallel, held, processes) if parallel.use_distributed_optimizer else held.total


def own_share(parallel: ParallelConfig, held: RankParameters, processes: int) -> int:
    """Return the elements per rank if replicas split what they hold in common, as they do when writing checkpoints."""
    replicas, of_experts = optimizer_ranks(parallel, processes)
    return -(-(held.dense + held.vocabulary) // replicas) + -(-held.experts // of_experts)


def optimizer_ranks(parallel: ParallelConfig, processes: int) -> tuple[int, int]:
    """Return the number of ranks that share the optimizer state of dense layers, and that of experts."""
    stage_size = processes // parallel.pp_size
    return stage_size // parallel.tp_size, stage_size // ((parallel.etp_size or parallel.tp_size) * parallel.ep_size)


def attention_sizes(architecture: ModelArchitecture) -> tuple[int, int]:
    """Return the widths of all queries and of all keys."""
    head = architecture.head_dim
    return architecture.num_attention_heads * head, architecture.num_key_value_heads * head
