"""Policy losses: per-token losses [P] and metric sums, from log-probabilities and advantages.

A loss is a function of the inputs and its section of the configuration. Common notation: log r_t = log pi(o_t) - log
pi_old(o_t), clamped to +-20 before exp; losses are minimized. Three policies are kept apart (arXiv 2605.12070): pi_rollout
has the engine's numbers as it sampled, pi_old the trainer's for the policy that sampled, pi is trained. A loss returns one value per token and never averages:
weights from `aggregation` turn the values into the step's loss. Metrics are SUMS over the trained tokens of the call;
to get means, add them over micro-batches and ranks and divide by the global `num_tokens`.

The gradient passes at a bound: a token is clipped only if its ratio lies strictly outside.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from megatron_dapo.algorithms.linear_scan import reverse_linear_scan
from megatron_dapo.algorithms.policy_loss_inputs import Metrics, PolicyLossInputs, clipped, loss_metrics
from megatron_dapo.algorithms.sequence_losses import gmpo, gspo, gspo_token
from megatron_dapo.algorithms.trust_region_losses import dis, dppo_kl, dppo_tv
from megatron_dapo.config.loss_schema import (
    CispoLossConfig,
    FipoLossConfig,
    FunctionLossConfig,
    PolicyLossConfig,
    PpoClipLossConfig,
    SapoLossConfig,
)
from megatron_dapo.hooks import HookError, load_hook, named


def ppo_clip(inputs: PolicyLossInputs, loss: PpoClipLossConfig) -> tuple[torch.Tensor, Metrics]:
    """l_t = -min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t). PPO (arXiv 1707.06347, Eq 7), DAPO (arXiv 2503.14476, Eq 10).

    PPO has equal bounds. DAPO widens the upper bound so that unlikely tokens can grow, but not the lower one, which
    would let them be driven to 0. With a dual clip c (arXiv 1912.09729, Eq 5), l_t is at most -c A_t if A_t < 0;
    without it, a bad token whose ratio has exploded has an unbounded loss.
    """
    advantages = inputs.trained_advantages()
    ratio, below, above = clipped(inputs.log_ratio().exp(), advantages, loss.clip_ratio_low, loss.clip_ratio_high)
    token_loss = -advantages * ratio
    if loss.dual_clip == "off":
        return token_loss, loss_metrics(inputs, token_loss, below, above)
    bound = -advantages * loss.dual_clip
    exceeded = (advantages < 0) & (token_loss > bound)
    token_loss = torch.where(exceeded, bound, token_loss)
    metrics = loss_metrics(inputs, token_loss, below, above)
    return token_loss, {**metrics, "dual_clip_sum": exceeded.sum().to(token_loss.dtype)}


def fipo(inputs: PolicyLossInputs, loss: FipoLossConfig) -> tuple[torch.Tensor, Metrics]:
    """`ppo_clip` of f_t A_t, f_t = sg[clip(exp(F_t), 1 - low, 1 + high)], F_t = sum_{k >= t} 2^{-(k - t) / h} log r_k.

    FIPO (arXiv 2603.19835): a token counts for more if the policy has come to prefer what follows it. Tokens whose ratio
    exceeds the dual clip, which have no gradient, stay out of F. This follows the authors' code but for one rule, which
    drops a sequence with two such tokens. Distances count trained tokens, so that what an environment says changes
    nothing. F_t needs the log-ratios of the whole sequence, which context-parallel ranks tell each other: 24 bytes a token.
    """
    per_token = torch.stack([inputs.log_ratio().detach(), inputs.trained, inputs.sequence_ids]).double()
    log_ratio, trained, sequences = inputs.of_whole_sequences(per_token)
    counted = torch.where(log_ratio > math.log(loss.dual_clip), 0.0, log_ratio)
    decays = torch.where(trained > 0, 0.5 ** (1.0 / loss.half_life), 1.0)
    decays[:-1] *= sequences[1:] == sequences[:-1]

    def fill(start: int, stop: int, values: torch.Tensor, factors: torch.Tensor) -> None:
        values.copy_(counted[start:stop])
        factors.copy_(decays[start:stop])

    future = inputs.of_these_tokens(reverse_linear_scan(torch.empty_like(counted), fill))
    weights = future.exp().clamp(1.0 - loss.weight_low, 1.0 + loss.weight_high).to(inputs.logprobs.dtype)
    return ppo_clip(replace(inputs, advantages=inputs.trained_advantages() * weights), loss)


def cispo(inputs: PolicyLossInputs, loss: CispoLossConfig) -> tuple[torch.Tensor, Metrics]:
    """l_t = -sg[clip(r_t, 1 - low, 1 + high)] A_t log pi_t. CISPO, MiniMax-M1 (arXiv 2506.13585, Eq 4-5).

    The weight is clipped, never the gradient: every token keeps learning. Only the gradient is meaningful; the value
    does not belong to any objective.
    """
    ratio = inputs.log_ratio().detach().exp()
    low, high = 1.0 - loss.clip_ratio_low, 1.0 + loss.clip_ratio_high
    token_loss = -ratio.clamp(low, high) * inputs.trained_advantages() * inputs.trained_logprobs()
    return token_loss, loss_metrics(inputs, token_loss, inputs.trained & (ratio < low), inputs.trained & (ratio > high))


def sapo(inputs: PolicyLossInputs, loss: SapoLossConfig) -> tuple[torch.Tensor, Metrics]:
    """l_t = -(4 / tau_t) sigmoid(tau_t (r_t - 1)) A_t, tau_t by the sign of A_t. SAPO (arXiv 2511.20347).

    A gate in place of a bound: its slope is 1 at r_t = 1 and falls off on both sides, so no token loses its gradient at
    once. Negative advantages have the higher temperature, because they raise the logits of all other tokens.
    """
    advantages = inputs.trained_advantages()
    temperature = torch.full_like(advantages, loss.temperature_negative)
    temperature = temperature.masked_fill(advantages > 0, loss.temperature_positive)
    gate = 4.0 / temperature * torch.sigmoid(temperature * (inputs.log_ratio().exp() - 1.0))
    none = torch.zeros_like(inputs.trained)
    token_loss = -gate * advantages
    return token_loss, loss_metrics(inputs, token_loss, none, none)


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
    return token_loss, loss_metrics(inputs, token_loss, inputs.trained & below, inputs.trained & above)


POLICY_LOSSES: dict[str, Callable[[PolicyLossInputs, Any], tuple[torch.Tensor, Metrics]]] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "luspo": gspo,  # The aggregation differs, see LuspoLossConfig.
    "gmpo": gmpo,
    "fipo": fipo,
    "cispo": cispo,
    "sapo": sapo,
    "dis": dis,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "function": function,
}


def policy_loss(loss: PolicyLossConfig, inputs: PolicyLossInputs) -> tuple[torch.Tensor, Metrics]:
    """Return the token losses [P] of the loss named by the section `loss`, and their sums over trained tokens."""
    return POLICY_LOSSES[loss.name](inputs, loss)
