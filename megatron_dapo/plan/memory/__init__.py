"""Memory of a run on devices and nodes, computed from a configuration and the sizes of its model.

    parameters    elements that a trainer rank holds, exactly as in `checkpoints.layouts.megatron`
    activations   bytes kept for the backward pass, by kernels and recomputation
    head          buffers of the log-prob head, and its tiles
    communication buffers of NCCL groups
    batch         a step's samples
    model         weights, gradients, optimizer and activations of a trained model on its fullest rank
    engine        weights of a server's rank and the capacity of its KV cache in tokens
    run           every GPU by phase and component, and the host memory of a node, for all models and servers of a run

The only home of these rules: the validator, the dry run and `megatron-dapo plan` read the same numbers. Imports no torch.
"""

from megatron_dapo.plan.memory.activations import chunks_in_flight, layer_bytes, recompute_of, trainer_cut
from megatron_dapo.plan.memory.adapters import policy_parameters, rank_adapters
from megatron_dapo.plan.memory.engine import (
    SGLANG_VOCABULARY_MULTIPLE,
    SPARE_POSITIONS,
    EngineMemory,
    engine_memory,
    engine_weight_bytes,
    free_at_start,
    kv_bytes_per_token,
)
from megatron_dapo.plan.memory.head import KEPT_GROUP, Tiles, head_tiles, kept_logit_bytes
from megatron_dapo.plan.memory.model import ModelMemory, model_memory, stage_memory
from megatron_dapo.plan.memory.parameters import (
    ITEM_SIZES,
    VOCABULARY_MULTIPLE,
    RankParameters,
    checkpoint_bytes,
    num_parameters,
    optimizer_ranks,
    optimizer_share,
    padded_vocabulary,
    rank_parameters,
)
from megatron_dapo.plan.memory.run import (
    PhaseMemory,
    RunMemory,
    run_checkpoint_bytes,
    run_memory,
    teacher_architectures,
)
