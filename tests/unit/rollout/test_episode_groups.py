"""Groups of episodes: each is trained once or its prompt queued again, lost ones are never scored."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace

import episode_world as world
import numpy as np
import pytest

from megatron_dapo.config.reward_schema import RewardConfig
from megatron_dapo.config.rollout_schema import RolloutConfig
from megatron_dapo.data.prompt_stream import PromptStream
from megatron_dapo.evaluation.protocol import EvaluationProtocol
from megatron_dapo.evaluation.runner import build_requests, generate, unique_problems
from megatron_dapo.rewards.pool.environment import EnvironmentRewards
from megatron_dapo.rewards.pool.pool import ScoreRequest, score_request
from megatron_dapo.rollout.collector import CollectorInputs, EpisodesLost, LossLimits
from megatron_dapo.rollout.group_collector import GroupCollector
from megatron_dapo.rollout.scoring import SampleScorer
from megatron_dapo.trainer.metrics import episode_metrics
from megatron_dapo.types import Episode, Prompt, SamplingParams
from tests.examples import examples

PROMPTS = {
    f"p{index}": Prompt(f"p{index}", ({"role": "user", "content": f"{index}"},), (1, 2), "7", extra={"question": f"q{index}"}, begins_episode=True)
    for index in range(12)
}
ROLLOUT = {"prompts_per_step": 3, "group_size": 2, "filter_groups": False, "on_exhausted": "train_partial"}


def collecting(seed: int, loss_rate: float, retries: int, losses: LossLimits = LossLimits(1000, 1000), **rollout: object):
    limits = world.settings(retries=retries)
    engine, inner, pool = world.world(seed, limits, loss_rate=loss_rate)
    scorer = SampleScorer(EnvironmentRewards(RewardConfig(verifier="environment")), lambda ids: " ".join(map(str, ids)))
    stream = PromptStream(list(PROMPTS), 3, 2)
    inputs = CollectorInputs(stream, PROMPTS, engine, scorer, losses=losses)
    sampling = SamplingParams(max_new_tokens=60, stop_token_ids=inner.turns.stop_token_ids)
    return GroupCollector(inputs, RolloutConfig(**{**ROLLOUT, **rollout}), sampling, 5), engine, inner, pool


def test_every_group_is_trained_once_or_queued_again():
    """With losses, engines that give up, weight updates in the middle, and processes that resume from a checkpoint."""
    for seed in range(examples(20)):
        draw = random.Random(seed)
        loss_rate = draw.choice([0, 0.05, 0.3])
        options = {"oversample": draw.choice([1.0, 2.0]), "max_staleness": draw.choice([0, 1]), "max_num_gen_batches": 0}
        options["partial_rollout"] = bool(options["max_staleness"])
        collector, engine, inner, pool = collecting(seed, loss_rate, draw.choice([0, 1]), **options)
        trained: Counter[str] = Counter()
        lost = 0

        def between_polls() -> None:
            assert collector.accounting().is_balanced and engine.accounting().is_balanced
            if draw.random() < 0.03:
                collector.hold()

        for _ in range(4):
            batch = collector.collect(3, between_polls=between_polls)
            for group in batch.groups:
                trained[group.group_id] += 1
                for sample in group.samples:
                    episode = sample.completion.episode
                    assert episode is not None and episode.end not in ("lost", "abort")
                    assert sample.score.is_lost is False
            accounting = collector.accounting()
            assert accounting.is_balanced
            lost = accounting.lost
            inner.policy_version += 1
            if draw.random() < 0.4:
                state = json.loads(json.dumps(collector.state_dict(), default=np.ndarray.tolist))
                version, pool_draw = inner.policy_version, pool.draw
                collector, engine, inner, pool = collecting(seed, loss_rate, 1, **options)
                inner.policy_version, pool.draw = version, pool_draw
                collector.load_state_dict(state)
            if batch.should_stop:
                break
        assert set(trained.values()) == {1}
        assert lost > 0 or loss_rate < 0.3


def test_what_is_sampled_is_trained_or_discarded():
    """Every token of a collection that an engine sampled is in one trained episode, or was counted as thrown away."""
    collector, _, inner, _ = collecting(4, 0.2, 0)
    batch = collector.collect(3)
    kept = Counter(
        (request_seed, len(completion.prompt_ids) + place)
        for group in batch.groups
        for sample in group.samples
        for completion in [sample.completion]
        for request_seed in [next(one.seed for one in inner.requests if one.affinity[0] == completion.request_id)]
        for run in completion.runs
        if run.is_sampled
        for place in range(run.start, run.end)
    )
    assert set(kept.values()) == {1} and kept.keys() <= inner.sampled.keys()
    statistics = batch.statistics
    assert sum(kept.values()) + statistics.num_discarded_tokens == sum(inner.sampled.values()) == statistics.num_tokens
    assert statistics.num_lost == collector.accounting().lost > 0


def test_an_episode_is_truncated_by_its_limits_and_not_by_a_cut_turn() -> None:
    """One that went on after a cut turn is judged by its environment; one that a limit ended is never correct."""
    limits = world.settings(on_cut="observe", max_turn_tokens=5, max_turns=4, max_context_tokens=400)
    engine, inner, _ = world.world(3, limits)
    requests = {f"g/{index}": world.request(f"g/{index}", inner.turns, index, 16) for index in range(examples(120))}
    engine.submit(list(requests.values()))
    scorer = EnvironmentRewards(RewardConfig(verifier="environment"))
    seen: Counter[tuple[str, bool]] = Counter()
    for one in world.drain(engine):
        episode = one.episode
        score = scorer.score_many([score_request("g/0", PROMPTS["p0"], one, "", scorer)])["g/0"]
        has_cut = any(turn.finish_reason == "length" for turn in episode.turns)
        seen[episode.end, has_cut] += 1
        assert one.is_truncated == (episode.end != "done") == (score.outcome == "truncated")
        played = world.play(requests[one.request_id], inner.turns, limits)
        assert score.accuracy == float(bool(played.is_correct)) and (episode.end == "done" or score.accuracy == 0)
        assert score.reward == pytest.approx(sum(played.rewards)) or episode.reward is None
        claimed = replace(one, episode=replace(episode, is_correct=True))
        claim = scorer.score_many([score_request("g/0", PROMPTS["p0"], claimed, "", scorer)])["g/0"]
        assert claim.accuracy == float(episode.end == "done")
    assert min(seen["done", True], seen["done", False], seen["max_turns", True], seen["max_tokens", True]) > 0


def test_groups_that_are_lost_one_after_another_end_the_collection():
    collector, _, _, _ = collecting(1, 1.0, 0, LossLimits(3, 1000))
    with pytest.raises(EpisodesLost, match="3 groups in a row lost an episode .* the worker died; mend the environment"):
        collector.collect(3)
    assert collector.accounting().is_balanced and collector.accounting().lost == 3


def losing_for(monkeypatch, prompts: set[str]) -> None:
    """Lose each episode of `prompts`."""
    reply = world.ScriptedPool._reply

    def reply_or_lose(pool, name, is_restored=False):
        pool.loss_rate = float(pool.tasks[name].fields["question"] in prompts)
        reply(pool, name, is_restored)

    monkeypatch.setattr(world.ScriptedPool, "_reply", reply_or_lose)


def test_a_prompt_that_is_always_lost_is_left_out_with_its_reason(monkeypatch, caplog):
    """It would come back before every other prompt, without an end; what it has been through survives a checkpoint."""
    losing_for(monkeypatch, {"q4"})
    collector, engine, inner, _ = collecting(1, 0.0, 1, LossLimits(1000, 2))
    trained = Counter()
    for _ in range(12):
        batch = collector.collect(2)
        trained.update(group.prompt.prompt_id for group in batch.groups)
        assert collector.accounting().is_balanced
        state = json.loads(json.dumps(collector.state_dict(), default=np.ndarray.tolist))
        inner.policy_version += 1
        version = inner.policy_version
        collector, engine, inner, _ = collecting(1, 0.0, 1, LossLimits(1000, 2))
        inner.policy_version = version
        collector.load_state_dict(state)
        if batch.should_stop:
            break
    assert trained == {f"p{index}": 2 for index in range(12) if index != 4}, "two epochs of the others"
    assert collector.accounting().lost == 6, "three groups in each epoch"
    message = "prompt p4 is left out until the next epoch: an episode of it was lost in 3 groups in a row: the worker died"
    assert [record.getMessage() for record in caplog.records if "left out" in record.getMessage()] == [message] * 2


def test_a_group_goes_on_without_its_lost_episodes():
    """on_lost = "shrink": what is left of a group is trained with its ids, if it is two episodes or more."""
    collector, _, inner, _ = collecting(3, 0.12, 0, LossLimits(1000, 1000, True), group_size=4)
    sizes, left_out, lost = Counter(), 0, 0
    for _ in range(4):
        batch = collector.collect(3)
        for group in batch.groups:
            names = [sample.sample_id for sample in group.samples]
            assert len(set(names)) == len(names) and all(name.startswith(f"{group.group_id}/") for name in names)
            assert all(sample.completion.episode.end != "lost" for sample in group.samples)
            sizes[len(names)] += 1
        left_out += batch.statistics.num_left_out
        assert collector.accounting().is_balanced
        kept = sum(sample.completion.num_sampled for group in batch.groups for sample in group.samples)
        assert kept + batch.statistics.num_discarded_tokens == batch.statistics.num_tokens
        lost = collector.accounting().lost
    assert set(sizes) >= {2, 3} and max(sizes) <= 4 and left_out >= sizes[2] * 2 + sizes[3]
    assert episode_metrics(batch)["episodes/left_out"] == batch.statistics.num_left_out and lost >= 0


def test_an_evaluation_with_a_lost_episode_has_no_score():
    engine, inner, _ = world.world(1, world.settings(retries=0), loss_rate=1.0)
    requests = {"evaluation/0/0": world.request("evaluation/0/0", inner.turns, 3)}
    with pytest.raises(RuntimeError, match="environment of 'evaluation/0/0' was lost: the worker died"):
        generate(requests, engine)


def test_evaluated_prompts_keep_their_tasks():
    prompts = [PROMPTS["p0"], PROMPTS["p1"], PROMPTS["p0"]]
    problems = unique_problems(prompts)
    assert [(one.prompt.prompt_id, one.num_rows) for one in problems] == [("p0", 2), ("p1", 1)]
    unused = dict.fromkeys(EvaluationProtocol.__dataclass_fields__)
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 9, "stop_token_ids": ()}
    protocol = EvaluationProtocol(**{**unused, **sampling, "num_problems": 2, "num_samples": 2, "seed": 1})
    for name, request in build_requests(problems, protocol).items():
        assert request.task == PROMPTS[f"p{name.split('/')[1]}"].task
        assert request.task["messages"] == [{"role": "user", "content": name.split("/")[1]}] and request.task["answer"] == "7"


@pytest.mark.parametrize(
    ("given", "is_truncated", "expected"),
    [
        ({"reward": 0.7, "is_correct": True}, False, (1.0, 0.7, "correct")),
        ({"reward": 0.7, "is_correct": False}, False, (0.0, 0.7, "wrong")),
        ({"reward": 0.7, "is_correct": None}, True, (0.0, 0.7, "truncated")),
        ({"reward": 0.7, "is_correct": True}, True, (0.0, 0.7, "truncated")),
        ({"is_correct": True}, False, (1.0, 1.0, "correct")),
        ({}, True, (0.0, -1.0, "truncated")),
    ],
)
def test_an_environment_s_reward(given, is_truncated, expected):
    rewards = EnvironmentRewards(RewardConfig(verifier="environment"))
    score = rewards.score_many([ScoreRequest("g/0", "", "", is_truncated, {"episode": Episode("done", (), **given)})])["g/0"]
    assert (score.accuracy, score.reward, score.outcome) == expected
    with pytest.raises(ValueError, match="g/0 is no episode"):
        rewards.score_many([ScoreRequest("g/0", "", "", False, {"episode": None})])


def test_a_verifier_reads_an_episode_s_last_turn():
    read: list[str] = []

    class Verifier(EnvironmentRewards):
        takes_episode = takes_sample = False

        def score_many(self, items):
            items = list(items)
            read.extend(item.response for item in items)
            return {item.key: self._score(item._replace(sample={"episode": Episode("done", ())})) for item in items}

    engine, inner, _ = world.world(2, world.settings())
    engine.submit([world.request("g/0", inner.turns, 3)])
    (done,) = world.drain(engine)
    scorer = SampleScorer(Verifier(RewardConfig()), lambda ids: " ".join(map(str, ids)))
    scored = scorer.score([(PROMPTS["p0"], done)])["g/0"]
    last = done.episode.turns[-1]
    assert len(done.episode.turns) > 1 and read == [" ".join(map(str, done.token_ids[last.start : last.end]))]
    assert scored.text == " ".join(map(str, done.token_ids))


def test_metrics_of_episodes():
    collector, _, _, _ = collecting(2, 0.1, 3)
    batch = collector.collect(3)
    episodes = [sample.completion.episode for group in batch.groups for sample in group.samples]
    metrics = episode_metrics(batch)
    assert metrics["episodes/turns_mean"] == np.mean([len(one.turns) for one in episodes])
    sampled = [sample.completion.num_sampled for group in batch.groups for sample in group.samples]
    assert metrics["episodes/sampled_tokens_mean"] == np.mean(sampled)
    whole = [sample.completion.num_tokens for group in batch.groups for sample in group.samples]
    assert metrics["episodes/observed_tokens_mean"] == pytest.approx(np.mean(whole) - np.mean(sampled))
    ends = sum(value for name, value in metrics.items() if "/end_" in name)
    calls = [call for one in episodes for turn in one.turns for call in turn.calls]
    assert ends == pytest.approx(1) and metrics["episodes/calls_mean"] == len(calls) / len(episodes)
    wrong = [call for call in calls if call.status == "bad_arguments"]
    assert metrics["episodes/calls_bad_arguments_share"] == pytest.approx(len(wrong) / max(1, len(calls)))
    assert metrics["episodes/retries"] == sum(one.num_retries for one in episodes) > 0
