"""From scored groups to what the trainer learns from: one advantage or critic context a response, one mask a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from megatron_dapo.algorithms.advantages import AdvantageInputs, compute_advantages
from megatron_dapo.algorithms.length_reward import overlong_keep_mask
from megatron_dapo.config.algorithm_schema import AdvantageConfig
from megatron_dapo.types import Completion, CriticContext, Group, ScoredSample, TrainSample


@dataclass(frozen=True)
class TrainSamples:
    """The samples of one rollout batch in group order, with the advantages' diagnostics."""

    samples: tuple[TrainSample, ...]
    metrics: dict[str, float]


def build_train_samples(groups: Sequence[Group], advantage: AdvantageConfig, *, filter_overlong: bool) -> TrainSamples:
    """Advantages are computed over complete groups, before any split into mini-batches (DAPO, arXiv 2503.14476, Eq 9).

    With `filter_overlong` truncated responses keep their place in the group's statistics and lose their loss mask, so their tokens
    leave every denominator.
    """
    scored = [(index, sample) for index, group in enumerate(groups) for sample in group.samples]
    lengths = torch.tensor([len(sample.completion.token_ids) for _, sample in scored], dtype=torch.int64)
    keep = torch.ones(len(scored))
    if filter_overlong:
        keep = overlong_keep_mask(torch.tensor([sample.completion.is_truncated for _, sample in scored]))
    advantages = compute_advantages(
        advantage,
        AdvantageInputs(
            rewards=torch.tensor([sample.reward for _, sample in scored], dtype=torch.float64),
            group_index=torch.tensor([index for index, _ in scored], dtype=torch.int64),
            response_lengths=lengths * keep.to(torch.int64),
        ),
    )
    samples = tuple(
        _train_sample(groups[index], sample, index, float(advantages.values[place]), float(keep[place]))
        for place, (index, sample) in enumerate(scored)
    )
    return TrainSamples(samples, dict(advantages.metrics))


def build_critic_samples(groups: Sequence[Group], *, filter_overlong: bool) -> TrainSamples:
    """For algorithms with a critic, which makes the advantages later: the loss is over the tokens of the window alone.

    With `filter_overlong` truncated responses lose their loss mask, for policy and critic.
    """
    samples = []
    for index, group in enumerate(groups):
        for sample in group.samples:
            is_left_out = filter_overlong and sample.window.is_finished and sample.completion.is_truncated
            built = _train_sample(group, sample, index, 0.0, 0.0 if is_left_out else 1.0)
            built.loss_mask[: sample.window.start] = 0.0
            critic_context = CriticContext(sample.reward, sample.score.accuracy > 0, sample.window)
            samples.append(replace(built, critic_context=critic_context))
    return TrainSamples(tuple(samples), {})


def with_staleness(samples: Sequence[TrainSample], groups: Sequence[Group], version: int) -> tuple[TrainSample, ...]:
    """`samples` of `groups`, in their order, with the versions each token is behind `version`, the policy trained."""
    completions = [sample.completion for group in groups for sample in group.samples]
    return tuple(
        replace(sample, staleness=_staleness(completion, version))
        for sample, completion in zip(samples, completions, strict=True)
    )


def _staleness(completion: Completion, version: int) -> torch.Tensor:
    staleness = torch.zeros(len(completion.token_ids))
    for run in completion.versions:
        staleness[run.start : run.end] = version - run.version
    return staleness


def _train_sample(group: Group, sample: ScoredSample, group_index: int, advantage: float, mask: float) -> TrainSample:
    completion = sample.completion
    num_response = len(completion.token_ids)
    assert num_response == len(completion.logprobs), (
        f"sample {sample.sample_id}: {num_response} response tokens but {len(completion.logprobs)} log-probs"
    )
    return TrainSample(
        sample_id=sample.sample_id,
        group_index=group_index,
        tokens=torch.tensor([*group.prompt.token_ids, *completion.token_ids], dtype=torch.int64),
        prompt_length=len(group.prompt.token_ids),
        loss_mask=torch.full((num_response,), mask),
        advantages=torch.full((num_response,), advantage),
        rollout_logprobs=torch.tensor(completion.logprobs, dtype=torch.float32),
    )
