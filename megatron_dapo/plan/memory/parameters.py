"""Number of parameters on a rank, exactly as in `checkpoints.layouts.megatron`, and the ranks that share optimizer
state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megatron_dapo.config.model_schema import ParallelConfig
from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.models.stages import layers_of_stages
from megatron_dapo.rounding import round_up

VOCABULARY_MULTIPLE = 128  # Megatron-core pads the vocabulary to a multiple of this times the tensor-parallel size
ITEM_SIZES: Mapping[str, int] = MappingProxyType({"float32": 4, "bfloat16": 2})
FP32 = 4  # bytes
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


def layers_of_stage(architecture: ModelArchitecture, parallel: ParallelConfig, stage: int) -> int:
    """Return the layers of a pipeline stage; an even share for sizes that do not divide them, which a rule refuses."""
    ends = parallel.first_stage_layers, parallel.last_stage_layers
    try:
        return layers_of_stages(architecture.num_layers, parallel.pp_size, parallel.vpp_size, *ends)[stage]
    except ValueError:
        return architecture.num_layers // parallel.pp_size


def rank_parameters(
    architecture: ModelArchitecture, parallel: ParallelConfig, stage: int = 0, has_value_head: bool = False
) -> RankParameters:
    """Return the elements on each rank of a pipeline stage.

    If some layers have experts, all are assumed to.
    """
    tensor, hidden, is_last = parallel.tp_size, architecture.hidden_size, stage == parallel.pp_size - 1
    layers = layers_of_stage(architecture, parallel, stage)
    dense, experts = attention_parameters(architecture, tensor) + architecture.num_norms // 2 * hidden, 0
    if architecture.num_experts:
        dense += architecture.num_experts * hidden  # the router, whole on every rank
        num_local = architecture.num_experts // parallel.ep_size
        experts = num_local * 3 * hidden * architecture.moe_intermediate_size // (parallel.etp_size or tensor)
    else:
        dense += 3 * hidden * architecture.intermediate_size // tensor
    rows = padded_vocabulary(architecture.vocab_size, tensor) // tensor
    # A tied model has a second copy of the embedding if the last stage is not the first; a value head replaces the
    # output matrix.
    has_output = is_last and not has_value_head and (stage > 0 or not architecture.tie_word_embeddings)
    outside = hidden * is_last + (hidden + 1) * (is_last and has_value_head)
    return RankParameters(layers * dense + outside, layers * experts, ((stage == 0) + has_output) * rows * hidden)


def attention_parameters(architecture: ModelArchitecture, tensor_parallel: int) -> int:
    """Return the elements of a layer's attention on each rank, with half of the layer's norms."""
    hidden = architecture.hidden_size
    query, groups = attention_sizes(architecture)
    matrices = hidden * (2 * query + 2 * groups) // tensor_parallel
    biases = (query + 2 * groups) // tensor_parallel * architecture.qkv_bias
    norms = architecture.num_norms // 2 * hidden + 2 * architecture.head_dim * architecture.qk_norm
    return matrices + biases + norms


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
