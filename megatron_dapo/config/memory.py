"""Memory of a run on a device and on a node, as arithmetic over a configuration and the sizes of its model.

    rank_parameters      elements that a trainer rank holds, exactly those of `checkpoints.megatron_layout`
    model_memory         weights, gradients, optimizer and activations of a trained model on its fullest rank
    engine_memory        weights of a server's rank and the tokens its KV cache holds
    run_memory           the peaks of a GPU and the host memory of a node, for all models and servers of a run

Imports no torch: the numbers are printed and checked where no GPU is. Sources: activations after arXiv 2205.05198, table 2
(without dropout, with grouped heads and gated MLPs); the KV cache after SGLang 0.5.17, `DefaultPoolConfigurator` and
`KVCacheConfigurator._profile_available_bytes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from megatron_dapo.config.cluster import GIB, Cluster
from megatron_dapo.config.critic_rules import as_policy
from megatron_dapo.config.inputs import ArchitectureFacts
from megatron_dapo.config.model_schema import ParallelConfig
from megatron_dapo.config.schema import CheckpointConfig, Config
from megatron_dapo.precision import RECIPES, PrecisionRecipe, padded_tokens

VOCABULARY_MULTIPLE = 128  # Megatron-core pads the vocabulary to a multiple of this times the tensor-parallel size
SGLANG_VOCABULARY_MULTIPLE = 64  # SGLang pads the vocabulary to a multiple of this
SPARE_POSITIONS = 16  # SGLang keeps a few positions of a sequence free; short of them it cuts responses silently

ITEM_SIZES: Mapping[str, int] = MappingProxyType({"float32": 4, "bfloat16": 2})
FP32 = 4  # bytes
NUM_MOMENTS = 2
# A weight for FP8 products is kept twice, for the forward and for the backward pass: a byte each.
FP8_COPIES = 2
FP8_BLOCK = 128
# Of what no formula gives: measured orders of magnitude on H100, rounded up.
TRAINER_CONTEXT = int(1.5 * GIB)  # CUDA context, NCCL's buffers and Transformer Engine's workspaces of a trainer rank
ENGINE_CONTEXT = 1 * GIB  # CUDA context and NCCL's buffers of a server's rank
ENGINE_ASLEEP = 3 * GIB  # what a sleeping server keeps: its context, CUDA graphs and workspaces
# SGLang 0.5.17 reserves at least as much beside mem_fraction_static on GPUs above 60 GB (server_args.py,
# pre_capture_activation_reserve_mb): CUDA graphs, activations of a prefill, logits.
ENGINE_WORKSPACE = 10 * GIB
FRAGMENTATION = 0.05  # of the trainer's peak, lost between the allocator's blocks
HEAD_TILES = 512 << 20  # logits and their gradients that the log-prob head holds at a time
TRAINER_PROCESS = 4 * GIB  # host memory of a trainer process without its tensors: libraries and CUDA's mappings
SERVER_PROCESS = 5 * GIB  # host memory of a server's rank
NUM_SLOTS = 2  # buckets of a weight sync in memory for each engine rank


def padded_vocabulary(vocab_size: int, tensor_parallel: int) -> int:
    """Return the rows of the embedding over all tensor-parallel ranks: Megatron pads with zero rows."""
    return _padded(vocab_size, VOCABULARY_MULTIPLE * tensor_parallel)


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


# ---- trainer


@dataclass(frozen=True)
class RankParameters:
    """Elements of the parameters on a rank; `experts` are replicated over other ranks than the rest."""

    dense: int  # attention, dense MLPs, norms, routers, a value head
    experts: int
    vocabulary: int  # embedding and output matrix, with padding

    @property
    def total(self) -> int:
        return self.dense + self.experts + self.vocabulary


def rank_parameters(
    architecture: ArchitectureFacts, parallel: ParallelConfig, stage: int = 0, has_value_head: bool = False
) -> RankParameters:
    """Return the elements on each rank of a pipeline stage.

    A model in which some layers have experts is taken as one in which all have.
    """
    tensor, hidden, is_last = parallel.tp_size, architecture.hidden_size, stage == parallel.pp_size - 1
    layers = architecture.num_layers // parallel.pp_size
    query, groups = _attention_sizes(architecture)
    dense = hidden * (2 * query + 2 * groups) // tensor + architecture.num_norms * hidden
    dense += (query + 2 * groups) // tensor * architecture.qkv_bias + 2 * architecture.head_size * architecture.qk_norm
    experts = 0
    if architecture.num_experts:
        dense += architecture.num_experts * hidden  # the router, whole on every rank
        num_local = architecture.num_experts // parallel.ep_size
        experts = num_local * 3 * hidden * architecture.moe_intermediate_size // (parallel.etp_size or tensor)
    else:
        dense += 3 * hidden * architecture.intermediate_size // tensor
    rows = padded_vocabulary(architecture.vocab_size, tensor) // tensor
    # A tied model has a copy of the embedding on a last stage of its own; a value head replaces the output matrix.
    has_output = is_last and not has_value_head and (stage > 0 or not architecture.tie_word_embeddings)
    outside = hidden * is_last + (hidden + 1) * (is_last and has_value_head)
    return RankParameters(layers * dense + outside, layers * experts, ((stage == 0) + has_output) * rows * hidden)


def num_parameters(architecture: ArchitectureFacts, has_value_head: bool = False) -> int:
    """Return the elements of the whole model, without padding and each counted once."""
    held = rank_parameters(architecture, ParallelConfig(), has_value_head=has_value_head)
    padding = padded_vocabulary(architecture.vocab_size, 1) - architecture.vocab_size
    matrices = 1 if architecture.tie_word_embeddings or has_value_head else 2
    return held.total - matrices * padding * architecture.hidden_size


def checkpoint_bytes(architecture: ArchitectureFacts, dtype: str, has_value_head: bool = False) -> int:
    """Return the unique bytes of a model in a checkpoint: weights, fp32 main params (an fp32 weight is its own) and moments."""
    main_param = FP32 if dtype != "float32" else 0
    return num_parameters(architecture, has_value_head) * (ITEM_SIZES[dtype] + main_param + NUM_MOMENTS * FP32)


@dataclass(frozen=True)
class ModelMemory:
    """Bytes of one model on a rank."""

    weights: int
    gradients: int = 0
    optimizer: int = 0  # fp32 main params and moments
    activations: int = 0  # at their peak, with the log-prob head's
    saved: int = 0  # of its part of a checkpoint, which is copied in host memory while the run continues

    @property
    def state(self) -> int:
        """Bytes between steps where nothing is offloaded."""
        return self.weights + self.gradients + self.optimizer

    @property
    def training(self) -> int:
        """Bytes at the peak of a training step."""
        return self.state + self.activations

    def resident(self, offload: str) -> int:
        """Return the bytes on the GPU while others use it."""
        return {"none": self.state, "optimizer": self.weights, "all": 0}[offload]

    def on_host(self, offload: str) -> int:
        """Return the bytes of the host copies; gradients have none."""
        return {"none": 0, "optimizer": self.optimizer, "all": self.weights + self.optimizer}[offload]


def model_memory(
    config: Config, architecture: ArchitectureFacts, processes: int, has_value_head: bool = False
) -> ModelMemory:
    """Return the memory of the policy, or of the critic given `as_policy`, on the rank of `processes` that needs most."""
    stages = range(config.parallel.pp_size)
    return max(
        (stage_memory(config, architecture, processes, stage, has_value_head) for stage in stages),
        key=lambda memory: memory.training,
    )


def stage_memory(
    config: Config, architecture: ArchitectureFacts, processes: int, stage: int, has_value_head: bool = False
) -> ModelMemory:
    """Return the memory of a trained model on each rank of a pipeline stage."""
    held = rank_parameters(architecture, config.parallel, stage, has_value_head)
    main_param = FP32 if config.model.dtype != "float32" else 0  # an fp32 weight is its own
    updated = main_param + NUM_MOMENTS * FP32
    return ModelMemory(
        weights=_weight_bytes(config, held),
        gradients=FP32 * held.total,
        optimizer=updated * optimizer_share(config.parallel, held, processes),
        activations=_activation_bytes(config, architecture, stage, has_value_head),
        saved=(ITEM_SIZES[config.model.dtype] + updated) * _share(config.parallel, held, processes),
    )


def optimizer_share(parallel: ParallelConfig, held: RankParameters, processes: int) -> int:
    """Return the elements whose main params and moments a rank keeps."""
    return _share(parallel, held, processes) if parallel.use_distributed_optimizer else held.total


def _share(parallel: ParallelConfig, held: RankParameters, processes: int) -> int:
    """Return the elements of a rank where replicas share what they hold alike, as they do the writing of checkpoints."""
    replicas, of_experts = optimizer_ranks(parallel, processes)
    return -(-(held.dense + held.vocabulary) // replicas) + -(-held.experts // of_experts)


def optimizer_ranks(parallel: ParallelConfig, processes: int) -> tuple[int, int]:
    """Return the ranks that share the optimizer's state of dense layers, and of experts."""
    stage_size = processes // parallel.pp_size
    return stage_size // parallel.tp_size, stage_size // ((parallel.etp_size or parallel.tp_size) * parallel.ep_size)


def _weight_bytes(config: Config, held: RankParameters) -> int:
    item, linear = ITEM_SIZES[config.model.dtype], held.dense + held.experts
    if not RECIPES.get(config.precision.recipe, PrecisionRecipe()).is_fp8:
        return item * held.total
    if config.precision.fp8_param:
        return FP8_COPIES * linear + item * held.vocabulary
    return item * held.total + FP8_COPIES * linear


def _activation_bytes(config: Config, architecture: ArchitectureFacts, stage: int, has_value_head: bool) -> int:
    """Return the bytes kept for the backward pass at their peak, and what that pass needs of its own."""
    parallel, item = config.parallel, ITEM_SIZES[config.model.dtype]
    sizes = (parallel.tp_size, parallel.cp_size, parallel.sequence_parallel)
    tokens = padded_tokens(config.training.micro_batch_tokens, *sizes, config.precision.recipe) // parallel.cp_size
    layer = layer_activation_bytes(architecture, parallel, item)
    kept = layer
    if config.model.recompute_granularity == "full":
        kept = _residual_bytes(architecture, parallel, item)
    # The layer that the backward pass is in: recomputed as a whole where layers are, and its own gradients.
    working = (layer if kept < layer else 0) + _backward_bytes(architecture, parallel, item)
    num_bytes = tokens * (layers_in_flight(architecture, parallel, stage) * kept + working)
    if stage == parallel.pp_size - 1 and not has_value_head:
        num_bytes += _head_bytes(config, architecture, tokens)
    return num_bytes


def layers_in_flight(architecture: ArchitectureFacts, parallel: ParallelConfig, stage: int) -> int:
    """Return how many layers' activations, summed over micro-batches, a stage keeps at its peak."""
    if parallel.vpp_size > 1:
        chunks = parallel.pp_size * parallel.vpp_size + parallel.pp_size - 2 * stage - 1
        return chunks * (architecture.num_layers // (parallel.pp_size * parallel.vpp_size))
    return (parallel.pp_size - stage) * (architecture.num_layers // parallel.pp_size)


def layer_activation_bytes(architecture: ArchitectureFacts, parallel: ParallelConfig, item: int) -> int:
    """Return the bytes of a token that one layer keeps for its backward pass, `item` bytes a number, by an attention that
    keeps no scores."""
    query, groups = _attention_sizes(architecture)
    # Input and output of each norm; q, k, v and the attention's output; [gate; up] and their product.
    norms = 2 * architecture.num_norms * _residual_bytes(architecture, parallel, item)
    attention = (2 * query + 2 * groups) * item // parallel.tp_size
    return norms + attention + _mlp_activation_bytes(architecture, parallel, item)


def _residual_bytes(architecture: ArchitectureFacts, parallel: ParallelConfig, item: int) -> int:
    return architecture.hidden_size * item // (parallel.tp_size if parallel.sequence_parallel else 1)


def _mlp_activation_bytes(architecture: ArchitectureFacts, parallel: ParallelConfig, item: int) -> int:
    if not architecture.num_experts:
        return 3 * architecture.intermediate_size * item // parallel.tp_size
    # Each copy of a token: what its expert reads and writes, and the three products inside. Balanced routing.
    inside = 3 * architecture.moe_intermediate_size // (parallel.etp_size or parallel.tp_size)
    return architecture.num_experts_per_token * (2 * architecture.hidden_size + inside) * item


def _backward_bytes(architecture: ArchitectureFacts, parallel: ParallelConfig, item: int) -> int:
    """Return the bytes of a token of the gradients inside one layer."""
    return _mlp_activation_bytes(architecture, parallel, item) + 2 * architecture.hidden_size * item


def _head_bytes(config: Config, architecture: ArchitectureFacts, tokens: int) -> int:
    """Return the bytes of the log-prob head: hidden states of all tokens, their gradient in fp32 and in the model's type,
    the output weight's gradient, and tiles of logits."""
    item = ITEM_SIZES[config.model.dtype]
    rows = padded_vocabulary(architecture.vocab_size, config.parallel.tp_size) // config.parallel.tp_size
    logits = 3 * FP32 * tokens * rows  # of all tokens: logits, probabilities and their gradient
    if config.model.logprob_implementation != "reference":
        logits = min(logits, HEAD_TILES)
    hidden = tokens * architecture.hidden_size * (2 * item + FP32)
    return hidden + (item + FP32) * rows * architecture.hidden_size + logits


def _attention_sizes(architecture: ArchitectureFacts) -> tuple[int, int]:
    """Return the widths of all queries and of all keys."""
    head = architecture.head_size
    return architecture.num_attention_heads * head, architecture.num_key_value_heads * head


# ---- engines


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


def engine_weight_bytes(architecture: ArchitectureFacts, tensor: int, expert: int, dtype: str, is_fp8: bool) -> int:
    """Return the bytes of a rank's parameters, exactly those of `checkpoints.sglang_layout` for a GPU; under FP8 those of
    `checkpoints.fp8_layout`."""
    hidden, head, item = architecture.hidden_size, architecture.head_size, ITEM_SIZES[dtype]
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
    linear = _matrix_bytes(matrices, item, is_fp8) + copies * _matrix_bytes(mlp, item, is_fp8)
    vectors = (
        architecture.num_norms * hidden + (query + 2 * groups) * architecture.qkv_bias + 2 * head * architecture.qk_norm
    )
    # SGLang ties the output matrix to the embedding in its dense models alone.
    num_matrices = 1 if architecture.tie_word_embeddings and not architecture.num_experts else 2
    rows = _padded(architecture.vocab_size, SGLANG_VOCABULARY_MULTIPLE) // tensor
    if architecture.is_gemma3:
        rows = architecture.vocab_size
    outside = num_matrices * rows * hidden + hidden
    return architecture.num_layers * (linear + item * (vectors + router)) + item * outside


def _matrix_bytes(shapes: list[tuple[int, int]], item: int, is_fp8: bool) -> int:
    if not is_fp8:
        return item * sum(rows * columns for rows, columns in shapes)
    return sum(rows * columns + FP32 * -(-rows // FP8_BLOCK) * -(-columns // FP8_BLOCK) for rows, columns in shapes)


def _kv_heads(architecture: ArchitectureFacts, tensor: int) -> int:
    """Return the key-value heads of an engine's rank; with fewer heads than ranks, neighbors hold the same one."""
    return max(1, architecture.num_key_value_heads // tensor)


def kv_bytes_per_token(architecture: ArchitectureFacts, tensor: int, dtype: str) -> int:
    """Return the bytes that a rank's KV cache holds for a token: keys and values of its heads in all layers."""
    return 2 * _kv_heads(architecture, tensor) * architecture.head_size * architecture.num_layers * ITEM_SIZES[dtype]


def engine_memory(config: Config, architecture: ArchitectureFacts, cluster: Cluster) -> EngineMemory:
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
    # SGLang sizes the cache by what is free when it starts, and a trainer's process is there before it.
    shared = TRAINER_CONTEXT if sglang.placement == "colocated" else 0
    budget = int((cluster.gpu_bytes - ENGINE_CONTEXT - shared) * sglang.mem_fraction_static)
    tokens = max(0, budget - weights) // cell
    if sglang.max_total_tokens:
        tokens = min(tokens, sglang.max_total_tokens)
    return EngineMemory(weights, cell, tokens, budget)


# ---- run


@dataclass(frozen=True)
class RunMemory:
    """Peaks of a run, in bytes; 0 where there is no such thing."""

    trainer: int  # of a GPU while a model is trained
    engine: int  # of a GPU while it generates or receives weights, the trainer's part included where they share it
    host: int  # of a node
    num_engines: int  # of the whole run
    engine_memory: EngineMemory | None  # None: servers are not started by this run
    policy: ModelMemory
    critic: ModelMemory | None = None


def run_memory(config: Config, architecture: ArchitectureFacts, processes: int, cluster: Cluster) -> RunMemory:
    """Return the memory of a run of `processes` whose layouts fit the model."""
    own = config.num_critic_processes
    policy = model_memory(config, architecture, processes - own)
    critic = reference = None
    if config.has_critic:
        tokens = config.critic.micro_batch_tokens or config.training.micro_batch_tokens
        training = config.training.model_copy(update={"micro_batch_tokens": tokens})
        as_critic = as_policy(config).model_copy(update={"training": training})
        critic = model_memory(as_critic, architecture, own or processes, has_value_head=True)
    if config.algorithm.needs_reference:
        # It makes no step, so Adam has no moments for it; gradient buffers and main params are there.
        share = FP32 / (FP32 + NUM_MOMENTS * FP32) if config.model.dtype != "float32" else 0
        reference = replace(policy, optimizer=int(policy.optimizer * share), activations=0, saved=0)
    offload, of_critic = config.model.offload, config.critic.offload
    models = [(policy, offload)]
    models += [(reference, offload)] if reference else []
    models += [(critic, of_critic)] if critic and not own else []
    resident = sum(model.resident(how) for model, how in models)

    is_sglang, starts = config.rollout.engine == "sglang", not config.sglang.urls
    engine = engine_memory(config, architecture, cluster) if starts or not is_sglang else None
    shares = bool(engine) and (not is_sglang or config.sglang.placement == "colocated")
    peaks = [resident - policy.resident(offload) + policy.training]
    if reference:  # the reference's weights are there while the policy is trained, wherever they are otherwise
        peaks[0] += max(0, reference.weights - reference.resident(offload))
    if critic:
        others = 0 if own else resident - critic.resident(of_critic)
        peaks.append(others + critic.training)
    beside = 0
    if shares and engine:
        beside = ENGINE_ASLEEP if is_sglang else engine.static
    trainer = int((1 + FRAGMENTATION) * max(peaks)) + TRAINER_CONTEXT + beside
    awake = 0
    if engine and is_sglang:
        awake = engine.static + ENGINE_CONTEXT + ENGINE_WORKSPACE
        if shares:
            # The policy's weights are on the GPU until the servers have theirs and their caches.
            awake += (
                TRAINER_CONTEXT + resident - policy.resident(offload) + max(policy.weights, policy.resident(offload))
            )
    per_node = cluster.processes_per_node(processes)
    return RunMemory(
        trainer=trainer,
        engine=awake,
        host=_host_bytes(config, models, critic if own else None, engine if is_sglang else None, per_node),
        num_engines=cluster.num_engines(config, processes),
        engine_memory=engine,
        policy=policy,
        critic=critic,
    )


def _copied_bytes(checkpoint: CheckpointConfig, saved: int) -> int:
    """Return the bytes of copies of checkpoints on a node whose ranks save `saved`, at most those that it may have."""
    # During a save those of the one before are there too.
    num_bytes = {"none": 0, "node": 2, "peer": 4}[checkpoint.memory_copies] * saved
    limit = int(checkpoint.memory_copies_gib * GIB)
    return min(num_bytes, limit) if limit else num_bytes


def _host_bytes(
    config: Config,
    models: list[tuple[ModelMemory, str]],
    separate: ModelMemory | None,
    engine: EngineMemory | None,
    processes: int,
) -> int:
    """Return the host memory of the fullest node, that of rank 0, which has the verifiers."""
    sglang = config.sglang
    # The copy for a checkpoint stays for the next one, once the first was saved.
    after_save = sum(model.on_host(how) + model.saved for model, how in models)
    # While a 16-bit model is loaded an fp32 copy of it is there, beside the models that were built before.
    loading = max((model.gradients for model, _ in models), default=0) if config.model.dtype != "float32" else 0
    of_rank = TRAINER_PROCESS + max(after_save, loading)
    if separate:
        after_save = separate.on_host(config.critic.offload) + separate.saved
        of_rank = max(of_rank, TRAINER_PROCESS + max(after_save, separate.gradients))
    num_bytes = processes * of_rank + config.reward.num_processes * config.reward.memory_limit_mb * (1 << 20)
    saved = max(sum(model.saved for model, _ in models), separate.saved if separate else 0)
    num_bytes += _copied_bytes(config.checkpoint, processes * saved)
    if engine:
        ranks = sglang.servers_per_node * sglang.tp_size
        num_bytes += ranks * SERVER_PROCESS
        if sglang.weight_sync_transport == "shared_memory" and sglang.shared_memory == "host":
            num_bytes += ranks * NUM_SLOTS * min(sglang.weight_sync_bucket_mb << 20, engine.weights)
    return num_bytes
