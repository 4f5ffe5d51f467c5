"""Train samples from scored groups, and the advantages of groups."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron_dapo.algorithms.aggregation import AGGREGATIONS
from megatron_dapo.algorithms.group_advantages import equal_prompt_weights, estimate_group_advantages
from megatron_dapo.config.algorithm_schema import DrGrpoAdvantageConfig, GdpoAdvantageConfig, GrpoAdvantageConfig
from megatron_dapo.data.sample_tensors import from_tensors, to_tensors
from megatron_dapo.engines.base import PrefixReuse
from megatron_dapo.engines.sglang.client import EngineError
from megatron_dapo.engines.sglang.servers import ServersFailed
from megatron_dapo.parallel.rank0_commands import CommandFailed
from megatron_dapo.telemetry.metrics import STEP_METRICS
from megatron_dapo.trainer.batch_header import header_of, samples_of
from megatron_dapo.trainer.rollout import CollectionEnded, Rollout
from megatron_dapo.trainer.updater import cut, loss_weights
from megatron_dapo.types import (
    Completion,
    Episode,
    Group,
    Prompt,
    Score,
    ScoredSample,
    Segment,
    Turn,
    VersionRange,
    Window,
)
from tests.examples import examples
from tests.made_samples import train_samples

GRPO = GrpoAdvantageConfig()


def _sample(name, length, reward, finish="stop"):
    completion = Completion(name, tuple(range(length)), (-0.5,) * length, finish, (VersionRange(0, length, 0),))
    return ScoredSample(name, completion, "", Score(float(reward > 0), reward, "correct"), {"verifier": reward})


def _group(name, samples):
    prompt = Prompt(name, (), (7, 8), "1")
    return Group(name, prompt, tuple(samples), policy_version=0, generation_step=0)


def estimated(groups, advantage=GRPO, filter_overlong=False):
    samples = train_samples(groups, 0, filter_overlong=filter_overlong)
    return estimate_group_advantages(samples, advantage)


def test_every_token_has_its_response_s_advantage():
    group = _group(
        "g", [_sample("g/0", 2, 1.0), _sample("g/1", 3, -1.0), _sample("g/2", 1, -1.0), _sample("g/3", 4, 1.0)]
    )
    batch = estimated([group], GrpoAdvantageConfig(std="unbiased"))
    expected = 3**0.5 / 2
    for sample, sign in zip(batch.policy_samples, (1, -1, -1, 1), strict=True):
        assert sample.advantages.tolist() == pytest.approx([sign * expected] * sample.num_response_tokens, rel=1e-5)
        assert batch.shown_advantages[sample.sample_id] == float(sample.advantages[0])
        assert sample.tokens.tolist() == [7, 8, *range(sample.num_response_tokens)]
        assert sample.prompt_length == 2
        assert sample.loss_mask.sum() == sample.num_response_tokens
    assert batch.metrics["advantage/abs_max"] == pytest.approx(expected) and set(batch.metrics) <= set(STEP_METRICS)
    assert batch.samples == batch.policy_samples and batch.critic_samples == []


def test_overlong_filter_masks_the_loss_but_not_the_statistics():
    groups = [_group("g", [_sample("g/0", 2, 1.0), _sample("g/1", 3, -1.0, "length")])]
    plain, filtered = estimated(groups).policy_samples, estimated(groups, filter_overlong=True).policy_samples
    assert filtered[1].loss_mask.tolist() == [0.0, 0.0, 0.0]
    assert filtered[0].advantages.tolist() == plain[0].advantages.tolist()


def test_groups_are_told_apart():
    groups = [_group(name, [_sample(f"{name}/0", 1, 1.0), _sample(f"{name}/1", 1, 0.0)]) for name in ("a", "b")]
    samples = estimated(groups, DrGrpoAdvantageConfig()).policy_samples
    assert [sample.group_index for sample in samples] == [0, 0, 1, 1]
    assert [float(sample.advantages[0]) for sample in samples] == [0.5, -0.5, 0.5, -0.5]


def test_samples_of_an_older_dump_keep_their_advantages():
    samples = train_samples([_group("g", [_sample("g/0", 2, 1.0)])], 0)
    older = [replace(one, critic_context=None, advantages=one.advantages + 0.25) for one in samples]
    batch = estimate_group_advantages(older, GRPO)
    assert batch.policy_samples[0].advantages.tolist() == [0.25, 0.25] and batch.shown_advantages == {"g/0": 0.25}


def test_a_header_has_the_runs_of_each_response():
    mixed = replace(_sample("g/1", 4, -1.0), window=Window(1, False))
    versions = (VersionRange(0, 2, 3), VersionRange(2, 4, 5))
    mixed = replace(mixed, completion=replace(mixed.completion, versions=versions))
    header = header_of([_group("g", [_sample("g/0", 3, 0.1), mixed, _sample("g/2", 0, 0.0)])], 5)
    assert header["runs"].tolist() == [[0, 3, 1, 5], [1, 1, 0, 2], [1, 1, 1, 2], [1, 2, 1, 0]]
    samples = samples_of(header)
    assert [one.sample_id for one in samples] == ["g/0", "g/1", "g/2"]
    assert [one.num_response_tokens for one in samples] == [3, 4, 0]
    assert samples_of(header_of([], 5)) == []


def test_rewards_travel_by_name():
    """A function's parts stand for the verifier's reward if they add up to it; a sample without a reward of the others has 0."""
    first, second, third = (_sample(f"g/{index}", 2, reward) for index, reward in enumerate((0.75, 1.0, -1.0)))
    parts = {"answer": 1.0, "style": -0.25}
    first = replace(first, score=replace(first.score, detail={"parts": parts}))
    second = replace(
        second,
        score=replace(second.score, detail={"parts": {"other": 0.5}}),
        reward_parts={**second.reward_parts, "overlong": -0.5},
    )
    samples = samples_of(header_of([_group("g", [first, second, third])], 0))
    expected = [parts, {"verifier": 1.0, "overlong": -0.5}, {"verifier": -1.0}]
    names = ("answer", "overlong", "style", "verifier")
    assert [dict(one.critic_context.rewards) for one in samples] == [
        {name: rewards.get(name, 0.0) for name in names} for rewards in expected
    ]
    assert [sum(one.critic_context.rewards.values()) for one in samples] == [one.critic_context.reward for one in samples]
    batch = estimate_group_advantages(samples, GdpoAdvantageConfig(weights={"overlong": 0.0}))
    assert batch.shown_advantages != estimate_group_advantages(samples, GRPO).shown_advantages


def test_every_token_has_its_age():
    sample = _sample("g/0", 4, 1.0)
    versions = (VersionRange(0, 1, 3), VersionRange(1, 3, 4), VersionRange(3, 4, 5))
    mixed = replace(sample, completion=replace(sample.completion, versions=versions))
    samples = train_samples([_group("g", [mixed, _sample("g/1", 2, -1.0)])], training_version=5)
    assert [one.staleness.tolist() for one in samples] == [[2.0, 1.0, 1.0, 0.0], [5.0, 5.0]]


def test_the_loss_is_over_the_tokens_of_a_window() -> None:
    group = _group_of_windows()
    samples = train_samples([group], 0, filter_overlong=True)
    assert [sample.loss_mask.tolist() for sample in samples] == [[0.0, 1.0, 1.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]
    assert [sample.critic_context.window.is_finished for sample in samples] == [False, True, True]
    assert [(sample.critic_context.reward, sample.critic_context.is_correct) for sample in samples] == [
        (0.0, False),
        (1.0, True),
        (-1.0, False),
    ]
    assert train_samples([group], 0)[2].loss_mask.sum() == 3


def _group_of_windows() -> Group:
    """Three responses: one continues after the window of its first token, one is correct, one is cut at the limit."""

    def make(index: int, reason: str, reward: float, window: Window) -> ScoredSample:
        completion = Completion(f"g/{index}", (5, 6, 7), (-1.0,) * 3, reason, (VersionRange(0, 3, 0),))
        score = Score(float(reward > 0), reward, "correct" if reward > 0 else "wrong")
        return ScoredSample(f"g/{index}", completion, "", score, {"verifier": reward}, window)

    prompt = Prompt("p", (), (1, 2), "4")
    samples = (
        make(0, "abort", 0.0, Window(1, False)),
        make(1, "stop", 1.0, Window()),
        make(2, "length", -1.0, Window()),
    )
    return Group("g", prompt, samples, 0, 0)


def test_prompts_of_unequal_groups_count_alike() -> None:
    """The weighted advantages of a group add up to the same share of the batch, whatever its size."""
    index = torch.tensor([0] * 4 + [1] * 12 + [2] * 8)
    weights = equal_prompt_weights(index)
    sums = torch.zeros(3, dtype=torch.float64).index_add_(0, index, weights)
    torch.testing.assert_close(sums, torch.full((3,), 8.0, dtype=torch.float64))


@pytest.mark.parametrize(
    ("error", "is_shared"),
    [
        (ZeroDivisionError("in a verifier"), True),
        (EngineError("server 0", "/generate", "gone"), True),
        (CommandFailed(RuntimeError("a handler failed on every rank")), False),
        (TimeoutError("no answer of the other ranks"), False),
        (ServersFailed("server 0 is lost"), False),
    ],
)
def test_an_error_of_the_collection_reaches_all_ranks_where_they_can_save(error: Exception, is_shared: bool) -> None:
    def fail(num_groups: int, part_size: int) -> None:
        raise error

    engine = SimpleNamespace(run_on_rank0=lambda body: body(), prefix_reuse=PrefixReuse())
    collector = SimpleNamespace(next_batch=fail, generation_step=7)
    coordination = SimpleNamespace(rank=0, size=1, broadcast=lambda facts: facts)
    engines = SimpleNamespace(engine=engine, servers=None)
    rollout = Rollout(engines, collector, coordination, filter_overlong=False)
    if not is_shared:
        with pytest.raises(type(error)):
            rollout.generate(4, lambda samples: ((), ()))
        return
    with pytest.raises(CollectionEnded) as ended:
        rollout.generate(4, lambda samples: ((), ()))
    assert ended.value.error is error and ended.value.generation_step == 7


# ---- episodes


def _episode(name: str, draw: random.Random, reward: float, num_streams: int) -> ScoredSample:
    """An episode with random turns in its main stream and in each other one, of random versions."""
    streams = []
    for _ in range(num_streams):
        turns, position = [], draw.randint(0, 2)
        for _ in range(draw.randint(1, 4)):
            end = position + draw.randint(0, 4)
            observed_end = end + draw.randint(0, 3)
            turns.append(Turn(position, end, observed_end, reward=draw.random(), trained=draw.random() < 0.8, order=draw.randint(0, 9)))
            position = observed_end
        cut = draw.randint(0, position)
        versions = tuple(run for run in (VersionRange(0, cut, 3), VersionRange(cut, position, 5)) if run.end > run.start)
        logprobs = [draw.random() for _ in range(position)]
        streams.append((tuple(draw.randrange(100) for _ in range(position)), logprobs, versions, tuple(turns)))
    (tokens, logprobs, versions, turns), *others = streams
    segments = tuple(Segment((1, 2, 3), *other) for other in others)
    episode = Episode("done", turns, segments)
    completion = Completion(name, tokens, logprobs, "stop", versions, prompt_ids=(4,), episode=episode)
    return ScoredSample(name, completion, "", Score(float(reward > 0), reward, "correct"), {"verifier": reward})


def test_the_sampled_tokens_of_episodes_are_trained_once() -> None:
    """Trained are the sampled tokens of the trained turns, each once, with the engine's bits; observed ones never."""
    draw = random.Random(0)
    for _ in range(examples(200)):
        sample = _episode("g/0", draw, 1.0, draw.randint(1, 4))
        one = sample.completion
        streams = [(one.token_ids, one.logprobs, one.versions, one.episode.turns, (4,))]
        streams += [(s.token_ids, s.logprobs, s.versions, s.turns, s.prompt_ids) for s in one.episode.segments]
        trained = train_samples([_group("g", [sample])], training_version=5)
        assert [t.sample_id for t in trained] == ["g/0", *(f"g/0#{k}" for k in range(1, len(streams)))]
        assert {t.episode for t in trained} == {"g/0"}
        for segment, (numbers, (tokens, logprobs, versions, turns, prompt)) in enumerate(zip(trained, streams, strict=True)):
            expected = [0.0] * len(tokens)
            sampled = [False] * len(tokens)
            for turn in turns:
                for position in range(turn.start, turn.end):
                    expected[position], sampled[position] = float(turn.trained), True
            age = {position: 5 - run.version for run in versions for position in range(run.start, run.end)}
            assert numbers.segment == segment and numbers.loss_mask.tolist() == expected
            assert numbers.tokens.tolist() == [*prompt, *tokens] and numbers.prompt_length == len(prompt)
            assert numbers.rollout_logprobs.numpy().tobytes() == logprobs.tobytes()
            observed = [False] * len(tokens) if numbers.observed is None else numbers.observed.tolist()
            assert observed == [not each for each in sampled] and numbers.num_sampled == sum(sampled)
            ages = [0.0] * len(tokens) if numbers.staleness is None else numbers.staleness.tolist()
            assert ages == [float(age[position]) if sampled[position] else 0.0 for position in range(len(tokens))]
        again = from_tensors(*to_tensors(trained))
        for one, other in zip(trained, again, strict=True):
            assert one.critic_context == other.critic_context
            assert (one.segment, one.episode) == (other.segment, other.episode)
            assert (one.observed is None) == (other.observed is None)
            assert one.observed is None or torch.equal(one.observed, other.observed)


@pytest.mark.parametrize("rewards_turns", [True, False])
def test_turns_travel_with_their_rewards_and_contexts(rewards_turns: bool) -> None:
    """Contexts are equal exactly if the tokens before two turns are, in whichever stream or episode."""
    draw = random.Random(1)
    for _ in range(examples(50)):
        episodes = [_episode(f"g/{index}", draw, 1.0, draw.randint(1, 3)) for index in range(3)]
        episodes = [*episodes, replace(episodes[0], sample_id="g/3")]
        header = header_of([_group("g", episodes)], 5, rewards_turns=rewards_turns)
        contexts: dict[int, tuple[int, ...]] = {}
        sequences = iter(samples_of(header))
        for sample in episodes:
            one = sample.completion
            streams = [(one.prompt_ids, one.token_ids, one.episode.turns)]
            streams += [(s.prompt_ids, s.token_ids, s.turns) for s in one.episode.segments]
            for prompt, tokens, turns in streams:
                credits = next(sequences).critic_context.turns
                places = [(turn.start, turn.end, turn.order) for turn in turns]
                assert [(credit.start, credit.end, credit.order) for credit in credits] == places
                assert [c.reward for c in credits] == [turn.reward if rewards_turns else 0.0 for turn in turns]
                for credit in credits:
                    before = (*prompt, *tokens[: credit.start].tolist())
                    assert contexts.setdefault(credit.context, before) == before
        assert len(set(contexts.values())) == len(contexts)


def _cut(sample: ScoredSample, draw: random.Random) -> ScoredSample:
    """The same sampled tokens in more streams: each turn of the main stream stays or moves to a separate segment."""
    one, main, segments = sample.completion, [], []
    for turn in one.episode.turns:
        if draw.random() < 0.5:
            main.append(turn)
            continue
        main.append(replace(turn, start=turn.end))  # its tokens are context here, and trained there
        part = slice(turn.start, turn.end)
        whole = (VersionRange(0, turn.end - turn.start, 5),) if turn.end > turn.start else ()
        moved = replace(turn, start=0, end=turn.end - turn.start, observed_end=turn.end - turn.start)
        segments.append(Segment((9,), one.token_ids[part], one.logprobs[part], whole, (moved,)))
    episode = replace(one.episode, turns=tuple(main), segments=(*segments, *one.episode.segments))
    return replace(sample, completion=replace(one, episode=episode))


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
def test_cutting_episodes_into_segments_changes_no_weight_and_no_advantage(aggregation: str) -> None:
    draw = random.Random(1)
    for _ in range(examples(60)):
        groups = [
            _group(f"g{g}", [_episode(f"g{g}/{i}", draw, draw.choice((-1.0, 0.0, 1.0)), 1) for i in range(3)])
            for g in range(3)
        ]
        cut_groups = [replace(group, samples=tuple(_cut(one, draw) for one in group.samples)) for group in groups]
        results = []
        for each in (groups, cut_groups):
            batch = estimated(each, GrpoAdvantageConfig(std="unbiased"))
            weights = loss_weights(batch.policy_samples, aggregation, 16, 100, 2)
            # Each trained token's log-prob, which tells it apart, with its weight and advantage.
            rows = [
                (one.episode, float(logprob), weight, float(advantage))
                for one, weight in zip(batch.policy_samples, weights, strict=True)
                for logprob, mask, advantage in zip(one.rollout_logprobs, one.loss_mask, one.advantages, strict=True)
                if mask
            ]
            results.append((sorted(rows), batch.metrics))
        (whole, metrics), (parts, parts_metrics) = results
        assert [row[:2] for row in whole] == [row[:2] for row in parts]
        numbers = [torch.tensor([row[2:] for row in rows]) for rows in (whole, parts)]
        torch.testing.assert_close(*numbers, rtol=1e-6, atol=0)
        assert metrics == pytest.approx(parts_metrics, rel=1e-6)


def test_an_episode_s_sequences_stay_in_one_mini_batch() -> None:
    draw = random.Random(2)
    groups = [_group(f"g{g}", [_episode(f"g{g}/{i}", draw, 1.0, 3) for i in range(2)]) for g in range(3)]
    samples = train_samples(groups, 5)
    assert len(samples) == 18
    for seed in (None, 3):
        parts = cut(samples, 2, "samples", seed)
        assert [len(part) for part in parts] == [6, 6, 6]
        assert all(len({one.episode for one in part}) == 2 for part in parts)
