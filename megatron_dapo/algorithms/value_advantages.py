"""Advantages, returns and masks from a critic's values (PPO, VAPO, T-PPO), as pure functions of a whole rollout batch.

    tokens of the window --GAE / EGAE, lambda by rule--> advantages --without tail--> whitened, clipped: the policy's
    tokens of all windows of finished responses --GAE, the critic's lambda--> returns: the critic's targets

A whole response is a single finished window, so PPO and VAPO use the same computation as T-PPO. Every rank computes it
for the whole batch, from the same numbers.

The steps of an episode are its sampled tokens in the order of its turns, whichever streams they are in: an answer of its
environment, or another stream, lies between two of them. So the estimates do not depend on how it is cut into sequences.
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


@dataclass(frozen=True)
class _Batch:
    """Sequences, one after the other, and the E episodes of which they are neighbors."""

    sequences: Sequence[_Sequence]

    @cached_property
    def counts(self) -> list[int]:
        """Sequences of each episode."""
        return [len(each) for each in _episodes([one.sample for one in self.sequences])]

    @cached_property
    def episodes(self) -> list[Sequence[_Sequence]]:
        ends = list(accumulate(self.counts))
        return [self.sequences[end - count : end] for end, count in zip(ends, self.counts, strict=True)]

    @property
    def is_finished(self) -> torch.Tensor:
        """[E] bool"""
        return torch.tensor([each[0].is_finished for each in self.episodes], dtype=torch.bool)

    @property
    def values_after(self) -> torch.Tensor:
        """[E], the critic's values of the states after the windows; NaN if the last token of one was sampled."""
        return torch.tensor([_known_value_after(each) for each in self.episodes])

    def in_time(self, starts: Sequence[int]) -> torch.Tensor | None:
        """Return the positions of all tokens from `starts` on, [P] int64, episode by episode in the order of their turns.

        None if that is the order in which they are.
        """
        if not any(one.sample.segment for one in self.sequences):
            return None
        episodes = torch.arange(len(self.counts)).repeat_interleave(torch.tensor(self.counts))
        keys = [
            episode * _MOST_TURNS + _turn_numbers(one)[start:]
            for episode, one, start in zip(episodes.tolist(), self.sequences, starts, strict=True)
        ]
        return torch.cat(keys).argsort(stable=True)

    def sums(self, numbers: Sequence[int]) -> torch.Tensor:
        """Return [E] int64, the sums over the sequences of each episode."""
        parts = torch.tensor(numbers, dtype=torch.int64).split(self.counts)
        return torch.stack([part.sum() for part in parts]) if parts and self.counts else torch.zeros(0, dtype=torch.int64)


_MOST_TURNS = 1 << 32


def _turn_numbers(one: _Sequence) -> torch.Tensor:
    """Return [R] int64, the number of each token's turn among those of the episode; an answer has that of its turn."""
    numbers = torch.zeros(one.sample.num_response_tokens, dtype=torch.int64)
    for turn in one.turns:
        numbers[turn.start :] = turn.order
    return numbers


def _known_value_after(sequences: Sequence[_Sequence]) -> float:
    """Return the value of the state after an episode's window: in a stream that has just begun, or after an answer."""
    *_, current = sorted(sequences, key=lambda one: one.turns[-1].order if one.turns else _MOST_TURNS)
    observed = current.sample.observed
    if not current.sample.num_response_tokens or (observed is not None and bool(observed[-1])):
        return current.sample.value_after
    return math.nan


def _arranged(tensor: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    return tensor if index is None else tensor[index]


def _put_back(tensor: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    return tensor if index is None else torch.empty_like(tensor).index_copy_(0, index, tensor)


def _policy_samples(
    sequences: Sequence[_Sequence],
    section: AdvantageEstimationConfig,
    lambda_rule: LambdaRule,
    ignored_tail_tokens: int,
) -> tuple[list[TrainSample], dict[str, float]]:
    """Return advantages of the tokens of each window; earlier tokens get 0 and leave the loss."""
    batch = _Batch(sequences)
    starts, sizes = [one.start for one in sequences], [one.num_window_tokens for one in sequences]
    lengths, is_finished, index = batch.sums(sizes), batch.is_finished, batch.in_time(starts)
    mask = _arranged(_joined([one.sample.loss_mask[one.start :] for one in sequences]), index)
    estimates = extended_estimates(
        _arranged(_joined([one.values[one.start :] for one in sequences]), index),
        _token_rewards(batch, mask, lengths, starts, index),
        mask,
        lengths,
        is_finished,
        section.gamma,
        lambda_rule(batch.sums([one.sample.num_sampled for one in sequences]), is_finished),
        batch.values_after,
    )
    trained = without_tail(mask, lengths, is_finished, ignored_tail_tokens)
    advantages = _scaled(estimates.advantages, trained, section)
    metrics = _advantage_metrics(estimates.advantages, advantages, trained)
    masks, values = (_put_back(each, index).split(sizes) for each in (trained, advantages))
    return [_of_window(*each) for each in zip(sequences, masks, values, strict=True)], metrics


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
        for each in _Batch(sequences).episodes
        if each[0].is_finished and any(bool(one.sample.loss_mask.any()) for one in each)
        for one in each
    ]
    batch, sizes, starts = _Batch(finished), [one.sample.num_response_tokens for one in finished], [0] * len(finished)
    lengths, index, masks = batch.sums(sizes), batch.in_time(starts), [_whole_mask(one) for one in finished]
    mask, values = (_arranged(_joined(each), index) for each in (masks, [one.values for one in finished]))
    rewards = _token_rewards(batch, mask, lengths, starts, index)
    inputs = ValueInputs(values, rewards, mask, lengths, torch.zeros(len(lengths)))
    returns = estimate_values(inputs, section.gamma, section.critic_lambda).returns
    samples = [
        replace(one.sample, loss_mask=whole, values=one.values, returns=target.to(torch.float32))
        for one, whole, target in zip(finished, masks, _put_back(returns, index).split(sizes), strict=True)
        if bool(whole.any())
    ]
    return samples, *_explained(values, returns, mask, lengths)


def _whole_mask(one: _Sequence) -> torch.Tensor:
    mask, observed = one.sample.loss_mask.clone(), one.sample.observed
    mask[: one.start] = 1.0 if observed is None else (~observed[: one.start]).float()
    return mask


def _token_rewards(
    batch: _Batch, mask: torch.Tensor, lengths: torch.Tensor, starts: Sequence[int], index: torch.Tensor | None
) -> torch.Tensor:
    """Return [P]: rewards of turns at their ends, the rest of the outcome on the last trained token of finished responses,
    less the tokens' penalties. `mask` and the result are arranged by `index`."""
    outcomes = torch.tensor([
        each[0].reward - sum(turn.reward for one in each for turn in one.turns) if each[0].is_finished else 0.0
        for each in batch.episodes
    ])  # fmt: skip
    sizes = [one.sample.num_response_tokens - start for one, start in zip(batch.sequences, starts, strict=True)]
    # Turns that ended before the window were rewarded in theirs.
    turns = [
        (offset + turn.end - start - 1, turn.reward)
        for one, start, offset in zip(batch.sequences, starts, accumulate(sizes, initial=0), strict=False)
        for turn in one.turns
        if turn.reward and turn.end > start
    ]
    ends = torch.tensor([end for end, _ in turns], dtype=torch.int64)
    if index is not None:
        ends = torch.empty_like(index).index_copy_(0, index, torch.arange(len(index)))[ends]
    of_turns = turn_rewards(torch.tensor([reward for _, reward in turns]), ends, mask, lengths)
    penalties = _joined([one.penalties[start:] for one, start in zip(batch.sequences, starts, strict=True)])
    rewards = outcome_rewards(outcomes, mask, lengths) + of_turns
    return kl_shaped_rewards(rewards, _arranged(penalties, index), mask, beta=1.0)


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
