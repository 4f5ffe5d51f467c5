"""Advantages of the turns of an episode, from the rewards of each: which turns earned what follows.

    G_k = r_k + discount G_{k+1}                        return of turn k of an episode; 0 after its last turn

The turns of one group are compared as its responses are, by the estimator that `algorithm.advantage` names:

    credit "turn"       A_k = estimator of G_k among all turns of the group (with GRPO: whitened over them)
    credit "anchor"     A_k = estimator of the episode's reward in its group
                            + estimator of G_k among the group's turns with the same context
                        (GiGPO, arXiv 2505.10978, Eq 3-9, with omega = 1; its states are contexts here, token by token)

A turn that is the only one in its context has no second term. Every token of a turn gets its turn's advantage. Which
sequence of the episode a turn is in makes no difference. Arithmetic is float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from megatron_dapo.algorithms.advantages import AdvantageInputs, Advantages, compute_advantages
from megatron_dapo.algorithms.linear_scan import reverse_linear_scan
from megatron_dapo.config.algorithm_schema import AdvantageConfig


@dataclass(frozen=True)
class Turns:
    """V turns of a batch of E episodes, one episode after the other, each in order of time."""

    episodes: torch.Tensor  # [V] int64, ascending
    rewards: torch.Tensor  # [V] float64; they add up to the episodes' rewards
    contexts: torch.Tensor  # [V] int64, equal if the tokens before two turns are
    lengths: torch.Tensor  # [V] int64, trained tokens


def turn_returns(rewards: torch.Tensor, episodes: torch.Tensor, discount: float) -> torch.Tensor:
    """Return G_k, float64 [V], for turns that are ordered as in `Turns`."""
    rewards = rewards.to(torch.float64)
    is_last = torch.ones_like(episodes, dtype=torch.bool)
    is_last[:-1] = episodes[1:] != episodes[:-1]

    def fill(start: int, stop: int, inputs: torch.Tensor, decays: torch.Tensor) -> None:
        inputs.copy_(rewards[start:stop])
        decays.fill_(discount).masked_fill_(is_last[start:stop], 0.0)

    return reverse_linear_scan(torch.empty_like(rewards), fill)


def turn_advantages(
    turns: Turns,
    groups: torch.Tensor,
    credit: Literal["turn", "anchor"],
    discount: float,
    advantage: AdvantageConfig,
) -> Advantages:
    """Return the advantages [V] fp32 and the diagnostics of the returns' estimate; `groups` [E] int64 of the episodes.

    Raise ValueError if a reward is not finite.
    """
    returns = turn_returns(turns.rewards, turns.episodes, discount)
    index = groups[turns.episodes]
    if credit == "turn":
        return compute_advantages(advantage, AdvantageInputs(returns, index, turns.lengths))
    # Anchors: the turns of a group with one context.
    _, anchors = torch.unique(torch.stack([index, turns.contexts], 1), dim=0, return_inverse=True)
    among_turns = compute_advantages(advantage, AdvantageInputs(returns, anchors, turns.lengths))
    totals = torch.zeros(len(groups), dtype=torch.float64).index_add_(0, turns.episodes, turns.rewards.to(torch.float64))
    lengths = torch.zeros_like(groups).index_add_(0, turns.episodes, turns.lengths)
    among_episodes = compute_advantages(advantage, AdvantageInputs(totals, groups, lengths))
    values = among_turns.values + among_episodes.values[turns.episodes]
    return Advantages(values, among_episodes.metrics)
