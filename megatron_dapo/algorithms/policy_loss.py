"""Policy losses: per-token losses [P] and metric sums, from log-probabilities and advantages.

A loss is a function of the inputs and its section of the configuration. Common notation: log r_t = log pi(o_t) - log
pi_old(o_t), clamped to +-20 before exp; losses are minimized. A loss returns one value per token and never averages:
weights from `aggregation` turn the values into the step's loss. Metrics are SUMS over the trained tokens of the call;
to get means, add them over micro-batches and ranks and divide by the global `num_tokens`.

The gradient passes at a bound: a token is clipped only if its ratio lies strictly outside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_dapo.algorithms.kl import KL_ESTIMATORS, LOG_RATIO_LIMIT
from megatron_dapo.algorithms.segments import identity, segment_sum
from megatron_dapo.config.algorithm_schema import (
    CispoLossConfig,
    FunctionLossConfig,
    GspoLossConfig,
    GspoTokenLossConfig,
    PolicyLossConfig,
    PpoClipLossConfig,
)
from megatron_dapo.hooks import HookError, load_hook, named

Metrics = dict[str, torch.Tensor]


@dataclass(frozen=True)
class PolicyLossInputs:
    """Tokens of one packed micro-batch (or of this rank's share of it)."""

    logprobs: torch.Tensor  # [P], the only one that carries gradients
    old_logprobs: torch.Tensor  # [P]
    advantages: torch.Tensor  # [P]
    loss_mask: torch.Tensor  # [P] 0 or 1
    sequence_ids: torch.Tensor  # [P] int64 in [0, num_sequences)
    num_sequences: int
    # Reduces per-sequence sums [k, num_sequences] of this rank's tokens to sums over whole sequences: an all-reduce
    # over the context-parallel group if sequences are cut. No gradient flows through it.
    reduce_over_sequence_parts: Callable[[torch.Tensor], torch.Tensor] = identity

    @property
    def trained(self) -> torch.Tensor:
        """[P] bool."""
        return self.loss_mask > 0

    def log_ratio(self) -> torch.Tensor:
        """[P] log pi / pi_old, 0 where masked, even over NaN."""
        difference = torch.where(self.trained, self.logprobs - self.old_logprobs, 0.0)
        return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

    def trained_advantages(self) -> torch.Tensor:
        """[P], 0 where masked."""
        return torch.where(self.trained, self.advantages, 0.0)


def _clipped(
    ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the ratio clipped so that min(r A, clip(r) A) = ratio * A, and masks of tokens clipped below, above."""
    below = (advantages < 0) & (ratio < 1.0 - low)
    above = (advantages > 0) & (ratio > 1.0 + high)
    # Detached: a clipped token has the bound's value and no gradient.
    bounded = ratio.detach().clamp(1.0 - low, 1.0 + high)
    return torch.where(below | above, bounded, ratio), below, above


def _metrics(inputs: PolicyLossInputs, token_loss: torch.Tensor, below: torch.Tensor, above: torch.Tensor) -> Metrics:
    """Return sums over trained tokens. The approximate KL is that of pi_old from pi, on tokens drawn from pi_old."""
    log_ratio = inputs.log_ratio().detach()
    zeros = torch.zeros_like(log_ratio)
    return {
        "num_tokens": inputs.trained.sum().to(log_ratio.dtype),
        "policy_loss_sum": token_loss.detach().sum(),
        "ratio_sum": torch.where(inputs.trained, log_ratio.exp(), 0.0).sum(),
        "approx_kl_k1_sum": KL_ESTIMATORS["k1"](zeros, log_ratio).sum(),
        "approx_kl_k3_sum": KL_ESTIMATORS["k3"](zeros, log_ratio).sum(),
        "clip_low_sum": below.sum().to(log_ratio.dtype),
        "clip_high_sum": above.sum().to(log_ratio.dtype),
    }


def ppo_clip(inputs: PolicyLossInputs, loss: PpoClipLossConfig) -> tuple[torch.Tensor, Metrics]:
    """l_t = -min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t). PPO (arXiv 1707.06347, Eq 7), DAPO (arXiv 2503.14476, Eq 10).

    PPO has equal bounds. DAPO widens the upper bound so that unlikely tokens can grow, but not the lower one, which
    would let them be driven to 0. With a dual clip c (arXiv 1912.09729, Eq 5), l_t is at most -c A_t if A_t < 0;
    without it, a bad token whose ratio has exploded has an unbounded loss.
    """
    advantages = inputs.trained_advantages()
    ratio, below, above = _clipped(inputs.log_ratio().exp(), advantages, loss.clip_ratio_low, loss.clip_ratio_high)
    token_loss = -advantages * ratio
    if loss.dual_clip == "off":
        return token_loss, _metrics(inputs, token_loss, below, above)
    bound = -advantages * loss.dual_clip
    exceeded = (advantages < 0) & (token_loss > bound)
    token_loss = torch.where(exceeded, bound, token_loss)
    metrics = _metrics(inputs, token_loss, below, above)
    return token_loss, {**metrics, "dual_clip_sum": exceeded.sum().to(token_loss.dtype)}


def _sequence_means(inputs: PolicyLossInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return detached means over each whole sequence's trained tokens: log ratio [N], advantage [N]."""
    per_token = torch.stack(
        [inputs.log_ratio().detach(), inputs.trained_advantages(), inputs.trained.to(inputs.logprobs.dtype)]
    )
    sums = segment_sum(per_token, inputs.sequence_ids, inputs.num_sequences)
    log_ratio, advantage, count = inputs.reduce_over_sequence_parts(sums)
    # A sequence without a trained token on any rank computes 0 / 1 and stays out of the loss.
    count = count.clamp(min=1)
    return (log_ratio / count).to(inputs.logprobs.dtype), (advantage / count).to(inputs.logprobs.dtype)


def _straight_through(value: torch.Tensor, logprobs: torch.Tensor, trained: torch.Tensor) -> torch.Tensor:
    """Return `value` with gradient `value` with respect to each token's log-probability."""
    # exp(x - sg[x]) is exactly 1 with derivative 1, so the value is the sequence's and the gradient the token's.
    logprobs = torch.where(trained, logprobs, 0.0)
    return value * (logprobs - logprobs.detach()).exp()


def gspo_token(inputs: PolicyLossInputs, loss: GspoTokenLossConfig) -> tuple[torch.Tensor, Metrics]:
    """s_it = sg[s_i] pi_t / sg[pi_t], s_i = exp(mean_t log r_t); l_t = -min(s_it A_t, clip(s_it, 1 - low, 1 + high) A_t).

    GSPO-token (arXiv 2507.18071, Eq 13-15): the value and the clipping are per sequence, the advantage per token. The
    bounds are about 700 times tighter than PPO's, because a mean of log ratios moves far less than a single one.
    """
    mean_log_ratio, _ = _sequence_means(inputs)
    return _sequence_clipped(inputs, mean_log_ratio, inputs.trained_advantages(), loss)


def gspo(inputs: PolicyLossInputs, loss: GspoLossConfig) -> tuple[torch.Tensor, Metrics]:
    """l_i = -min(s_i A_i, clip(s_i, 1 - low, 1 + high) A_i), s_i = exp(mean_t log r_t). GSPO (arXiv 2507.18071, Eq 5-7).

    Each of a sequence's tokens carries l_i; under "sample_mean" weights they add up to mean_i l_i. A_i is the mean of
    the tokens' advantages. The gradient of w sum_t l_i with respect to log pi_t is -w s_i A_i, which is what GSPO-token
    gives each token. It is computed that way, so that no gradient has to pass through the reduction over
    context-parallel parts. This requires one weight for all tokens of a sequence, so any importance-sampling correction
    must be at sequence or geometric level.
    """
    mean_log_ratio, mean_advantage = _sequence_means(inputs)
    advantages = torch.where(inputs.trained, mean_advantage[inputs.sequence_ids], 0.0)
    return _sequence_clipped(inputs, mean_log_ratio, advantages, loss)


def _sequence_clipped(
    inputs: PolicyLossInputs, mean_log_ratio: torch.Tensor, advantages: torch.Tensor, loss: GspoLossConfig
) -> tuple[torch.Tensor, Metrics]:
    """Return the loss of sequence means [N] and token advantages [P]."""
    sequence_ratio = mean_log_ratio.exp()[inputs.sequence_ids]
    ratio = _straight_through(sequence_ratio, inputs.logprobs, inputs.trained)
    ratio, below, above = _clipped(ratio, advantages, loss.clip_ratio_low, loss.clip_ratio_high)
    token_loss = -advantages * ratio
    return token_loss, _metrics(inputs, token_loss, below, above)


def cispo(inputs: PolicyLossInputs, loss: CispoLossConfig) -> tuple[torch.Tensor, Metrics]:
    """l_t = -sg[clip(r_t, 1 - low, 1 + high)] A_t log pi_t. CISPO, MiniMax-M1 (arXiv 2506.13585, Eq 4-5).

    The weight is clipped, never the gradient: every token keeps learning. Only the gradient is meaningful; the value
    does not belong to any objective.
    """
    ratio = inputs.log_ratio().detach().exp()
    low, high = 1.0 - loss.clip_ratio_low, 1.0 + loss.clip_ratio_high
    logprobs = torch.where(inputs.trained, inputs.logprobs, 0.0)
    token_loss = -ratio.clamp(low, high) * inputs.trained_advantages() * logprobs
    return token_loss, _metrics(inputs, token_loss, inputs.trained & (ratio < low), inputs.trained & (ratio > high))


def function(inputs: PolicyLossInputs, loss: FunctionLossConfig) -> tuple[torch.Tensor, Metrics]:
    """Return the losses [P] of a user's function of `inputs`.

    The function may also return the tokens that it clips below and above, [P] bool each. Token weights
    apply as for any loss, so the result is exact under any layout if a token's loss depends only on its sequence. Raise
    HookError if the function fails, or if its result has another shape or no gradient.
    """
    field = "algorithm.loss"
    own = load_hook(loss.function, f"{field}.function")
    with named(loss.function, field):
        result = own(inputs)
        none = torch.zeros_like(inputs.trained)
        token_loss, below, above = result if isinstance(result, tuple) else (result, none, none)
        shapes = [tuple(each.shape) for each in (token_loss, below, above)]
    if set(shapes) != {tuple(inputs.logprobs.shape)}:
        raise HookError(
            f"hook {loss.function!r} ({field}) returned the shapes {shapes}, not {tuple(inputs.logprobs.shape)}: one loss a token"
        )
    if inputs.logprobs.requires_grad and not token_loss.requires_grad:
        raise HookError(
            f"hook {loss.function!r} ({field}) returned losses without a gradient; compute them from inputs.logprobs"
        )
    token_loss = torch.where(inputs.trained, token_loss, 0.0)
    return token_loss, _metrics(inputs, token_loss, inputs.trained & below, inputs.trained & above)


POLICY_LOSSES: dict[str, Callable[[PolicyLossInputs, Any], tuple[torch.Tensor, Metrics]]] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "cispo": cispo,
    "function": function,
}


def policy_loss(loss: PolicyLossConfig, inputs: PolicyLossInputs) -> tuple[torch.Tensor, Metrics]:
    """Return the token losses [P] of the loss named by the section `loss`, and their sums over trained tokens."""
    return POLICY_LOSSES[loss.name](inputs, loss)
