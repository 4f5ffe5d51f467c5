"""Advantages, returns and masks of a whole batch from a critic's values.

    tokens of the window --GAE / EGAE, lambda by rule--> advantages --without tail--> whitened, limited: the policy's
    tokens of all windows of finished responses --GAE, the critic's lambda--> returns: the critic's targets

A whole response is one window that is finished, so PPO and VAPO are the same computation as T-PPO. Every rank computes
it for the whole batch, from the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from megatron_dapo.algorithms.egae import extended_estimates, without_tail
from megatron_dapo.algorithms.explained_variance import PARTS, explained_variance, explained_variance_sums
from megatron_dapo.algorithms.gae import ValueInputs, estimate_values
from megatron_dapo.algorithms.length_adaptive_lambda import LambdaRule
from megatron_dapo.algorithms.token_rewards import kl_shaped_rewards, outcome_rewards
from megatron_dapo.algorithms.whitening import limited, moments, whiten
from megatron_dapo.types import CriticContext, TrainSample


@dataclass(frozen=True)
class AdvantageSettings:
    """Lambdas, whitening and clipping of advantages."""

    lambda_rule: LambdaRule  # of the policy's advantages
    gamma: float = 1.0
    critic_lambda: float = 1.0
    whiten: bool = True
    limit: float = 0.0  # largest magnitude; 0: none
    ignored_tail_tokens: int = 0  # of windows whose responses continue


@dataclass(frozen=True)
class EstimatedBatch:
    """Samples for the policy (advantages of the window's tokens) and for the critic (finished ones: values, returns)."""

    policy_samples: list[TrainSample]
    critic_samples: list[TrainSample]
    metrics: dict[str, float]
    has_spread: bool = True  # the critic's targets differ, so that there is something to explain


def estimate_advantages(
    samples: Sequence[TrainSample],
    values: Sequence[torch.Tensor],
    settings: AdvantageSettings,
    penalties: Sequence[torch.Tensor] | None = None,
) -> EstimatedBatch:
    """`values` [R] each, of the state every response token was drawn in; `penalties` [R] are taken off the tokens'
    rewards (KL). A sample with a value or penalty that is not finite trains nothing and is counted.

    ValueError where gamma or lambda lie outside [0, 1], or no sample has finite values.
    """
    penalties = penalties if penalties is not None else [torch.zeros_like(each) for each in values]
    usable = [bool(torch.isfinite(torch.cat(pair)).all()) for pair in zip(values, penalties, strict=True)]
    if samples and not any(usable):
        finite_values = any(bool(torch.isfinite(each).all()) for each in values)
        what, whose = ("KL penalties", "the policy") if finite_values else ("critic's values", "the critic")
        raise ValueError(
            f"none of the {what} of {len(samples)} responses are finite: the weights of {whose} are damaged; resume from an "
            "earlier checkpoint"
        )
    judged = [_Judged.of(*each) for each in zip(samples, values, penalties, usable, strict=True)]
    policy, advantages_metrics = _policy_samples(judged, settings)
    critic, value_metrics, has_spread = _critic_samples(judged, settings)
    finished = [one.critic_context.window.is_finished for one in judged]
    metrics = {
        **advantages_metrics,
        **value_metrics,
        "critic/nonfinite_samples": float(usable.count(False)),
        "critic/finished_share": sum(finished) / max(1, len(finished)),
    }
    return EstimatedBatch(policy, critic, metrics, has_spread)


@dataclass(frozen=True)
class _Judged:
    """One response with what the critic said of it; every number is finite."""

    sample: TrainSample
    critic_context: CriticContext
    values: torch.Tensor  # [R]
    penalties: torch.Tensor  # [R]

    @staticmethod
    def of(sample: TrainSample, values: torch.Tensor, penalties: torch.Tensor, usable: bool) -> _Judged:
        assert sample.critic_context is not None, f"sample {sample.sample_id} was not judged"
        if usable:
            return _Judged(sample, sample.critic_context, values, penalties)
        untrained = replace(sample, loss_mask=torch.zeros_like(sample.loss_mask))
        return _Judged(untrained, sample.critic_context, torch.zeros_like(values), torch.zeros_like(penalties))

    @property
    def start(self) -> int:
        return self.critic_context.window.start

    @property
    def is_finished(self) -> bool:
        return self.critic_context.window.is_finished


def _policy_samples(
    judged: Sequence[_Judged], settings: AdvantageSettings
) -> tuple[list[TrainSample], dict[str, float]]:
    """Advantages over the tokens of each window, 0 on the tokens before it, which leave the loss."""
    lengths = torch.tensor([one.sample.num_response_tokens - one.start for one in judged], dtype=torch.int64)
    is_finished = torch.tensor([one.is_finished for one in judged], dtype=torch.bool)
    mask = _joined([one.sample.loss_mask[one.start :] for one in judged])
    rewards = _token_rewards(judged, mask, lengths, [one.start for one in judged])
    whole_lengths = torch.tensor([one.sample.num_response_tokens for one in judged], dtype=torch.int64)
    estimates = extended_estimates(
        _joined([one.values[one.start :] for one in judged]),
        rewards,
        mask,
        lengths,
        is_finished,
        settings.gamma,
        settings.lambda_rule(whole_lengths, is_finished),
    )
    trained = without_tail(mask, lengths, is_finished, settings.ignored_tail_tokens)
    advantages = _scaled(estimates.advantages, trained, settings)
    parts = zip(judged, trained.split(lengths.tolist()), advantages.split(lengths.tolist()), strict=True)
    samples = [_of_window(one, window_mask, window_advantages) for one, window_mask, window_advantages in parts]
    return samples, _advantage_metrics(estimates.advantages, advantages, trained)


def _scaled(advantages: torch.Tensor, mask: torch.Tensor, settings: AdvantageSettings) -> torch.Tensor:
    """Whitened over the whole batch and limited, as the settings say; 0 where masked."""
    scaled = torch.where(mask > 0, advantages, 0.0)
    if settings.whiten:
        spread = moments(advantages, mask)
        scaled = whiten(advantages, mask, spread.mean(), spread.variance())
    return limited(scaled, settings.limit) if settings.limit else scaled


def _of_window(one: _Judged, mask: torch.Tensor, advantages: torch.Tensor) -> TrainSample:
    before = torch.zeros(one.start)
    return replace(
        one.sample, loss_mask=torch.cat([before, mask]), advantages=torch.cat([before, advantages.to(torch.float32)])
    )


def _critic_samples(
    judged: Sequence[_Judged], settings: AdvantageSettings
) -> tuple[list[TrainSample], dict[str, float], bool]:
    """All tokens of finished responses, whatever window they are of, with values and targets.

    What of a response lies before its last window had its mask then; now it counts as a whole, so the mask is taken to
    be that of its last token. The last of what is returned: whether the targets differ.
    """
    finished = [one for one in judged if one.is_finished and bool(one.sample.loss_mask.any())]
    lengths = torch.tensor([one.sample.num_response_tokens for one in finished], dtype=torch.int64)
    masks = [_whole_mask(one) for one in finished]
    mask, values = _joined(masks), _joined([one.values for one in finished])
    rewards = _token_rewards(finished, mask, lengths, [0] * len(finished))
    inputs = ValueInputs(values, rewards, mask, lengths, torch.zeros(len(finished)))
    returns = estimate_values(inputs, settings.gamma, settings.critic_lambda).returns
    samples = [
        replace(one.sample, loss_mask=whole, values=one.values, returns=target.to(torch.float32))
        for one, whole, target in zip(finished, masks, returns.split(lengths.tolist()), strict=True)
    ]
    return samples, *_explained(values, returns, mask, lengths)


def _whole_mask(one: _Judged) -> torch.Tensor:
    mask = one.sample.loss_mask.clone()
    mask[: one.start] = 1.0
    return mask


def _token_rewards(
    judged: Sequence[_Judged], mask: torch.Tensor, lengths: torch.Tensor, starts: Sequence[int]
) -> torch.Tensor:
    """[P] the outcome on the last trained token of finished responses, less the tokens' penalties."""
    outcomes = torch.tensor([one.critic_context.reward if one.is_finished else 0.0 for one in judged])
    penalties = _joined([one.penalties[start:] for one, start in zip(judged, starts, strict=True)])
    return kl_shaped_rewards(outcome_rewards(outcomes, mask, lengths), penalties, mask, beta=1.0)


def _explained(
    values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor
) -> tuple[dict[str, float], bool]:
    """Return the explained variance of the critic before this update, 0 if all returns are equal, and whether they differ."""
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
