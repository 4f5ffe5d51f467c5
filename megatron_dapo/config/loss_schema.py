"""Sections of the policy losses: [algorithm.loss]."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from megatron_dapo.config.section import (
    Bounds,
    Fraction,
    FunctionPath,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    Section,
)

Aggregation = Literal["token_mean", "sample_mean", "per_group", "dr_grpo", "seq_sum_mean", "rollout_token_mean"]


class TokenLossConfig(Section):
    """Keys that all per-token losses share: how token losses are reduced to one number."""

    aggregation: Aggregation = "token_mean"
    """Reduction of token losses to one number over the whole optimizer step (exact under any layout and packing).
    token_mean: all trained tokens weigh the same. sample_mean: all responses do. per_group: token mean within a group,
    then mean over groups. dr_grpo: sum / (responses * aggregation_length). seq_sum_mean: mean over responses of their
    sums. rollout_token_mean: sum / trained tokens of the whole rollout batch * its mini-batches (T-PPO's code)."""

    aggregation_length: NonNegativeInt = 0
    """Constant length L of aggregation = dr_grpo, in tokens. 0: rollout.max_response_tokens."""


    needs_old_logprobs: ClassVar[bool] = True
    """Whether the loss reads the trainer's log-probs of the policy that sampled."""


class PpoClipLossConfig(TokenLossConfig):
    """Per-token ratio clipping: PPO and GRPO with equal bounds, DAPO (arXiv 2503.14476) with a wider upper bound."""

    name: Literal["ppo_clip"] = "ppo_clip"
    """ppo_clip: clipped token ratios. gspo, gspo_token, luspo, gmpo: sequence ratios. fipo: ppo_clip with weights by what
    follows a token. cispo: the clipped ratio as a constant weight, so that every token keeps its gradient. sapo: a gate
    in place of a bound. dis, dppo_tv, dppo_kl: ratios to the policy that sampled, without tokens outside a trust region.
    Each loss has different keys and defaults; docs/losses.md says when to take which."""

    clip_ratio_low: Fraction = 0.2
    """The ratio is clipped below at 1 - clip_ratio_low."""

    clip_ratio_high: NonNegativeFloat = 0.28
    """The ratio is clipped above at 1 + clip_ratio_high. A value above clip_ratio_low is DAPO's clip-higher; PPO and
    GRPO use the value of clip_ratio_low."""

    # With c = 1, ratios just above 1 would lose their gradient although they are inside the clipping range.
    dual_clip: Annotated[Literal["off"] | float, Bounds(gt=1)] = "off"
    """Bound c of the loss for negative advantages: at most c * |advantage| (arXiv 1912.09729). The public scripts of
    DAPO and T-PPO use 10."""


class GspoLossConfig(Section):
    """Sequence-level ratio clipping (GSPO, arXiv 2507.18071); the loss is the mean over responses."""

    name: Literal["gspo"] = "gspo"
    """Name of the policy loss."""

    # A sequence's ratio is a geometric mean over its tokens, so it varies far less than a token's.
    clip_ratio_low: Fraction = 3e-4
    """The sequence's ratio is clipped below at 1 - clip_ratio_low."""

    clip_ratio_high: NonNegativeFloat = 4e-4
    """The sequence's ratio is clipped above at 1 + clip_ratio_high."""

    # Keys in the other losses, constants here: GSPO is defined as a mean over responses.
    aggregation: ClassVar[Aggregation] = "sample_mean"
    aggregation_length: ClassVar[int] = 0
    needs_old_logprobs: ClassVar[bool] = True


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


class LuspoLossConfig(GspoLossConfig):
    """GSPO with the sum over a response's tokens in place of their mean (LUSPO, arXiv 2602.05261), so that a long response
    does not count for less."""

    name: Literal["luspo"] = "luspo"  # type: ignore[assignment]
    """Name of the policy loss."""

    aggregation: ClassVar[Aggregation] = "seq_sum_mean"


class GmpoLossConfig(Section):
    """Geometric mean of the tokens' bounded ratios (GMPO, arXiv 2507.20673); the loss is the mean over responses."""

    name: Literal["gmpo"] = "gmpo"
    """Name of the policy loss."""

    clip_log_ratio_low: NonNegativeFloat = 0.4
    """A token's ratio is bounded below at exp(-clip_log_ratio_low) if its advantage is negative."""

    clip_log_ratio_high: NonNegativeFloat = 0.4
    """A token's ratio is bounded above at exp(clip_log_ratio_high) if its advantage is positive."""

    aggregation: ClassVar[Aggregation] = "sample_mean"
    aggregation_length: ClassVar[int] = 0
    needs_old_logprobs: ClassVar[bool] = True


class FipoLossConfig(PpoClipLossConfig):
    """Clipped token ratios with advantages weighted by how the policy changed what follows (FIPO, arXiv 2603.19835)."""

    name: Literal["fipo"] = "fipo"  # type: ignore[assignment]
    """Name of the policy loss."""

    dual_clip: Annotated[float, Bounds(gt=1)] = 10.0
    """Bound c of the loss for negative advantages, as in ppo_clip. Tokens with a higher ratio stay out of the weights."""

    half_life: PositiveFloat = 32.0
    """Number of trained tokens after which a later token counts half."""

    weight_low: Fraction = 0.0
    """The weight is at least 1 - weight_low. The authors take 0 for 32B, 0.2 for 7B."""

    weight_high: NonNegativeFloat = 0.2
    """The weight is at most 1 + weight_high."""


class SapoLossConfig(TokenLossConfig):
    """A smooth gate on token ratios in place of clipping (SAPO, arXiv 2511.20347)."""

    name: Literal["sapo"] = "sapo"
    """Name of the policy loss."""

    aggregation: Aggregation = "sample_mean"
    """Reduction of token losses to one number, as in ppo_clip. The paper takes the mean over responses."""

    temperature_positive: PositiveFloat = 1.0
    """Steepness of the gate for positive advantages: a higher one damps tokens with ratios far from 1 more."""

    temperature_negative: PositiveFloat = 1.05
    """Steepness of the gate for negative advantages."""


class DisLossConfig(TokenLossConfig):
    """The ratio to the policy that sampled as a constant weight, 0 outside a trust region (SAO, arXiv 2607.07508)."""

    name: Literal["dis"] = "dis"
    """Name of the policy loss."""

    clip_ratio_low: Fraction = 0.8
    """Tokens with a ratio below 1 - clip_ratio_low have no gradient. The paper names no value; 0.8 and 3 are in use."""

    clip_ratio_high: NonNegativeFloat = 3.0
    """Tokens with a ratio above 1 + clip_ratio_high have no gradient."""

    needs_old_logprobs: ClassVar[bool] = False


class DppoTvLossConfig(TokenLossConfig):
    """The same with a trust region of probabilities, not ratios (DPPO, binary total variation, arXiv 2602.04879)."""

    name: Literal["dppo_tv"] = "dppo_tv"
    """Name of the policy loss."""

    divergence_low: NonNegativeFloat = 0.15
    """Largest fall of a token's probability at which a negative advantage still has a gradient."""

    divergence_high: NonNegativeFloat = 0.15
    """Largest rise of a token's probability at which a positive advantage still has a gradient."""

    ratio_max: Annotated[float, Bounds(gt=1)] = 20.0
    """Upper bound of the ratio as a weight."""

    needs_old_logprobs: ClassVar[bool] = False


class DppoKlLossConfig(DppoTvLossConfig):
    """The same with a trust region by the KL divergence (DPPO, binary KL, arXiv 2602.04879)."""

    name: Literal["dppo_kl"] = "dppo_kl"  # type: ignore[assignment]
    """Name of the policy loss."""

    divergence_low: NonNegativeFloat = 0.05
    """Largest divergence of a fallen probability at which a negative advantage still has a gradient, in nats."""

    divergence_high: NonNegativeFloat = 0.05
    """Largest divergence of a risen probability at which a positive advantage still has a gradient, in nats."""


class FunctionLossConfig(TokenLossConfig):
    """A user-defined per-token loss: name = "package.module:function" or "path/to/file.py:function"."""

    name: Literal["function"] = "function"
    """Name of the policy loss."""

    function: Annotated[FunctionPath, Bounds(min_length=1)] = ""
    """Function of `PolicyLossInputs` that returns a loss for each token; see docs/python.md. A loss name that contains
    a colon sets it. A file path is relative to the recipe's directory."""


PolicyLossConfig = (
    PpoClipLossConfig
    | GspoLossConfig
    | GspoTokenLossConfig
    | LuspoLossConfig
    | GmpoLossConfig
    | FipoLossConfig
    | CispoLossConfig
    | SapoLossConfig
    | DisLossConfig
    | DppoTvLossConfig
    | DppoKlLossConfig
    | FunctionLossConfig
)
