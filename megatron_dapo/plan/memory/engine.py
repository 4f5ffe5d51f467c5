"""Bytes of a server's rank: its weights, and the tokens that its KV cache holds.

After SGLang 0.5.17, `DefaultPoolConfigurator` and `KVCacheConfigurator._profile_available_bytes`.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dapo.config.schema import Config
from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.plan.cluster import GIB, Cluster
from megatron_dapo.plan.memory.communication import SERVER_GROUP
from megatron_dapo.plan.memory.model import CUDA_CONTEXT
from megatron_dapo.plan.memory.parameters import FP32, ITEM_SIZES, padded

SGLANG_VOCABULARY_MULTIPLE = 64  # SGLang pads the vocabulary to a multiple of this
SPARE_POSITIONS = 16  # SGLang keeps a few positions of a sequence free; short of them it cuts responses silently
FP8_BLOCK = 128
# Of what no formula gives: measured orders of magnitude on H100, rounded up.
ENGINE_CONTEXT = 1 * GIB  # CUDA context of a server's rank
ENGINE_ASLEEP = 3 * GIB  # what a sleeping server of one rank keeps: its context, CUDA graphs and workspaces
# SGLang 0.5.17 reserves at least as much beside mem_fraction_static on GPUs above 60 GB (server_args.py,
# pre_capture_activation_reserve_mb): CUDA graphs, activations of a prefill, logits.
ENGINE_WORKSPACE = 10 * GIB


@dataclass(frozen=True)
class EngineMemory:
    """Memory of one engine, on each of its ranks."""

    weights: int  # bytes
    bytes_per_token: int  # of the KV cache
    kv_tokens: int
    budget: int  # bytes for weights and KV cache together

    @property
    def static(self) -> int:
        """Bytes of weights and KV cache together."""
        return self.weights + self.kv_tokens * self.bytes_per_token


@dataclass(frozen=True)
class EngineWeights:
    """Bytes of a server rank's parameters by what they are."""

    layer: int  # of each layer, without its experts
    experts: int  # of each layer
    row: int  # of a token in the embedding, or in the output matrix
    rows: int  # of either on this rank, padding included
    matrices: int  # 1: the output matrix is the embedding
    norm: int  # after the last layer

    def total(self, num_layers: int) -> int:
        return num_layers * (self.layer + self.experts) + self.matrices * self.rows * self.row + self.norm


def engine_weights(
    architecture: ModelArchitecture, tensor: int, expert: int, dtype: str, is_fp8: bool
) -> EngineWeights:
    """Return the parameters of a rank, exactly those of `checkpoints.layouts.sglang` for a GPU; under FP8 those of
    `checkpoints.layouts.fp8`."""
    hidden, head, item = architecture.hidden_size, architecture.head_dim, ITEM_SIZES[dtype]
    query, groups = architecture.num_attention_heads * head // tensor, _kv_heads(architecture, tensor) * head
    matrices = [(query + 2 * groups, hidden), (hidden, query)]
    router, copies = 0, 1
    if architecture.num_experts:
        router = architecture.num_experts * hidden
        inner = architecture.moe_intermediate_size * expert // tensor
        copies = architecture.num_experts // expert
    else:
        inner = architecture.intermediate_size // tensor
    mlp = [(2 * inner, hidden), (hidden, inner)]
    inside = copies * _matrix_bytes(mlp, item, is_fp8)
    vectors = (
        architecture.num_norms * hidden + (query + 2 * groups) * architecture.qkv_bias + 2 * head * architecture.qk_norm
    )
    # SGLang ties the output matrix to the embedding in its dense models alone.
    num_matrices = 1 if architecture.tie_word_embeddings and not architecture.num_experts else 2
    rows = padded(architecture.vocab_size, SGLANG_VOCABULARY_MULTIPLE) // tensor
    if architecture.is_gemma3:
        rows = architecture.vocab_size
    layer = _matrix_bytes(matrices, item, is_fp8) + item * (vectors + router)
    dense, experts = (layer, inside) if architecture.num_experts else (layer + inside, 0)
    return EngineWeights(dense, experts, item * hidden, rows, num_matrices, item * hidden)


def engine_weight_bytes(architecture: ModelArchitecture, tensor: int, expert: int, dtype: str, is_fp8: bool) -> int:
    """Return the bytes of a rank's parameters."""
    return engine_weights(architecture, tensor, expert, dtype, is_fp8).total(architecture.num_layers)


def _matrix_bytes(shapes: list[tuple[int, int]], item: int, is_fp8: bool) -> int:
    if not is_fp8:
        return item * sum(rows * columns for rows, columns in shapes)
    return sum(rows * columns + FP32 * -(-rows // FP8_BLOCK) * -(-columns // FP8_BLOCK) for rows, columns in shapes)


def _kv_heads(architecture: ModelArchitecture, tensor: int) -> int:
    """Return the key-value heads of an engine's rank; with fewer heads than ranks, neighbors hold the same one."""
    return max(1, architecture.num_key_value_heads // tensor)


def kv_bytes_per_token(architecture: ModelArchitecture, tensor: int, dtype: str) -> int:
    """Return the bytes that a rank's KV cache holds for a token: keys and values of its heads in all layers."""
    return 2 * _kv_heads(architecture, tensor) * architecture.head_dim * architecture.num_layers * ITEM_SIZES[dtype]


def engine_context(config: Config) -> int:
    """Return the bytes of a server's rank beside weights, cache and graphs: its context, and NCCL's where it has several ranks."""
    return ENGINE_CONTEXT + (SERVER_GROUP if config.sglang.tp_size > 1 else 0)


def engine_asleep(config: Config) -> int:
    """Return the bytes that a sleeping server keeps on each of its GPUs."""
    return ENGINE_ASLEEP + engine_context(config) - ENGINE_CONTEXT


def free_at_start(config: Config, cluster: Cluster) -> int:
    """Return the bytes by which a server's rank sizes its cache: those that are free when it starts.

    On the trainer's GPUs the trainer's process is there before it, with neither a model nor groups.
    """
    shared = CUDA_CONTEXT if config.sglang.placement == "colocated" else 0
    return cluster.gpu_bytes - engine_context(config) - shared


def engine_memory(config: Config, architecture: ModelArchitecture, cluster: Cluster) -> EngineMemory:
    """Return the memory of a rank of an SGLang server, or of an embedded engine with all its slots full."""
    sglang, dtype = config.sglang, config.model.dtype
    if config.rollout.engine == "embedded":
        weights, cell = (
            engine_weight_bytes(architecture, 1, 1, dtype, False),
            kv_bytes_per_token(architecture, 1, dtype),
        )
        tokens = config.rollout.slots_per_rank * config.longest_sequence
        return EngineMemory(weights, cell, tokens, budget=weights + tokens * cell)
    is_fp8 = sglang.quantization == "fp8"
    weights = engine_weight_bytes(architecture, sglang.tp_size, sglang.ep_size, dtype, is_fp8)
    weights += architecture.vision_parameters * ITEM_SIZES[dtype]
    cell = kv_bytes_per_token(architecture, sglang.tp_size, dtype)
    budget = int(free_at_start(config, cluster) * sglang.mem_fraction_static)
    tokens = max(0, budget - weights) // cell
    if sglang.max_total_tokens:
        tokens = min(tokens, sglang.max_total_tokens)
    return EngineMemory(weights, cell, tokens, budget)
