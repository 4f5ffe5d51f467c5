"""Policy losses in which the tokens of a sequence share a ratio or a weight; the notation is that of `policy_loss`."""

from __future__ import annotations

import torch

from megatron_dapo.algorithms.policy_loss_inputs import Metrics, PolicyLossInputs, clipped, loss_metrics
from megatron_dapo.algorithms.segments import segment_sum
from megatron_dapo.config.loss_schema import GmpoLossConfig, GspoLossConfig, GspoTokenLossConfig


def _sequence_means(inputs: PolicyLossInputs, log_ratio: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return detached means over each whole sequence's trained tokens: `log_ratio` [P] as [N], advantage [N]."""
    per_token = torch.stack(
        [log_ratio.detach(), inputs.trained_advantages(), inputs.trained.to(inputs.logprobs.dtype)]
    )
    sums = segment_sum(per_token, inputs.sequence_ids, inputs.num_sequences)
    total, advantage, count = inputs.reduce_over_sequence_parts(sums)
    # A sequence without a trained token on any rank computes 0 / 1 and stays out of the loss.
    count = count.clamp(min=1)
    return (total / count).to(inputs.logprobs.dtype), (advantage / count).to(inputs.logprobs.dtype)


def _straight_through(value: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    """Return `value` with gradient `value` with respect to each token's log-probability."""
    # exp(x - sg[x]) is exactly 1 with derivative 1, so the value is the sequence's and the gradient the token's.
    return value * (logprobs - logprobs.detach()).exp()


def gspo_token(inputs: PolicyLossInputs, loss: GspoTokenLossConfig) -> tuple[torch.Tensor, Metrics]:
    """s_it = sg[s_i] pi_t / sg[pi_t], s_i = exp(mean_t log r_t); l_t = -min(s_it A_t, clip(s_it, 1 - low, 1 + high) A_t).

    GSPO-token (arXiv 2507.18071, Eq 13-15): the value and the clipping are per sequence, the advantage per token. The
    bounds are about 700 times tighter than PPO's, because a mean of log ratios moves far less than a single one.
    """
    mean_log_ratio, _ = _sequence_means(inputs, inputs.log_ratio())
    return _sequence_clipped(inputs, mean_log_ratio, inputs.trained_advantages(), loss)


def gspo(inputs: PolicyLossInputs, loss: GspoLossConfig) -> tuple[torch.Tensor, Metrics]:
    """l_i = -min(s_i A_i, clip(s_i, 1 - low, 1 + high) A_i), s_i = exp(mean_t log r_t). GSPO (arXiv 2507.18071, Eq 5-7).

    Each of a sequence's tokens carries l_i; under "sample_mean" weights they add up to mean_i l_i. A_i is the mean of
    the tokens' advantages. The gradient of w sum_t l_i with respect to log pi_t is -w s_i A_i, which is what GSPO-token
    gives each token. It is computed that way, so that no gradient has to pass through the reduction over
    context-parallel parts. This requires one weight for all tokens of a sequence, so any importance-sampling correction
    must be at sequence or geometric level.
    """
    mean_log_ratio, mean_advantage = _sequence_means(inputs, inputs.log_ratio())
    advantages = torch.where(inputs.trained, mean_advantage[inputs.sequence_ids], 0.0)
    return _sequence_clipped(inputs, mean_log_ratio, advantages, loss)


def _sequence_clipped(
    inputs: PolicyLossInputs, mean_log_ratio: torch.Tensor, advantages: torch.Tensor, loss: GspoLossConfig
) -> tuple[torch.Tensor, Metrics]:
    """Return the loss of sequence means [N] and token advantages [P]."""
    sequence_ratio = mean_log_ratio.exp()[inputs.sequence_ids]
    ratio = _straight_through(sequence_ratio, inputs.trained_logprobs())
    ratio, below, above = clipped(ratio, advantages, loss.clip_ratio_low, loss.clip_ratio_high)
    token_loss = -advantages * ratio
    return token_loss, loss_metrics(inputs, token_loss, below, above)


def gmpo(inputs: PolicyLossInputs, loss: GmpoLossConfig) -> tuple[torch.Tensor, Metrics]:
    """l_i = -A_i exp(mean_t b_t), b_t = log r_t bounded above if A_i > 0, below if A_i < 0. GMPO (arXiv 2507.20673).

    The geometric mean over tokens is less sensitive to one extreme ratio than PPO's arithmetic one, so the bounds are
    wider. As in `gspo` each token carries l_i, and a bounded token has no gradient.
    """
    log_ratio = inputs.log_ratio()
    advantages = inputs.trained_advantages()
    above = (advantages > 0) & (log_ratio > loss.clip_log_ratio_high)
    below = (advantages < 0) & (log_ratio < -loss.clip_log_ratio_low)
    bounded = torch.where(above | below, log_ratio.clamp(-loss.clip_log_ratio_low, loss.clip_log_ratio_high), log_ratio)
    mean_log_ratio, mean_advantage = _sequence_means(inputs, bounded)
    logprobs = inputs.trained_logprobs()
    ratio = _straight_through(
        mean_log_ratio.exp()[inputs.sequence_ids], torch.where(above | below, logprobs.detach(), logprobs)
    )
    token_loss = -torch.where(inputs.trained, mean_advantage[inputs.sequence_ids], 0.0) * ratio
    return token_loss, loss_metrics(inputs, token_loss, below, above)
