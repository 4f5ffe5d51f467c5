"""Weights that turn token losses into the loss of an optimizer step: one per token, from global denominators.

    loss = sum over all trained tokens of  weight(sample of the token) * token loss

| mode               | loss                                        | weight of a token of sample i in group q |
|--------------------|---------------------------------------------|------------------------------------------|
| token_mean         | sum l / sum len      (DAPO, over the step)  | 1 / sum len                              |
| sample_mean        | mean_i(sum_t l / len_i)   (GRPO)            | 1 / (N len_i)                            |
| per_group          | mean_q(sum l / sum_{i in q} len_i)          | 1 / (Q sum_{i in q} len_i)               |
| dr_grpo            | sum l / (N_all L), constant L (Dr. GRPO)    | 1 / (N_all L)                            |
| seq_sum_mean       | mean_i sum_t l                              | 1 / N                                    |
| rollout_token_mean | sum l * M / sum len of the rollout's M      | M / sum len of the whole rollout batch   |
|                    | mini-batches (T-PPO's code)                 |                                          |

The denominators are those of the whole optimizer mini-batch: every micro-batch of every data-parallel rank, after every
filter. The weights are then right however that mini-batch is split, and gradients are SUMMED over micro-batches and
ranks. A mean over micro-batches with unequal token counts would be another objective; no mode uses one. per_group is
DAPO's Eq 8 as written (arXiv 2503.14476); its text and public code mean token_mean. Under rollout_token_mean all tokens
of a rollout batch weigh the same, so a mini-batch with few tokens makes a smaller step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_dapo.algorithms.segments import group_positions, segment_sum


@dataclass(frozen=True)
class Denominators:
    """Counts over one optimizer mini-batch. Unless noted, samples and groups without a trained token do not count."""

    num_tokens: int  # trained tokens
    num_sequences: int  # samples with a trained token
    num_groups: int  # groups with a trained token
    num_all_sequences: int  # all samples: Dr. GRPO's divisor must not depend on a filter
    group_ids: torch.Tensor  # [num_groups_all] int64, sorted
    tokens_per_group: torch.Tensor  # [num_groups_all] int64: the group's trained tokens WITHIN this mini-batch
    mean_mini_batch_tokens: float  # trained tokens of the whole rollout batch / its mini-batches


def global_denominators(
    trained_tokens: torch.Tensor,
    group_index: torch.Tensor,
    rollout_tokens: int | None = None,
    num_mini_batches: int = 1,
) -> Denominators:
    """Denominators from the trained tokens [S] and the group [S] of ALL samples of an optimizer mini-batch.

    A group spread over several mini-batches counts in each with the tokens it has there. `rollout_tokens`: trained tokens
    of all `num_mini_batches` mini-batches of the rollout batch; None: this is the only one.
    """
    if num_mini_batches < 1:
        raise ValueError(f"num_mini_batches {num_mini_batches} must be at least 1")
    assert trained_tokens.shape == group_index.shape, f"{trained_tokens.shape} token counts, {group_index.shape} groups"
    positions, num_groups = group_positions(group_index)
    per_group = segment_sum(trained_tokens, positions, num_groups).round().to(torch.int64)
    num_tokens = int(trained_tokens.sum())
    return Denominators(
        num_tokens=num_tokens,
        num_sequences=int((trained_tokens > 0).sum()),
        num_groups=int((per_group > 0).sum()),
        num_all_sequences=int(trained_tokens.numel()),
        group_ids=torch.unique(group_index),
        tokens_per_group=per_group,
        mean_mini_batch_tokens=(num_tokens if rollout_tokens is None else rollout_tokens) / num_mini_batches,
    )


@dataclass(frozen=True)
class WeightInputs:
    """Counts that a mode may divide by."""

    trained_tokens: torch.Tensor  # [S] float64
    group_tokens: torch.Tensor  # [S] float64, trained tokens of the sample's group within the mini-batch
    denominators: Denominators
    max_length: int


def _tokens_of_groups(group_index: torch.Tensor, denominators: Denominators) -> torch.Tensor:
    """Return [S], the trained tokens of each sample's group. Raise ValueError for an unknown group."""
    if group_index.numel() == 0:
        return torch.zeros(0, dtype=torch.float64)
    place = torch.searchsorted(denominators.group_ids, group_index).clamp(max=denominators.group_ids.numel() - 1)
    unseen = denominators.group_ids[place] != group_index
    if bool(unseen.any()):
        raise ValueError(
            f"group {int(group_index[unseen][0])} is not among the {denominators.group_ids.numel()} groups the "
            "denominators were computed from; compute them over the whole optimizer mini-batch"
        )
    return denominators.tokens_per_group[place].to(torch.float64)


# Divisor [S] of each sample's tokens. A divisor of 0 means that nothing is trained.
AGGREGATIONS = {
    "token_mean": lambda w: torch.full_like(w.trained_tokens, w.denominators.num_tokens),
    "sample_mean": lambda w: w.trained_tokens * w.denominators.num_sequences,
    "per_group": lambda w: w.group_tokens * w.denominators.num_groups,
    "dr_grpo": lambda w: torch.full_like(w.trained_tokens, w.denominators.num_all_sequences * w.max_length),
    "seq_sum_mean": lambda w: torch.full_like(w.trained_tokens, w.denominators.num_sequences),
    "rollout_token_mean": lambda w: torch.full_like(w.trained_tokens, w.denominators.mean_mini_batch_tokens),
}


def sample_token_weights(
    mode: str, trained_tokens: torch.Tensor, group_index: torch.Tensor, denominators: Denominators, max_length: int
) -> torch.Tensor:
    """Return the weight, float64 [S], of each sample's trained tokens under `mode`.

    `trained_tokens` and `group_index` [S] describe any part of the mini-batch that `denominators` was computed from;
    `max_length` is Dr. GRPO's constant (the maximum response length, not the longest one of the batch). Samples
    without a trained token get 0, so a mini-batch without trained tokens has weights 0, not NaN.
    """
    if max_length < 1:
        raise ValueError(f"max_length {max_length} must be at least 1: the longest response that may be generated")
    counts = trained_tokens.to(torch.float64)
    inputs = WeightInputs(counts, _tokens_of_groups(group_index, denominators), denominators, max_length)
    divisor = AGGREGATIONS[mode](inputs)
    trained = (counts > 0) & (divisor > 0)
    return torch.where(trained, 1.0 / torch.where(trained, divisor, 1.0), 0.0)
