"""The typed, immutable configuration of a run: one section a class, a docstring under every field.

The sections of one subject share a file (`*_schema.py`). Types, allowed names and unknown keys are checked by them; ranges
and relations between fields by `validator.validate`, which reports all of them at once. TOML has no null, so "off" and "take
the default of another key" are written 0 or "" and said so in the field's docstring. Defaults live only here: a recipe holds what differs.
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
from megatron_dapo.config.model_schema import ModelConfig, OptimizerConfig, ParallelConfig, PrecisionConfig
from megatron_dapo.config.reward_schema import RewardConfig
from megatron_dapo.config.rollout_schema import (
    DataConfig,
    RejectionSamplingConfig,
    RolloutConfig,
    SglangConfig,
)
from megatron_dapo.config.section import (
    AtLeastOne,
    Bounds,
    Fraction,
    InputPath,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ProbabilityMass,
    Section,
    Seed,
)

Resume = Literal["auto", "never", "must"]
NodeAction = Literal["warn", "exclude"]
Tracker = Literal["wandb", "mlflow"]


class RunConfig(Section):
    """Name, output directory, length and time limits of the run."""

    name: Annotated[str, Bounds(min_length=1)] = "run"
    """Label in logs, TensorBoard and the summary."""

    output_dir: Path = Path("runs/run")
    """Directory everything is written to (metrics, samples, checkpoints, summary); relative to the current directory."""

    group_readable: bool = False
    """Let members of the files' group read what the run writes. Off: the run's directory and files are the user's alone. The key of
    the servers is the user's alone either way."""

    seed: Seed = 0
    """Seed of parameter initialization, of every sample's random numbers and of mini-batch shuffling. Change it to
    repeat a run."""

    deterministic: bool = False
    """Use only kernels whose results repeat bit for bit (PyTorch, cuBLAS, cuDNN, NCCL, Transformer Engine). On a GPU a
    resumed run equals the uninterrupted one bit for bit only with it; it is slower there. A CPU's kernels always repeat."""

    total_steps: PositiveInt = 100  # not epochs: under dynamic sampling an epoch has no fixed number of steps
    """Train steps (rollout batches trained); the run ends after this many. Learning-rate schedules are laid over it."""

    max_generation_steps: NonNegativeInt = 0
    """Generation steps (times the collector was called) after which the run ends even if fewer train steps
    were made. 0: no limit. Set it when the data may be too easy or too hard to fill batches."""

    max_train_seconds: NonNegativeFloat = 0.0
    """Seconds of training, over all attempts and without evaluations and checkpoints, after which the run ends with the train
    step that reaches them. 0: no limit. Gives runs to be compared the same time; a learning-rate schedule is still laid
    over total_steps."""

    wait_timeout_seconds: PositiveFloat = 1800.0
    """Seconds without progress (no response finished, no verdict, no byte written, no collective completed) after which
    stacks are dumped and the run ends with an error. A phase may take longer as long as it makes progress; raise it when
    one response or one collective takes longer. Dead, stopped and silent ranks are found within seconds without it: docs/failures.md."""

    hang_timeout_seconds: PositiveFloat = 180.0
    """Seconds without a new collective or micro-batch on any rank after which ranks on GPUs that have entered different numbers
    of collectives count as hung. Raise it if one micro-batch takes longer."""

    node_timeout_seconds: PositiveFloat = 30.0
    """Seconds without contact, by datagram or connection, after which a node counts as lost. Raise it on a network that is
    saturated for longer."""

    stopped_timeout_seconds: PositiveFloat = 8.0
    """Seconds for which a rank may be stopped (SIGSTOP) before the run ends. Raise it if a tool suspends processes."""

    max_fruitless_attempts: PositiveInt = 3
    """Attempts in a row without a new train step after which the run is not started again by itself (requeued under Slurm,
    restarted by torchrun)."""

    stop_notice_seconds: NonNegativeFloat = 0.0
    """Seconds between a stop signal and the kill. A checkpoint that took longer is not begun then: the last one stands. 0:
    until the end of the Slurm job, without limit outside of one."""

    callbacks: tuple[str, ...] = ()
    """Classes of the user's own, as "package.module:Class" or "path/to/file.py:Class", whose methods are called at the start, after
    train steps, evaluations and checkpoints, see docs/python.md."""


class CheckpointConfig(Section):
    """Checkpoints, from which a run resumes exactly, and the exported model. A resumed run equals the uninterrupted one bit
    for bit on a CPU; on GPUs with run.deterministic alone, and with servers under sglang.enable_deterministic_inference."""

    output_dir: str = ""
    """Directory of checkpoints; relative to the current directory. "": <run.output_dir>/checkpoints."""

    interval: NonNegativeInt = 20
    """Train steps between checkpoints. 0: only at the end, on a signal and before an orderly failure."""

    keep: PositiveInt = 2  # one to resume from if the newest turns out to be damaged
    """Newest valid checkpoints kept; an older one is deleted only after a newer one is valid."""

    keep_every: NonNegativeInt = 0
    """Train steps between checkpoints that are kept for good, beside the newest ones; a multiple of checkpoint.interval. 0: none."""

    keep_best: str = ""
    """Metric of the evaluations, such as eval/avg_at_k, by which the best checkpoint is kept as well. "": none. One that was not
    evaluated is never the best: let evaluation.interval fall on checkpoints."""

    keep_best_is: Literal["higher", "lower"] = "higher"
    """The better value of checkpoint.keep_best."""

    memory_copies: Literal["none", "node", "peer"] = "none"
    """Copies of the newest checkpoint in host memory, from which a restart after a failure reads instead of storage. node: what
    the ranks of a node saved, in its memory; survives lost processes. peer: in that of another node as well, of another
    data-parallel replica where there is one; survives a lost node. Linux only. See docs/checkpoints.md for the memory."""

    memory_copies_gib: NonNegativeFloat = 0.0
    """GiB of copies on a node at most; a checkpoint beyond it is on storage alone, with a warning. 0: as much as /dev/shm has."""

    memory_copies_seconds: PositiveFloat = 600.0
    """Seconds without a trainer process on a node after which its copies are freed: longer than a restart takes."""

    resume: Resume = "auto"
    """auto: continue from the newest valid checkpoint if there is one; refused where the run's records say that there was one and
    the directory has none, as when it is not mounted. never: fail if the directory holds one. must: fail
    if it holds none."""

    export_huggingface: bool = True
    """Write the trained policy as a Hugging Face directory, <run.output_dir>/huggingface, when the run ends, and the critic, where
    there is one, as <run.output_dir>/critic."""


class EvaluationConfig(Section):
    """Evaluation on data.eval_paths: avg@k, pass@k, cons@k."""

    interval: NonNegativeInt = 0
    """Train steps between evaluations. 0: none in between."""

    num_samples: PositiveInt = 32  # DAPO's paper reports avg@32 on AIME 2024
    """Responses per problem (k)."""

    temperature: NonNegativeFloat = 1.0
    """Sampling temperature; 0 is greedy."""

    top_p: ProbabilityMass = 0.7  # as DAPO's paper evaluates
    """Nucleus mass."""

    top_k: NonNegativeInt = 0
    """Only the k likeliest tokens; 0: off."""

    max_response_tokens: NonNegativeInt = 0
    """Longest response in tokens. 0: rollout.max_response_tokens."""

    at_start: bool = True
    """Evaluate the initial policy."""

    at_end: bool = True
    """Evaluate the trained policy."""


class TelemetryConfig(Section):
    """Records of a run: metrics, samples, dumps."""

    tensorboard: bool = True
    """Write TensorBoard events to <run.output_dir>/tensorboard, x axis the train step. metrics.jsonl is written either
    way."""

    trackers: tuple[Tracker, ...] = ()
    """"wandb" and "mlflow", beside TensorBoard: metrics, and what recipe and options set. A resumed run continues its run there.
    Each takes its own variables (WANDB_MODE, WANDB_PROJECT, MLFLOW_TRACKING_URI, ...); MLflow without one writes to
    <run.output_dir>/mlruns. Extras of the same names install them."""

    samples_per_step: NonNegativeInt = 64
    """Responses written to samples.jsonl per train step. 0: none."""

    progress: bool = True
    """Live progress display on a terminal (otherwise plain log lines)."""

    report: bool = True
    """Write <run.output_dir>/report.html at every evaluation and at the end, by a process of its own: one HTML file with
    verdict, curves, samples and configuration, which reloads in a browser while the run is under way."""

    references: tuple[InputPath, ...] = ()
    """Curves that the run is compared with after every evaluation, as `megatron-dapo compare` does: published ones
    (examples/references) or directories of other runs. The log and the progress display say whether it is on track.
    Relative: from the recipe's directory."""

    dump_batches: NonNegativeInt = 0
    """Train steps between dumps of a whole rollout batch, for replay through the trainer alone. 0: none."""


class MismatchConfig(Section):
    """Gate on the gap between engine and trainer log-probs: mean |old_logprobs - rollout_logprobs| over trained tokens,
    in nats."""

    step0_max_mean_abs: PositiveFloat = 0.05
    """The run ends with an error if the gap of the first batch is larger: engine and trainer do not hold the same
    model. bfloat16 on both sides comes to some 0.01 to 0.04, so less than 0.05 is refused there; float32 allows 1e-3."""

    alarm: PositiveFloat = 0.02  # within what bfloat16 alone explains: it warns, the gate above ends the run
    """A warning names the step when the gap of a batch is larger."""

    trend_factor: Annotated[float, Bounds(gt=1)] = 2.0
    """A warning also comes when the gap, smoothed over some steps, has grown by this factor within the last hundred."""

    trend_floor: NonNegativeFloat = 1e-3
    """Smoothed gaps up to this many nats are never a trend."""


class QualityConfig(Section):
    """Alarms on trained responses, their text and their rewards: a warning names the step, the value and the threshold. The metrics
    are quality/* and reward/failed_share."""

    repetition_alarm: Fraction = 0.2
    """Mean share of repeated 20-grams above which there is a warning. 1: none."""

    tail_loop_alarm: Fraction = 0.2
    """Share of responses that end in a loop above which there is a warning. 1: none."""

    compression_alarm: Fraction = 0.0
    """Mean compressed / raw size of a response's token ids below which there is a warning; 0: none. Off by default, as the
    ratio depends on the length and the tokenizer more than on repetition: sums of six tokens are at 1.1, chains of eighty at 0.4.
    Half of the first step's value is a start; repetition_alarm and tail_loop_alarm are on."""

    probability_alarm: Fraction = 1.0
    """Mean probability of sampled tokens above which there is a warning, before entropy has collapsed; 1: none. Off by default, as
    the level is the model's and the task's: the quickstart starts at 0.97 and learns, SmolLM2-135M goes from 0.63 to 0.94.
    Halfway from the first step's value to 1 is a start; the report names a collapse of entropy against the run's own first steps."""

    reward_failure_alarm: Fraction = 0.02
    """Share of responses whose reward timed out or failed, wholly or in a part of it, above which there is a warning. 1: none."""


class NodesConfig(Section):
    """The watch over the nodes of a run: a sample of their metrics a second, and a node that is unlike the others named
    (Minder, arXiv 2411.01791; docs/nodes.md). Runs of one node have none; with fewer than four no node is judged."""

    enabled: bool = False
    """Sample every node into <run.output_dir>/nodes, compare the nodes, and report the slowest rank of each phase. Off by
    default: the detector is proved only on simulated faults, of which it finds a third (docs/nodes.md)."""

    period_seconds: AtLeastOne = 480.0  # as the published system is called
    """Seconds between two looks at the samples. A look covers 15/8 of it, at least twice continuity_seconds."""

    continuity_seconds: AtLeastOne = 240.0
    """Seconds that the same node must be the outlier of a metric, without a break, before there is an alert."""

    noise_chance: Annotated[float, Bounds(gt=0, lt=1)] = 1e-3
    """Chance of a candidate in one window among healthy nodes, as far as their noise is Gaussian; lower is less sensitive. The
    similarity threshold follows from it and from the number of nodes."""

    action: NodeAction = "warn"
    """After an alert. warn: a line in the log and a record. exclude: also save and end with exit code 75; slurm.sh requeues the
    job without that node, which needs a spare one in the partition."""


class Config(Section):
    """Everything a run is told. Sections are read by name; functions below the trainer take plain values, never this
    tree."""

    run: RunConfig = RunConfig()
    """Name, output directory, length and time limits of the run."""

    model: ModelConfig
    """The policy that is trained."""

    precision: PrecisionConfig = PrecisionConfig()
    """How linear layers multiply."""

    parallel: ParallelConfig = ParallelConfig()
    """How model and batch are cut over processes."""

    megatron: Mapping[str, Any] = {}
    """Fields of megatron-core's TransformerConfig, DistributedDataParallelConfig and OptimizerConfig by their own names, for the
    policy and, unless critic.megatron says otherwise, the critic: docs/megatron.md."""

    data: DataConfig
    """Prompts to train and evaluate on."""

    rollout: RolloutConfig = RolloutConfig()
    """Sampling and dynamic sampling."""

    sglang: SglangConfig = SglangConfig()
    """SGLang servers and how weights reach them."""

    reward: RewardConfig = RewardConfig()
    """Verifier and reward shaping."""

    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Advantage and loss."""

    training: TrainingConfig = TrainingConfig()
    """From rollout batch to optimizer steps."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its schedule."""

    critic: CriticConfig = CriticConfig()
    """The critic of ppo, vapo and tppo."""

    advantage_estimation: AdvantageEstimationConfig = AdvantageEstimationConfig()
    """From the critic's values to advantages and to its own targets."""

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
        # Memory of a GPU that a dead process shared must not stay open.
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
        """True if processes of the run's nodes outlive trainer processes that fail, so that a restart on the same nodes is worth it."""
        return self.keeps_servers or self.checkpoint.memory_copies != "none"

    @property
    def has_critic(self) -> bool:
        return self.algorithm.name != "dapo"

    @property
    def policy_starts_at(self) -> int:
        """The first train step, from 0, in which the policy learns; its schedule counts from there."""
        return self.critic.warmup_train_steps if self.has_critic else 0

    @property
    def critic_parallel(self) -> ParallelConfig:
        """Return the critic's parallel sizes; those of 0 are the policy's."""
        asked, policy = self.critic.parallel, self.parallel
        tensor, pipeline = asked.tp_size or policy.tp_size, asked.pp_size or policy.pp_size
        # Chunks divide the stages' layers: the policy's number means nothing for another number of stages.
        same_stages = pipeline == policy.pp_size
        return policy.model_copy(
            update={
                "tp_size": tensor,
                "pp_size": pipeline,
                "vpp_size": asked.vpp_size or (policy.vpp_size if same_stages else 1),
                "cp_size": asked.cp_size or policy.cp_size,
                "ep_size": asked.ep_size or policy.ep_size,
                # Megatron-core refuses sequence parallelism on one tensor rank.
                "sequence_parallel": policy.sequence_parallel and tensor > 1,
            }
        )

    @property
    def critic_megatron(self) -> Mapping[str, Any]:
        """Return the critic's fields of megatron-core's configuration."""
        return {**self.megatron, **self.critic.megatron}

    @property
    def checkpoint_dir(self) -> Path:
        return Path(self.checkpoint.output_dir) if self.checkpoint.output_dir else self.run.output_dir / "checkpoints"

    @property
    def evaluation_response_tokens(self) -> int:
        return self.evaluation.max_response_tokens or self.rollout.max_response_tokens

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest prompt with the longest response, of training or evaluation."""
        return self.data.max_prompt_tokens + max(self.rollout.max_response_tokens, self.evaluation_response_tokens)

    @property
    def mismatch_gate(self) -> float | None:
        """Largest mean gap, in nats, between engine and trainer on the first batch; None where no engine sampled it."""
        if self.rollout.responses == "given":
            return None
        if self.rollout.engine == "sglang" and self.sglang.quantization == "fp8":
            return self.sglang.fp8_step0_max_mean_abs
        return self.mismatch.step0_max_mean_abs

    @property
    def aggregation_length(self) -> int:
        return self.algorithm.loss.aggregation_length or self.rollout.max_response_tokens

    @property
    def num_processes(self) -> int:
        """Processes this run asks for when no outside launcher decides."""
        p = self.parallel
        return (p.num_processes or p.tp_size * p.pp_size * p.cp_size) + self.num_critic_processes

    @property
    def num_critic_processes(self) -> int:
        """Processes that hold nothing but the critic: the last ranks of the run."""
        return self.critic.parallel.num_processes if self.has_critic else 0


def _members(info: FieldInfo) -> tuple[type[BaseModel], ...]:
    """The sections a field may be: one, the members of a union, or none for a plain value."""
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
    """Every section by dotted path ("" is the root, "algorithm.loss" a nested one): the classes it may be, the default
    first. More than one is a union, told apart by its field `name`."""
    return MappingProxyType({"": (Config,), **dict(_sections(Config, ""))})


@cache
def leaf_fields() -> Mapping[str, FieldInfo]:
    """Every field that holds a value (not a section), by dotted path, in the order of the schema. Of a union those of all
    its members; its name has all their names."""
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
    """The names that the section at `path` may have, the default first; empty where it is no union."""
    members = section_types().get(path, ())
    return tuple(member.model_fields["name"].default for member in members) if len(members) > 1 else ()


