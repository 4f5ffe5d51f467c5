"""Episodes against the conversation played straight: whatever is aborted, lost, resumed or late, the stream is the same."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import episode_world as world
import numpy as np
import pytest

from megatron_dapo.engines.base import completion_from_json, completion_to_json
from megatron_dapo.rollout.episodes.engine import EpisodeEngine
from megatron_dapo.rollout.episodes.live_episode import EpisodeSettings
from megatron_dapo.rollout.episodes.stream import EpisodeStreams
from megatron_dapo.types import Completion, TurnCall, VersionRange
from tests.examples import examples


def assert_is(
    completion: Completion, played: world.Played, engine: world.FakeTurnEngine, limits: EpisodeSettings = world.settings()
) -> None:
    episode = completion.episode
    assert episode is not None and episode.end == played.end
    assert completion.finish_reason == ("stop" if played.end == "done" else "length")
    assert completion.num_segments + 1 == len(played.streams)
    for number, ((prompt, tokens), places) in enumerate(zip(played.streams, played.places, strict=True)):
        stream = completion.stream(number)
        assert stream.prompt_ids == prompt and stream.token_ids.tolist() == tokens
        assert len(prompt) + len(tokens) <= limits.max_context_tokens, "a micro-batch holds it"
        assert [run.is_sampled for run in stream.runs for _ in range(run.start, run.end)] == [one is not None for one in places]
        sampled = [stream.logprobs[run.start : run.end] for run in stream.runs if run.is_sampled]
        assert np.concatenate(sampled).tolist() == [world.logprob(*place) for place in places if place]
        versions = [run.version for run in stream.versions for _ in range(run.start, run.end)]
        assert len(versions) == len(tokens)
        for place, version, before in zip(places, versions, [None, *versions]):
            assert version == (engine.version_of[place] if place else before)
    assert [turn.reward for _, turn in completion.ordered_turns][: len(played.rewards)] == played.rewards
    expected = pytest.approx(sum(played.rewards)) if played.is_rewarded else None
    assert episode.reward == expected and episode.is_correct == played.is_correct


@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize("order", ["rounds", "arrival"])
def test_streams_are_the_conversation_played_straight(order, branches):
    """Under random aborts, losses, engines that give up, new processes and weights; every token is sampled once.

    With branches, environments continue earlier turns, come back to a stream and begin other conversations.
    """
    num_segments = 0
    for number in range(examples(100)):
        draw = random.Random(number)
        limits = world.settings(
            order=order,
            retries=1000,
            max_turn_tokens=draw.choice([0, 6, 20]),
            on_cut=draw.choice(["end", "observe"]),
            max_context_tokens=draw.choice([420, 700]),
            max_environments=draw.choice([1, 2, 9]),
            resume=draw.choice(["replay", "state"]),
        )
        name = draw.choice(["qwen3", "llama3", "glm4moe", "gptoss"])
        engine, inner, pool = world.world(number, limits, name, loss_rate=draw.choice([0, 0.1]), abort_rate=draw.choice([0, 0.1]))
        pool.with_state = limits.resume == "state"
        requests = {
            one.request_id: one
            for one in (
                world.request(f"g{index}/0", inner.turns, 7 * number + index, branches=branches) for index in range(3)
            )
        }
        engine.submit(list(requests.values()))
        finished: list[Completion] = []
        for _ in range(100_000):
            if not engine.num_unfinished:
                break
            finished += engine.poll()
            assert len(pool.tasks) <= limits.max_environments
            if draw.random() < 0.05:
                returned = engine.abort()
                assert engine.num_unfinished == inner.num_unfinished == 0 and engine.accounting().is_balanced
                inner.policy_version += 1
                if draw.random() < 0.5:  # another process, from what was saved
                    pool = world.ScriptedPool(pool.draw, pool.loss_rate, with_state=pool.with_state)
                    engine = EpisodeEngine(inner, pool, inner.turns, limits)
                    returned = [completion_from_json(completion_to_json(one)) for one in returned]
                finished += [one for one in returned if one.finish_reason != "abort"]
                held = [one for one in returned if one.finish_reason == "abort"]
                engine.submit([replace(requests[one.request_id], prefix=one if one.num_tokens else None) for one in held])
            assert engine.accounting().is_balanced
        assert sorted(one.request_id for one in finished) == sorted(requests) and not pool.tasks
        total = 0
        for one in finished:
            played = world.play(requests[one.request_id], inner.turns, limits)
            assert_is(one, played, inner, limits)
            total += len(played.sampled)
            num_segments += one.num_segments
        assert set(inner.sampled.values()) <= {1} and sum(inner.sampled.values()) == total
        assert engine.accounting().diverged == 0
    assert bool(num_segments) == branches


def test_a_record_is_of_the_same_answers():
    """A shorter answer than the recorded one is another one, although the record begins with it."""

    def streams(*answers: tuple[int, ...], last: int | None = None) -> EpisodeStreams:
        played = EpisodeStreams((1, 2))
        for turn, answer in enumerate(answers):
            played.add_turn(Completion("", (7, 8), (0.0, 0.0), "stop", (VersionRange(0, 2, 0),)))
            played.observe(turn if last is None or turn + 1 < len(answers) else last, answer)
        return played

    turns = world.template()
    record = streams((3, 4), (5,)).completion(world.request("g/0", turns, 1), "abort")
    assert streams((3, 4)).agree_with(record, (1, 2)) and streams((3, 4), (5,)).agree_with(record, (1, 2))
    for other in (streams((3,)), streams((3, 4, 7)), streams((3, 4), ()), streams((3, 4), (6,))):
        assert not other.agree_with(record, (1, 2))
    branch = streams((3, 4), (5,), last=0)
    assert not branch.agree_with(record, (1, 2)), "the record's last answer continues its stream"
    assert branch.agree_with(branch.completion(world.request("g/0", turns, 1), "abort"), (1, 2))


def test_each_turn_s_context_is_the_stream_so_far():
    engine, inner, _ = world.world(3, world.settings())
    engine.submit([world.request("g/0", inner.turns, 5)])
    (done,) = world.drain(engine)
    stream = [*done.prompt_ids, *done.token_ids]
    starts = [len(done.prompt_ids) + turn.start for turn in done.episode.turns]
    assert [list(one.prompt_ids) for one in inner.requests] == [stream[:start] for start in starts]
    assert len(starts) > 1 and {one.seed for one in inner.requests} == {5}
    assert {one.affinity for one in inner.requests} == {("g/0", "g")}


def test_rounds_depend_on_counts_only():
    """Equal requests give equal polls, however late the environments answer."""

    def polls(late: int) -> list[list[Completion]]:
        engine, inner, pool = world.world(1, world.settings())
        pool.draw = random.Random(late)
        engine.submit([world.request(f"g/{index}", inner.turns, index) for index in range(8)])
        taken = []
        while engine.num_unfinished:
            before = engine._round
            taken.append((before, engine.poll()))
        return [(number, world.facts_of(done)) for number, done in taken if done]

    assert polls(1) == polls(2) == polls(3)


def test_a_resumed_run_goes_on_in_the_same_rounds():
    """An episode that a new process plays again enters in the round in which a held one goes on."""

    limits = world.settings(max_environments=6)  # two of eight wait for a place

    def rest(is_new: bool, num_polls: int) -> list[tuple[int, object]]:
        engine, inner, _ = world.world(4, limits)
        requests = {f"g/{index}": world.request(f"g/{index}", inner.turns, index) for index in range(8)}
        engine.submit(list(requests.values()))
        for _ in range(num_polls):
            engine.poll()
        held = [one for one in engine.abort() if one.finish_reason == "abort"]
        assert any(one.num_tokens > one.num_sampled for one in held)
        if is_new:
            engine = EpisodeEngine(inner, world.ScriptedPool(random.Random(9)), inner.turns, limits)
        start = engine._round
        engine.submit([replace(requests[one.request_id], prefix=one if one.num_tokens else None) for one in held])
        taken = []
        while engine.num_unfinished:
            before = engine._round
            if done := engine.poll():
                taken.append((before - start, world.facts_of(done)))
        return taken

    for num_polls in (6, 9, 12, 15):
        assert rest(False, num_polls) == rest(True, num_polls)


def test_a_held_environment_is_not_asked_again():
    engine, inner, pool = world.world(2, world.settings())
    one = world.request("g/0", inner.turns, 3)
    engine.submit([one])
    finished = []
    while not pool.num_acts:
        finished += engine.poll()
    for _ in range(10_000):
        finished += engine.poll()
        if finished:
            break
        (held,) = engine.abort()
        assert held.finish_reason == "abort" and engine.num_unfinished == 0
        engine.submit([replace(one, prefix=held if held.num_tokens else None)])
    played = world.play(one, inner.turns, world.settings())
    assert_is(finished[0], played, inner)
    assert pool.num_acts["g/0"] == played.num_acts and pool.num_starts["g/0"] == 1


def test_a_lost_episode_is_given_up_after_its_retries():
    engine, inner, pool = world.world(5, world.settings(retries=2), loss_rate=1.0)
    engine.submit([world.request("g/0", inner.turns, 3)])
    (done,) = world.drain(engine)
    assert (done.episode.end, done.episode.lost, done.finish_reason) == ("lost", "the worker died", "length")
    assert done.episode.reward is None and done.num_tokens == 0
    accounting = engine.accounting()
    assert pool.num_starts["g/0"] == 3 and (accounting.retried, accounting.ended) == (2, {"lost": 1})


def test_an_environment_that_does_not_repeat_begins_anew():
    engine, inner, pool = world.world(6, world.settings())
    one = world.request("g/0", inner.turns, 3)
    engine.submit([one])
    while not pool.num_acts:
        engine.poll()
    (held,) = engine.abort()
    pool = world.ScriptedPool(random.Random(1), changes=True)
    engine = EpisodeEngine(inner, pool, inner.turns, world.settings())
    engine.submit([replace(one, prefix=held)])
    (done,) = world.drain(engine)
    accounting = engine.accounting()
    assert accounting.diverged == 1 and accounting.discarded_tokens == held.num_sampled
    assert done.episode.attempt == 1 and pool.num_starts["g/0"] == 2


def held_after_a_reward(pool: world.ScriptedPool) -> tuple[EpisodeEngine, world.FakeTurnEngine, object, Completion]:
    """An episode that was stopped after two answers, the first of them with a reward."""
    for seed in range(100):
        limits = world.settings(resume="state" if pool.with_state else "replay")
        _, inner, _ = world.world(6, limits)
        engine = EpisodeEngine(inner, pool, inner.turns, limits)
        one = world.request("g/0", inner.turns, seed)
        engine.submit([one])
        for _ in range(1000):
            engine.poll()
            if not engine.num_unfinished or pool.num_acts["g/0"] == 3:
                break
        held = [one for one in engine.abort() if one.finish_reason == "abort"]
        if held and held[0].episode.turns[0].reward:
            return engine, inner, one, held[0]
        pool.num_acts.clear()
        pool.end("g/0")
    raise AssertionError("no episode has a reward in its first turn")


@pytest.mark.parametrize("change", [{"reward": 0.123}, {"done": True}, {"calls": (TurnCall("other", "ok"),)}])
def test_an_answer_with_the_same_text_and_another_judgement_is_another(change, monkeypatch):
    """Rewards and ends count, not only what the model reads."""
    _, inner, one, held = held_after_a_reward(world.ScriptedPool(random.Random(1)))
    answer_of, is_first = world.answer_of, True

    def changed(task, actions, has_tools=True):
        nonlocal is_first
        answer = answer_of(task, actions, has_tools)
        if len(actions) == 1 and is_first:
            is_first = False
            return {**answer, **change}
        return answer

    monkeypatch.setattr(world, "answer_of", changed)
    engine = EpisodeEngine(inner, world.ScriptedPool(random.Random(1)), inner.turns, world.settings())
    engine.submit([replace(one, prefix=held)])
    (done,) = world.drain(engine)
    assert engine.accounting().diverged == 1 and done.episode.attempt == 1
    monkeypatch.setattr(world, "answer_of", answer_of)
    assert_is(done, world.play(one, inner.turns, world.settings()), inner)


def test_resume_restart_begins_anew_and_counts_it():
    _, inner, one, held = held_after_a_reward(world.ScriptedPool(random.Random(1)))
    pool = world.ScriptedPool(random.Random(2))
    engine = EpisodeEngine(inner, pool, inner.turns, world.settings(resume="restart"))
    engine.submit([replace(one, prefix=held)])
    (done,) = world.drain(engine)
    accounting = engine.accounting()
    assert (accounting.restarted, accounting.diverged) == (1, 0)
    assert accounting.discarded_tokens == held.num_sampled and done.episode.attempt == held.episode.attempt + 1
    played = world.play(one, inner.turns, world.settings())
    assert_is(done, played, inner)
    assert pool.num_acts["g/0"] == played.num_acts


def test_resume_state_asks_no_environment_twice():
    """Turns that had an answer are not played again; the state is in what a checkpoint has, and in nothing that is trained."""
    _, inner, one, held = held_after_a_reward(world.ScriptedPool(random.Random(1), with_state=True))
    assert json.loads(held.episode.state)["turns"] >= 2
    held = completion_from_json(json.loads(json.dumps(completion_to_json(held), default=np.ndarray.tolist)))
    pool = world.ScriptedPool(random.Random(2), with_state=True)
    engine = EpisodeEngine(inner, pool, inner.turns, world.settings(resume="state"))
    engine.submit([replace(one, prefix=held)])
    (done,) = world.drain(engine)
    played = world.play(one, inner.turns, world.settings())
    assert_is(done, played, inner)
    assert pool.num_acts["g/0"] == played.num_acts - json.loads(held.episode.state)["turns"] and not done.episode.state


def test_a_repetition_does_not_use_up_the_seconds_of_an_episode():
    """Answers of half a second: two losses and their repetitions are not the policy's."""
    limits = world.settings(max_seconds=2.9, retries=1000)
    engine, inner, pool = world.world(1, limits, loss_rate=0.3)
    requests = {f"g/{index}": world.request(f"g/{index}", inner.turns, index) for index in range(10)}
    engine.submit(list(requests.values()))
    for done in world.drain(engine):
        assert_is(done, world.play(requests[done.request_id], inner.turns, limits), inner)
    assert engine.accounting().retried > 5


def test_an_episode_without_an_answer_in_its_seconds_ends_truncated_and_is_not_repeated(monkeypatch):
    engine, inner, pool = world.world(2, world.settings(retries=2))
    answer_of = world.answer_of
    monkeypatch.setattr(
        world, "answer_of", lambda task, actions: {"timed_out": True} if len(actions) == 1 else answer_of(task, actions)
    )
    engine.submit([world.request("g/0", inner.turns, 3)])
    (done,) = world.drain(engine)
    assert (done.episode.end, done.finish_reason, len(done.episode.turns)) == ("seconds", "length", 1)
    assert pool.num_starts["g/0"] == 1 and not pool.tasks and engine.accounting().retried == 0


def test_an_environment_that_answers_a_turn_that_is_not_there_is_started_again(monkeypatch):
    engine, inner, pool = world.world(2, world.settings(retries=1))
    answer_of = world.answer_of
    monkeypatch.setattr(
        world, "answer_of",
        lambda task, actions: {**answer_of(task, actions), "done": False, "messages": ({"role": "user", "content": "x"},), "after": 9}
        if actions else answer_of(task, actions),
    )  # fmt: skip
    engine.submit([world.request("g/0", inner.turns, 3)])
    (done,) = world.drain(engine)
    assert done.episode.end == "lost" and "answered turn 9 of 1, which are numbered from 0" in done.episode.lost
    assert pool.num_starts["g/0"] == 2 and not pool.tasks


def test_losses_by_another_episode_do_not_count():
    engine, inner, pool = world.world(5, world.settings(retries=0), loss_rate=1.0)
    pool.num_others_losses = 8
    engine.submit([world.request("g/0", inner.turns, 3)])
    (done,) = world.drain(engine)
    assert done.episode.end == "lost" and done.episode.num_retries == 1 and pool.num_starts["g/0"] == 9


@pytest.mark.parametrize("is_aborted", [True, False])
def test_what_is_not_continued_is_dropped_when_others_begin_or_are_aborted(is_aborted):
    """Environments of episodes that nobody wants keep no others from a process."""
    engine, inner, pool = world.world(7, world.settings())
    one, other = (world.request(name, inner.turns, 3) for name in ("g/0", "h/0"))
    engine.submit([one])
    while not pool.num_acts:
        engine.poll()
    engine.abort()
    assert "g/0" in pool.tasks and engine.accounting().held == 1
    _ = engine.abort() if is_aborted else engine.submit([other])
    assert "g/0" not in pool.tasks and engine.accounting().dropped == 1
    world.drain(engine)
    engine.submit([one])  # It starts from its begin.
    assert engine.accounting().is_balanced and world.drain(engine)[0].request_id == "g/0"


def test_a_request_without_prefix_begins_a_held_episode_anew():
    engine, inner, pool = world.world(8, world.settings())
    one = world.request("g/0", inner.turns, 3)
    engine.submit([one])
    assert engine.abort()[0].num_tokens == 0 and not pool.tasks, "it has said nothing yet"
    engine.submit([one])
    while not pool.num_acts:
        engine.poll()
    assert engine.abort()[0].num_tokens > 0 and pool.tasks
    engine.submit([one])
    assert pool.num_starts["g/0"] == 3 and engine.accounting().dropped == 2
    assert_is(world.drain(engine)[0], world.play(one, inner.turns, world.settings()), inner)


def test_requests_without_a_task_go_through_untouched():
    engine, inner, _ = world.world(9, world.settings())
    plain = replace(world.request("p/0", inner.turns, 4), task=None)
    engine.submit([plain, world.request("g/0", inner.turns, 5)])
    assert inner.requests == [plain]
    done = {one.request_id: one for one in world.drain(engine)}
    assert done["p/0"].episode is None and done["g/0"].episode is not None
    other = world.FakeTurnEngine(inner.turns, random.Random(9))
    other.submit([plain])
    alone = next(iter([one for _ in range(100) for one in other.poll()]))
    assert alone == done["p/0"]


def test_a_rewritten_history_begins_a_segment(monkeypatch):
    """With history = "rewrite", a template that drops earlier thinking gets a stream of its text, with another seed; another
    process makes the same of the record."""
    turns = world.template("qwen3", "rewrite")
    spoken = [*turns.template.encode("<think>\nhm\n</think>\n\nHello"), turns.stop_token_ids[0]]
    monkeypatch.setattr(world, "turn_of", lambda turns, seed, position: spoken)

    def played(polls_until_abort: int) -> tuple[list[Completion], world.FakeTurnEngine]:
        inner = world.FakeTurnEngine(turns, random.Random(0))
        engine = EpisodeEngine(inner, world.ScriptedPool(random.Random(1)), turns, world.settings(max_turns=4))
        requests = {f"g/{index}": world.request(f"g/{index}", turns, index, 200) for index in range(4)}
        engine.submit(list(requests.values()))
        finished = [one for _ in range(polls_until_abort) for one in engine.poll()]
        if polls_until_abort:
            held = [one for one in engine.abort() if one.finish_reason == "abort"]
            engine = EpisodeEngine(inner, world.ScriptedPool(random.Random(2)), turns, world.settings(max_turns=4))
            engine.submit([replace(requests[one.request_id], prefix=one if one.num_tokens else None) for one in held])
        return finished + world.drain(engine), inner

    straight, inner = played(0)
    for done in straight:
        assert len(done.episode.turns) == 1
        for stream in done.episode.segments:
            text = turns.template.tokenizer.decode(list(stream.prompt_ids))
            assert "hm" not in text and "Hello" in text and len(stream.turns) == 1
    assert sum(one.num_segments for one in straight) > 3
    assert len({(one.seed, one.request_id) for one in inner.requests}) == len({one.seed for one in inner.requests})
    for polls in range(2, 30, 4):
        assert world.facts_of(played(polls)[0]) == world.facts_of(straight)


def test_a_begin_longer_than_prompts_may_be_is_an_error():
    engine, inner, _ = world.world(1, world.settings(max_prompt_tokens=20))
    engine.submit([world.request("g/0", inner.turns, 5)])
    with pytest.raises(ValueError, match=r"g/0: its environment begins with \d+ tokens, data.max_prompt_tokens = 20: raise it"):
        world.drain(engine)


def test_an_answer_that_the_template_cannot_render_is_an_error(monkeypatch):
    engine, inner, _ = world.world(1, world.settings(), "gemma3")
    with pytest.raises(ValueError, match="no place for messages of the roles"):
        proven = replace(inner.turns, roles=("user",))
        engine = EpisodeEngine(inner, world.ScriptedPool(random.Random(1)), proven, world.settings())
        engine.submit([world.request(f"g/{index}", inner.turns, index) for index in range(20)])
        world.drain(engine)


def test_episodes_end_when_environments_take_too_long():
    engine, inner, _ = world.world(1, world.settings(max_seconds=0.9))  # two answers of half a second
    engine.submit([world.request(f"g/{index}", inner.turns, index) for index in range(10)])
    done = world.drain(engine)
    assert {one.episode.end for one in done} >= {"seconds"}
    assert all(len(one.episode.turns) <= 2 for one in done)
    assert np.all([one.finish_reason == "length" for one in done if one.episode.end == "seconds"])
