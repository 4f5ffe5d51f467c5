"""Windows of episodes: each sampled token in one window, whatever is held, lost or resumed in between."""

from __future__ import annotations

import json
import random
from collections import Counter

import episode_world as world
import numpy as np
import pytest

from megatron_dapo.config.algorithm_schema import WindowConfig
from megatron_dapo.config.reward_schema import RewardConfig
from megatron_dapo.config.rollout_schema import RolloutConfig
from megatron_dapo.data.prompt_stream import PromptStream
from megatron_dapo.rewards.pool.environment import EnvironmentRewards
from megatron_dapo.rollout.collector import CollectorInputs, EpisodesLost, LossLimits, sample_seed
from megatron_dapo.rollout.scoring import SampleScorer
from megatron_dapo.rollout.window_collector import WindowCollector
from megatron_dapo.rollout.windows import sampled_in
from megatron_dapo.trainer.metrics import episode_metrics
from megatron_dapo.types import Completion, Episode, Prompt, SamplingParams, Segment, Turn, VersionRange, Window
from tests.examples import examples

PROMPTS = {
    f"p{index}": Prompt(
        f"p{index}", ({"role": "user", "content": f"{index}"},), (1, 2), "7", extra={"question": f"q{index}"}, begins_episode=True
    )
    for index in range(12)
}
TOKENS, LIMIT, SEED = 7, 40, 5


def collecting(seed: int, loss_rate: float = 0.0, retries: int = 1000, max_lost: int = 1000, abort_rate: float = 0.0, **limits):
    engine, inner, pool = world.world(seed, world.settings(retries=retries, **limits), loss_rate=loss_rate, abort_rate=abort_rate)
    scorer = SampleScorer(EnvironmentRewards(RewardConfig(verifier="environment")), lambda ids: " ".join(map(str, ids)))
    inputs = CollectorInputs(PromptStream(list(PROMPTS), 3, 1), PROMPTS, engine, scorer, losses=LossLimits(max_lost))
    rollout = RolloutConfig(prompts_per_step=3, group_size=2, on_exhausted="train_partial")
    sampling = SamplingParams(max_new_tokens=LIMIT, stop_token_ids=inner.turns.stop_token_ids)
    return WindowCollector(inputs, rollout, WindowConfig(tokens=TOKENS), sampling, SEED), engine, inner, pool


def played_of(group_id: str, index: int, prompt: Prompt, turns, limits) -> world.Played:
    request = world.request(f"{group_id}/{index}", turns, sample_seed(SEED, group_id, index), LIMIT)
    return world.play(world.replace(request, task=prompt.task), turns, limits)


@pytest.mark.parametrize("num_places", [2, pytest.param(100, marks=pytest.mark.long)], ids=["few-places", "all-held"])
def test_windows_of_an_episode_are_the_conversation_played_straight(num_places: int) -> None:
    """With losses, an engine that gives up, weight updates in the middle, and processes that resume from a checkpoint."""
    ends: Counter[str] = Counter()
    for seed in range(examples(4)):
        draw = random.Random(seed)
        options = {"loss_rate": draw.choice([0, 0.1]), "abort_rate": draw.choice([0, 0.2]), "max_environments": num_places}
        collector, engine, inner, pool = collecting(seed, **options)
        sampled: Counter[str] = Counter()  # tokens handed out
        finished: dict[str, Completion] = {}
        plays: dict[str, world.Played] = {}

        def between_polls() -> None:
            assert collector.accounting().is_balanced and engine.accounting().is_balanced
            assert len(pool.tasks) <= num_places
            if draw.random() < 0.03:
                collector.hold()

        while not (batch := collector.collect(3, between_polls=between_polls)).should_stop:
            for group in batch.groups:
                for sample in group.samples:
                    one, window = sample.completion, sample.window
                    assert one.num_sampled - sampled_in(one, window) == sampled[sample.sample_id]
                    sampled[sample.sample_id] = one.num_sampled
                    assert sample.sample_id not in finished
                    if window.is_finished:
                        finished[sample.sample_id] = one
                    else:
                        assert one.episode.end == "window"
                        in_turn = one.episode.turns[-1].finish_reason == "abort"
                        assert sampled_in(one, window) == TOKENS and in_turn != (one.episode.turns[-1].observed_end > one.episode.turns[-1].end)
                        ends["inside a turn" if in_turn else "with the answer"] += 1
                    index = int(sample.sample_id.rpartition("/")[2])
                    if sample.sample_id not in plays:
                        plays[sample.sample_id] = played_of(group.group_id, index, group.prompt, inner.turns, engine._settings)
                    played = plays[sample.sample_id]
                    assert one.token_ids.tolist() == played.streams[0][1][: one.num_tokens]
                    if window.is_finished:
                        assert one.episode.end == played.end and one.num_sampled == len(played.sampled)
            inner.policy_version += 1
            assert collector.accounting().is_balanced
            if draw.random() < 0.4:
                state = json.loads(json.dumps(collector.state_dict(), default=np.ndarray.tolist))
                version, pool_draw, before = inner.policy_version, pool.draw, inner.sampled
                collector, engine, inner, pool = collecting(seed, **options)
                inner.policy_version, pool.draw, inner.sampled = version, pool_draw, before
                collector.load_state_dict(state)
        assert len(finished) == 24 == collector.accounting().trained
        assert set(inner.sampled.values()) == {1} and sum(inner.sampled.values()) == sum(sampled.values())
    assert min(ends["inside a turn"], ends["with the answer"]) > 2


def test_an_environment_is_asked_once_over_all_windows() -> None:
    """It stays with its episode between windows, as long as there are places."""
    collector, engine, inner, pool = collecting(3)
    num_turns = 0
    while not (batch := collector.collect(12)).should_stop:
        finished = [one for group in batch.groups for one in group.samples if one.window.is_finished]
        num_turns += sum(played_of(*name_of(one), inner.turns, engine._settings).num_acts for one in finished)
    assert set(pool.num_starts.values()) == {1} and sum(pool.num_acts.values()) == num_turns
    assert engine.accounting().dropped == 0 and not pool.tasks


def name_of(sample) -> tuple[str, int, Prompt]:
    group_id, index = sample.sample_id.split("/")
    prompts = list(PROMPTS)
    stream = PromptStream(prompts, 3, 1)
    order = [stream.next() for _ in prompts]
    return group_id, int(index), PROMPTS[order[int(group_id)]]


def test_a_lost_episode_leaves_the_pool_and_is_never_scored() -> None:
    collector, engine, _, _ = collecting(2, loss_rate=0.2, retries=0)
    seen: set[str] = set()
    while not (batch := collector.collect(3)).should_stop:
        for group in batch.groups:
            for sample in group.samples:
                assert sample.completion.episode.end != "lost" and not sample.score.is_lost
                seen |= {sample.sample_id} if sample.window.is_finished else set()
    accounting = collector.accounting()
    assert accounting.is_balanced and accounting.lost > 0 and accounting.lost + len(seen) == 24
    assert engine.accounting().ended["lost"] == accounting.lost


def test_episodes_that_are_lost_one_after_another_end_the_collection() -> None:
    collector, _, _, _ = collecting(1, loss_rate=1.0, retries=0, max_lost=3)
    with pytest.raises(EpisodesLost, match="in a row were lost .* the worker died; mend the environment"):
        collector.collect(3)
    assert collector.accounting().is_balanced and collector.accounting().lost >= 3


def test_shares_of_ends_are_of_the_episodes_that_ended() -> None:
    collector, _, _, _ = collecting(4)
    for batch in (collector.collect(3) for _ in range(8)):
        finished = [one.window.is_finished for group in batch.groups for one in group.samples]
        if 0 < sum(finished) < len(finished):
            break
    else:
        raise AssertionError("no window of several ended an episode")
    metrics = episode_metrics(batch)
    assert sum(value for name, value in metrics.items() if "/end_" in name) == pytest.approx(1)


def test_a_window_counts_the_sampled_tokens_of_every_stream() -> None:
    """An episode of two streams; the window begins inside the turn of the first."""
    versions = (VersionRange(0, 5, 0),)
    segment = Segment((9, 9), np.arange(5), np.zeros(5), versions, (Turn(0, 2, 4), Turn(4, 5, 5, "abort")))
    episode = Episode("abort", (Turn(0, 4, 5),), (segment,))
    one = Completion("g/0", np.arange(5), np.zeros(5), "abort", versions, episode=episode)
    assert one.num_sampled == 7 and one.sampled.token_ids.tolist() == [0, 1, 2, 3, 0, 1, 4]
    assert sampled_in(one, Window()) == 7
    assert sampled_in(one, Window(3, False)) == 4
    assert sampled_in(one, Window(5, False, (1,))) == 2
