"""Two users of one engine: each gets its responses whole, and an evaluation during training changes no batch."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_world import SAMPLING, FakeEngine, World, whole_response

from megatron_dapo.config.rollout_schema import RolloutConfig
from megatron_dapo.engines.shared import SharedEngine
from megatron_dapo.evaluation.runner import generate
from megatron_dapo.rollout.async_collector import AsyncCollector
from megatron_dapo.types import Completion, GenerationRequest
from tests.examples import examples

WAIT_S = 60.0


class ArrayEngine(FakeEngine):
    """With token ids as arrays, which prefixes are made of."""

    def completion_of(self, running: Any, reason: str) -> Completion:
        from dataclasses import replace

        made = super().completion_of(running, reason)
        return replace(made, token_ids=np.array(made.token_ids, np.int32), logprobs=np.array(made.logprobs, np.float32))


def requests(prefix: str, count: int) -> list[GenerationRequest]:
    return [GenerationRequest(f"{prefix}/{i}", (3 + i, 500), SAMPLING, seed=1000 + i) for i in range(count)]


def require_whole(asked: Sequence[GenerationRequest], completions: Sequence[Completion]) -> None:
    assert sorted(one.request_id for one in completions) == sorted(one.request_id for one in asked)
    by_id = {one.request_id: one for one in asked}
    for one in completions:
        request = by_id[one.request_id]
        assert one.finish_reason == "stop"
        assert tuple(one.token_ids.tolist()) == whole_response(request.prompt_ids, request.seed)


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 20), st.integers(0, 30), st.integers(0, 30))
def test_each_view_gets_its_own_responses_once_and_whole(
    seed: int, num_places: int, num_trained: int, num_evaluated: int
) -> None:
    """Any order of calls, with stops of rollout in between, whose responses are submitted again with their tokens."""
    chance, engine = random.Random(seed), ArrayEngine(jitter=seed)
    shared = SharedEngine(engine, num_places)
    trained, evaluated = requests("group", num_trained), requests("evaluation", num_evaluated)
    shared.evaluation.submit(evaluated)
    shared.rollout.submit(trained)
    by_id, mine, others = {one.request_id: one for one in trained}, [], []
    while shared.rollout.num_unfinished or shared.evaluation.num_unfinished:
        call = chance.random()
        if call < 0.4:
            mine += shared.rollout.poll()
        elif call < 0.8:
            others += shared.evaluation.poll()
        else:
            stopped = shared.rollout.abort()
            mine += [one for one in stopped if one.finish_reason != "abort"]
            unfinished = [one for one in stopped if one.finish_reason == "abort"]
            again = [
                GenerationRequest(r.request_id, r.prompt_ids, r.sampling, r.seed, prefix=one if one.num_tokens else None)
                for one in unfinished
                for r in [by_id[one.request_id]]
            ]
            shared.rollout.submit(again)
    require_whole(trained, mine)
    require_whole(evaluated, others)


@pytest.mark.parametrize("num_trained", [0, 100])
def test_an_evaluation_takes_the_places_that_rollout_leaves_and_an_eighth_at_least(num_trained: int) -> None:
    engine = ArrayEngine()
    shared = SharedEngine(engine, num_places=32)
    shared.rollout.submit(requests("group", num_trained))
    shared.evaluation.submit(requests("evaluation", 100))
    engine._poll = list  # nothing finishes
    shared.evaluation.poll()
    num_evaluated = sum(name.startswith("evaluation") for name in engine._running)
    assert num_evaluated == (4 if num_trained else 32) and len(engine._running) == num_trained + num_evaluated
    # Rollout is not delayed by what waits.
    shared.rollout.submit(requests("later", 8))
    assert sum(name.startswith("later") for name in engine._running) == 8


def test_a_cancelled_evaluation_leaves_rollout_whole() -> None:
    engine = ArrayEngine(jitter=3)
    shared = SharedEngine(engine, num_places=8)
    trained = requests("group", 6)
    shared.rollout.submit(trained)
    shared.evaluation.submit(requests("evaluation", 20))
    first = [*shared.rollout.poll(), *shared.rollout.poll()]
    stopped = shared.evaluation.abort()
    assert len(stopped) == 20 and shared.evaluation.num_unfinished == 0
    while shared.rollout.num_unfinished:
        first += shared.rollout.poll()
    require_whole(trained, first)


def test_turns_are_first_come_first_served() -> None:
    """A thread that polls again and again does not keep another from its turn."""
    engine = ArrayEngine()
    shared, is_done, polls = SharedEngine(engine, 4), threading.Event(), []
    engine._poll = lambda: is_done.wait(0.01) and [] or []

    def poll() -> None:
        while not is_done.is_set():
            polls.append(shared.evaluation.poll())

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        for _ in range(20):
            before = len(polls)
            shared.rollout.submit([])
            assert len(polls) - before <= 2
    finally:
        is_done.set()
        thread.join(WAIT_S)


def trained_batches(max_staleness: int, evaluations: int, jitter: int) -> tuple[list[Any], list[list[Completion]]]:
    """Return five batches of a run that publishes a version after each, and its evaluations, one a version."""
    settings_ = RolloutConfig(
        prompts_per_step=4, group_size=4, max_staleness=max_staleness, partial_rollout=max_staleness > 0, oversample=1.0
    )
    world = World([0.3, 0.5, 0.7, 0.0, 1.0] * 12, settings_, max_epochs=None, jitter=jitter)
    world.engine = ArrayEngine(jitter)
    shared = SharedEngine(world.engine, num_places=16)
    view = shared.rollout
    world.collector._engine = world.collector._open._engine = view
    rollout = AsyncCollector(world.collector, max_staleness, WAIT_S)
    batches, done = [], []
    try:
        for version in range(6):
            rollout.before_update()
            assert world.engine.num_unfinished == 0
            world.engine.policy_version = version
            rollout.after_update(version)
            found: dict[str, Completion] = {}
            asked = {one.request_id: one for one in requests("evaluation", 24)} if version < evaluations else {}
            thread = threading.Thread(target=lambda asked=asked, found=found: found.update(generate(asked, shared.evaluation)))
            thread.start()
            if version < 5:
                batches.append(rollout.next_batch(4))
            thread.join(WAIT_S)
            assert not thread.is_alive() and found.keys() == asked.keys()
            done.append(list(found.values()))
            if asked:
                require_whole(list(asked.values()), list(found.values()))
            assert {run.version for one in found.values() for run in one.versions} <= {version}, "of one version"
    finally:
        rollout.close()
    return batches, done


@pytest.mark.parametrize("jitter", [0, 1, 2])
def test_batches_on_policy_are_the_same_with_evaluations(jitter: int) -> None:
    with_them, evaluated = trained_batches(0, 5, jitter)
    without, _ = trained_batches(0, 0, jitter + 10)
    assert len(evaluated[0]) == 24
    for one, other in zip(with_them, without, strict=True):
        assert [tokens_of(group) for group in one.groups] == [tokens_of(group) for group in other.groups]


@pytest.mark.parametrize("jitter", [0, 1, 2])
def test_batches_ahead_have_the_same_prompts_in_the_same_order(jitter: int) -> None:
    with_them, _ = trained_batches(2, 5, jitter)
    without, _ = trained_batches(2, 0, jitter)
    for one, other in zip(with_them, without, strict=True):
        assert [group.prompt.prompt_id for group in one.groups] == [group.prompt.prompt_id for group in other.groups]
        ages = [one.training_version - run.version for g in one.groups for s in g.samples for run in s.completion.versions]
        assert max(ages) <= 2


def tokens_of(group: Any) -> tuple[Any, ...]:
    samples = [(one.sample_id, one.completion.token_ids.tolist(), one.completion.versions, one.reward) for one in group.samples]
    return group.group_id, group.prompt.prompt_id, samples


def test_places_are_counted(make_world: Callable) -> None:
    with pytest.raises(ValueError, match="num_places = 0, must be at least 1"):
        SharedEngine(FakeEngine(), 0)
