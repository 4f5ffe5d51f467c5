"""The typed, immutable configuration of a run: one section a class, a docstring under every field.

Types, allowed names and unknown keys are checked here; ranges and relations between fields are checked by
`validator.validate`, which reports all of them at once. TOML has no null, so "off" and "take it from elsewhere" are
written 0 or "" and said so in the field's docstring. Defaults live only here: a recipe holds what differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megatron_dapo.config.critic_schema import (
    AdvantageEstimationConfig,
    CriticConfig,
    ValuePretrainingConfig,
    WindowConfig,
)
from megatron_dapo.config.optimizer_schema import OptimizerConfig
from megatron_dapo.config.precision_schema import PrecisionConfig
from megatron_dapo.config.section import InputPath, Offload, Section
from megatron_dapo.config.sglang_schema import SglangConfig

Dtype = Literal["float32", "bfloat16"]
LogprobImplementation = Literal["auto", "reference", "chunked", "triton", "te_fp8"]
Recompute = Literal["none", "selective", "full"]
Template = Literal["chat", "plain"]
Engine = Literal["embedded", "sglang"]
Partial = Literal["restart", "continue"]
OnExhausted = Literal["train_partial", "stop", "error"]
AlgorithmName = Literal["dapo", "ppo", "vapo", "tppo"]
AdvantageName = Literal["grpo", "dr_grpo", "rloo", "reinforce_baseline"]
GrpoStd = Literal["unbiased", "biased"]
PolicyLossName = Literal["ppo_clip", "clip_higher", "gspo", "gspo_token", "cispo"]
Aggregation = Literal["token_mean", "sample_mean", "per_group", "dr_grpo", "seq_sum_mean", "rollout_token_mean"]
KlEstimator = Literal["k2", "k3"]
RewardKlEstimator = Literal["k1", "k2", "k3"]
Correction = Literal["none", "tis", "mis", "icepop"]
CorrectionLevel = Literal["token", "sequence", "geometric"]
Resume = Literal["auto", "never", "must"]


class RunConfig(Section):
    """What the run is called, where it writes and when it ends."""

    name: str = "run"
    """Label in logs, TensorBoard and the summary."""

    folder: Path = Path("runs/run")
    """Folder everything is written to (metrics, samples, checkpoints, summary); relative to the current directory."""

    seed: int = 0
    """Seed of parameter initialisation, of every sample's random numbers and of mini-batch shuffling. Change it to
    repeat a run."""

    total_steps: int = 100
    """Train steps (rollout batches trained); the run ends after this many. Learning-rate schedules are laid over it."""

    max_generation_steps: int = 0
    """Generation steps (times the collector was asked for a batch) after which the run ends even if fewer train steps
    were made. 0: no limit. Set it when the data may be too easy or too hard to fill batches."""

    wait_timeout_seconds: float = 1800.0
    """Seconds any wait (collective, engine, verifier pool, checkpoint) may take before stacks are dumped and the run
    ends with an error. Raise it when one generation step of the largest responses takes longer."""


class ModelConfig(Section):
    """The policy and how its numbers are held."""

    path: InputPath
    """Hugging Face folder of the initial policy (config.json, tokenizer, *.safetensors). Relative: from the recipe's
    folder."""

    dtype: Dtype = "float32"
    """Type of parameters and activations; masters and moments are float32 either way. bfloat16 on accelerators. How
    linear layers multiply is precision.recipe's, which may be FP8."""

    recompute: Recompute = "none"
    """Activations recomputed in the backward pass: none, selective (attention only) or full (whole layers). Raise it
    when activations do not fit in memory."""

    offload: Offload = "none"
    """What leaves the device for host memory while engines generate or a critic works: nothing, the optimizer state and
    gradients, or those and the weights. A reference policy likewise."""

    trust_remote_code: bool = False
    """Run Python code that ships in the model folder. Only for folders whose author you trust."""

    allow_random_init: bool = False
    """Start from random parameters where the folder holds no weights. Otherwise missing weights are an error."""

    logprob_implementation: LogprobImplementation = "auto"
    """What computes log-probs and entropy. auto: triton for a 16-bit model on compute capability 8.0 or more, else
    chunked. reference: full logits. chunked: tiles of tokens and vocabulary by torch. triton: own kernels. te_fp8: FP8
    products, an approximation."""

    logprob_chunk_tokens: int = 1024
    """Tokens whose vocabulary scores are in memory at a time in the log-prob kernel. Lower it when the vocabulary is
    large."""


class ParallelConfig(Section):
    """How the model and the batch are cut over processes. data-parallel size = processes / (tensor * pipeline *
    context)."""

    tensor: int = 1
    """Ranks every weight matrix is cut over; must divide attention heads and key-value heads."""

    pipeline: int = 1
    """Stages the layers are cut into."""

    virtual_pipeline: int = 1
    """Model chunks per pipeline stage (interleaved schedule); 1 is the plain schedule. Raise it to shrink the pipeline
    bubble."""

    context: int = 1
    """Ranks every sequence is cut over. Raise it when one sequence's activations do not fit."""

    expert: int = 1
    """Ranks experts are cut over, within context x data. For mixture-of-experts models only."""

    expert_tensor: int = 0
    """Ranks each expert's matrices are cut over; 0: as many as tensor. Another size than tensor needs expert > 1."""

    sequence_parallel: bool = False
    """Cut the activations between matrix products over the tensor ranks as well. Saves memory; needs tensor > 1."""

    distributed_optimizer: bool = True
    """Cut optimizer state over the data-parallel ranks."""

    num_processes: int = 0
    """Processes of the policy to start on this machine, or expected of an outside launcher; critic.parallel.num_processes
    come on top. 0: tensor * pipeline * context, or what the launcher gives."""


class DataConfig(Section):
    """Prompts to train and evaluate on."""

    train_paths: tuple[InputPath, ...]
    """Parquet or JSONL files in the DAPO-Math-17k schema. Relative: from the recipe's folder."""

    eval_paths: tuple[InputPath, ...] = ()
    """Held-out files in the same schema. Empty: no evaluation."""

    template: Template = "chat"
    """chat: the tokenizer's chat template. plain: the contents of the messages as they are, for models without a
    template."""

    max_prompt_tokens: int = 2048
    """Longest prompt in tokens; longer ones are dropped and counted."""

    deduplicate: bool = True
    """Keep one of several equal (prompt, answer) rows, and say how many there were."""

    shuffle_seed: int = 0
    """Seed of the order of prompts, apart from run.seed so that two runs may share the order."""

    max_epochs: int = 0
    """Passes over the prompts after which the data is exhausted (see rollout.on_exhausted). 0: no limit."""


class RolloutConfig(Section):
    """How responses are sampled and which groups are trained on."""

    engine: Engine = "embedded"
    """embedded: transformers generation inside the trainer's processes, fed by the weight bridge. sglang: SGLang
    servers."""

    prompts_per_step: int = 512
    """Groups (prompts) of one rollout batch, i.e. of one train step."""

    group_size: int = 16
    """Responses per prompt."""

    max_response_tokens: int = 1024
    """Longest response in tokens, stop token included; a longer one is cut and counts as truncated."""

    temperature: float = 1.0
    """Sampling temperature of training rollouts; the trainer's log-probs are taken at the same temperature."""

    top_p: float = 1.0
    """Nucleus mass. Below 1 the engine renormalises what the trainer does not: refused unless accept_bias."""

    top_k: int = 0
    """Only the k likeliest tokens; 0: off. Above 0 it biases like top_p < 1: refused unless accept_bias."""

    accept_bias: bool = False
    """Allow top_p < 1 or top_k > 0 in training rollouts, knowing that the importance ratios are then wrong."""

    oversample: float = 1.0
    """Prompts in flight at a time as a multiple of prompts_per_step. Above 1 fills a batch sooner when many groups are
    filtered, at the price of surplus groups."""

    max_generation_rounds: int = 10
    """A generation round is prompts_per_step * oversample prompts; after this many in one step collecting ends as
    on_exhausted says. 0: no limit."""

    on_exhausted: OnExhausted = "train_partial"
    """What happens when rounds or prompts run out: train on the full groups there are, stop cleanly with a checkpoint,
    or fail."""

    filter_groups: bool = True
    """Dynamic sampling: keep a group only if accuracy_min < mean accuracy < accuracy_max, and refill the batch."""

    accuracy_min: float = 0.0
    """Exclusive lower bound on the mean accuracy (0..1, never the shaped reward) of a group that is kept."""

    accuracy_max: float = 1.0
    """Exclusive upper bound on the mean accuracy of a group that is kept."""

    max_staleness: int = 0
    """Policy versions a carried-over surplus group may be behind when it is trained; older ones are dropped and their
    prompts queued again. Above 0 needs algorithm.off_policy.correction."""

    partial: Partial = "restart"
    """What becomes of responses that are unfinished when a batch is full: restart their prompts later, or continue them
    from where they are in the next generation step, each token with the version that sampled it. continue has an effect
    within max_staleness only."""

    slots_per_rank: int = 64
    """Responses one rank of the embedded engine generates at a time. Raise it while memory allows."""


class OverlongPunishmentConfig(Section):
    """Soft overlong punishment (DAPO eq. 13): 0 up to max_length - cache_length tokens, falling linearly to -factor at
    max_length."""

    enabled: bool = False
    """Add the punishment to the reward."""

    max_length: int = 20480
    """Response tokens at which the punishment is full. Usually rollout.max_response_tokens."""

    cache_length: int = 4096
    """Response tokens over which the punishment grows, ending at max_length."""

    factor: float = 1.0
    """Full punishment as a positive number."""


class RewardConfig(Section):
    """The verifier, the processes it runs in, and what is added to its word."""

    verifier: str = "dapo"
    """Preset dapo (bit-compatible with the published scorer) or lenient (math-verify), or a user's function as
    "package.module:function"."""

    shadow_verifier: str = ""
    """A second verifier whose disagreements are logged and that never changes a reward. "": none."""

    answer_format: str = "auto"
    """What the start-up self-test takes the prompts to ask for: auto reads it from them, answer_line ("Answer: ..."), boxed, or a
    template of your own with {answer}."""

    num_workers: int = 1
    """Verifier processes. Raise it when the reward phase shows in the step time."""

    timeout_seconds: float = 10.0
    """Seconds one answer may take in a worker before that worker is killed and the outcome is "timeout"."""

    memory_limit_mb: int = 2048
    """Memory limit of one verifier process, in MiB."""

    correct: float = 1.0
    """Reward of a correct answer."""

    incorrect: float = -1.0
    """Reward of any other answer."""

    overlong_punishment: OverlongPunishmentConfig = OverlongPunishmentConfig()
    """Soft punishment of long responses, added to the reward."""

    overlong_filter: bool = False
    """Leave truncated responses out of the loss (their tokens leave the denominator, too). Not the same as the
    punishment."""

    confirm_both_overlong: bool = False
    """Allow overlong_filter together with overlong_punishment, knowing that truncated responses then never feel the
    punishment."""


class OffPolicyConfig(Section):
    """Correction for the gap between the engine that sampled and the trainer: weight w from old_logprobs -
    rollout_logprobs."""

    correction: Correction = "none"
    """tis: w cut to [low, high]. mis: w inside [low, high], 0 outside, usually with low = 0. icepop: the same with both
    tails dropped (low above 0)."""

    level: CorrectionLevel = "token"
    """w per token, per sequence (product over tokens) or per sequence as the geometric mean over tokens."""

    low: float = 0.0
    """Lower bound of w."""

    high: float = 2.0
    """Upper bound of w."""

    normalise: bool = False
    """Divide the weights by their mean over the optimizer mini-batch, after cutting."""


class AlgorithmConfig(Section):
    """Advantage, policy loss and its aggregation."""

    name: AlgorithmName = "dapo"
    """Which algorithm puts the parts together. dapo: advantages from groups. ppo, vapo: from a critic ([critic],
    [advantage_estimation]); the two differ in their switches alone. tppo: the same over windows of responses
    ([window])."""

    advantage: AdvantageName = "grpo"
    """For name = dapo. grpo: (reward - group mean) / group std. dr_grpo: without the std. rloo: leave-one-out mean. reinforce_baseline:
    group mean subtracted, then scaled by the std of the batch."""

    grpo_std: GrpoStd = "unbiased"
    """Divisor of the group's standard deviation: G - 1 (unbiased) or G (biased). For advantage = grpo."""

    policy_loss: PolicyLossName = "clip_higher"
    """clip_higher: per-token ratio, bounds apart (DAPO). ppo_clip: the same with equal bounds. gspo / gspo_token:
    per-sequence ratio. cispo: clipped ratio as a constant weight, so that every token keeps its gradient."""

    clip_ratio_low: float = 0.2
    """The ratio is clipped below at 1 - clip_ratio_low."""

    clip_ratio_high: float = 0.28
    """The ratio is clipped above at 1 + clip_ratio_high; above clip_ratio_low it is DAPO's clip-higher."""

    dual_clip: float = 10.0
    """Bound c of the loss for negative advantages: at most c * |advantage|. For clip_higher and ppo_clip. 0: off."""

    aggregation: Aggregation = "token_mean"
    """How token losses become one number over the whole optimizer step (exact under any layout and packing).
    token_mean: all trained tokens weigh the same. sample_mean: all responses do. per_group: token mean within a group,
    then mean over groups. dr_grpo: sum / (responses * aggregation_length). seq_sum_mean: mean over responses of their
    sums. rollout_token_mean: sum / trained tokens of the whole rollout batch * its mini-batches (T-PPO's code)."""

    aggregation_length: int = 0
    """Constant length L of aggregation = dr_grpo, in tokens. 0: rollout.max_response_tokens."""

    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus. Entropy is logged either way."""

    kl_loss_coefficient: float = 0.0
    """Weight of the KL loss towards the initial policy. Above 0 the reference policy is kept in memory."""

    kl_estimator: KlEstimator = "k3"
    """Per-token estimator of the KL loss; k2 alone has the gradient of the reverse KL (k1 has none and is only a
    metric)."""

    kl_reward_coefficient: float = 0.0
    """Weight of the KL towards the initial policy that is taken off the reward of every token (PPO from human feedback).
    For algorithms with a critic. Above 0 the reference policy is kept in memory."""

    kl_reward_estimator: RewardKlEstimator = "k1"
    """Its per-token estimator."""

    positive_example_coefficient: float = 0.0
    """Weight of the language-model loss on correct responses, normalised over the optimizer step (VAPO, eq. 9 and 10:
    0.1). For algorithms with a critic."""

    off_policy: OffPolicyConfig = OffPolicyConfig()
    """Correction for the gap between the policy that sampled and the one that is trained."""


class TrainingConfig(Section):
    """How a rollout batch becomes optimizer steps."""

    mini_batch_prompts: int = 32
    """Groups of one optimizer step; must divide rollout.prompts_per_step."""

    epochs: int = 1
    """Passes over a rollout batch."""

    micro_batch_tokens: int = 24576
    """Padded tokens of one packed micro-batch of one data-parallel rank (before context parallelism cuts it). Bounds
    activation memory; must hold the longest prompt and response."""

    shuffle: bool = True
    """Shuffle the responses of a rollout batch before they are cut into mini-batches."""

    max_consecutive_skips: int = 3
    """Optimizer steps in a row that may be skipped for a non-finite loss or gradient before the run ends with an
    error."""


class CheckpointConfig(Section):
    """Exact resume, and the exported model."""

    folder: str = ""
    """Where checkpoints are kept; relative to the current directory. "": <run.folder>/checkpoints."""

    interval: int = 20
    """Train steps between checkpoints. 0: only at the end and on a signal."""

    keep: int = 2
    """Newest valid checkpoints kept; an older one is deleted only after a newer one is valid."""

    resume: Resume = "auto"
    """auto: continue from the newest valid checkpoint if there is one. never: fail if the folder holds one. must: fail
    if it holds none."""

    export_huggingface: bool = True
    """Write the trained policy as a Hugging Face folder, <run.folder>/huggingface, when the run ends."""


class EvaluationConfig(Section):
    """Evaluation on data.eval_paths: avg@k, pass@k, cons@k."""

    interval: int = 0
    """Train steps between evaluations. 0: none in between."""

    num_samples: int = 32
    """Responses per problem (k)."""

    temperature: float = 1.0
    """Sampling temperature; 0 is greedy."""

    top_p: float = 0.7
    """Nucleus mass."""

    top_k: int = 0
    """Only the k likeliest tokens; 0: off."""

    max_response_tokens: int = 0
    """Longest response in tokens. 0: rollout.max_response_tokens."""

    at_start: bool = True
    """Evaluate the initial policy."""

    at_end: bool = True
    """Evaluate the trained policy."""


class TelemetryConfig(Section):
    """What is recorded of a run."""

    tensorboard: bool = True
    """Write TensorBoard events to <run.folder>/tensorboard, x axis the train step. metrics.jsonl is written either
    way."""

    samples_per_step: int = 64
    """Responses written to samples.jsonl per train step. 0: none."""

    progress: bool = True
    """Live progress display on a terminal (plain log lines elsewhere)."""

    dump_batches: int = 0
    """Train steps between dumps of a whole rollout batch, for replay through the trainer alone. 0: none."""


class MismatchConfig(Section):
    """Gate on the gap between engine and trainer log-probs: mean |old_logprobs - rollout_logprobs| over trained tokens,
    in nats."""

    step0_max_mean_abs: float = 0.02
    """The run ends with an error if the gap of the first batch is larger: engine and trainer do not hold the same
    model."""

    alarm: float = 0.05
    """A warning names the step when the gap of a later batch is larger."""

    trend_factor: float = 2.0
    """A warning also comes when the gap, smoothed over some steps, has grown by this factor within the last hundred."""

    trend_floor: float = 1e-3
    """Smoothed gaps up to this many nats are never a trend."""


class Config(Section):
    """Everything a run is told. Sections are read by name; functions below the trainer take plain values, never this
    tree."""

    run: RunConfig = RunConfig()
    """What the run is called, where it writes and when it ends."""

    model: ModelConfig
    """The policy that is trained."""

    precision: PrecisionConfig = PrecisionConfig()
    """How linear layers multiply."""

    parallel: ParallelConfig = ParallelConfig()
    """How model and batch are cut over processes."""

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

    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints and export."""

    evaluation: EvaluationConfig = EvaluationConfig()
    """Held-out evaluation."""

    telemetry: TelemetryConfig = TelemetryConfig()
    """Metrics, samples, progress."""

    mismatch: MismatchConfig = MismatchConfig()
    """Gate on the engine-trainer gap."""

    @property
    def has_critic(self) -> bool:
        return self.algorithm.name != "dapo"

    @property
    def policy_starts_at(self) -> int:
        """The first train step, from 0, in which the policy learns; its schedule counts from there."""
        return self.critic.warmup_train_steps if self.has_critic else 0

    @property
    def critic_parallel(self) -> ParallelConfig:
        """How the critic is cut: what it does not say is as the policy's."""
        asked, policy = self.critic.parallel, self.parallel
        tensor, pipeline = asked.tensor or policy.tensor, asked.pipeline or policy.pipeline
        same_stages = pipeline == policy.pipeline
        return policy.model_copy(
            update={
                "tensor": tensor,
                "pipeline": pipeline,
                "virtual_pipeline": asked.virtual_pipeline or (policy.virtual_pipeline if same_stages else 1),
                "context": asked.context or policy.context,
                "expert": asked.expert or policy.expert,
                "sequence_parallel": policy.sequence_parallel and tensor > 1,
            }
        )

    @property
    def checkpoint_folder(self) -> Path:
        return Path(self.checkpoint.folder) if self.checkpoint.folder else self.run.folder / "checkpoints"

    @property
    def evaluation_response_tokens(self) -> int:
        return self.evaluation.max_response_tokens or self.rollout.max_response_tokens

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest prompt with the longest response, of training or evaluation."""
        return self.data.max_prompt_tokens + max(self.rollout.max_response_tokens, self.evaluation_response_tokens)

    @property
    def mismatch_gate(self) -> float:
        """Largest mean gap, in nats, between engine and trainer on the first batch."""
        if self.rollout.engine == "sglang" and self.sglang.quantization == "fp8":
            return self.sglang.fp8_step0_max_mean_abs
        return self.mismatch.step0_max_mean_abs

    @property
    def aggregation_length(self) -> int:
        return self.algorithm.aggregation_length or self.rollout.max_response_tokens

    @property
    def num_processes(self) -> int:
        """Processes this run asks for when no outside launcher decides."""
        p = self.parallel
        return (p.num_processes or p.tensor * p.pipeline * p.context) + self.num_critic_processes

    @property
    def num_critic_processes(self) -> int:
        """Processes that hold nothing but the critic: the last ranks of the run."""
        return self.critic.parallel.num_processes if self.has_critic else 0


def _sections(model: type[BaseModel], prefix: str) -> list[tuple[str, type[BaseModel]]]:
    found = []
    for name, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            found += [(prefix + name, info.annotation), *_sections(info.annotation, f"{prefix}{name}.")]
    return found


@cache
def section_types() -> Mapping[str, type[BaseModel]]:
    """Every section by dotted path ("" is the root, "algorithm.off_policy" a nested one)."""
    return MappingProxyType({"": Config, **dict(_sections(Config, ""))})


@cache
def leaf_fields() -> Mapping[str, FieldInfo]:
    """Every field that holds a value (not a section), by dotted path, in the order of the schema."""
    sections = section_types()
    leaves = {}
    for path, model in sections.items():
        for name, info in model.model_fields.items():
            dotted = f"{path}.{name}" if path else name
            if dotted not in sections:
                leaves[dotted] = info
    return MappingProxyType(leaves)
