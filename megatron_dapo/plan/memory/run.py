"""Memory of a run: each kind of GPU by phase and component, and the host memory of a node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from megatron_dapo.config.derive import as_critic
from megatron_dapo.config.schema import CheckpointConfig, Config
from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.models.config_json import planned_directory, read_architecture
from megatron_dapo.plan.cluster import Cluster
from megatron_dapo.plan.memory.activations import Kernels
from megatron_dapo.plan.memory.adapters import policy_parameters
from megatron_dapo.plan.memory.batch import batch_bytes, host_batch_bytes, mini_batch_tokens
from megatron_dapo.plan.memory.communication import (
    GROUP_BYTES,
    NcclGroup,
    communication_bytes,
    model_groups,
    weight_sync_groups,
)
from megatron_dapo.plan.memory.engine import (
    ENGINE_WORKSPACE,
    EngineMemory,
    engine_asleep,
    engine_context,
    engine_memory,
)
from megatron_dapo.plan.memory.model import CUDA_CONTEXT, WORKSPACES, ModelMemory, model_memory
from megatron_dapo.plan.memory.parameters import ITEM_SIZES, checkpoint_bytes, num_parameters, padded_vocabulary
from megatron_dapo.rounding import GIB

FRAGMENTATION = 0.05  # share of the trainer's tensors lost to allocator fragmentation
TRAINER_PROCESS = 4 * GIB  # host memory of a trainer process without its tensors: libraries and CUDA's mappings
SERVER_PROCESS = 5 * GIB  # host memory of a server's rank
DRAFT_TOKEN = 1024  # host memory of a token in the corpus of a server's rank that drafts: an order of magnitude
NUM_SLOTS = 2  # buckets in memory per engine rank during a weight sync

# User of the GPU: trainer and engine in turns, or only one of them.
Device = Literal["shared", "trainer", "engine"]
GENERATING = ("generate", "weight_update", "evaluation")


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes on a GPU in one phase of a step, by component."""

    phase: str  # generate, log_probs, train, train_critic, weight_update, checkpoint, evaluation
    device: Device
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class RunMemory:
    """Peaks of a run, in bytes; 0 for components that it does not have."""

    trainer: int  # a GPU's, while a model is trained
    engine: int  # a GPU's, while it generates or receives weights, with the trainer's part if they share it
    host: int  # a node's
    num_engines: int  # the whole run's
    engine_memory: EngineMemory | None  # None: servers are not started by this run
    policy: ModelMemory
    critic: ModelMemory | None = None
    phases: tuple[PhaseMemory, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class _Roles:
    """Models and servers of a run, and how they share GPUs."""

    config: Config
    policy: ModelMemory
    critic: ModelMemory | None
    reference: ModelMemory | None
    teachers: tuple[ModelMemory, ...]
    engine: EngineMemory | None
    critic_is_apart: bool  # it has separate processes
    shares: bool  # an engine is on the trainer's GPUs
    communication: int  # bytes of a trainer process's buffers, kept from its first step to its end
    batch: int  # bytes of samples while a model is trained
    teacher_heads: int  # bytes of the teachers' output weights on a rank of the last stage
    lessons: int  # bytes of their hidden states of an optimizer step in its host memory

    @property
    def is_sglang(self) -> bool:
        return self.config.rollout.engine == "sglang"

    @property
    def models(self) -> list[tuple[ModelMemory, str]]:
        """Models on the policy's processes, each with its offload setting."""
        offload, of_critic = self.config.model.offload, self.config.critic.offload
        models: list[tuple[ModelMemory, str]] = [(self.policy, offload)]
        models += [(self.reference, offload)] if self.reference else []
        models += [(teacher, self.config.distillation.offload) for teacher in self.teachers]
        return models + ([(self.critic, of_critic)] if self.critic and not self.critic_is_apart else [])

    @property
    def resident(self) -> int:
        """Bytes of all these models while engines use the GPU."""
        return sum(model.resident(how) for model, how in self.models)


def run_memory(config: Config, architecture: ModelArchitecture, processes: int, cluster: Cluster) -> RunMemory:
    """Return the memory of a run of `processes`; its layouts must fit the model."""
    kernels: Kernels = "transformer_engine" if cluster.gpus_per_node else "torch"
    roles = _roles(config, architecture, processes, cluster, kernels)
    phases = tuple(_phases(roles))
    trains = [phase.total for phase in phases if phase.phase not in GENERATING]
    generates = [phase.total for phase in phases if phase.phase in GENERATING and phase.device != "trainer"]
    engine, critic = roles.engine, roles.critic
    served = engine if roles.is_sglang else None
    separate = critic if roles.critic_is_apart else None
    return RunMemory(
        trainer=max(trains),
        engine=max(generates, default=0) if roles.is_sglang else 0,
        host=_host_bytes(config, roles.models, separate, served, cluster.processes_per_node(processes))
        + host_batch_bytes(
            config,
            architecture,
            processes - config.num_critic_processes,
            cluster.processes_per_node(processes),
            served.kv_tokens * config.sglang.servers_per_node * config.sglang.ranks_per_node if served else 0,
        )
        + roles.lessons * -(-cluster.processes_per_node(processes) // config.parallel.pp_size),
        num_engines=cluster.num_engines(config, processes),
        engine_memory=engine,
        policy=roles.policy,
        critic=critic,
        phases=phases,
    )


def _roles(
    config: Config, architecture: ModelArchitecture, processes: int, cluster: Cluster, kernels: Kernels
) -> _Roles:
    own = config.num_critic_processes
    policy = model_memory(config, architecture, processes - own, kernels=kernels)
    critic = reference = None
    if config.has_critic:
        critic = model_memory(as_critic(config), architecture, own or processes, has_value_head=True, kernels=kernels)
    if config.algorithm.needs_reference and not config.lends_base:
        reference = _frozen(policy)
    shapes = teacher_architectures(config, architecture)
    teachers = tuple(_frozen(model_memory(config, one, processes - own, kernels=kernels)) for one in shapes)
    tensor, item = config.parallel.tp_size, ITEM_SIZES[config.model.dtype]
    rows = padded_vocabulary(architecture.vocab_size, tensor) // tensor
    heads = sum(rows * one.hidden_size * item for one in shapes)
    # Teachers of some sources share a step's samples, those of all prompts see all.
    widths = [(one.hidden_size, bool(teacher.sources)) for one, teacher in zip(shapes, config.distillation.models)]
    width = sum(size for size, is_part in widths if not is_part) + max((size for size, is_part in widths if is_part), default=0)
    lessons = width * item * mini_batch_tokens(config, processes - own) // config.parallel.cp_size
    starts = not config.sglang.urls or config.rollout.engine != "sglang"
    engine = engine_memory(config, architecture, cluster) if starts else None
    shares = engine is not None and (config.rollout.engine != "sglang" or config.sglang.placement == "colocated")
    overlap = max(policy.overlap, critic.overlap if critic else 0)
    communication = WORKSPACES + _groups(config, architecture, processes, cluster) + overlap
    batch = batch_bytes(config, architecture, processes - own)
    return _Roles(config, policy, critic, reference, teachers, engine, bool(own), shares, communication, batch, heads, lessons)


def run_checkpoint_bytes(config: Config, architecture: ModelArchitecture) -> int:
    """Return the unique bytes of a run's models in a checkpoint: policy, critic, and weights of teachers that are snapshots."""
    dtype = config.model.dtype
    policy = checkpoint_bytes(architecture, dtype) * policy_parameters(config, architecture) // num_parameters(architecture)
    trained = policy + config.has_critic * checkpoint_bytes(architecture, dtype, has_value_head=True)
    return trained + len(config.distillation.snapshots) * num_parameters(architecture) * ITEM_SIZES[dtype]


def teacher_architectures(config: Config, policy: ModelArchitecture) -> list[ModelArchitecture]:
    """Return the architectures of the teachers that are models, the policy's for one whose config.json cannot be read."""
    found = []
    for teacher in config.distillation.models:
        try:
            found.append(read_architecture(planned_directory(Path(teacher.path))) if teacher.path else policy)
        except ValueError:  # `config.inputs` says why
            found.append(policy)
    return found


def _frozen(memory: ModelMemory) -> ModelMemory:
    """Return the memory of a model that is never trained: only weights, and the buffers of a pass without gradients."""
    nothing = dict.fromkeys(("gradients", "main_params", "moments", "activations", "working", "head", "saved"), 0)
    return replace(memory, **nothing, piece=None)


def _groups(config: Config, architecture: ModelArchitecture, processes: int, cluster: Cluster) -> int:
    """Return the bytes of NCCL groups on the rank that has most of them."""
    own, node = config.num_critic_processes, cluster.processes_per_node(processes)
    has_experts = bool(architecture.num_experts)
    policy = model_groups(config.parallel, processes - own, has_experts, node)
    found = communication_bytes(policy.values(), cluster)
    if config.has_critic:
        critic = model_groups(config.critic_parallel, own or processes, has_experts, node)
        # Models with equal layouts on the same processes share their groups.
        if own:
            found = max(found, communication_bytes(critic.values(), cluster))
        elif critic != policy:
            found += communication_bytes(critic.values(), cluster)
    found += communication_bytes([NcclGroup(processes, min(processes, node))], cluster)
    sglang = config.sglang
    if config.rollout.engine == "sglang" and sglang.weight_sync_transport == "p2p":
        replicas = (processes - own) // (config.parallel.tp_size * config.parallel.pp_size)
        groups = weight_sync_groups(cluster.num_engines(config, processes), max(1, replicas), sglang.tp_size)
        found += communication_bytes(groups, cluster)
    return found


def _phases(roles: _Roles) -> Iterator[PhaseMemory]:
    """Yield the phases of a step in order, for each kind of GPU that works in them."""
    device: Device = "shared" if roles.shares else "trainer"
    if roles.engine and roles.is_sglang:
        generating = _engine_parts(roles, trainer_bytes=roles.resident)
        yield PhaseMemory("generate", "shared" if roles.shares else "engine", generating)
    policy, offload = roles.policy, roles.config.model.offload
    others = roles.resident - policy.resident(offload)
    if roles.reference:  # its weights are onloaded while log-probs are computed or the policy is trained
        others += max(0, roles.reference.weights - roles.reference.resident(offload))
    held = policy.state_parts if offload == "none" else {"weights": policy.weights}
    batch = {"batch": roles.batch}
    # Teachers take turns: one of those in host memory comes at a time.
    away = [teacher for teacher in roles.teachers if roles.config.distillation.offload == "all"]
    turn = max((teacher.weights for teacher in away), default=0)
    forward = max(policy.forward, *(teacher.forward for teacher in roles.teachers), 0)
    with_teachers = policy.state_parts if roles.teachers else held  # The policy's steps themselves hold all of it.
    scored = {**with_teachers, "forward": forward, **batch}
    yield PhaseMemory("log_probs", device, _trainer_parts(roles, scored, others + turn))
    # The policy learns from their output weights, which stay for the steps of a batch.
    heads = roles.teacher_heads if away else 0
    yield PhaseMemory("train", device, _trainer_parts(roles, {**policy.training_parts, **batch}, others + heads))
    if roles.critic:
        other_models = 0 if roles.critic_is_apart else roles.resident - roles.critic.resident(roles.config.critic.offload)
        where: Device = "trainer" if roles.critic_is_apart else device
        yield PhaseMemory("train_critic", where, _trainer_parts(roles, {**roles.critic.training_parts, **batch}, other_models))
    if roles.engine and roles.is_sglang:
        # The policy's weights stay on the GPU until the servers have their weights and caches.
        trainer = others + max(policy.weights, policy.resident(offload))
        yield PhaseMemory(
            "weight_update", "shared" if roles.shares else "engine", _engine_parts(roles, trainer_bytes=trainer)
        )
    yield PhaseMemory("checkpoint", device, _trainer_parts(roles, held, others))
    if roles.engine and roles.is_sglang:
        yield PhaseMemory("evaluation", "shared" if roles.shares else "engine", generating)


def _trainer_parts(roles: _Roles, parts: Mapping[str, int], others: int) -> dict[str, int]:
    """Return `parts` plus the memory of other models, the allocator, the process and an engine on the same GPU."""
    found = {**parts, "other_models": others}
    found["slack"] = int(FRAGMENTATION * sum(found.values()))
    found |= {"context": CUDA_CONTEXT, "communication": roles.communication}
    if roles.shares and roles.engine:
        found["engine_asleep"] = engine_asleep(roles.config) if roles.is_sglang else roles.engine.static
    return found


def _engine_parts(roles: _Roles, trainer_bytes: int) -> dict[str, int]:
    """Return the components of an awake server's rank, plus the memory that the trainer keeps next to it."""
    assert roles.engine is not None, "servers are started by this run"
    found = {
        "engine_weights": roles.engine.weights,
        "kv_tokens": roles.engine.kv_tokens * roles.engine.bytes_per_token,
        **({"states": roles.engine.states} if roles.engine.states else {}),
        "graphs_and_prefill": ENGINE_WORKSPACE,
        "engine_context": engine_context(roles.config),
    }
    if roles.config.sglang.weight_sync_transport == "p2p":
        found["engine_context"] += GROUP_BYTES  # the group that receives weights
    if roles.shares:
        found |= {"trainer": trainer_bytes, "context": CUDA_CONTEXT, "communication": roles.communication}
    return found


def _copied_bytes(checkpoint: CheckpointConfig, saved: int) -> int:
    """Return the bytes of checkpoint copies on a node whose ranks save `saved` bytes, up to the configured limit."""
    # During a save, the copies of the previous checkpoint still exist.
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
    """Return the host memory of the fullest node: that of rank 0, which runs the verifiers."""
    sglang = config.sglang
    # After the first save, the buffer of the checkpoint copy is kept for the next one.
    after_save = sum(model.on_host(how) + model.saved for model, how in models)
    # While a 16-bit model is loaded, an fp32 copy of it exists in addition to the models built before.
    loading = max((model.gradients for model, _ in models), default=0) if config.model.dtype != "float32" else 0
    of_rank = TRAINER_PROCESS + max(after_save, loading)
    if separate:
        after_save = separate.on_host(config.critic.offload) + separate.saved
        of_rank = max(of_rank, TRAINER_PROCESS + max(after_save, separate.gradients))
    num_bytes = processes * of_rank + config.reward.num_processes * config.reward.memory_limit_mb * (1 << 20)
    saved = max(sum(model.saved for model, _ in models), separate.saved if separate else 0)
    num_bytes += _copied_bytes(config.checkpoint, processes * saved)
    if engine:
        ranks = sglang.servers_per_node * sglang.ranks_per_node
        num_bytes += ranks * SERVER_PROCESS
        if sglang.drafting != "off":  # the next corpus is built next to the last one
            num_bytes += ranks * 2 * sglang.draft_corpus_tokens * DRAFT_TOKEN
        if sglang.weight_sync_transport == "shared_memory" and sglang.shared_memory == "host":
            num_bytes += ranks * NUM_SLOTS * min(sglang.weight_sync_bucket_mb << 20, engine.weights)
    if sglang.weight_sync_full_interval > 1:  # a copy of the weights sent last
        num_bytes += processes * models[0][0].weights
    return num_bytes
