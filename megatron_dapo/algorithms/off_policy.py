"""Measure and correct the mismatch between the engine that sampled and the trainer that learns.

There are three policies: rollout (the engine's numbers), old (the trainer's numbers for the same weights) and current.
The policy loss handles the ratio current / old. This module handles w = pi_old / pi_rollout, which multiplies only the
policy loss (not KL, entropy or value terms) and carries no gradient.

| level     | log w of a token                              |
|-----------|-----------------------------------------------|
| token     | log pi_old - log pi_rollout                   |
| sequence  | its sum over the sequence (the exact weight)  |
| geometric | its mean over the sequence                    |

| method | weight                                   | known as                                        |
|--------|------------------------------------------|-------------------------------------------------|
| tis    | w limited to [low, high]                   | truncated importance sampling                   |
| mis    | w, or 0 outside [low, high]               | masked importance sampling                      |
| icepop | the same with a lower bound above 0      | IcePop: both tails are noise, drop them         |
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_dapo.algorithms.kl import LOG_RATIO_LIMIT, k3
from megatron_dapo.algorithms.segments import MetricSums, identity, segment_sum
from megatron_dapo.config.algorithm_schema import OffPolicyConfig


@dataclass(frozen=True)
class OffPolicyInputs:
    """Tokens of one packed micro-batch (or of this rank's share of it)."""

    old_logprobs: torch.Tensor  # [P]
    rollout_logprobs: torch.Tensor  # [P], at the sampling temperature, without top-p renormalization
    loss_mask: torch.Tensor  # [P] 0 or 1
    sequence_ids: torch.Tensor  # [P] int64 in [0, num_sequences)
    num_sequences: int
    # Reduces per-sequence sums [2, num_sequences] of this rank's tokens to sums over whole sequences (see policy_loss).
    reduce_over_sequence_parts: Callable[[torch.Tensor], torch.Tensor] = identity

    @property
    def trained(self) -> torch.Tensor:
        """[P] bool."""
        return self.loss_mask > 0


def _token_level(inputs: OffPolicyInputs) -> torch.Tensor:
    return torch.where(inputs.trained, (inputs.old_logprobs - inputs.rollout_logprobs).detach(), 0.0)


def _sequence_sums(inputs: OffPolicyInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the log-ratio [N] and the trained tokens [N] of whole sequences, float64."""
    log_ratio = _token_level(inputs)
    per_token = torch.stack([log_ratio, inputs.trained.to(log_ratio.dtype)])
    # One reduction covers both: under context parallelism it is a collective.
    sums, counts = inputs.reduce_over_sequence_parts(segment_sum(per_token, inputs.sequence_ids, inputs.num_sequences))
    return sums, counts


def _sequence_level(inputs: OffPolicyInputs) -> torch.Tensor:
    sums, _ = _sequence_sums(inputs)
    return sums[inputs.sequence_ids]


def _geometric_level(inputs: OffPolicyInputs) -> torch.Tensor:
    sums, counts = _sequence_sums(inputs)
    return (sums / counts.clamp(min=1))[inputs.sequence_ids]


def _drop(weights: torch.Tensor, lower: float, upper: float) -> torch.Tensor:
    return torch.where((weights >= lower) & (weights <= upper), weights, 0.0)


LEVELS = {
    "token": _token_level,
    "sequence": _sequence_level,
    "geometric": _geometric_level,
}
OFF_POLICY_METHODS: dict[str, Callable[[torch.Tensor, float, float], torch.Tensor]] = {
    "tis": torch.clamp,
    "mis": _drop,
    "icepop": _drop,
}


def importance_weights(
    section: OffPolicyConfig, inputs: OffPolicyInputs
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return bounded weights [P] without gradient (0 where masked), and sums over trained tokens for the metrics.

    log w is clamped to +-20. `is_bounded_sum` counts tokens whose weight the bounds changed, `is_masked_sum` tokens
    whose weight is 0. With `batch_normalize`, next add up the sums over the whole optimizer mini-batch and pass the
    weights through `normalize_by_batch_mean`.
    """
    # Clamp before exp: a single token with probability 0 on either side would make the batch's sum infinite.
    log_weights = LEVELS[section.level](inputs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    raw = log_weights.to(inputs.old_logprobs.dtype).exp()
    bounded = OFF_POLICY_METHODS[section.correction](raw, section.low, section.high)
    weights = torch.where(inputs.trained, bounded, 0.0)
    changed = inputs.trained & (bounded != raw)
    metrics = {
        "num_tokens": inputs.trained.sum().to(torch.float64),
        "is_weight_sum": weights.sum(dtype=torch.float64),
        "is_weight_square_sum": weights.square().sum(dtype=torch.float64),
        "is_bounded_sum": changed.sum().to(torch.float64),
        "is_masked_sum": (inputs.trained & (weights == 0)).sum().to(torch.float64),
    }
    return weights, metrics


def normalize_by_batch_mean(weights: torch.Tensor, weight_sum: float, num_tokens: float) -> torch.Tensor:
    """Divide bounded weights [P] by their token mean over the optimizer mini-batch (the GLOBAL sum and count).

    If the sum is 0 (every token dropped), the weights stay 0.
    """
    return weights if weight_sum == 0 else weights * (num_tokens / weight_sum)


# Classes of tokens by staleness in policy versions: name -> (lowest, highest).
LAGS: dict[str, tuple[float, float]] = {"lag0": (0, 0), "lag1": (1, 1), "lag2plus": (2, math.inf)}


def mismatch_sums(
    old_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    loss_mask: torch.Tensor,
    staleness: torch.Tensor | None = None,
) -> MetricSums:
    """Return sums and maxima over the trained tokens of [P] tokens; w is not bounded, but log w is clamped to +-20.

    `staleness` [P] is how many policy versions old each token is; None means 0 everywhere.
    """
    trained = loss_mask > 0

    def over(tokens: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        # values[tokens] would make the host wait for the number of tokens.
        return torch.where(tokens, values, 0.0).sum()

    # float64, because the gap between two fp32 engines is 1e-7, too small for a float32 sum over 1e8 tokens to resolve.
    # Untrained tokens get 0 on both sides, so they add no gap.
    old, rollout = (torch.where(trained, side.detach().double(), 0.0) for side in (old_logprobs, rollout_logprobs))
    difference, low_variance = old - rollout, k3(rollout, old)
    weights = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    probability_gap = (old.exp() - rollout.exp()).abs()
    zero = torch.zeros(1, dtype=torch.float64, device=old.device)
    sums = {
        "num_tokens": trained.sum().to(torch.float64),
        "abs_logprob_diff": difference.abs().sum(),
        "abs_prob_diff": probability_gap.sum(),
        "k1": -difference.sum(),
        "k3": low_variance.sum(),
        "weight": over(trained, weights),
        "weight_square": over(trained, weights.square()),
    }
    behind = torch.zeros_like(old) if staleness is None else staleness.to(old.device)
    for lag, (first, last) in LAGS.items():
        chosen = trained & (behind >= first) & (behind <= last)
        sums[f"{lag}_tokens"] = chosen.sum().to(torch.float64)
        sums[f"{lag}_abs_logprob_diff"] = over(chosen, difference.abs())
        sums[f"{lag}_k3"] = over(chosen, low_variance)
    maxima = {
        "abs_logprob_diff": torch.cat([difference.abs(), zero]).max(),
        "abs_prob_diff": torch.cat([probability_gap, zero]).max(),
    }
    return MetricSums(sums, maxima)


def mismatch_metrics(total: MetricSums) -> dict[str, float]:
    """Return metrics from globally combined sums; all 0 (ratios 1) if no token was trained.

    k1 and k3 estimate KL(rollout || old) on tokens the engine drew. `ess` = (sum w)^2 / (n sum w^2) in (0, 1].
    `ppl_ratio` = perplexity under the trainer / under the engine = exp(k1). Per lag, the metrics give the share of
    tokens that are that many policy versions old, and their mean |log w| and k3. At lag 0 the mismatch comes only from
    the engines' numerics; at higher lags the policy has also moved.
    """
    sums = {key: float(value) for key, value in total.sums.items()}
    num_tokens = max(sums["num_tokens"], 1.0)
    k1_mean = sums["k1"] / num_tokens
    return {
        "mismatch/abs_logprob_diff_mean": sums["abs_logprob_diff"] / num_tokens,
        "mismatch/abs_logprob_diff_max": float(total.maxima["abs_logprob_diff"]),
        "mismatch/abs_prob_diff_mean": sums["abs_prob_diff"] / num_tokens,
        "mismatch/abs_prob_diff_max": float(total.maxima["abs_prob_diff"]),
        "mismatch/kl_k1": k1_mean,
        "mismatch/kl_k3": sums["k3"] / num_tokens,
        "mismatch/ess": sums["weight"] ** 2 / (num_tokens * sums["weight_square"]) if sums["weight_square"] else 1.0,
        "mismatch/ppl_ratio": math.exp(min(max(k1_mean, -LOG_RATIO_LIMIT), LOG_RATIO_LIMIT)),
        **{name: value for lag in LAGS for name, value in _lag_metrics(lag, sums, num_tokens).items()},
    }


def _lag_metrics(lag: str, sums: dict[str, float], num_tokens: float) -> dict[str, float]:
    num_of_lag = max(sums[f"{lag}_tokens"], 1.0)
    return {
        f"mismatch/{lag}_token_share": sums[f"{lag}_tokens"] / num_tokens,
        f"mismatch/{lag}_abs_logprob_diff_mean": sums[f"{lag}_abs_logprob_diff"] / num_of_lag,
        f"mismatch/{lag}_kl_k3": sums[f"{lag}_k3"] / num_of_lag,
    }
