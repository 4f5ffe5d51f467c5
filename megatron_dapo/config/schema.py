"""The typed, immutable configuration of a run: one section a class, a docstring under every field.

The sections of one subject share a file (`*_schema.py`). They check types, allowed names and unknown keys, and know the
relations between their own fields; `validator.validate` reports these, ranges and relations between sections at once.
TOML has no null, so "off" and "use another key's value" are written as 0 or "", as the field's docstring says. Defaults
live only here: a recipe holds only what differs.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megatron_dapo.config.algorithm_schema import (
    AdvantageEstimationConfig,
    AlgorithmConfig,
    CriticConfig,
    RoundsConfig,
    SftConfig,
    TrainingConfig,
    ValuePretrainingConfig,
    WindowConfig,
)
from megatron_dapo.config.data_schema import DataConfig
from megatron_dapo.config.distillation_schema import DistillationConfig
from megatron_dapo.config.environment_schema import EnvironmentConfig, TurnsConfig
from megatron_dapo.config.model_schema import ModelConfig, OptimizerConfig, ParallelConfig, PrecisionConfig
from megatron_dapo.config.monitoring_schema import (
    EvaluationConfig,
    MismatchConfig,
    NodesConfig,
    QualityConfig,
    TelemetryConfig,
)
from megatron_dapo.config.reward_schema import RewardConfig
from megatron_dapo.config.rollout_schema import RejectionSamplingConfig, RolloutConfig
from megatron_dapo.config.section import (
    Bounds,
    FunctionPath,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Rule,
    Section,
    Seed,
)
from megatron_dapo.config.sglang_schema import SglangConfig
from megatron_dapo.rounding import round_up

Resume = Literal["auto", "never", "must"]


class RunConfig(Section):
    """Name, output directory, length and time limits of the run."""

    name: Annotated[str, Bounds(min_length=1)] = "run"
    """Label in logs, TensorBoard and the summary."""

    output_dir: Path = Path("runs/run")
    """Directory for everything the run writes (metrics, samples, checkpoints, summary); relative to the current
    directory."""

    group_readable: bool = False
    """Let members of the files' group read what the run writes. Off: only the user can read the run's directory and
    files. The servers' key is readable only by the user either way."""

    seed: Seed = 0
    """Seed of parameter initialization, of every sample's random numbers and of mini-batch shuffling. Change it to
    repeat a run."""

    deterministic: bool = False
    """Use only kernels whose results repeat bit for bit (PyTorch, cuBLAS, cuDNN, NCCL, Transformer Engine). On GPUs it
    is slower, and a resumed run equals the uninterrupted one bit for bit only with it. CPU kernels are always
    deterministic."""

    total_steps: PositiveInt = 100  # not epochs: under dynamic sampling an epoch has no fixed number of steps
    """Train steps (rollout batches trained); the run ends after this many. Learning-rate schedules span all of them."""

    max_generation_steps: NonNegativeInt = 0
    """Generation steps (times the collector was called) after which the run ends even if fewer train steps
    were made. 0: no limit. Set it when the data may be too easy or too hard to fill batches."""

    max_train_seconds: NonNegativeFloat = 0.0
    """Seconds of training, over all attempts and without evaluations and checkpoints; the run ends with the train step
    that reaches them. 0: no limit. Use it to compare runs at equal training time; a learning-rate schedule still spans
    total_steps."""

    wait_timeout_seconds: Annotated[float, Bounds(ge=30)] = 1800.0
    """Seconds without progress (no response finished, no verdict, no byte written, no collective completed) after which
    stacks are dumped and the run ends with an error. A phase may take longer as long as it makes progress; raise it
    when one response or one collective takes longer. Dead, stopped and silent ranks are found within seconds regardless
    of this timeout: docs/failures.md."""

    hang_timeout_seconds: PositiveFloat = 180.0
    """Seconds without a new collective or micro-batch on any rank, after which GPU ranks that have entered different
    numbers of collectives count as hung. Raise it if one micro-batch takes longer."""

    node_timeout_seconds: PositiveFloat = 30.0
    """Seconds without contact, by datagram or connection, after which a node counts as lost. Raise it on a network that is
    saturated for longer."""

    stopped_timeout_seconds: PositiveFloat = 8.0
    """Seconds for which a rank may be stopped (SIGSTOP) before the run ends. Raise it if a tool suspends processes."""

    max_fruitless_attempts: PositiveInt = 3
    """Attempts in a row without a new train step after which the run is no longer restarted automatically (requeued
    under Slurm, restarted by torchrun)."""

    max_node_failures: NonNegativeInt = 2
    """Attempts in a row that failed on the same node without a new train step, after which a requeued Slurm job leaves
    that node out, if its partition has enough others. 0: never."""

    stop_notice_seconds: NonNegativeFloat = 0.0
    """Seconds between a stop signal and the kill. If earlier checkpoints took longer than this, none is started and the
    last one stands. 0: the time left in the Slurm job; no limit outside one."""

    ignore_estimates: bool = False
    """Start a run on CPUs even if it is estimated to take more than a day or more memory than is free."""

    callbacks: tuple[FunctionPath, ...] = ()
    """User-defined classes, as "package.module:Class" or "path/to/file.py:Class", whose methods are called at the start
    and after train steps, evaluations and checkpoints; see docs/python.md."""

    def broken_rules(self) -> Iterator[Rule]:
        if 0 < self.max_generation_steps < self.total_steps:
            yield Rule(
                "run.max_generation_steps == 0 or run.max_generation_steps >= run.total_steps",
                f"set run.max_generation_steps = {self.total_steps} or more, or 0",
                reason="a train step takes at least one generation step",
            )


class CheckpointConfig(Section):
    """Checkpoints, from which a run resumes exactly, and the exported model. A resumed run equals the uninterrupted one
    bit for bit on a CPU; on GPUs only with run.deterministic, and with servers only under
    sglang.enable_deterministic_inference."""

    output_dir: str = ""
    """Directory of checkpoints; relative to the current directory. "": <run.output_dir>/checkpoints."""

    interval: NonNegativeInt = 20
    """Train steps between checkpoints. 0: only at the end, on a signal and before an orderly failure."""

    keep: PositiveInt = 2  # one to resume from if the newest turns out to be damaged
    """Newest valid checkpoints kept; an older one is deleted only after a newer one is valid."""

    keep_every: NonNegativeInt = 0
    """Train steps between checkpoints that are kept permanently, in addition to the newest ones; a multiple of
    checkpoint.interval. 0: none."""

    keep_best: str = ""
    """Evaluation metric, such as eval/avg_at_k, by which the best checkpoint is also kept. "": none. Only evaluated
    checkpoints can be the best, so let evaluation.interval coincide with checkpoints."""

    keep_best_is: Literal["higher", "lower"] = "higher"
    """Whether a higher or a lower value of checkpoint.keep_best is better."""

    memory_copies: Literal["none", "node", "peer"] = "none"
    """Copies of the newest checkpoint in host memory, which a restart after a failure reads instead of storage. node:
    each node keeps what its ranks saved; survives lost processes. peer: another node keeps a copy as well, one of
    another data-parallel replica if there is one; survives a lost node. Linux only. See docs/checkpoints.md for the
    memory."""

    memory_copies_gib: NonNegativeFloat = 0.0
    """Most GiB of copies on a node; a larger checkpoint goes to storage only, with a warning. 0: as much as /dev/shm
    has."""

    memory_copies_seconds: PositiveFloat = 600.0
    """Seconds without a trainer process on a node after which its copies are freed. Must be longer than a restart
    takes."""

    resume: Resume = "auto"
    """auto: continue from the newest valid checkpoint if there is one; fails if the run's records mention a checkpoint
    but the directory has none, e.g. because it is not mounted. never: fail if the directory holds one. must: fail if it
    holds none."""

    export_huggingface: bool = True
    """Write the trained policy as a Hugging Face directory, <run.output_dir>/huggingface, when the run ends, and the
    critic, if there is one, as <run.output_dir>/critic."""

    def broken_rules(self) -> Iterator[Rule]:
        if self.keep_every > 0 and not (self.interval > 0 and self.keep_every % self.interval == 0):
            interval = self.interval or self.keep_every
            yield Rule(
                "checkpoint.interval > 0 and checkpoint.keep_every % checkpoint.interval == 0",
                f"set checkpoint.keep_every = {round_up(self.keep_every, interval)} and checkpoint.interval = {interval}",
                when="checkpoint.keep_every > 0",
                reason="only what is saved can be kept",
            )


class Config(Section):
    """Complete configuration of a run."""

    run: RunConfig = RunConfig()
    """Name, output directory, length and time limits of the run."""

    model: ModelConfig
    """The policy that is trained."""

    precision: PrecisionConfig = PrecisionConfig()
    """Precision of the linear layers' products."""

    parallel: ParallelConfig = ParallelConfig()
    """How model and batch are cut over processes."""

    megatron: Mapping[str, Any] = {}
    """Fields of megatron-core's TransformerConfig, DistributedDataParallelConfig and OptimizerConfig under their
    original names, for the policy and, unless critic.megatron overrides them, the critic: docs/megatron.md."""

    data: DataConfig
    """Prompts to train and evaluate on."""

    rollout: RolloutConfig = RolloutConfig()
    """Sampling and dynamic sampling."""

    sglang: SglangConfig = SglangConfig()
    """SGLang servers and how weights reach them."""

    environment: EnvironmentConfig = EnvironmentConfig()
    """Environments of episodes with several turns."""

    turns: TurnsConfig = TurnsConfig()
    """How the turns of an episode are joined."""

    reward: RewardConfig = RewardConfig()
    """Verifier and reward shaping."""

    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Advantage and loss."""

    distillation: DistillationConfig = DistillationConfig()
    """Teachers of the policy."""

    training: TrainingConfig = TrainingConfig()
    """From rollout batch to optimizer steps."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its schedule."""

    critic: CriticConfig = CriticConfig()
    """The critic of ppo, vapo and tppo."""

    advantage_estimation: AdvantageEstimationConfig = AdvantageEstimationConfig()
    """Advantages and critic targets from the critic's values."""

    window: WindowConfig = WindowConfig()
    """Windows of tppo."""

    value_pretraining: ValuePretrainingConfig = ValuePretrainingConfig()
    """When `megatron-dapo pretrain-value` ends."""

    rejection_sampling: RejectionSamplingConfig = RejectionSamplingConfig()
    """Sampling and selection of `megatron-dapo rejection-sample`."""

    sft: SftConfig = SftConfig()
    """Data and optimizer steps of `megatron-dapo sft`."""

    rounds: RoundsConfig = RoundsConfig()
    """Stages of `megatron-dapo rounds`."""

    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints and export."""

    evaluation: EvaluationConfig = EvaluationConfig()
    """Held-out evaluation."""

    telemetry: TelemetryConfig = TelemetryConfig()
    """Metrics, samples, progress."""

    nodes: NodesConfig = NodesConfig()
    """Faulty nodes and slow ranks."""

    quality: QualityConfig = QualityConfig()
    """Alarms on repetition and certainty of responses."""

    mismatch: MismatchConfig = MismatchConfig()
    """Gate on the engine-trainer gap."""

    @property
    def keeps_servers(self) -> bool:
        """True if servers that the run starts are to outlive trainer processes that fail."""
        sglang = self.sglang
        # Servers must not keep GPU memory open that a dead process shared with them.
        is_kept = not sglang.urls and sglang.keep_seconds > 0 and not self.shares_gpu_memory
        return self.rollout.engine == "sglang" and is_kept

    @property
    def shares_gpu_memory(self) -> bool:
        """True if servers read new weights from the trainer's GPU memory."""
        sglang = self.sglang
        is_shared = sglang.weight_sync_transport == "shared_memory" and sglang.shared_memory == "device"
        return self.rollout.engine == "sglang" and is_shared

    @property
    def leaves_processes(self) -> bool:
        """True if some processes outlive failed trainer processes, so that a restart on the same nodes is
        worthwhile."""
        return self.keeps_servers or self.checkpoint.memory_copies != "none"

    @property
    def lends_base(self) -> bool:
        """True if the policy without its adapters is the reference policy, which then needs no other weights."""
        # Replayed routing belongs to the policy, and would be the reference's too. A policy may start with adapters.
        return self.model.lora.rank > 0 and not self.model.lora.path and not self.rollout.routing_replay

    @property
    def has_critic(self) -> bool:
        return self.algorithm.name not in ("dapo", "sft")

    @property
    def policy_starts_at(self) -> int:
        """First train step, counted from 0, in which the policy learns; its schedule starts there."""
        return self.critic.warmup_train_steps if self.has_critic else 0

    @property
    def critic_parallel(self) -> ParallelConfig:
        """Return the critic's parallel sizes; a size of 0 means the policy's."""
        asked, policy = self.critic.parallel, self.parallel
        tensor, pipeline = asked.tp_size or policy.tp_size, asked.pp_size or policy.pp_size
        # Chunks divide the layers of a stage, so the policy's number applies only to the same number of stages.
        same_stages = pipeline == policy.pp_size
        sizes = {
            "tp_size": tensor,
            "pp_size": pipeline,
            "vpp_size": asked.vpp_size or (policy.vpp_size if same_stages else 1),
            "cp_size": asked.cp_size or policy.cp_size,
            "ep_size": asked.ep_size or policy.ep_size,
            # Megatron-core refuses sequence parallelism on one tensor rank.
            "sequence_parallel": policy.sequence_parallel and tensor > 1,
        }
        return ParallelConfig(**{**dict(policy), **sizes})

    @property
    def critic_megatron(self) -> Mapping[str, Any]:
        """Return megatron-core's fields for the critic."""
        return {**self.megatron, **self.critic.megatron}

    @property
    def checkpoint_dir(self) -> Path:
        return Path(self.checkpoint.output_dir) if self.checkpoint.output_dir else self.run.output_dir / "checkpoints"

    @property
    def evaluation_response_tokens(self) -> int:
        return self.evaluation.max_response_tokens or self.rollout.max_response_tokens

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest prompt plus the longest response, or of the longest episode, in training or evaluation."""
        return max(self.longest_trained, self.data.max_prompt_tokens + self.evaluation_response_tokens)

    @property
    def longest_trained(self) -> int:
        """Tokens of the longest trained sequence."""
        responses = self.data.max_prompt_tokens + self.rollout.max_response_tokens
        return max(responses, self.environment.max_context_tokens if self.environment.is_on else 0)

    @property
    def mismatch_gate(self) -> float:
        """Largest mean gap, in nats, between engine and trainer on the first batch."""
        if self.rollout.engine == "sglang" and self.sglang.quantization == "fp8":
            return self.sglang.fp8_step0_max_mean_abs
        return self.mismatch.step0_max_mean_abs

    @property
    def part_size(self) -> int:
        """Groups that are handed to the trainer at once; 0: a whole batch."""
        return self.training.mini_batch_prompts if self.training.stream != "off" else 0

    @property
    def aggregation_length(self) -> int:
        return self.algorithm.loss.aggregation_length or self.rollout.max_response_tokens

    @property
    def num_processes(self) -> int:
        """Processes of this run when no outside launcher decides."""
        p = self.parallel
        return (p.num_processes or p.tp_size * p.pp_size * p.cp_size) + self.num_critic_processes

    @property
    def num_critic_processes(self) -> int:
        """Processes that hold only the critic: the last ranks of the run."""
        return self.critic.parallel.num_processes if self.has_critic else 0


def _members(info: FieldInfo) -> tuple[type[BaseModel], ...]:
    """Return the section classes of a field: one, the members of a union, or none for a plain value."""
    annotation = info.annotation
    if typing.get_origin(annotation) is tuple:
        return ()  # a list of tables is one value
    kinds = (annotation,) if isinstance(annotation, type) else typing.get_args(annotation)
    return tuple(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel))


def _sections(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, tuple[type[BaseModel], ...]]]:
    for name, info in model.model_fields.items():
        if members := _members(info):
            yield prefix + name, members
            for member in members:
                yield from _sections(member, f"{prefix}{name}.")


@cache
def section_types() -> Mapping[str, tuple[type[BaseModel], ...]]:
    """Return the possible classes of every section by dotted path ("" is the root, "algorithm.loss" a nested one), the
    default first. Several classes are a union, discriminated by its field `name`."""
    return MappingProxyType({"": (Config,), **dict(_sections(Config, ""))})


def recipe_schema() -> dict[str, Any]:
    """Return the JSON schema of a recipe's file, with which an editor completes and explains its keys."""
    schema = Config.model_json_schema()
    _loosen(schema)
    base = {"type": "string", "description": "Recipe from which everything is taken that this one leaves out."}
    schema["properties"] = {"base": base, **schema["properties"]}
    return {"$schema": "http://json-schema.org/draft-07/schema#", **schema}


def _loosen(node: Any) -> None:
    """Let what a base may set be absent, and a union be the name of one of its members."""
    if isinstance(node, dict):
        node.pop("required", None)
        if "discriminator" in node:
            del node["discriminator"]
            node["anyOf"] = [{"type": "string"}, *node.pop("oneOf")]
    for inner in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        _loosen(inner)


@cache
def leaf_fields() -> Mapping[str, FieldInfo]:
    """Return every field that holds a value (not a section), by dotted path, in schema order. A union contributes the
    fields of all its members; its `name` takes any of their names."""
    sections = section_types()
    leaves: dict[str, FieldInfo] = {}
    for path, members in sections.items():
        for member in members:
            for name, info in member.model_fields.items():
                dotted = f"{path}.{name}" if path else name
                if dotted not in sections:
                    leaves.setdefault(dotted, info)
    return MappingProxyType(leaves)


def union_names(path: str) -> tuple[str, ...]:
    """Return the names that the section at `path` may have, the default first; empty if it is not a union."""
    members = section_types().get(path, ())
    return tuple(member.model_fields["name"].default for member in members) if len(members) > 1 else ()
