"""Collecting ahead: the synchronous batches at bound 0, the bound kept above it, and no error, prompt or token lost."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from megatron_dapo.rollout.async_collector import AsyncCollector, State
from megatron_dapo.rollout.batch import CollectionExhausted, RolloutBatch
from megatron_dapo.rollout.open_group import OpenGroup
from megatron_dapo.types import Completion, Prompt, VersionRange

MIXED = [0.0, 0.05, 0.3, 0.5, 0.7, 0.95, 1.0]
TIMEOUT_S = 30.0


@contextmanager
def overlapped(
    world: Any, timeout_s: float = TIMEOUT_S, keeps_requests: bool = False
) -> Iterator[AsyncCollector]:
    rollout = AsyncCollector(world.collector, world.max_staleness, timeout_s, keeps_requests=keeps_requests)
    try:
        publish(world, rollout, world.version)
        yield rollout
    finally:
        rollout.close()


def publish(world: Any, rollout: AsyncCollector, version: int) -> None:
    rollout.before_update()
    assert world.engine.num_unfinished == 0 or rollout._keeps_requests
    world.engine.policy_version = version
    rollout.after_update(version)


def ages(batch: RolloutBatch) -> set[int]:
    samples = [sample for group in batch.groups for sample in group.samples]
    return {batch.training_version - run.version for sample in samples for run in sample.completion.versions}


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.001)


def poll_when(world: Any, is_open: Callable[[], bool]) -> None:
    """Polls wait until `is_open`; `num_polls` counts those begun."""
    engine, poll = world.engine, world.engine.poll
    engine.num_polls = 0

    def gated_poll() -> list:
        engine.num_polls += 1
        wait_until(is_open)
        return poll()

    engine.poll = gated_poll


@pytest.mark.parametrize("partial_rollout", [False, True])
@pytest.mark.parametrize("oversample", [1.0, 2.0])
def test_bound_0_gives_the_batches_of_the_synchronous_run(
    make_world: Callable, oversample: float, partial_rollout: bool
) -> None:
    synchronous = make_world(MIXED * 20, oversample=oversample, max_epochs=None)
    world = make_world(MIXED * 20, oversample=oversample, max_epochs=None, partial_rollout=partial_rollout)
    threads = set(threading.enumerate())
    with overlapped(world) as rollout:
        for version in range(1, 9):
            batch = rollout.next_batch(6)
            assert batch == synchronous.collector.collect(6) and ages(batch) == {0}
            assert (
                batch.statistics.filter_decisions["all_right"] + batch.statistics.filter_decisions["all_wrong"] > 0
                or version > 1
            )
            assert rollout.generation_step == synchronous.collector.generation_step
            assert set(threading.enumerate()) <= threads  # one of another test may have ended
            publish(world, rollout, version)
            synchronous.engine.policy_version = version
        assert rollout.state_dict() == synchronous.collector.state_dict()


@pytest.mark.parametrize("max_staleness", [1, 2, 3])
@pytest.mark.parametrize("oversample", [1.0, 2.5])
@pytest.mark.parametrize("keeps_requests", [False, True])
def test_tokens_keep_the_bound_and_prompts_are_trained_once(
    make_world: Callable, max_staleness: int, oversample: float, keeps_requests: bool
) -> None:
    world = make_world(
        [0.5] * 150, max_staleness=max_staleness, oversample=oversample, partial_rollout=True, group_size=8
    )
    trained: list[str] = []
    seen: set[int] = set()
    with overlapped(world, keeps_requests=keeps_requests) as rollout:
        for version in range(1, 1000):
            batch = rollout.next_batch(5)
            if batch.should_stop:
                break
            assert batch.training_version == version - 1
            assert max(ages(batch)) <= max_staleness
            seen |= ages(batch)
            trained += [group.prompt.prompt_id for group in batch.groups]
            if version % 3 == 0:
                wait_until(lambda: len(rollout._ready) == max_staleness or rollout._state is State.EXHAUSTED)
            assert len(rollout._ready) <= max_staleness
            publish(world, rollout, version)
        else:
            pytest.fail("the run does not end")
        accounting = world.collector.accounting()
        assert rollout.next_batch(5).should_stop, "asked again, it says so again"
    assert accounting.is_balanced and accounting.buffered == accounting.unfinished == accounting.in_flight == 0
    assert max(Counter(trained).values()) == 1 and len(trained) + accounting.filtered == 150
    assert seen >= set(range(1, max_staleness + 1)), "batches were collected ahead"


@pytest.mark.parametrize("order", ["start", "guarded"])
def test_responses_stay_in_an_engine_that_keeps_its_requests_at_an_update(make_world: Callable, order: str) -> None:
    world = make_world(
        [0.5] * 400, filter_groups=False, max_staleness=2, oversample=2.5, partial_rollout=True, group_size=8, order=order
    )
    num_kept = 0
    with overlapped(world, keeps_requests=True) as rollout:
        batches = []
        for version in range(1, 25):
            batch = rollout.next_batch(5)
            batches.append(batch)
            assert max(ages(batch)) <= 2
            # The next collection is in the middle of its polls, or waits for newer weights.
            wait_until(lambda: world.engine.num_unfinished > 0 or rollout._state is State.WAITING)
            rollout.before_update()
            assert world.collector.accounting().is_balanced
            num_kept += world.engine.num_unfinished
            world.engine.policy_version = version
            rollout.after_update(version)
    samples = [sample for batch in batches for group in batch.groups for sample in group.samples]
    num_mixed = sum(len(sample.completion.versions) > 1 for sample in samples)
    trained = Counter(group.group_id for batch in batches for group in batch.groups)
    assert set(trained.values()) == {1} and sum(trained.values()) == 24 * 5
    assert num_kept > 0 and num_mixed > 0, "updates met responses under way"
    assert world.collector.accounting().queued_again == 0, "nothing is dropped for its age"


def test_a_group_in_flight_is_as_old_as_its_requests() -> None:
    group = OpenGroup("0", Prompt("p", (), (3,), "1"), 0, size=2, sent=4)
    assert group.oldest_version(6) == 4, "the engine may have sampled by it"
    group.add(0, Completion("0/0", np.zeros(2, np.int32), np.zeros(2, np.float32), "stop", (VersionRange(0, 2, 5),)))
    assert group.oldest_version(6) == 4
    group.sent = None  # it was held
    assert group.oldest_version(6) == 5


def test_a_collection_spans_an_update_and_continues_with_the_new_weights(make_world: Callable) -> None:
    world, plain = (make_world([0.5] * 100, max_staleness=1, partial_rollout=True, group_size=8) for _ in range(2))
    with overlapped(world) as rollout:
        # The first poll of the second batch ends when the update asks for it.
        poll_when(
            world, lambda: world.collector.train_step != 1 or rollout._state is State.PAUSING or rollout._version > 0
        )
        first = rollout.next_batch(4)
        wait_until(lambda: world.engine.num_unfinished == 32)
        rollout.before_update()
        assert world.engine.num_unfinished == 0 and world.collector.accounting().unfinished == 4
        num_polls = world.engine.num_polls
        time.sleep(0.02)
        assert world.engine.num_polls == num_polls and world.engine.num_unfinished == 0, "the engine is idle"
        world.engine.policy_version = 1
        rollout.after_update(1)
        second = rollout.next_batch(4)
    assert ages(first) == {0} and ages(second) == {0, 1} and second.statistics.num_continued > 0
    for batch in (first, second):
        expected = plain.collector.collect(4)
        assert [[s.completion.token_ids.tolist() for s in g.samples] for g in batch.groups] == [
            [s.completion.token_ids.tolist() for s in g.samples] for g in expected.groups
        ]


def test_an_evaluation_has_the_engine_for_itself(make_world: Callable) -> None:
    world = make_world([0.5] * 400, max_staleness=2, partial_rollout=True)
    with overlapped(world) as rollout:
        rollout.next_batch(4)
        for _ in range(5):
            with rollout.paused():
                assert world.engine.num_unfinished == 0
                before = world.engine.num_generated
                time.sleep(0.002)
                assert world.engine.num_generated == before
        with rollout.paused(), rollout.paused():
            assert rollout.state_dict()["counters"]["num_trained"] == 4
        publish(world, rollout, 1)
        assert len(rollout.next_batch(4).groups) == 4


@pytest.mark.parametrize("call", ["next_batch", "before_update", "paused"])
def test_an_error_of_the_thread_is_raised_by_the_next_call(make_world: Callable, call: str) -> None:
    world = make_world([0.5] * 400, max_staleness=1, partial_rollout=True)
    with overlapped(world) as rollout:
        rollout.next_batch(4)
        wait_until(lambda: len(rollout._ready) == 1)
        world.engine.polls_until_crash = 0
        publish(world, rollout, 1)
        wait_until(lambda: rollout._error is not None)
        calls = {
            "next_batch": lambda: rollout.next_batch(4),
            "before_update": rollout.before_update,
            "paused": lambda: rollout.paused().__enter__(),
        }
        for _ in range(2):
            with pytest.raises(ConnectionError, match="the engine went away"):
                calls[call]()
        state = rollout.state_dict()
    later = make_world([0.5] * 400, max_staleness=1, partial_rollout=True, version=1)
    later.collector.load_state_dict(json.loads(json.dumps(state, default=np.ndarray.tolist)))
    accounting = later.collector.accounting()
    assert accounting.is_balanced and accounting.trained == 4 and accounting.buffered + accounting.unfinished > 0


def test_waiting_for_a_batch_ends_with_the_error(make_world: Callable) -> None:
    world = make_world([0.0] * 40, max_staleness=1, partial_rollout=True, on_exhausted="error")
    with overlapped(world) as rollout, pytest.raises(CollectionExhausted, match="only 0 of 4"):
        rollout.next_batch(4)


def test_an_error_that_no_call_raised_is_logged(make_world: Callable, caplog: pytest.LogCaptureFixture) -> None:
    world = make_world([0.5] * 400, max_staleness=1, partial_rollout=True)
    with caplog.at_level(logging.ERROR), overlapped(world) as rollout:
        rollout.next_batch(4)
        wait_until(lambda: len(rollout._ready) == 1)
        world.engine.polls_until_crash = 0
        publish(world, rollout, 1)
        wait_until(lambda: rollout._error is not None)
    assert "the engine went away" in caplog.text


@pytest.mark.parametrize("trial", range(4))
def test_a_state_taken_at_any_time_is_a_consistent_cut(make_world: Callable, trial: int) -> None:
    """Saved while collections run, restored in a new process: every prompt is trained or filtered exactly once."""
    arguments = {"max_staleness": 2, "partial_rollout": True, "oversample": 1.5, "group_size": 8}
    world = make_world([0.5] * 120, jitter=trial, **arguments)
    trained: list[str] = []
    version = 0
    for life in range(30):
        is_over = False
        with overlapped(world) as rollout:
            for _ in range(trial + 1):
                batch = rollout.next_batch(5)
                is_over = batch.should_stop
                trained += [group.prompt.prompt_id for group in batch.groups]
                if is_over:
                    break
                version += 1
                publish(world, rollout, version)
            state = json.loads(json.dumps(rollout.state_dict(), default=np.ndarray.tolist))
            rollout.next_batch(5)  # never trained: the process dies
        if is_over:
            break
        world = make_world([0.5] * 120, jitter=100 * trial + life, version=version, **arguments)
        world.collector.load_state_dict(state)
        accounting = world.collector.accounting()
        assert accounting.is_balanced and accounting.trained == len(trained) and accounting.in_flight == 0
    else:
        pytest.fail("the run does not end")
    assert max(Counter(trained).values()) == 1
    assert len(trained) + world.collector.accounting().filtered == 120


def test_closing_keeps_what_the_engine_had_begun(make_world: Callable) -> None:
    world = make_world([0.5] * 400, max_staleness=1, partial_rollout=True, group_size=16)
    with overlapped(world) as rollout:
        poll_when(world, lambda: world.collector.train_step == 0 or rollout._state is State.CLOSING)
        rollout.next_batch(4)
        wait_until(lambda: world.engine.num_unfinished == 64)
        rollout.close()
        rollout.close()
        state = rollout.state_dict()
        assert world.engine.num_unfinished == 0
        held = [c for group in state["open_groups"] for c in group["completions"].values()]
        assert sum(len(c["token_ids"]) for c in held) > 0 and len(state["open_groups"]) == 4


def test_engines_are_looked_after_while_the_main_thread_waits(
    make_world: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two polls: no other thread sees the engine in between."""
    monkeypatch.setattr("megatron_dapo.rollout.async_collector._RECOVERY_INTERVAL_S", 0.005)
    world = make_world([0.5] * 400, max_staleness=1, partial_rollout=True)
    poll, num_looks, is_down = world.engine.poll, 0, True

    def poll_nothing_while_down() -> list:
        time.sleep(0.001)
        assert rollout._state in (State.COLLECTING, State.PAUSING)
        return [] if is_down else poll()

    def look() -> None:
        nonlocal num_looks, is_down
        assert threading.current_thread() is threading.main_thread() and rollout._state is State.PAUSED
        num_looks += 1
        is_down = num_looks < 4

    world.engine.poll = poll_nothing_while_down
    rollout = AsyncCollector(world.collector, 1, TIMEOUT_S, look)
    publish(world, rollout, 0)
    assert len(rollout.next_batch(4).groups) == 4 and num_looks >= 4
    rollout.close()


def test_a_hung_engine_ends_every_wait(make_world: Callable) -> None:
    world = make_world([0.5] * 400, max_staleness=1, partial_rollout=True)
    hung = threading.Event()
    poll_when(world, hung.is_set)
    rollout = AsyncCollector(world.collector, 1, timeout_s=0.1)
    publish(world, rollout, 0)
    with pytest.raises(
        TimeoutError, match=r"for a rollout batch .COLLECTING.; published policy version 0.*in_flight=4"
    ):
        rollout.next_batch(4)
    with pytest.raises(TimeoutError, match="for the collection to pause .PAUSING."):
        rollout.before_update()
    with pytest.raises(TimeoutError, match="to end"):
        rollout.close()
    hung.set()
    rollout._timeout_s = TIMEOUT_S
    rollout.close()


def test_wrong_use_is_refused(make_world: Callable) -> None:
    with pytest.raises(ValueError, match="max_ahead = -1"):
        AsyncCollector(make_world(MIXED).collector, -1, 1.0)
    world = make_world([0.5] * 400, max_staleness=2, partial_rollout=True)
    with overlapped(world) as rollout:
        rollout.next_batch(4)
        with pytest.raises(ValueError, match="a batch of 5 groups was requested, batches of 4 are collected"):
            rollout.next_batch(5)
        with pytest.raises(AssertionError, match="a batch for policy version 1 is requested at version 0"):
            rollout.next_batch(4)
        rollout.before_update()
        with pytest.raises(ValueError, match="policy version went from 0 to 2"):
            rollout.after_update(2)
        rollout.after_update(1)
