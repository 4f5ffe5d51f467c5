"""Sections of everything after a scored group: advantages, losses, optimizer steps, the critic and its windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from megatron_dapo.config.model_schema import CriticOptimizerConfig, SftOptimizerConfig
from megatron_dapo.config.section import (
    AtLeastOne,
    Bounds,
    Fraction,
    InputPath,
    NonNegativeFloat,
    NonNegativeInt,
    Offload,
    PositiveFloat,
    PositiveInt,
    Section,
)

AlgorithmName = Literal["dapo", "ppo", "vapo", "tppo"]
Aggregation = Literal["token_mean", "sample_mean", "per_group", "dr_grpo", "seq_sum_mean", "rollout_token_mean"]
GrpoStd = Literal["unbiased", "biased"]
KlEstimator = Literal["k2", "k3"]
RewardKlEstimator = Literal["k1", "k2", "k3"]
Correction = Literal["none", "tis", "mis", "icepop"]
CorrectionLevel = Literal["token", "sequence", "geometric"]


class TokenLossConfig(Section):
    """Keys of every loss of single tokens: how token losses become one number."""

    aggregation: Aggregation = "token_mean"
    """Reduction of token losses to one number over the whole optimizer step (exact under any layout and packing).
    token_mean: all trained tokens weigh the same. sample_mean: all responses do. per_group: token mean within a group,
    then mean over groups. dr_grpo: sum / (responses * aggregation_length). seq_sum_mean: mean over responses of their
    sums. rollout_token_mean: sum / trained tokens of the whole rollout batch * its mini-batches (T-PPO's code)."""

    aggregation_length: NonNegativeInt = 0
    """Constant length L of aggregation = dr_grpo, in tokens. 0: rollout.max_response_tokens."""


class PpoClipLossConfig(TokenLossConfig):
    """Clipped ratio of every token: PPO and GRPO with equal bounds, DAPO (arXiv 2503.14476) with a wider upper one."""

    name: Literal["ppo_clip"] = "ppo_clip"
    """ppo_clip: ratios of tokens, clipped. gspo, gspo_token: ratios of sequences. cispo: the clipped ratio as a constant
    weight, so that every token keeps its gradient. Each has keys and defaults of its own."""

    clip_ratio_low: Fraction = 0.2
    """The ratio is clipped below at 1 - clip_ratio_low."""

    clip_ratio_high: NonNegativeFloat = 0.28
    """The ratio is clipped above at 1 + clip_ratio_high. Above clip_ratio_low it is DAPO's clip-higher; PPO and GRPO
    take clip_ratio_low."""

    # With c = 1 ratios just above 1 would lose their gradient, inside the clipping range.
    dual_clip: Annotated[Literal["off"] | float, Bounds(gt=1)] = "off"
    """Bound c of the loss for negative advantages: at most c * |advantage| (arXiv 1912.09729). Public scripts of DAPO
    and T-PPO take 10."""


class GspoLossConfig(Section):
    """Clipped ratio of whole sequences (GSPO, arXiv 2507.18071); the loss is the mean over responses."""

    name: Literal["gspo"] = "gspo"
    """Name of the policy loss."""

    # A sequence's ratio is a geometric mean over tokens, so it moves far less than a token's.
    clip_ratio_low: Fraction = 3e-4
    """The sequence's ratio is clipped below at 1 - clip_ratio_low."""

    clip_ratio_high: NonNegativeFloat = 4e-4
    """The sequence's ratio is clipped above at 1 + clip_ratio_high."""

    # Constants beside the keys of the other losses: GSPO is defined as a mean over responses.
    aggregation: ClassVar[Aggregation] = "sample_mean"
    aggregation_length: ClassVar[int] = 0


class GspoTokenLossConfig(GspoLossConfig):
    """GSPO with an advantage for every token (GSPO-token, arXiv 2507.18071, eq. 13)."""

    name: Literal["gspo_token"] = "gspo_token"  # type: ignore[assignment]
    """Name of the policy loss."""


class CispoLossConfig(TokenLossConfig):
    """Clipped ratio as a constant weight (CISPO, MiniMax-M1, arXiv 2506.13585)."""

    name: Literal["cispo"] = "cispo"
    """Name of the policy loss."""

    clip_ratio_low: Fraction = 1.0
    """The weight is at least 1 - clip_ratio_low. 1: no lower bound, as in the paper."""

    clip_ratio_high: NonNegativeFloat = 4.0
    """The weight is at most 1 + clip_ratio_high. The paper names no value; 4 bounds the weight at 5."""


class FunctionLossConfig(TokenLossConfig):
    """A loss of single tokens of the user's own: name = "package.module:function" or "path/to/file.py:function"."""

    name: Literal["function"] = "function"
    """Name of the policy loss."""

    function: Annotated[str, Bounds(min_length=1)] = ""
    """Function of `PolicyLossInputs` that returns a loss for each token, see docs/python.md. A name of the loss with a colon
    sets it. A file is relative to the current directory."""


PolicyLossConfig = PpoClipLossConfig | GspoLossConfig | GspoTokenLossConfig | CispoLossConfig | FunctionLossConfig


class GrpoAdvantageConfig(Section):
    """(reward - group mean) / group standard deviation (GRPO, DAPO)."""

    name: Literal["grpo"] = "grpo"
    """Name of the advantage, used with algorithm.name = dapo. grpo: (reward - group mean) / group std. dr_grpo: without the std. rloo: the mean of
    the others subtracted. reinforce_baseline: group mean subtracted, then scaled over the batch. reinforce_pp: scaled
    over the batch alone, for one response a prompt."""

    std: GrpoStd = "unbiased"
    """Divisor of the group's standard deviation: G - 1 (unbiased) or G (biased)."""

    eps: NonNegativeFloat = 1e-6
    """Added to the standard deviation."""


class DrGrpoAdvantageConfig(Section):
    """Reward - group mean (Dr. GRPO, arXiv 2503.20783)."""

    name: Literal["dr_grpo"] = "dr_grpo"
    """Name of the advantage."""


class RlooAdvantageConfig(Section):
    """Reward - mean of the group's other rewards (RLOO, arXiv 2402.14740)."""

    name: Literal["rloo"] = "rloo"
    """Name of the advantage."""


class ReinforceBaselineAdvantageConfig(Section):
    """Reward - group mean, scaled over the batch (REINFORCE++-baseline, arXiv 2501.03262)."""

    name: Literal["reinforce_baseline"] = "reinforce_baseline"
    """Name of the advantage."""

    variant: Literal["scale_only", "paper"] = "scale_only"
    """paper: subtract the batch's mean before dividing by its standard deviation. scale_only: only divide; groups of
    equal rewards then keep advantage 0 where lengths differ."""

    weighting: Literal["token", "sequence"] = "token"
    """Unit of the batch moments: trained tokens or responses."""

    std: GrpoStd = "biased"
    """Divisor of the batch's variance: n (biased) or n - 1 (unbiased)."""

    scale: Literal["variance_floor", "variance_plus_eps", "std_plus_eps"] = "variance_floor"
    """Placement of eps, which keeps the division finite: 1 / sqrt(max(variance, eps)), 1 / sqrt(variance + eps), 1 / (std + eps)."""

    eps: NonNegativeFloat = 1e-8
    """Keeps the division by the standard deviation finite, as scale says."""


class ReinforcePpAdvantageConfig(ReinforceBaselineAdvantageConfig):
    """Reward scaled over the batch, without a baseline of the group (REINFORCE++ with one response a prompt). Its KL
    term is kl_loss_coefficient's."""

    name: Literal["reinforce_pp"] = "reinforce_pp"  # type: ignore[assignment]
    """Name of the advantage."""

    variant: Literal["scale_only", "paper"] = "paper"
    """paper: subtract the batch's mean before dividing by its standard deviation. scale_only: only divide."""


class FunctionAdvantageConfig(Section):
    """An advantage of the user's own: name = "package.module:function" or "path/to/file.py:function"."""

    name: Literal["function"] = "function"
    """Name of the advantage."""

    function: Annotated[str, Bounds(min_length=1)] = ""
    """Function of `AdvantageInputs` that returns an advantage for each response, see docs/python.md. A name of the advantage
    with a colon sets it. A file is relative to the current directory."""


AdvantageConfig = (
    GrpoAdvantageConfig
    | DrGrpoAdvantageConfig
    | RlooAdvantageConfig
    | ReinforceBaselineAdvantageConfig
    | ReinforcePpAdvantageConfig
    | FunctionAdvantageConfig
)


class OffPolicyConfig(Section):
    """Correction for the gap between the engine that sampled and the trainer: weight w from old_logprobs -
    rollout_logprobs."""

    correction: Correction = "none"
    """tis: w cut to [low, high]. mis: w inside [low, high], 0 outside, usually with low = 0. icepop: the same with both
    tails dropped (low above 0)."""

    level: CorrectionLevel = "token"
    """w per token, per sequence (product over tokens) or per sequence as the geometric mean over tokens."""

    low: Fraction = 0.0
    """Lower bound of w."""

    high: AtLeastOne = 2.0
    """Upper bound of w."""

    batch_normalize: bool = False
    """Divide the weights by their mean over the optimizer mini-batch, after cutting. The mean is over trained tokens;
    verl takes it over sequences for level = sequence, which differs much where lengths do."""


class GeneralizedKlConfig(Section):
    """Generalized KL between the initial policy and the trained one in the loss (GKL, arXiv 2503.08038), over the whole
    vocabulary at every trained token:

        coefficient * (weighted_mse * 1/2 Var_q(log p_ref - log p) + cross_entropy * -sum p_ref log p),  q ~ weights^gamma

    Its value is no KL; its gradient is. weighted_mse = 0 is the gradient of KL(ref || policy); cross_entropy = 0 with weigh_by
    = "actor" and gamma = 1 that of KL(policy || ref). The paper's weights per class mean nothing for text and are left out."""

    coefficient: NonNegativeFloat = 0.0
    """Weight of both terms in the loss, e.g. 1e-3. Above 0 the reference policy is kept in memory, and runs forward before
    each optimizer step. 0: off."""

    gamma: NonNegativeFloat = 0.5
    """Power of the probabilities that weigh the words: 1 as they are, 0 all words alike."""

    weigh_by: Literal["reference", "actor"] = "reference"
    """The model whose probabilities weigh the words; no gradient flows through the weights."""

    weighted_mse: NonNegativeFloat = 1.0
    """Weight of the weighted squared error of log-probs."""

    cross_entropy: NonNegativeFloat = 1.0
    """Weight of the cross-entropy towards the reference."""


class AlgorithmConfig(Section):
    """Advantage, policy loss and its aggregation."""

    name: AlgorithmName = "dapo"
    """Algorithm that puts the parts together. dapo: advantages from groups. ppo, vapo: from a critic ([critic],
    [advantage_estimation]); the two differ in their switches alone. tppo: the same over windows of responses
    ([window])."""

    advantage: AdvantageConfig = Field(default=GrpoAdvantageConfig(), discriminator="name")
    """Advantages from groups: a name, or a table with a name and its keys. For name = dapo."""

    loss: PolicyLossConfig = Field(default=PpoClipLossConfig(), discriminator="name")
    """The policy loss: a name, or a table with a name and its keys."""

    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of the entropy bonus. Entropy is logged either way."""

    kl_loss_coefficient: NonNegativeFloat = 0.0
    """Weight of the KL loss towards the initial policy. Above 0 the reference policy is kept in memory."""

    kl_estimator: KlEstimator = "k3"  # GRPO's
    """Per-token estimator of the KL loss; k2 alone has the gradient of the reverse KL (k1 has none and is only a
    metric)."""

    gkl: GeneralizedKlConfig = GeneralizedKlConfig()
    """Generalized KL in the loss, beside or in place of kl_loss_coefficient."""

    kl_reward_coefficient: NonNegativeFloat = 0.0
    """Weight of the KL towards the initial policy that is taken off the reward of every token (PPO from human feedback).
    For algorithms with a critic. Above 0 the reference policy is kept in memory."""

    kl_reward_estimator: RewardKlEstimator = "k1"
    """Its per-token estimator."""

    positive_example_coefficient: NonNegativeFloat = 0.0
    """Weight of the language-model loss on correct responses, normalized over the optimizer step (VAPO, eq. 9 and 10:
    0.1). For algorithms with a critic."""

    off_policy: OffPolicyConfig = OffPolicyConfig()
    """Correction for the gap between the policy that sampled and the one that is trained."""

    @property
    def needs_reference(self) -> bool:
        """True if a term compares the policy with the initial one."""
        return max(self.kl_loss_coefficient, self.kl_reward_coefficient, self.gkl.coefficient) > 0


class TrainingConfig(Section):
    """Mini-batches, epochs and micro-batches of the policy's optimizer steps."""

    mini_batch_prompts: PositiveInt = 32  # 16 optimizer steps a rollout batch, as in DAPO's paper
    """Groups of one optimizer step; must divide rollout.prompts_per_step."""

    epochs: PositiveInt = 1
    """Passes over a rollout batch."""

    micro_batch_tokens: PositiveInt = 24576  # holds DAPO's 2,048 prompt and 20,480 response tokens
    """Padded tokens of one packed micro-batch of one data-parallel rank (before context parallelism cuts it). Bounds
    activation memory; must hold the longest prompt and response."""

    shuffle: bool = True
    """Shuffle the responses of a rollout batch before they are cut into mini-batches."""

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
    """Processes that hold the critic alone, started besides the policy's; the last ranks of the run. Critic and policy
    then update at the same time. 0: it lives in the policy's processes, and they update in turn."""

    tp_size: NonNegativeInt = 0
    """Ranks every weight matrix is cut over. 0: parallel.tp_size."""

    pp_size: NonNegativeInt = 0
    """Stages the layers are cut into. 0: parallel.pp_size."""

    vpp_size: NonNegativeInt = 0
    """Model chunks per pipeline stage. 0: parallel.vpp_size where the stages are as many, else 1."""

    cp_size: NonNegativeInt = 0
    """Ranks every sequence is cut over. 0: parallel.cp_size."""

    ep_size: NonNegativeInt = 0
    """Ranks experts are cut over. 0: parallel.ep_size."""


class CriticConfig(Section):
    """The critic of ppo, vapo and tppo: the policy's layers and a head that gives one value a token."""

    path: str = ""
    """Hugging Face directory it starts from: a policy (the head is fresh), a reward model, or a critic, of the policy's
    architecture and tokenizer. Relative: from the current directory, where pretraining wrote it. "": model.path."""

    head_scale: NonNegativeFloat = 0.01
    """About how large the values of a fresh head are."""

    parallel: CriticParallelConfig = CriticParallelConfig()  # no etp_size: it is the policy's
    """Layout of the critic over the processes."""

    offload: Offload = "none"
    """State moved to host memory while the critic is idle: nothing, its optimizer state and gradients, or
    those and its weights. For a critic that shares the policy's processes."""

    optimizer: CriticOptimizerConfig = CriticOptimizerConfig()
    """AdamW of the critic."""

    megatron: Mapping[str, Any] = {}
    """Fields of megatron-core's configuration for the critic, laid over those of [megatron]."""

    mini_batch_prompts: NonNegativeInt = 0
    """Groups of one optimizer step of the critic. 0: training.mini_batch_prompts."""

    epochs: PositiveInt = 1
    """Passes over a rollout batch."""

    micro_batch_tokens: NonNegativeInt = 0
    """Padded tokens of one packed micro-batch. 0: training.micro_batch_tokens."""

    loss: ValueLossName = "clipped"
    """squared: (V - target)^2 / 2. clipped: where V has moved beyond its bounds since the advantages were estimated, it
    is trained only if it is further from the target than the bound is (PPO)."""

    clip_value_low: PositiveFloat = 0.5  # a quarter of what separates right from wrong by default
    """V is held above V_old - clip_value_low, in units of the return."""

    clip_value_high: PositiveFloat = 0.5
    """V is held below V_old + clip_value_high."""

    aggregation: ValueAggregation = "token_mean"
    """token_mean: all tokens of the optimizer step weigh the same. sample_mean: all responses do."""

    warmup_train_steps: NonNegativeInt = 0
    """Train steps at the beginning in which the critic learns and the policy does not, whose learning-rate schedule begins
    after them."""

    # Explained variance is at most 1 and has no lower bound.
    explained_variance_alarm: Annotated[float, Bounds(le=1)] = -1.0
    """A warning names the step when the critic explains less than this share of the returns' variance. Values start to
    help above 0."""


class AdvantageEstimationConfig(Section):
    """Generalized advantage estimation (arXiv 1506.02438), its lambdas apart for policy and critic (VC-PPO, VAPO)."""

    gamma: Fraction = 1.0
    """Discount of a token."""

    lambda_rule: LambdaRuleName = "fixed"
    """Lambda rule of the policy's advantages. fixed: policy_lambda. length_adaptive: 1 - 1 / (lambda_alpha * length),
    at least lambda_floor (VAPO, eq. 5). window: the same of the length so far and half a window more where the response
    continues (T-PPO)."""

    policy_lambda: Fraction = 0.95
    """Lambda under lambda_rule = fixed."""

    lambda_alpha: PositiveFloat = 0.05  # VAPO's paper
    """Share of the length that the weights of the errors sum to, under lambda_rule = length_adaptive and window."""

    lambda_floor: Annotated[float, Bounds(ge=0, lt=1)] = 0.0
    """Smallest lambda under lambda_rule = length_adaptive and window. The rule alone is negative below 1 /
    lambda_alpha tokens; VAPO names no floor, T-PPO's authors take 0.95."""

    critic_lambda: Fraction = 1.0  # below 1, long responses hide a late reward from early values (VC-PPO)
    """Lambda of the critic's targets. 1: Monte-Carlo returns (decoupled GAE). policy_lambda of a fixed rule: plain
    PPO. tppo needs 1."""

    whiten: bool = True
    """Shift and scale the advantages of a rollout batch to mean 0 and variance 1 over its trained tokens."""

    clip: NonNegativeFloat = 0.0
    """Largest magnitude of an advantage, after whitening. T-PPO's authors take 10. 0: off."""


class WindowConfig(Section):
    """Windows of tppo (arXiv 2506.15050): the tokens of a response made in one generation step; it continues in the next."""

    tokens: PositiveInt = 8192
    """Tokens of a window."""

    ignored_tail_tokens: NonNegativeInt = 8
    """Last tokens of a window that are left out of the policy's loss where the response continues: their advantages rest
    on one value alone."""

    windows_per_step: NonNegativeInt = 0
    """Windows trained in a step, chosen by priority: groups with mixed outcomes first. 0: all."""


class ValuePretrainingConfig(Section):
    """Data and end of `megatron-dapo pretrain-value`, in which the critic learns Monte-Carlo returns of the fixed policy
    (VC-PPO)."""

    train_paths: tuple[InputPath, ...] = ()
    """Prompts it samples from, e.g. a set of wide difficulty. Relative: from the recipe's directory. Empty:
    data.train_paths."""

    min_steps: Annotated[int, Bounds(ge=2)] = 20  # a slope needs two points
    """Steps (rollout batches) at least."""

    max_steps: PositiveInt = 150
    """Steps at most."""

    explained_variance_slope: NonNegativeFloat = 0.005
    """Ends where, over the last min_steps steps, explained variance rises by less than this in total, and the loss is
    flat as well."""

    loss_slope: NonNegativeFloat = 0.05
    """The value loss is flat where it falls by less than this share over the last min_steps steps."""


class SftConfig(Section):
    """Data and optimizer steps of `megatron-dapo sft` (supervised fine-tuning): the policy learns given responses by maximum
    likelihood."""

    train_paths: tuple[InputPath, ...] = ()
    """Parquet or JSONL files with the columns prompt and response, or messages. Relative: from the recipe's directory. Empty:
    data.train_paths."""

    batch_size: PositiveInt = 64
    """Responses of one optimizer step, which is a train step."""

    epochs: PositiveInt = 2
    """Passes over the data; rows * epochs / batch_size, rounded up, is the number of train steps."""

    aggregation: SftAggregation = "token_mean"
    """Reduction of the tokens' negative log-likelihood over the whole optimizer step. token_mean: all response tokens weigh the
    same. sample_mean: all responses do."""

    optimizer: SftOptimizerConfig = SftOptimizerConfig()
    """AdamW of supervised fine-tuning; its schedule is laid over these train steps."""


class RoundsConfig(Section):
    """Stages of `megatron-dapo rounds`: fine-tuning on sft.train_paths where they are set, rounds of rejection sampling and
    fine-tuning on what it keeps, then training."""

    num_rounds: NonNegativeInt = 1
    """Rounds of sampling and fine-tuning."""

    start: RoundStart = "previous"
    """Model that a round's fine-tuning starts from. previous: the one that sampled. first: the one before the first round (as in
    ReST-EM, arXiv 2312.06585)."""

    train: bool = True
    """Train by the recipe's own algorithm at the end."""
