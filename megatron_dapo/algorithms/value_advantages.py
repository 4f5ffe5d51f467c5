"""Advantages, returns and masks from a critic's values (PPO, VAPO, T-PPO), as pure functions of a whole rollout batch.

    tokens of the window --GAE / EGAE, lambda by rule--> advantages --without tail--> whitened, clipped: the policy's
    tokens of all windows of finished responses --GAE, the critic's lambda--> returns: the critic's targets

A whole response is a single finished window, so PPO and VAPO use the same computation as T-PPO. Every rank computes it
for the whole batch, from the same numbers.

The steps of an episode are its sampled tokens, in the order of its streams: an answer of its environment, or the begin of
another stream, lies between two of them. So the estimates do not depend on how an episode is cut into sequences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby

import torch

from megatron_dapo.algorithms.egae import extended_estimates, without_tail
from megatron_dapo.algorithms.explained_variance import PARTS, explained_variance, explained_variance_sums
from megatron_dapo.algorithms.gae import ValueInputs, estimate_values
from megatron_dapo.algorithms.group_advantages import EstimatedBatch
from megatron_dapo.algorithms.length_adaptive_lambda import LambdaRule
from megatron_dapo.algorithms.token_rewards import kl_shaped_rewards, outcome_rewards, turn_rewards
from megatron_dapo.algorithms.whitening import limited, moments, whiten
from megatron_dapo.config.algorithm_schema import AdvantageEstimationConfig
from megatron_dapo.types import TrainSample, TurnCredit


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
    usable = [all(map(_is_usable, sequences)) for sequences in _episodes(samples) for _ in sequences]
    if samples and not any(usable):
        finite_values = any(_is_finite(sample.values) for sample in samples)
        what, whose = ("KL penalties", "the policy") if finite_values else ("critic's values", "the critic")
        raise ValueError(
            f"none of the {what} of {len(samples)} responses are finite: the weights of {whose} are damaged; resume from an "
            "earlier checkpoint"
        )
    sequences = [_Sequence.of(*each) for each in zip(samples, usable, strict=True)]
    policy, advantages_metrics = _policy_samples(sequences, section, lambda_rule, ignored_tail_tokens)
    critic, value_metrics, has_spread = _critic_samples(sequences, section)
    finished = [one.is_finished for one in sequences if not one.sample.segment]
    metrics = {
        **advantages_metrics,
        **value_metrics,
        "critic/nonfinite_samples": float(usable.count(False)),
        "critic/finished_share": sum(finished) / max(1, len(finished)),
    }
    # Mean over the trained tokens; 0 for a sample without any.
    shown = {s.sample_id: float((s.advantages * s.loss_mask).sum() / s.loss_mask.sum().clamp(min=1)) for s in policy}
    return EstimatedBatch(list(samples), policy, critic, metrics, shown, has_spread)


def _episodes(samples: Sequence[TrainSample]) -> list[list[TrainSample]]:
    """Return the sequences of each episode, which are neighbors; a response of one turn is one."""
    return [list(sequences) for _, sequences in groupby(samples, lambda one: (one.group_index, one.episode))]


def _is_usable(sample: TrainSample) -> bool:
    return _is_finite(sample.values) and _is_finite(sample.kl_penalties) and math.isfinite(sample.value_after)


def _is_finite(numbers: torch.Tensor | None) -> bool:
    return numbers is None or bool(torch.isfinite(numbers).all())


@dataclass(frozen=True)
class _Sequence:
    """A response, or a stream of an episode, with its values and penalties; every number is finite."""

    sample: TrainSample
    reward: float
    start: int  # first response token of the window
    is_finished: bool
    values: torch.Tensor  # [R]
    penalties: torch.Tensor  # [R]

    @staticmethod
    def of(sample: TrainSample, usable: bool) -> _Sequence:
        context, values, penalties = sample.critic_context, sample.values, sample.kl_penalties
        assert context is not None and values is not None, f"sample {sample.sample_id} has no reward or no values"
        sample = replace(sample, values=None, kl_penalties=None)
        nothing = torch.zeros_like(values)
        if not usable:
            sample, values, penalties = replace(sample, loss_mask=torch.zeros_like(sample.loss_mask)), nothing, nothing
        window = context.window
        return _Sequence(
            sample,
            context.reward,
            window.start,
            window.is_finished,
            values,
            nothing if penalties is None else penalties,
        )

    @property
    def turns(self) -> tuple[TurnCredit, ...]:
        assert self.sample.critic_context is not None, f"sample {self.sample.sample_id} has no reward"
        return self.sample.critic_context.turns

    @property
    def num_window_tokens(self) -> int:
        """Tokens of the current window, an environment's included."""
        return self.sample.num_response_tokens - self.start

    @property
    def known_value_after(self) -> float:
        """The critic's value of the state after the window; NaN if no answer or begin of a stream is its last token."""
        observed = self.sample.observed
        is_known = not self.sample.num_response_tokens or (observed is not None and bool(observed[-1]))
        return self.sample.value_after if is_known else math.nan


@dataclass(frozen=True)
class _Batch:
    """Sequences, one after the other, and the E episodes of which they are neighbors."""

    sequences: Sequence[_Sequence]

    @cached_property
    def counts(self) -> list[int]:
        """Sequences of each episode."""
        return [len(each) for each in _episodes([one.sample for one in self.sequences])]

    @property
    def last(self) -> list[_Sequence]:
        """The last sequence of each episode."""
        return [self.sequences[end - 1] for end in accumulate(self.counts)]

    def sums(self, numbers: Sequence[int]) -> torch.Tensor:
        """Return [E] int64, the sums over the sequences of each episode."""
        parts = torch.tensor(numbers, dtype=torch.int64).split(self.counts)
        return torch.stack([part.sum() for part in parts]) if parts and self.counts else torch.zeros(0, dtype=torch.int64)


def _policy_samples(
    sequences: Sequence[_Sequence],
    section: AdvantageEstimationConfig,
    lambda_rule: LambdaRule,
    ignored_tail_tokens: int,
) -> tuple[list[TrainSample], dict[str, float]]:
    """Return advantages of the tokens of each window; earlier tokens get 0 and leave the loss."""
    batch = _Batch(sequences)
    sizes = [one.num_window_tokens for one in sequences]
    lengths = batch.sums(sizes)
    is_finished = torch.tensor([one.is_finished for one in batch.last], dtype=torch.bool)
    mask = _joined([one.sample.loss_mask[one.start :] for one in sequences])
    rewards = _token_rewards(batch, mask, lengths, [one.start for one in sequences])
    estimates = extended_estimates(
        _joined([one.values[one.start :] for one in sequences]),
        rewards,
        mask,
        lengths,
        is_finished,
        section.gamma,
        lambda_rule(batch.sums([one.sample.num_sampled for one in sequences]), is_finished),
        torch.tensor([one.known_value_after for one in batch.last]),
    )
    trained = without_tail(mask, lengths, is_finished, ignored_tail_tokens)
    advantages = _scaled(estimates.advantages, trained, section)
    parts = zip(sequences, trained.split(sizes), advantages.split(sizes), strict=True)
    samples = [_of_window(one, window_mask, window_advantages) for one, window_mask, window_advantages in parts]
    return samples, _advantage_metrics(estimates.advantages, advantages, trained)


def _scaled(advantages: torch.Tensor, mask: torch.Tensor, section: AdvantageEstimationConfig) -> torch.Tensor:
    """Return the advantages whitened over the whole batch and clipped, as configured; 0 where masked."""
    scaled = torch.where(mask > 0, advantages, 0.0)
    if section.whiten:
        spread = moments(advantages, mask)
        scaled = whiten(advantages, mask, spread.mean(), spread.variance())
    return limited(scaled, section.clip) if section.clip else scaled


def _of_window(one: _Sequence, mask: torch.Tensor, advantages: torch.Tensor) -> TrainSample:
    before = torch.zeros(one.start)
    return replace(
        one.sample, loss_mask=torch.cat([before, mask]), advantages=torch.cat([before, advantages.to(torch.float32)])
    )


def _critic_samples(
    sequences: Sequence[_Sequence], section: AdvantageEstimationConfig
) -> tuple[list[TrainSample], dict[str, float], bool]:
    """Return finished responses with the values and targets of all windows, and whether the targets differ.

    The policy trained on the tokens before the last window in earlier steps, so its mask leaves them out. The critic
    trains on the whole response, so they count here.
    """
    finished = [
        one
        for each in _split(sequences, _Batch(sequences).counts)
        if each[0].is_finished and any(bool(one.sample.loss_mask.any()) for one in each)
        for one in each
    ]
    batch, sizes = _Batch(finished), [one.sample.num_response_tokens for one in finished]
    lengths = batch.sums(sizes)
    masks = [_whole_mask(one) for one in finished]
    mask, values = _joined(masks), _joined([one.values for one in finished])
    rewards = _token_rewards(batch, mask, lengths, [0] * len(finished))
    inputs = ValueInputs(values, rewards, mask, lengths, torch.zeros(len(lengths)))
    returns = estimate_values(inputs, section.gamma, section.critic_lambda).returns
    samples = [
        replace(one.sample, loss_mask=whole, values=one.values, returns=target.to(torch.float32))
        for one, whole, target in zip(finished, masks, returns.split(sizes), strict=True)
        if bool(whole.any())
    ]
    return samples, *_explained(values, returns, mask, lengths)


def _split(sequences: Sequence[_Sequence], counts: Sequence[int]) -> list[Sequence[_Sequence]]:
    ends = list(accumulate(counts))
    return [sequences[end - count : end] for end, count in zip(ends, counts, strict=True)]


def _whole_mask(one: _Sequence) -> torch.Tensor:
    mask, observed = one.sample.loss_mask.clone(), one.sample.observed
    mask[: one.start] = 1.0 if observed is None else (~observed[: one.start]).float()
    return mask


def _token_rewards(
    batch: _Batch, mask: torch.Tensor, lengths: torch.Tensor, starts: Sequence[int]
) -> torch.Tensor:
    """Return [P]: rewards of turns at their ends, the rest of the outcome on the last trained token of finished responses,
    less the tokens' penalties."""
    outcomes, ends, rewards = [], [], []
    offset = 0
    for each in _split(batch.sequences, batch.counts):
        turns = [turn for one in each for turn in one.turns]
        outcomes.append(each[0].reward - sum(turn.reward for turn in turns) if each[0].is_finished else 0.0)
    for one, start in zip(batch.sequences, starts, strict=True):
        # Turns that ended before the window were rewarded in theirs.
        now = [turn for turn in one.turns if turn.reward and turn.end > start]
        ends += [offset + turn.end - start - 1 for turn in now]
        rewards += [turn.reward for turn in now]
        offset += one.sample.num_response_tokens - start
    placed = outcome_rewards(torch.tensor(outcomes), mask, lengths) + turn_rewards(
        torch.tensor(rewards), torch.tensor(ends, dtype=torch.int64), mask, lengths
    )
    penalties = _joined([one.penalties[start:] for one, start in zip(batch.sequences, starts, strict=True)])
    return kl_shaped_rewards(placed, penalties, mask, beta=1.0)


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
