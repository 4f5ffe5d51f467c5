"""Advantages, returns and masks from a critic's values (PPO, VAPO, T-PPO), as pure functions of a whole rollout batch.

    tokens of the window --GAE / EGAE, lambda by rule--> advantages --without tail--> whitened, clipped: the policy's
    tokens of all windows of finished responses --GAE, the critic's lambda--> returns: the critic's targets

A whole response is a single finished window, so PPO and VAPO use the same computation as T-PPO. Every rank computes it
for the whole batch, from the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from megatron_dapo.algorithms.egae import extended_estimates, without_tail
from megatron_dapo.algorithms.explained_variance import PARTS, explained_variance, explained_variance_sums
from megatron_dapo.algorithms.gae import ValueInputs, estimate_values
from megatron_dapo.algorithms.group_advantages import EstimatedBatch
from megatron_dapo.algorithms.length_adaptive_lambda import LambdaRule
from megatron_dapo.algorithms.token_rewards import kl_shaped_rewards, outcome_rewards
from megatron_dapo.algorithms.whitening import limited, moments, whiten
from megatron_dapo.config.algorithm_schema import AdvantageEstimationConfig
from megatron_dapo.types import TrainSample


def estimate_value_advantages(
    samples: Sequence[TrainSample],
    section: AdvantageEstimationConfig,
    lambda_rule: LambdaRule,
    ignored_tail_tokens: int = 0,
) -> EstimatedBatch:
    """Estimate advantages and returns from the samples' `values`, less `kl_penalties` in the tokens' rewards.

    A sample with a value or penalty that is not finite is counted but not trained on. `lambda_rule` sets the lambda for
    the policy's advantages. The policy loss leaves out the last `ignored_tail_tokens` of windows whose responses
    continue. Raise ValueError if gamma or lambda lies outside [0, 1], or if no sample has finite values.
    """
    usable = [_is_finite(sample.values) and _is_finite(sample.kl_penalties) for sample in samples]
    if samples and not any(usable):
        finite_values = any(_is_finite(sample.values) for sample in samples)
        what, whose = ("KL penalties", "the policy") if finite_values else ("critic's values", "the critic")
        raise ValueError(
            f"none of the {what} of {len(samples)} responses are finite: the weights of {whose} are damaged; resume from an "
            "earlier checkpoint"
        )
    responses = [_Response.of(*each) for each in zip(samples, usable, strict=True)]
    policy, advantages_metrics = _policy_samples(responses, section, lambda_rule, ignored_tail_tokens)
    critic, value_metrics, has_spread = _critic_samples(responses, section)
    finished = [one.is_finished for one in responses]
    metrics = {
        **advantages_metrics,
        **value_metrics,
        "critic/nonfinite_samples": float(usable.count(False)),
        "critic/finished_share": sum(finished) / max(1, len(finished)),
    }
    # Mean over the trained tokens; 0 for a sample without any.
    shown = {s.sample_id: float((s.advantages * s.loss_mask).sum() / s.loss_mask.sum().clamp(min=1)) for s in policy}
    return EstimatedBatch(list(samples), policy, critic, metrics, shown, has_spread)


def _is_finite(numbers: torch.Tensor | None) -> bool:
    return numbers is None or bool(torch.isfinite(numbers).all())


@dataclass(frozen=True)
class _Response:
    """One response with its values and penalties; every number is finite."""

    sample: TrainSample
    reward: float
    start: int  # first response token of the window
    is_finished: bool
    values: torch.Tensor  # [R]
    penalties: torch.Tensor  # [R]

    @staticmethod
    def of(sample: TrainSample, usable: bool) -> _Response:
        context, values, penalties = sample.critic_context, sample.values, sample.kl_penalties
        assert context is not None and values is not None, f"sample {sample.sample_id} has no reward or no values"
        sample = replace(sample, values=None, kl_penalties=None)
        nothing = torch.zeros_like(values)
        if not usable:
            sample, values, penalties = replace(sample, loss_mask=torch.zeros_like(sample.loss_mask)), nothing, nothing
        window = context.window
        return _Response(
            sample,
            context.reward,
            window.start,
            window.is_finished,
            values,
            nothing if penalties is None else penalties,
        )


def _policy_samples(
    responses: Sequence[_Response],
    section: AdvantageEstimationConfig,
    lambda_rule: LambdaRule,
    ignored_tail_tokens: int,
) -> tuple[list[TrainSample], dict[str, float]]:
    """Return advantages of the tokens of each window; earlier tokens get 0 and leave the loss."""
    lengths = torch.tensor([one.sample.num_response_tokens - one.start for one in responses], dtype=torch.int64)
    is_finished = torch.tensor([one.is_finished for one in responses], dtype=torch.bool)
    mask = _joined([one.sample.loss_mask[one.start :] for one in responses])
    rewards = _token_rewards(responses, mask, lengths, [one.start for one in responses])
    whole_lengths = torch.tensor([one.sample.num_sampled for one in responses], dtype=torch.int64)
    estimates = extended_estimates(
        _joined([one.values[one.start :] for one in responses]),
        rewards,
        mask,
        lengths,
        is_finished,
        section.gamma,
        lambda_rule(whole_lengths, is_finished),
    )
    trained = without_tail(mask, lengths, is_finished, ignored_tail_tokens)
    advantages = _scaled(estimates.advantages, trained, section)
    parts = zip(responses, trained.split(lengths.tolist()), advantages.split(lengths.tolist()), strict=True)
    samples = [_of_window(one, window_mask, window_advantages) for one, window_mask, window_advantages in parts]
    return samples, _advantage_metrics(estimates.advantages, advantages, trained)


def _scaled(advantages: torch.Tensor, mask: torch.Tensor, section: AdvantageEstimationConfig) -> torch.Tensor:
    """Return the advantages whitened over the whole batch and clipped, as configured; 0 where masked."""
    scaled = torch.where(mask > 0, advantages, 0.0)
    if section.whiten:
        spread = moments(advantages, mask)
        scaled = whiten(advantages, mask, spread.mean(), spread.variance())
    return limited(scaled, section.clip) if section.clip else scaled


def _of_window(one: _Response, mask: torch.Tensor, advantages: torch.Tensor) -> TrainSample:
    before = torch.zeros(one.start)
    return replace(
        one.sample, loss_mask=torch.cat([before, mask]), advantages=torch.cat([before, advantages.to(torch.float32)])
    )


def _critic_samples(
    responses: Sequence[_Response], section: AdvantageEstimationConfig
) -> tuple[list[TrainSample], dict[str, float], bool]:
    """Return finished responses with the values and targets of all windows, and whether the targets differ.

    The policy trained on the tokens before the last window in earlier steps, so its mask leaves them out. The critic
    trains on the whole response, so they count here.
    """
    finished = [one for one in responses if one.is_finished and bool(one.sample.loss_mask.any())]
    lengths = torch.tensor([one.sample.num_response_tokens for one in finished], dtype=torch.int64)
    masks = [_whole_mask(one) for one in finished]
    mask, values = _joined(masks), _joined([one.values for one in finished])
    rewards = _token_rewards(finished, mask, lengths, [0] * len(finished))
    inputs = ValueInputs(values, rewards, mask, lengths, torch.zeros(len(finished)))
    returns = estimate_values(inputs, section.gamma, section.critic_lambda).returns
    samples = [
        replace(one.sample, loss_mask=whole, values=one.values, returns=target.to(torch.float32))
        for one, whole, target in zip(finished, masks, returns.split(lengths.tolist()), strict=True)
    ]
    return samples, *_explained(values, returns, mask, lengths)


def _whole_mask(one: _Response) -> torch.Tensor:
    mask, observed = one.sample.loss_mask.clone(), one.sample.observed
    mask[: one.start] = 1.0 if observed is None else (~observed[: one.start]).float()
    return mask


def _token_rewards(
    responses: Sequence[_Response], mask: torch.Tensor, lengths: torch.Tensor, starts: Sequence[int]
) -> torch.Tensor:
    """Return [P]: the outcome on the last trained token of finished responses, less the tokens' penalties."""
    outcomes = torch.tensor([one.reward if one.is_finished else 0.0 for one in responses])
    penalties = _joined([one.penalties[start:] for one, start in zip(responses, starts, strict=True)])
    return kl_shaped_rewards(outcome_rewards(outcomes, mask, lengths), penalties, mask, beta=1.0)


def _explained(
    values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor
) -> tuple[dict[str, float], bool]:
    """Return the critic's explained variance before this update (0 if all returns are equal), and if they differ."""
    found = explained_variance(explained_variance_sums(values, returns, mask, lengths)) if len(lengths) else {}
    num_tokens = max(1.0, float(mask.sum()))
    metrics = {
        **{f"critic/{_EXPLAINED[part]}": found.get(part, 0.0) for part in PARTS},
        "critic/value_mean": float((values * mask).sum()) / num_tokens,
        "critic/return_mean": float((returns * mask).sum()) / num_tokens,
    }
    return metrics, "all" in found


_EXPLAINED = {part: f"explained_variance_{part}" if part != "all" else "explained_variance" for part in PARTS}


def _advantage_metrics(raw: torch.Tensor, scaled: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    spread = moments(raw, mask)
    return {
        "advantage/mean": spread.mean(),
        "advantage/std": spread.variance() ** 0.5,
        "advantage/abs_max": float((scaled * mask).abs().max()) if mask.numel() else 0.0,
    }


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(parts)) if parts else torch.zeros(0)
