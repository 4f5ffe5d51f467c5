"""What a run is told of advantages, loss and optimizer steps: from a scored group on."""

from __future__ import annotations

from typing import Literal

from megatron_dapo.config.section import Section

AlgorithmName = Literal["dapo", "ppo", "vapo", "tppo"]
AdvantageName = Literal["grpo", "dr_grpo", "rloo", "reinforce_baseline"]
GrpoStd = Literal["unbiased", "biased"]
PolicyLossName = Literal["ppo_clip", "clip_higher", "gspo", "gspo_token", "cispo"]
Aggregation = Literal["token_mean", "sample_mean", "per_group", "dr_grpo", "seq_sum_mean", "rollout_token_mean"]
KlEstimator = Literal["k2", "k3"]
RewardKlEstimator = Literal["k1", "k2", "k3"]
Correction = Literal["none", "tis", "mis", "icepop"]
CorrectionLevel = Literal["token", "sequence", "geometric"]


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

    batch_normalize: bool = False
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
    """Weight of the language-model loss on correct responses, normalized over the optimizer step (VAPO, eq. 9 and 10:
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
