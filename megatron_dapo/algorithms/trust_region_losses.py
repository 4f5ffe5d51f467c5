"""Policy losses whose ratio is to the policy that sampled, by the engine's numbers; no pass for old log-probs is needed.

The ratio is R_t = pi(o_t) / pi_rollout(o_t). A token outside the trust region has no gradient; inside it the gradient is
-R_t A_t grad log pi(o_t). The value belongs to no objective, as in `policy_loss.cispo`.
"""

from __future__ import annotations

import torch

from megatron_dapo.algorithms.policy_loss_inputs import Metrics, PolicyLossInputs, loss_metrics
from megatron_dapo.config.loss_schema import DisLossConfig, DppoKlLossConfig, DppoTvLossConfig


def dis(inputs: PolicyLossInputs, loss: DisLossConfig) -> tuple[torch.Tensor, Metrics]:
    """l_t = -sg[R_t 1(1 - low <= R_t <= 1 + high)] A_t log pi_t. SAO's direct double-sided importance sampling (arXiv
    2607.07508, Section 3.1, Eq 3).

    Unlike a clip it drops tokens on both sides whatever the sign of the advantage.
    """
    ratio = inputs.rollout_log_ratio().detach().exp()
    below = inputs.trained & (ratio < 1.0 - loss.clip_ratio_low)
    above = inputs.trained & (ratio > 1.0 + loss.clip_ratio_high)
    return _score_function(inputs, ratio, below, above)


def dppo_tv(inputs: PolicyLossInputs, loss: DppoTvLossConfig) -> tuple[torch.Tensor, Metrics]:
    """l_t = -sg[min(R_t, c) M_t] A_t log pi_t, M_t = 0 if pi - pi_rollout > high and A_t > 0, or < -low and A_t < 0.

    DPPO with the binary total variation (arXiv 2602.04879): the bound is on the change of the token's probability, so that
    an unlikely token may change its ratio a lot and a likely one may not.
    """
    current, rollout = (logprobs.detach().exp() for logprobs in (inputs.logprobs, inputs.sampled_logprobs))
    difference = torch.where(inputs.trained, current - rollout, 0.0)
    below, above = difference < -loss.divergence_low, difference > loss.divergence_high
    return _within_divergence(inputs, loss, below, above)


def dppo_kl(inputs: PolicyLossInputs, loss: DppoKlLossConfig) -> tuple[torch.Tensor, Metrics]:
    """`dppo_tv` with the binary KL: D_t = q log(q / p) + (1 - q) log((1 - q) / (1 - p)), p = pi_t, q = pi_rollout_t.

    DPPO with the binary KL (arXiv 2602.04879). M_t = 0 if D_t > high, p > q and A_t > 0, or D_t > low, p < q and
    A_t < 0.
    """
    log_ratio = inputs.rollout_log_ratio().detach().double()
    logprobs, rollout = (
        torch.where(inputs.trained, each.detach(), -1.0).double().clamp(max=0.0)
        for each in (inputs.logprobs, inputs.sampled_logprobs)
    )
    # log(1 - p) by expm1: p rounds to 1 long before 1 - p rounds to 0. A certain token has a finite divergence.
    rest, rollout_rest = (
        torch.log(-torch.expm1(each)).clamp(min=_LEAST_LOG_REST) for each in (logprobs, rollout)
    )
    divergence = -rollout.exp() * log_ratio + rollout_rest.exp() * (rollout_rest - rest)
    below = (divergence > loss.divergence_low) & (log_ratio < 0)
    above = (divergence > loss.divergence_high) & (log_ratio > 0)
    return _within_divergence(inputs, loss, below, above)


_LEAST_LOG_REST = -36.0  # log of the distance of doubles just below 1


def _within_divergence(
    inputs: PolicyLossInputs, loss: DppoTvLossConfig, below: torch.Tensor, above: torch.Tensor
) -> tuple[torch.Tensor, Metrics]:
    """Return the loss without the tokens that moved too far in the direction in which their advantage pushes them."""
    advantages = inputs.trained_advantages()
    ratio = inputs.rollout_log_ratio().detach().exp().clamp(max=loss.ratio_max)
    return _score_function(inputs, ratio, below & (advantages < 0), above & (advantages > 0))


def _score_function(
    inputs: PolicyLossInputs, ratio: torch.Tensor, below: torch.Tensor, above: torch.Tensor
) -> tuple[torch.Tensor, Metrics]:
    weights = torch.where(below | above, 0.0, ratio)
    token_loss = -weights * inputs.trained_advantages() * inputs.trained_logprobs()
    return token_loss, loss_metrics(inputs, token_loss, below, above)
