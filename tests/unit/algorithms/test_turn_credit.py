"""Credit of turns against the definitions written out turn by turn in Python's floats."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import fmean, stdev

import pytest
import torch
from judged_samples import judged

from megatron_dapo.algorithms.group_advantages import CreditSettings, estimate_group_advantages
from megatron_dapo.algorithms.turn_credit import turn_returns
from megatron_dapo.config.algorithm_schema import DrGrpoAdvantageConfig, GrpoAdvantageConfig, RlooAdvantageConfig
from megatron_dapo.types import TrainSample, TurnCredit
from tests.examples import examples

SECTIONS = {"grpo": GrpoAdvantageConfig(), "dr_grpo": DrGrpoAdvantageConfig(), "rloo": RlooAdvantageConfig()}


def whitened(name: str, rewards: list[float]) -> list[float]:
    """The advantages of one group."""
    if len(set(rewards)) < 2:
        return [0.0] * len(rewards)
    mean = fmean(rewards)
    scale = {"grpo": stdev(rewards) + SECTIONS["grpo"].eps, "dr_grpo": 1.0, "rloo": (len(rewards) - 1) / len(rewards)}[name]
    return [(reward - mean) / scale for reward in rewards]


def among(name: str, keys: list, rewards: list[float]) -> list[float]:
    """The advantages of `rewards` among those with the same key."""
    values = [0.0] * len(rewards)
    for key in set(keys):
        members = [place for place, other in enumerate(keys) if other == key]
        for place, value in zip(members, whitened(name, [rewards[place] for place in members]), strict=True):
            values[place] = value
    return values


def oracle(name: str, credit: str, discount: float, episodes: list[tuple[int, list[float], list[int]]]) -> list[list[float]]:
    """The advantage of each turn; an episode is its group, the rewards of its turns and their contexts."""
    returns = [[sum(discount ** (j - k) * r[j] for j in range(k, len(r))) for k in range(len(r))] for _, r, _ in episodes]
    flat = [each for one in returns for each in one]
    groups = [group for group, rewards, _ in episodes for _ in rewards]
    if credit == "turn":
        values = among(name, groups, flat)
    else:
        contexts = [context for _, _, each in episodes for context in each]
        totals = among(name, [group for group, _, _ in episodes], [sum(rewards) for _, rewards, _ in episodes])
        whole = [total for total, (_, rewards, _) in zip(totals, episodes, strict=True) for _ in rewards]
        values = [a + b for a, b in zip(whole, among(name, list(zip(groups, contexts, strict=True)), flat), strict=True)]
    parts = iter(values)
    return [[next(parts) for _ in rewards] for _, rewards, _ in episodes]


def played(name: str, rewards: list[float], contexts: list[int], rest: float, lengths: list[tuple[int, int]]) -> TrainSample:
    """An episode of turns with `lengths` (sampled, observed); the last turn's reward comes as `rest` of the total."""
    turns, kinds, position = [], [], 0
    for place, ((count, after), context) in enumerate(zip(lengths, contexts, strict=True)):
        reward = rewards[place] - (rest if place == len(rewards) - 1 else 0.0)
        turns.append(TurnCredit(position, position + count, reward, context, place))
        kinds += [False] * count + [True] * after
        position += count + after
    one = judged(name, position, sum(rewards))
    observed = torch.tensor(kinds)
    context = replace(one.critic_context, reward=sum(rewards), turns=tuple(turns))
    return replace(one, observed=observed, loss_mask=(~observed).float(), critic_context=context)


def in_streams(sample: TrainSample, draw: random.Random) -> list[TrainSample]:
    """The same turns, cut into streams at random."""
    turns = sample.critic_context.turns
    cuts = [0, *(place for place in range(1, len(turns)) if draw.random() < 0.5), len(turns)]
    streams = []
    for segment, (first, end) in enumerate(zip(cuts, cuts[1:], strict=False)):
        start, stop = turns[first].start, sample.num_response_tokens if end == len(turns) else turns[end].start
        moved = tuple(replace(turn, start=turn.start - start, end=turn.end - start) for turn in turns[first:end])
        own = judged(sample.sample_id, stop - start, 0.0)
        name = f"{sample.sample_id}#{segment}" if segment else sample.sample_id
        context = replace(sample.critic_context, turns=moved)
        part = slice(start, stop)
        streams.append(
            replace(
                own, sample_id=name, segment=segment, critic_context=context,
                observed=sample.observed[part], loss_mask=sample.loss_mask[part],
            )
        )  # fmt: skip
    return streams


@pytest.mark.parametrize("credit", ["turn", "anchor"])
@pytest.mark.parametrize("name", list(SECTIONS))
def test_credit_is_that_of_the_definition(name: str, credit: str) -> None:
    """Every sampled token has its turn's advantage, however the episode is cut into streams; observed ones have none."""
    draw = random.Random(3)
    for _ in range(examples(30)):
        discount = draw.choice([1.0, 0.9, 0.5, 0.0])
        episodes, samples, cut = [], [], []
        for group in range(3):
            for index in range(draw.randint(1, 5)):
                count = draw.randint(1, 5)
                rewards = [draw.choice([0.0, 0.1, -0.5, 1.0]) for _ in range(count)]
                contexts = [0, *(draw.choice([1, 2, 3]) for _ in range(count - 1))]
                lengths = [(draw.randint(1, 4), draw.randint(1, 3)) for _ in range(count)]
                episodes.append((group, rewards, contexts))
                samples.append(played(f"{group}/{index}", rewards, contexts, draw.choice([0.0, 0.7]), lengths))
                cut.append(in_streams(samples[-1], draw))
        expected = oracle(name, credit, discount, episodes)
        settings = CreditSettings(credit, discount)
        whole = estimate_group_advantages(samples, SECTIONS[name], settings).policy_samples
        for sample, values in zip(whole, expected, strict=True):
            tokens = torch.zeros(sample.num_response_tokens, dtype=torch.float64)
            for turn, value in zip(sample.critic_context.turns, values, strict=True):
                tokens[turn.start : turn.end] = value
            torch.testing.assert_close(sample.advantages.double(), tokens, rtol=1e-6, atol=1e-6)
        flat = estimate_group_advantages([one for each in cut for one in each], SECTIONS[name], settings).policy_samples
        for sample in whole:
            parts = torch.cat([one.advantages for one in flat if one.episode == sample.episode])
            torch.testing.assert_close(parts, sample.advantages, rtol=1e-6, atol=1e-6)


def test_returns_of_many_turns_stay_in_their_episodes() -> None:
    """More turns than a tile of the scan's columns."""
    draw = random.Random(5)
    counts = [draw.randint(1, 40) for _ in range(200)]
    rewards = [[draw.uniform(-1, 1) for _ in range(count)] for count in counts]
    episodes = torch.repeat_interleave(torch.arange(200), torch.tensor(counts))
    flat = torch.tensor([each for one in rewards for each in one], dtype=torch.float64)
    expected = [sum(0.9 ** (j - k) * one[j] for j in range(k, len(one))) for one in rewards for k in range(len(one))]
    torch.testing.assert_close(turn_returns(flat, episodes, 0.9), torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_with_one_turn_each_all_credits_agree() -> None:
    """A response that is no episode is one turn; its anchor is its prompt, which is counted twice."""
    samples = [judged(f"0/{index}", 3, reward) for index, reward in enumerate((1.0, 0.0, 0.0, 1.0))]
    episode, turn, anchor = (
        torch.cat([one.advantages for one in estimate_group_advantages(samples, SECTIONS["grpo"], CreditSettings(credit)).samples])
        for credit in ("episode", "turn", "anchor")
    )
    assert torch.equal(turn, episode) and torch.equal(anchor, 2 * episode)
