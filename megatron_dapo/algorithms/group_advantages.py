"""Advantages of a rollout batch from its groups (DAPO, GRPO, RLOO). Every rank computes them from the same numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from megatron_dapo.algorithms.advantages import AdvantageInputs, compute_advantages
from megatron_dapo.config.algorithm_schema import AdvantageConfig
from megatron_dapo.types import TrainSample


@dataclass(frozen=True)
class EstimatedBatch:
    """A rollout batch with advantages, on which the policy and the critic train.

    `samples` go into the batch dump. `policy_samples` hold the advantages of the tokens trained now, `critic_samples`
    (finished responses) the values and returns.
    """

    samples: list[TrainSample]
    policy_samples: list[TrainSample]
    critic_samples: list[TrainSample] = field(default_factory=list)
    metrics: Mapping[str, float] = field(default_factory=dict)
    # Sample id -> the number shown with its text.
    shown_advantages: Mapping[str, float] = field(default_factory=dict)
    has_spread: bool = True  # the critic's targets differ, so that there is variance to explain


def episode_positions(samples: Sequence[TrainSample]) -> torch.Tensor:
    """Return the episode of each sequence, [S] int64, 0.. in the order of first sight; a lone response is an episode."""
    if not any(sample.segment for sample in samples):
        return torch.arange(len(samples))
    places: dict[tuple[int, str], int] = {}
    return torch.tensor([places.setdefault((one.group_index, one.episode), len(places)) for one in samples])


def of_episodes(values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the value of each episode's first sequence, from `values` [S] and `positions` [S] of `episode_positions`."""
    first = positions.new_full((int(positions.max()) + 1 if len(positions) else 0,), len(positions))
    first.scatter_reduce_(0, positions, torch.arange(len(positions)), "amin")
    return values[first]


def equal_prompt_weights(group_index: torch.Tensor) -> torch.Tensor:
    """Return mean group size / size of each response's group, [S] float64, so that all groups count alike."""
    _, positions, sizes = torch.unique(group_index, return_inverse=True, return_counts=True)
    return (sizes.double().mean() / sizes)[positions]


def estimate_group_advantages(
    samples: Sequence[TrainSample], advantage: AdvantageConfig, *, equal_prompts: bool = False
) -> EstimatedBatch:
    """Give every token of a response the advantage of its reward within its group (DAPO, arXiv 2503.14476, Eq 9).

    An episode counts once in its group, however many sequences it has, and all of them get its advantage. Groups are complete here, before any split into mini-batches. A sample without a reward (from a batch dump of an
    older version) keeps its advantages. `equal_prompts` makes groups of unequal sizes count alike. Raise ValueError if
    a reward is not finite.
    """
    contexts = [sample.critic_context for sample in samples]
    rewards = [context.reward for context in contexts if context is not None]
    estimated, metrics = list(samples), {}
    if samples and len(rewards) == len(samples):
        episodes = episode_positions(samples)
        index = of_episodes(torch.tensor([sample.group_index for sample in samples], dtype=torch.int64), episodes)
        lengths = torch.tensor([int(sample.loss_mask.sum()) for sample in samples], dtype=torch.int64)
        advantages = compute_advantages(
            advantage,
            AdvantageInputs(
                # Filtered overlong responses have no trained token but stay in their group's statistics.
                rewards=of_episodes(torch.tensor(rewards, dtype=torch.float64), episodes),
                group_index=index,
                response_lengths=torch.zeros_like(index).index_add_(0, episodes, lengths),
            ),
        )
        values = advantages.values
        if equal_prompts:
            values = (values * equal_prompt_weights(index)).float()
        estimated = [
            replace(sample, advantages=value.expand(sample.num_response_tokens))
            for sample, value in zip(samples, values[episodes], strict=True)
        ]
        metrics = {
            "advantage/mean": advantages.metrics["advantage_mean"],
            "advantage/std": advantages.metrics["advantage_std"],
            "advantage/abs_max": advantages.metrics["advantage_abs_max"],
            "advantage/zero_std_groups_share": advantages.metrics["frac_zero_std_groups"],
        }
    shown = {one.sample_id: float(one.advantages[0]) if one.num_response_tokens else 0.0 for one in estimated}
    return EstimatedBatch(estimated, estimated, metrics=metrics, shown_advantages=shown)
