"""Sections for everything after a group is scored: advantages, losses, optimizer steps, the critic and T-PPO's
windows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from megatron_dapo.config.loss_schema import PolicyLossConfig, PpoClipLossConfig
from megatron_dapo.config.model_schema import CriticOptimizerConfig, SftOptimizerConfig
from megatron_dapo.config.section import (
    AtLeastOne,
    Bounds,
    Fraction,
    FunctionPath,
    InputPath,
    NonNegativeFloat,
    NonNegativeInt,
    Offload,
    PositiveFloat,
    PositiveInt,
    Rule,
    Section,
)

AlgorithmName = Literal["dapo", "ppo", "vapo", "tppo", "sft"]
GrpoStd = Literal["unbiased", "biased"]
KlEstimator = Literal["k2", "k3"]
RewardKlEstimator = Literal["k1", "k2", "k3"]
Correction = Literal["none", "tis", "mis", "icepop"]
Stream = Literal["off", "mini_batches"]
OldLogprobs = Literal["snapshot", "rollout"]
FrozenPart = Literal["attention"]
CorrectionLevel = Literal["token", "sequence", "geometric"]


class GrpoAdvantageConfig(Section):
    """(reward - group mean) / group standard deviation (GRPO, DAPO)."""

    name: Literal["grpo"] = "grpo"
    """Name of the advantage, used with algorithm.name = dapo. grpo: (reward - group mean) / group std. gdpo: the sum of
    those of several rewards, scaled over the batch. dr_grpo: without the std. rloo: reward minus the mean of the group's other rewards. maxrl: the group mean in place of the std, for
    rewards from 0 to 1. reinforce_baseline: group mean subtracted, then
    scaled over the batch. reinforce_pp: only scaled over the batch, for one response per prompt."""

    std: GrpoStd = "unbiased"
    """Divisor of the group's standard deviation: G - 1 (unbiased) or G (biased)."""

    eps: NonNegativeFloat = 1e-6
    """Added to the standard deviation."""


class GdpoAdvantageConfig(GrpoAdvantageConfig):
    """The weighted sum of GRPO's advantages of several rewards, scaled over the batch (GDPO, arXiv 2601.05242). A reward
    that varies little is not lost in the sum of all."""

    name: Literal["gdpo"] = "gdpo"  # type: ignore[assignment]
    """Name of the advantage."""

    weights: Mapping[str, NonNegativeFloat] = {}
    """Weight of each reward, by the names under reward/ in the metrics: a reward function's parts if they add up to its
    score, overlong and others. 1 for those not named."""


class DrGrpoAdvantageConfig(Section):
    """Reward - group mean (Dr. GRPO, arXiv 2503.20783)."""

    name: Literal["dr_grpo"] = "dr_grpo"
    """Name of the advantage."""


class RlooAdvantageConfig(Section):
    """Reward - mean of the group's other rewards (RLOO, arXiv 2402.14740)."""

    name: Literal["rloo"] = "rloo"
    """Name of the advantage."""


class MaxRlAdvantageConfig(Section):
    """(Reward - group mean) / group mean (MaxRL, arXiv 2602.02710)."""

    name: Literal["maxrl"] = "maxrl"
    """Name of the advantage."""


class ReinforceBaselineAdvantageConfig(Section):
    """Reward - group mean, scaled over the batch (REINFORCE++-baseline, arXiv 2501.03262)."""

    name: Literal["reinforce_baseline"] = "reinforce_baseline"
    """Name of the advantage."""

    variant: Literal["scale_only", "paper"] = "scale_only"
    """paper: subtract the batch's mean before dividing by its standard deviation. scale_only: only divide; groups of
    equal rewards then keep advantage 0 even if lengths differ."""

    weighting: Literal["token", "sequence"] = "token"
    """Unit of the batch moments: trained tokens or responses."""

    std: GrpoStd = "biased"
    """Divisor of the batch's variance: n (biased) or n - 1 (unbiased)."""

    scale: Literal["variance_floor", "variance_plus_eps", "std_plus_eps"] = "variance_floor"
    """Placement of eps, which keeps the division finite: 1 / sqrt(max(variance, eps)), 1 / sqrt(variance + eps), 1 / (std + eps)."""

    eps: NonNegativeFloat = 1e-8
    """Keeps the division by the standard deviation finite, as scale says."""


class ReinforcePpAdvantageConfig(ReinforceBaselineAdvantageConfig):
    """Reward scaled over the batch, without a group baseline (REINFORCE++ with one response per prompt). Set its KL
    term with kl_loss_coefficient."""

    name: Literal["reinforce_pp"] = "reinforce_pp"  # type: ignore[assignment]
    """Name of the advantage."""

    variant: Literal["scale_only", "paper"] = "paper"
    """paper: subtract the batch's mean before dividing by its standard deviation. scale_only: only divide."""


class FunctionAdvantageConfig(Section):
    """A user-defined advantage: name = "package.module:function" or "path/to/file.py:function"."""

    name: Literal["function"] = "function"
    """Name of the advantage."""

    function: Annotated[FunctionPath, Bounds(min_length=1)] = ""
    """Function of `AdvantageInputs` that returns an advantage for each response; see docs/python.md. An advantage name
    that contains a colon sets it. A file path is relative to the recipe's directory."""


AdvantageConfig = (
    GrpoAdvantageConfig
    | GdpoAdvantageConfig
    | DrGrpoAdvantageConfig
    | RlooAdvantageConfig
    | MaxRlAdvantageConfig
    | ReinforceBaselineAdvantageConfig
    | ReinforcePpAdvantageConfig
    | FunctionAdvantageConfig
)


class OffPolicyConfig(Section):
    """Correction for the gap between the engine that sampled and the trainer: a weight w computed from old_logprobs -
    rollout_logprobs."""

    correction: Correction = "none"
    """tis: w clipped to [low, high]. mis: w inside [low, high], 0 outside, usually with low = 0. icepop: like mis, with
    both tails dropped (low above 0)."""

    level: CorrectionLevel = "token"
    """w per token, per sequence (product over tokens) or per sequence as the geometric mean over tokens."""

    low: Fraction = 0.0
    """Lower bound of w."""

    high: AtLeastOne = 2.0
    """Upper bound of w."""

    batch_normalize: bool = False
    """Divide the weights by their mean over the optimizer mini-batch, after clipping. The mean is over trained tokens;
    verl takes it over sequences for level = sequence, which differs a lot when lengths do."""

    def broken_rules(self) -> Iterator[Rule]:
        if self.correction == "icepop" and not self.low > 0:
            yield Rule(
                "algorithm.off_policy.low > 0",
                'set algorithm.off_policy.low = 0.5, or algorithm.off_policy.correction = "mis"',
                when='algorithm.off_policy.correction == "icepop"',
                reason="icepop drops both tails",
            )


class GeneralizedKlConfig(Section):
    """Generalized KL between the initial policy and the trained one in the loss (GKL, arXiv 2503.08038), over the whole
    vocabulary at every trained token:

        coefficient * (weighted_mse * 1/2 Var_q(log p_ref - log p) + cross_entropy * -sum p_ref log p),  q ~ weights^gamma

    Its value is not a KL, but its gradient is that of one: of KL(ref || policy) with weighted_mse = 0, and of KL(policy
    || ref) with cross_entropy = 0, weigh_by = "actor" and gamma = 1. The paper's per-class weights have no meaning for
    text and are left out."""

    coefficient: NonNegativeFloat = 0.0
    """Weight of both terms in the loss, e.g. 1e-3. Above 0, the reference policy is kept in memory and runs a forward
    pass before each optimizer step. 0: off."""

    gamma: NonNegativeFloat = 0.5
    """Exponent of the probabilities that weight the vocabulary: 1 keeps them, 0 weights all tokens equally."""

    weigh_by: Literal["reference", "actor"] = "reference"
    """The model whose probabilities weight the vocabulary; no gradient flows through the weights."""

    weighted_mse: NonNegativeFloat = 1.0
    """Weight of the weighted squared error of log-probs."""

    cross_entropy: NonNegativeFloat = 1.0
    """Weight of the cross-entropy towards the reference."""

    def broken_rules(self) -> Iterator[Rule]:
        if self.coefficient > 0 and not self.weighted_mse + self.cross_entropy > 0:
            yield Rule(
                "algorithm.gkl.weighted_mse + algorithm.gkl.cross_entropy > 0",
                "set algorithm.gkl.weighted_mse = 1.0 and algorithm.gkl.cross_entropy = 1.0, or algorithm.gkl.coefficient = 0.0",
                when="algorithm.gkl.coefficient > 0",
            )


class AlgorithmConfig(Section):
    """Advantage, policy loss and its aggregation."""

    name: AlgorithmName = "dapo"
    """Algorithm that combines the parts. dapo: advantages from groups. ppo, vapo: advantages from a critic ([critic],
    [advantage_estimation]); the two differ only in their switches. tppo: the same over windows of responses
    ([window]). sft: maximum likelihood of the responses in data.train_paths, set by `megatron-dapo sft`; of this section
    it uses only loss.aggregation."""

    advantage: AdvantageConfig = Field(default=GrpoAdvantageConfig(), discriminator="name")
    """Group-relative advantage: a name, or a table with a name and its keys. Used with name = dapo."""

    credit: Literal["episode", "turn", "anchor"] = "episode"
    """What an advantage of algorithm.advantage is of, with an environment that rewards turns. episode: the sum of its
    rewards, for all its tokens. turn: each turn has the rewards from it on, compared with the turns of its group. anchor:
    the episode's, plus a comparison of the turns of a group that have one context (GiGPO). Used with name = dapo."""

    turn_discount: Fraction = 1.0
    """Discount from a turn to the one before, under credit = turn and anchor."""

    loss: PolicyLossConfig = Field(default=PpoClipLossConfig(), discriminator="name")
    """The policy loss: a name, or a table with a name and its keys."""

    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of the entropy bonus. Entropy is logged either way."""

    kl_loss_coefficient: NonNegativeFloat = 0.0
    """Weight of the KL loss towards the initial policy. Above 0, the reference policy is kept in memory."""

    kl_estimator: KlEstimator = "k3"  # GRPO's
    """Per-token estimator of the KL loss. Only k2 has the gradient of the reverse KL (k1 has none and is only a
    metric)."""

    gkl: GeneralizedKlConfig = GeneralizedKlConfig()
    """Generalized KL in the loss, in addition to or instead of kl_loss_coefficient."""

    kl_reward_coefficient: NonNegativeFloat = 0.0
    """Weight of the KL towards the initial policy that is subtracted from every token's reward (PPO from human
    feedback). For algorithms with a critic. Above 0, the reference policy is kept in memory."""

    kl_reward_estimator: RewardKlEstimator = "k1"
    """Per-token estimator of that KL."""

    positive_example_coefficient: NonNegativeFloat = 0.0
    """Weight of the language-model loss on correct responses, normalized over the optimizer step (VAPO, eq. 9 and 10:
    0.1). For algorithms with a critic."""

    off_policy: OffPolicyConfig = OffPolicyConfig()
    """Correction for the gap between the policy that sampled and the one that is trained."""

    def broken_rules(self) -> Iterator[Rule]:
        if self.advantage.name == "function" and self.name != "dapo":
            yield Rule(
                'algorithm.name == "dapo"',
                'set algorithm.name = "dapo", or algorithm.advantage.name = "grpo"',
                path="algorithm.advantage.name",
                when='algorithm.advantage.name == "function"',
                reason="a critic makes the advantages of the others",
            )
        if self.loss.name == "gspo" and self.off_policy.correction != "none" and self.off_policy.level == "token":
            yield Rule(
                'algorithm.off_policy.level != "token"',
                'set algorithm.off_policy.level = "geometric" or "sequence", or algorithm.loss.name = "gspo_token"',
                when='algorithm.off_policy.correction != "none" and algorithm.loss.name == "gspo"',
                reason="gspo takes one weight a sequence",
            )
        if not self.loss.needs_old_logprobs and self.off_policy.correction != "none":
            yield Rule(
                'algorithm.off_policy.correction == "none"',
                'set algorithm.off_policy.correction = "none"',
                when=f'algorithm.loss.name == "{self.loss.name}"',
                reason="its ratio is to the policy that sampled, so a correction would count twice",
            )
        # Terms of rewards and losses that only the algorithms with a critic compute.
        for path in ("kl_reward_coefficient", "positive_example_coefficient"):
            if self.name == "dapo" and getattr(self, path) != 0:
                yield Rule(
                    f"algorithm.{path} == 0",
                    f'set algorithm.{path} = 0, or algorithm.name = "vapo"',
                    when='algorithm.name == "dapo"',
                )

    @property
    def needs_reference(self) -> bool:
        """True if a term compares the policy with the initial one."""
        return max(self.kl_loss_coefficient, self.kl_reward_coefficient, self.gkl.coefficient) > 0


class TrainingConfig(Section):
    """Mini-batches, epochs and micro-batches of the policy's optimizer steps."""

    mini_batch_prompts: PositiveInt = 32  # 16 optimizer steps per rollout batch, as in DAPO's paper
    """Groups per optimizer step; must divide rollout.prompts_per_step."""

    epochs: PositiveInt = 1
    """Passes over a rollout batch."""

    micro_batch_tokens: PositiveInt = 24576  # holds DAPO's 2,048 prompt and 20,480 response tokens
    """Padded tokens of one packed micro-batch on one data-parallel rank, before context parallelism splits it. Bounds
    activation memory; must hold the longest prompt plus response."""

    shuffle: bool = True
    """Shuffle the responses of a rollout batch before they are split into mini-batches."""

    stream: Stream = "off"
    """mini_batches: train a mini-batch as soon as its groups are decided, in order of start, while the engines generate
    the rest of the batch. The step is the same as with "off" under equal settings; engines on their own devices gain
    time, others none. Each rank keeps a copy of its weights in host memory unless old_logprobs = "rollout"."""

    old_logprobs: OldLogprobs = "snapshot"
    """Denominator of the policy ratio. snapshot: the policy at the begin of the step, computed by the trainer. rollout: the
    engine's log-probs, which saves a forward pass; the ratio then includes the mismatch between engine and trainer, and
    the mismatch metrics are those of the step's first mini-batch."""

    max_consecutive_skips: PositiveInt = 3
    """Optimizer steps in a row that may be skipped for a non-finite loss or gradient before the run ends with an
    error."""


ValueLossName = Literal["squared", "clipped"]
ValueAggregation = Literal["token_mean", "sample_mean"]
SftAggregation = ValueAggregation
RoundStart = Literal["previous", "first"]
LambdaRuleName = Literal["fixed", "length_adaptive", "window"]


class CriticParallelConfig(Section):
    """Processes and parallel sizes of the critic; its data-parallel size follows. They may differ from the policy's."""

    num_processes: NonNegativeInt = 0
    """Processes that hold only the critic, started in addition to the policy's; the last ranks of the run. Critic and
    policy then update at the same time. 0: the critic shares the policy's processes, and they update in turn."""

    tp_size: NonNegativeInt = 0
    """Ranks every weight matrix is cut over. 0: parallel.tp_size."""

    pp_size: NonNegativeInt = 0
    """Stages the layers are cut into. 0: parallel.pp_size."""

    vpp_size: NonNegativeInt = 0
    """Model chunks per pipeline stage. 0: parallel.vpp_size if the critic has as many stages as the policy, otherwise
    1."""

    cp_size: NonNegativeInt = 0
    """Ranks every sequence is cut over. 0: parallel.cp_size."""

    ep_size: NonNegativeInt = 0
    """Ranks experts are cut over. 0: parallel.ep_size."""


class CriticConfig(Section):
    """The critic of ppo, vapo and tppo: the policy's layers with a head that outputs one value per token."""

    path: str = ""
    """Hugging Face directory it starts from: a policy (with a new head), a reward model, or a critic, with the policy's
    architecture and tokenizer. Relative: from the current directory, where pretraining wrote it. "": model.path."""

    head_scale: NonNegativeFloat = 0.01
    """Approximate magnitude of the values of a new head."""

    parallel: CriticParallelConfig = CriticParallelConfig()  # no etp_size: it is the policy's
    """Layout of the critic over the processes."""

    offload: Offload = "none"
    """State moved to host memory while the critic is idle: nothing, its optimizer state and gradients, or those and its
    weights. For a critic that shares the policy's processes."""

    optimizer: CriticOptimizerConfig = CriticOptimizerConfig()
    """AdamW of the critic."""

    freeze: tuple[FrozenPart, ...] = ()
    """Parts that keep the weights they start with. attention: projections and norms of every attention layer, as in SAO
    (arXiv 2607.07508). They have no gradients and no optimizer state."""

    megatron: Mapping[str, Any] = {}
    """Fields of megatron-core's configuration for the critic; they override those of [megatron]."""

    mini_batch_prompts: NonNegativeInt = 0
    """Groups per optimizer step of the critic. 0: training.mini_batch_prompts."""

    epochs: PositiveInt = 1
    """Passes over a rollout batch."""

    micro_batch_tokens: NonNegativeInt = 0
    """Padded tokens of one packed micro-batch. 0: training.micro_batch_tokens."""

    loss: ValueLossName = "clipped"
    """squared: (V - target)^2 / 2. clipped: if V has moved beyond its bounds since the advantages were estimated, it is
    trained only if it is further from the target than the bound is (PPO)."""

    clip_value_low: PositiveFloat = 0.5  # a quarter of the default distance between correct and incorrect rewards
    """Lower bound of V: V_old - clip_value_low, in units of the return."""

    clip_value_high: PositiveFloat = 0.5
    """Upper bound of V: V_old + clip_value_high."""

    aggregation: ValueAggregation = "token_mean"
    """token_mean: all tokens of the optimizer step weigh the same. sample_mean: all responses do."""

    warmup_train_steps: NonNegativeInt = 0
    """Train steps at the beginning in which only the critic learns; the policy's learning-rate schedule starts after
    them."""

    # Explained variance is at most 1 and has no lower bound.
    explained_variance_alarm: Annotated[float, Bounds(le=1)] = -1.0
    """Warn, naming the step, when the critic explains less than this share of the returns' variance. Values start to
    help above 0."""


class AdvantageEstimationConfig(Section):
    """Generalized advantage estimation (arXiv 1506.02438), with separate lambdas for policy and critic (VC-PPO,
    VAPO)."""

    gamma: Fraction = 1.0
    """Discount per token."""

    lambda_rule: LambdaRuleName = "fixed"
    """Lambda rule of the policy's advantages. fixed: policy_lambda. length_adaptive: 1 - 1 / (lambda_alpha * length),
    at least lambda_floor (VAPO, eq. 5). window: the same with the length so far, plus half a window if the response
    continues (T-PPO)."""

    policy_lambda: Fraction = 0.95
    """Lambda under lambda_rule = fixed."""

    lambda_alpha: PositiveFloat = 0.05  # VAPO's paper
    """Sum of the weights of the TD errors as a share of the length, under lambda_rule = length_adaptive and window."""

    lambda_floor: Annotated[float, Bounds(ge=0, lt=1)] = 0.0
    """Smallest lambda under lambda_rule = length_adaptive and window. Without a floor, the rule is negative below 1 /
    lambda_alpha tokens; VAPO names no floor, T-PPO's authors use 0.95."""

    critic_lambda: Fraction = 1.0  # below 1, long responses hide a late reward from early values (VC-PPO)
    """Lambda of the critic's targets. 1: Monte-Carlo returns (decoupled GAE). The value of policy_lambda under a fixed
    rule: plain PPO. tppo needs 1."""

    whiten: bool = True
    """Shift and scale the advantages of a rollout batch to mean 0 and variance 1 over its trained tokens."""

    clip: NonNegativeFloat = 0.0
    """Largest magnitude of an advantage, after whitening. T-PPO's authors use 10. 0: off."""


class WindowConfig(Section):
    """Windows of tppo (arXiv 2506.15050): the tokens that one generation step adds to a response, which continues in
    the next."""

    tokens: PositiveInt = 8192
    """Tokens per window; of an episode, sampled ones."""

    ignored_tail_tokens: NonNegativeInt = 8
    """Last tokens of a window that are left out of the policy's loss if the response continues, because their
    advantages rest on a single value."""

    windows_per_step: NonNegativeInt = 0
    """Windows trained per step, chosen by priority: groups with mixed outcomes first. 0: all."""


class ValuePretrainingConfig(Section):
    """Data and stopping rule of `megatron-dapo pretrain-value`, in which the critic learns the Monte-Carlo returns of
    the fixed policy (VC-PPO)."""

    train_paths: tuple[InputPath, ...] = ()
    """Prompts to sample from, e.g. a set with a wide range of difficulty. Relative: from the recipe's directory. Empty:
    data.train_paths."""

    min_steps: Annotated[int, Bounds(ge=2)] = 20  # a slope needs two points
    """Fewest steps (rollout batches)."""

    max_steps: PositiveInt = 150
    """Most steps."""

    explained_variance_slope: NonNegativeFloat = 0.005
    """Stop when explained variance has risen by less than this in total over the last min_steps steps and the loss is
    flat as well."""

    loss_slope: NonNegativeFloat = 0.05
    """The value loss is flat if it falls by less than this share over the last min_steps steps."""

    def broken_rules(self) -> Iterator[Rule]:
        if self.min_steps > self.max_steps:
            yield Rule(
                "value_pretraining.min_steps <= value_pretraining.max_steps",
                f"set value_pretraining.max_steps = {self.min_steps} or more",
            )


class SftConfig(Section):
    """Data and optimizer steps of `megatron-dapo sft` (supervised fine-tuning): the policy learns given responses by maximum
    likelihood."""

    train_paths: tuple[InputPath, ...] = ()
    """Parquet or JSONL files with the columns prompt and response, or messages. Relative: from the recipe's directory. Empty:
    data.train_paths."""

    batch_size: PositiveInt = 64
    """Responses per optimizer step, which is also a train step."""

    epochs: PositiveInt = 2
    """Passes over the data; rows * epochs / batch_size, rounded up, is the number of train steps."""

    aggregation: SftAggregation = "token_mean"
    """Reduction of the tokens' negative log-likelihood over the whole optimizer step. token_mean: all response tokens weigh the
    same. sample_mean: all responses do."""

    optimizer: SftOptimizerConfig = SftOptimizerConfig()
    """AdamW of supervised fine-tuning; its schedule spans these train steps."""


class RoundsConfig(Section):
    """Stages of `megatron-dapo rounds`: fine-tuning on sft.train_paths if they are set, rounds of rejection sampling
    and fine-tuning on the kept responses, then training."""

    num_rounds: NonNegativeInt = 1
    """Rounds of sampling and fine-tuning."""

    start: RoundStart = "previous"
    """Model that a round's fine-tuning starts from. previous: the one that sampled. first: the one before the first round (as in
    ReST-EM, arXiv 2312.06585)."""

    train: bool = True
    """Train with the recipe's algorithm at the end."""
