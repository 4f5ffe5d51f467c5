"""Advantages of a rollout batch from its groups (DAPO, GRPO, RLOO). Every rank computes them from the same numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from megatron_dapo.algorithms.advantages import AdvantageInputs, compute_advantages
from megatron_dapo.algorithms.turn_credit import Turns, turn_advantages
from megatron_dapo.config.algorithm_schema import AdvantageConfig
from megatron_dapo.types import TrainSample, TurnCredit


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


@dataclass(frozen=True)
class CreditSettings:
    """Which parts of an episode earn its reward; see `turn_credit`."""

    credit: Literal["episode", "turn", "anchor"] = "episode"
    turn_discount: float = 1.0


def estimate_group_advantages(
    samples: Sequence[TrainSample],
    advantage: AdvantageConfig,
    credit: CreditSettings = CreditSettings(),
    *,
    equal_prompts: bool = False,
) -> EstimatedBatch:
    """Give every token of a response the advantage of its reward within its group (DAPO, arXiv 2503.14476, Eq 9).

    An episode counts once in its group, however many sequences it has, and all of them get its advantage; with another
    `credit` each of its turns gets one. Groups are complete here, before any split into mini-batches. A sample without a
    reward (from a batch dump of an older version) keeps its advantages. `equal_prompts` makes groups of unequal sizes
    count alike. Raise ValueError if a reward is not finite.
    """
    contexts = [sample.critic_context for sample in samples if sample.critic_context is not None]
    estimated, metrics = list(samples), {}
    if samples and len(contexts) == len(samples):
        episodes = episode_positions(samples)
        index = of_episodes(torch.tensor([sample.group_index for sample in samples], dtype=torch.int64), episodes)
        # Filtered overlong responses have no trained token but stay in their group's statistics.
        rewards = of_episodes(torch.tensor([context.reward for context in contexts], dtype=torch.float64), episodes)
        weights = equal_prompt_weights(index) if equal_prompts else torch.ones(len(index), dtype=torch.float64)
        if credit.credit == "episode":
            lengths = torch.tensor([int(sample.loss_mask.sum()) for sample in samples], dtype=torch.int64)
            lengths = torch.zeros_like(index).index_add_(0, episodes, lengths)
            names = sorted({name for context in contexts for name in context.rewards})
            columns = {name: torch.tensor([one.rewards.get(name, 0.0) for one in contexts], dtype=torch.float64) for name in names}
            by_name = {name: of_episodes(column, episodes) for name, column in columns.items()}
            advantages = compute_advantages(advantage, AdvantageInputs(rewards, index, lengths, parts=by_name))
            values = (advantages.values * weights).float()[episodes]
            per_token = [value.expand(one.num_response_tokens) for one, value in zip(samples, values, strict=True)]
        else:
            places = [_turn_places(sample) for sample in samples]
            turns, order = _turns_of(samples, places, rewards, episodes)
            advantages = turn_advantages(turns, index, credit.credit, credit.turn_discount, advantage)
            values = torch.empty_like(advantages.values)
            values[order] = (advantages.values * weights[turns.episodes]).float()
            parts = values.split([len(each) for each in places])
            per_token = [_spread(*each) for each in zip(samples, places, parts, strict=True)]
        estimated = [replace(one, advantages=values) for one, values in zip(samples, per_token, strict=True)]
        metrics = {
            "advantage/mean": advantages.metrics["advantage_mean"],
            "advantage/std": advantages.metrics["advantage_std"],
            "advantage/abs_max": advantages.metrics["advantage_abs_max"],
            "advantage/zero_std_groups_share": advantages.metrics["frac_zero_std_groups"],
        }
    return EstimatedBatch(estimated, estimated, metrics=metrics, shown_advantages={one.sample_id: _shown(one) for one in estimated})


def _shown(sample: TrainSample) -> float:
    """Return the mean advantage of a sample's trained tokens; of equal ones, that number."""
    values = sample.advantages
    if not len(values) or bool((values == values[0]).all()):
        return float(values[0]) if len(values) else 0.0
    return float((values * sample.loss_mask).sum() / sample.loss_mask.sum().clamp(min=1))


def _turn_places(sample: TrainSample) -> tuple[TurnCredit, ...]:
    """Return the turns of a sequence; a response that is no episode is one turn."""
    assert sample.critic_context is not None, f"sample {sample.sample_id} has no reward"
    whole = TurnCredit(0, sample.num_response_tokens, 0.0, 0)
    return sample.critic_context.turns or (() if sample.observed is not None or sample.segment else (whole,))


def _turns_of(
    samples: Sequence[TrainSample],
    places: Sequence[Sequence[TurnCredit]],
    rewards: torch.Tensor,
    episodes: torch.Tensor,
) -> tuple[Turns, torch.Tensor]:
    """Return the turns of all episodes in order of time, and their numbers in the order of `places`, [V] int64.

    What the environments did not give for a turn is the last one's. `rewards` [E] of the episodes, `episodes` [S] of the
    samples.
    """
    turns = [
        (episode, turn.order, number, int(one.loss_mask[turn.start : turn.end].sum()), turn)
        for number, (episode, one, each) in enumerate(zip(episodes.tolist(), samples, places, strict=True))
        for turn in each
    ]
    order = sorted(range(len(turns)), key=lambda place: turns[place][:3])
    in_time = [turns[place] for place in order]
    of_turns = torch.tensor([episode for episode, *_ in in_time], dtype=torch.int64)
    given = torch.tensor([turn.reward for *_, turn in in_time], dtype=torch.float64)
    rest = rewards.clone().index_add_(0, of_turns, -given)
    last = torch.full_like(rewards, -1, dtype=torch.int64).scatter_reduce_(0, of_turns, torch.arange(len(of_turns)), "amax")
    has_turns = last >= 0
    given[last[has_turns]] += rest[has_turns]
    contexts = torch.tensor([turn.context for *_, turn in in_time], dtype=torch.int64)
    lengths = torch.tensor([count for *_, count, _ in in_time], dtype=torch.int64)
    return Turns(of_turns, given, contexts, lengths), torch.tensor(order, dtype=torch.int64)


def _spread(sample: TrainSample, turns: Sequence[TurnCredit], values: torch.Tensor) -> torch.Tensor:
    """Return [R]: each turn's value of `values` [V] on its tokens, 0 on others."""
    advantages = torch.zeros(sample.num_response_tokens)
    for turn, value in zip(turns, values, strict=True):
        advantages[turn.start : turn.end] = value
    return advantages
