"""Successive batching: each window once, in order, of the tokens an unsplit response has, whatever happens in between."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.rollout.async_collector import AsyncCollector
from megatron_dapo.rollout.batch import CollectionExhausted, RolloutBatch
from megatron_dapo.rollout.open_group import MAX_FRUITLESS
from megatron_dapo.rollout.window_collector import NOT_CHOSEN
from megatron_dapo.types import IS_LOST, SamplingParams, Score
from tests.examples import examples, first

MIXED = [0.0, 0.05, 0.3, 0.5, 0.7, 0.95, 1.0]


def window_world() -> ModuleType:
    import window_world

    return window_world


def make_world(pass_rates: list[float], **changes: object) -> object:
    return window_world().make_window_world(pass_rates, **changes)


def checker(world: object) -> object:
    return window_world().BatchChecker(world.settings)


def windows(batch: RolloutBatch) -> list:
    return [sample for group in batch.groups for sample in group.samples]


def contents(batch: RolloutBatch) -> tuple:
    return batch.groups, batch.statistics, batch.exhausted, batch.should_stop


def test_every_collection_works_on_the_same_number_and_unfinished_ones_go_first() -> None:
    world = make_world(MIXED * 20)
    seen, unfinished = checker(world), []
    for step in range(10):
        world.engine.submitted.clear()
        batch = world.collector.collect(5)
        seen.add(batch)
        assert len(windows(batch)) == 20 and not batch.exhausted and not batch.should_stop
        first = [request.request_id for request in world.engine.submitted[:20]]
        assert first[: len(unfinished)] == unfinished, "the head of the queue, in order of their start"
        assert sorted(first) == [sample.sample_id for sample in windows(batch)]
        assert {group.generation_step for group in batch.groups} == {step + 1}
        unfinished = [sample.sample_id for sample in windows(batch) if not sample.window.is_finished]
        accounting = world.collector.accounting()
        assert accounting.is_balanced and accounting.unfinished == len(unfinished)
        assert accounting.not_started < 4 and accounting.trained == len(seen.finished)
        world.engine.policy_version += 1
    assert world.collector.train_step == world.collector.generation_step == 10
    assert max(len(sample.completion.versions) for sample in windows(batch)) == 3, "three windows by three policies"


def test_groups_are_begun_in_one_step_and_completed_in_later_ones() -> None:
    world = make_world([0.5] * 200, group_size=8)
    sizes = [len(group.samples) for _ in range(6) for group in world.collector.collect(3).groups]
    assert min(sizes) < 8 and max(sizes) == 8


def test_each_token_keeps_the_version_that_sampled_it() -> None:
    world = make_world([0.5] * 200)
    for version in range(8):
        world.engine.policy_version = version
        for group in (batch := world.collector.collect(4)).groups:
            assert group.policy_version == version == batch.training_version
            for sample in group.samples:
                last = sample.completion.versions[-1]
                assert (last.start, last.version) == (sample.window.start, version)
                assert all(run.version < version for run in sample.completion.versions[:-1])


@pytest.mark.parametrize("jitter", range(1, 5))
def test_the_batch_does_not_depend_on_the_engine_s_timing_or_deaths(jitter: int) -> None:
    expected, actual = make_world(MIXED * 20), make_world(MIXED * 20, jitter=jitter, abort_rate=0.3)
    for _ in range(6):
        assert contents(expected.collector.collect(6)) == contents(actual.collector.collect(6))
    assert len(actual.engine.submitted) > len(expected.engine.submitted)
    assert actual.engine.num_generated == expected.engine.num_generated
    assert expected.checkpoint() == actual.checkpoint()


def test_an_engine_that_finishes_nothing_is_an_error() -> None:
    world = make_world([0.5] * 20)
    world.engine.poll = world.engine.abort
    with pytest.raises(RuntimeError, match=rf"gave up {MAX_FRUITLESS + 1} times in a row"):
        world.collector.collect(2)
    assert world.collector.accounting().is_balanced


def test_repeated_pauses_before_generation_are_no_error_of_the_engine() -> None:
    world, expected = make_world([0.5] * 20), make_world([0.5] * 20)
    num_polls = 0

    def starve() -> list:
        nonlocal num_polls
        num_polls += 1
        return poll() if num_polls > 2 * MAX_FRUITLESS else []

    poll, world.engine.poll = world.engine.poll, starve
    batch = world.collector.collect(2, between_polls=world.collector.hold)
    assert contents(batch) == contents(expected.collector.collect(2)) and num_polls > 2 * MAX_FRUITLESS


def test_finished_responses_are_scored_while_others_still_generate() -> None:
    world = make_world([0.5] * 20)
    score_many, running = world.verifier.score_many, []
    world.verifier.score_many = lambda items: (running.append(world.engine.num_unfinished), score_many(items))[1]
    world.collector.collect(5)
    assert len(running) > 1 and running[0] > 0 and running == sorted(running, reverse=True)


def test_an_engine_that_forgets_costs_the_tokens_not_the_window() -> None:
    world, expected = make_world([0.5] * 40), make_world([0.5] * 40)
    forgot = 0

    def forget() -> None:
        nonlocal forgot
        if world.engine._running and forgot < 3:
            forgot += 1
            world.engine._running.clear()
            world.collector.hold()

    assert contents(world.collector.collect(4, between_polls=forget)) == contents(expected.collector.collect(4))
    assert forgot == 3


@pytest.mark.parametrize(("window_tokens", "limit"), [(8, 20), (5, 20), (1, 3), (7, 7), (9, 8), (10, 30), (3, 31)])
def test_windows_of_any_length_make_the_whole_response(window_tokens: int, limit: int) -> None:
    """Windows that do not divide the maximum, that are longer than it, and responses that just fit."""
    sampling = SamplingParams(max_new_tokens=limit, stop_token_ids=window_world().STOPS)
    world = make_world(MIXED * 3, window_tokens=window_tokens, sampling=sampling)
    seen = checker(world)
    while not (batch := world.collector.collect(4)).should_stop:
        seen.add(batch)
    assert len(seen.finished) == len(seen.ends) == 4 * 21
    assert max(seen.ends.values()) == min(limit, 30)


def test_a_stop_token_in_the_last_place_of_a_window_ends_the_response() -> None:
    world = make_world([0.5] * 60)
    exact = 0
    for _ in range(12):
        for sample in windows(world.collector.collect(4)):
            tokens = sample.completion.token_ids
            if len(tokens) - sample.window.start == 8 and tokens[-1] in window_world().STOPS:
                assert sample.window.is_finished and sample.completion.finish_reason == "stop"
                exact += 1
    assert exact > 3


def test_exhausted_prompts_make_smaller_batches_while_something_is_unfinished() -> None:
    world = make_world([0.5] * 7)
    seen, sizes = checker(world), []
    while not (batch := world.collector.collect(4)).should_stop:
        seen.add(batch)
        sizes.append(len(windows(batch)))
        assert batch.exhausted == ("prompts" if sizes[-1] < 16 else "")
    assert sizes[0] == 16 and sizes == sorted(sizes, reverse=True) and sizes[-1] < 16
    assert batch.groups == () and batch.exhausted == "prompts"
    accounting = world.collector.accounting()
    assert len(seen.finished) == accounting.drawn == accounting.trained == 28
    assert world.collector.train_step == world.collector.generation_step == len(sizes)


def test_stop_keeps_what_waits_for_a_later_run() -> None:
    world = make_world([0.5] * 7, on_exhausted="stop")
    world.collector.collect(4)
    while not (batch := world.collector.collect(4)).should_stop:
        assert len(windows(batch)) == 16
    accounting = world.collector.accounting()
    assert batch.groups == () and accounting.unfinished + accounting.not_started > 0 and accounting.is_balanced
    later = world.restart(world.checkpoint(), settings=replace(world.settings, on_exhausted="train_partial"))
    assert len(windows(later.collector.collect(4))) == accounting.unfinished + accounting.not_started


def test_error_loses_nothing() -> None:
    world = make_world([0.5] * 3, on_exhausted="error")
    with pytest.raises(CollectionExhausted, match="only 12 of 16 responses to work on: prompts are exhausted after 3"):
        world.collector.collect(4)
    assert world.collector.accounting().not_started == 12 and world.collector.accounting().is_balanced
    assert len(windows(world.collector.collect(3))) == 12


def run(world: object, num_steps: int, num_groups: int = 5) -> list:
    """Batches of an undisturbed run, the policy moving on with each."""
    batches = []
    for _ in range(num_steps):
        batches.append(contents(world.collector.collect(num_groups)))
        world.engine.policy_version += 1
    return batches


@pytest.mark.parametrize("trial", first(5, range(20)))
@pytest.mark.parametrize("windows_per_step", [0, 12])
def test_killed_anywhere_and_resumed_every_window_is_handed_out_once_with_the_same_tokens(
    trial: int, windows_per_step: int
) -> None:
    """Kills within collections and between them, resuming from the last checkpoint; checkpoints within collections (a
    signal), of batches not yet trained, and after steps. Across an epoch's edge and to the end of the data.
    """
    chance = random.Random(trial)
    arguments = {"windows_per_step": windows_per_step, "max_epochs": 2}
    reference = make_world(MIXED * 3, **arguments)
    expected = run(reference, 16)
    world, actual = make_world(MIXED * 3, **arguments, jitter=trial), []
    saved, num_saved, num_kills = world.checkpoint(), 0, 0

    def disturb() -> None:
        nonlocal saved, num_saved
        if chance.random() < 0.2:
            world.collector.hold()
        if chance.random() < 0.2:
            saved, num_saved = world.checkpoint(), len(actual)
        assert world.collector.accounting().is_balanced
        if chance.random() < 0.1:
            raise InterruptedError

    while len(actual) < 16:
        if num_kills < 20:
            world.engine.polls_until_crash = chance.choice([None, 0, 1, 3, 6])
        try:
            batch = world.collector.collect(5, between_polls=disturb if num_kills < 20 else lambda: None)
        except (ConnectionError, InterruptedError):
            num_kills += 1
            world.engine.polls_until_crash = None
            if chance.random() < 0.7:
                world = world.restart(saved, jitter=chance.randrange(2**32), abort_rate=chance.choice([0.0, 0.2]))
                del actual[num_saved:]
            continue
        if chance.random() < 0.2:  # stopped before it was trained
            saved, num_saved = world.checkpoint(untrained=[batch]), len(actual)
            world.collector.give_back(batch)
            assert world.checkpoint() == saved and world.collector.accounting().is_balanced
            world = world.restart(saved)
            continue
        actual.append(contents(batch))
        world.engine.policy_version += 1
        if chance.random() < 0.5:
            saved, num_saved = world.checkpoint(), len(actual)
    assert num_kills >= 5
    assert actual == expected
    assert world.checkpoint() == reference.checkpoint()


@settings(max_examples=examples(100), deadline=None)
@given(
    pass_rates=st.lists(st.sampled_from(MIXED), min_size=1, max_size=12),
    group_size=st.integers(1, 5),
    window_tokens=st.integers(1, 25),
    extra_items=st.none() | st.integers(0, 10),
    seed=st.integers(0, 2**32),
)
def test_every_response_of_an_epoch_is_accounted_for(
    pass_rates: list[float], group_size: int, window_tokens: int, extra_items: int | None, seed: int
) -> None:
    """Batches of changing size, and windows that are not chosen; the pool stays within its bound."""
    chance = random.Random(seed)
    windows_per_step = 0 if extra_items is None else group_size + extra_items
    world = make_world(
        pass_rates,
        group_size=group_size,
        window_tokens=window_tokens,
        windows_per_step=windows_per_step,
        jitter=seed,
        abort_rate=0.1,
    )
    seen, bound = checker(world), 0
    while True:
        num_groups = chance.randint(1, 5)
        bound = max(bound, num_groups * group_size + group_size - 1)
        batch = world.collector.collect(num_groups)
        accounting = world.collector.accounting()
        assert accounting.is_balanced and accounting.in_flight == 0
        assert accounting.unfinished + accounting.not_started <= bound
        assert accounting.not_started < group_size
        assert batch.statistics.windows.num_waiting == accounting.unfinished + accounting.not_started
        if batch.should_stop:
            break
        assert batch.statistics.windows.num_windows <= num_groups * group_size
        assert len(windows(batch)) <= (windows_per_step or 999)
        if not windows_per_step:
            seen.add(batch)
    assert accounting.drawn == accounting.trained + accounting.not_chosen == group_size * len(pass_rates)
    if not windows_per_step:
        assert accounting.not_chosen == 0 and len(seen.finished) == accounting.drawn


def test_groups_left_out_are_counted_and_their_unfinished_responses_continue() -> None:
    whole, part = make_world(MIXED * 20), make_world(MIXED * 20, windows_per_step=12)
    num_left_out = num_groups = 0
    for _ in range(6):
        everything, batch = whole.collector.collect(5), part.collector.collect(5)
        assert len(windows(everything)) == 20 and 8 < len(windows(batch)) <= 12
        by_id = {group.group_id: group for group in everything.groups}
        assert all(group == by_id[group.group_id] for group in batch.groups), "whole windows of a group, unchanged"
        left_out = len(everything.groups) - len(batch.groups)
        assert batch.statistics.filter_decisions[NOT_CHOSEN] == left_out > 0
        assert batch.statistics.filter_decisions["kept"] == len(batch.groups)
        assert batch.statistics.windows == everything.statistics.windows
        num_left_out += left_out
        num_groups += len(everything.groups)
    before, after = whole.collector.accounting(), part.collector.accounting()
    assert after.is_balanced and after.not_chosen > 0 and after.trained + after.not_chosen == before.trained
    assert (after.unfinished, after.not_started) == (before.unfinished, before.not_started)


@pytest.mark.parametrize("windows_per_step", [0, 12])
def test_windows_with_a_lost_score_are_left_out(monkeypatch: pytest.MonkeyPatch, caplog, windows_per_step: int) -> None:
    """Every seventh verdict is lost, as if the kernel had killed its process; the rest of its group stays."""
    world, whole = (make_world(MIXED * 20, windows_per_step=windows_per_step) for _ in range(2))
    verifier, numbers = world.collector._scorer.scorer, iter(range(10**6))
    score, reason = verifier._score, {"error": "killed 3 times; out of memory", IS_LOST: True}

    def lose(*item: object) -> Score:
        found = score(*item)
        return replace(found, outcome="error", detail=reason) if next(numbers) % 7 == 6 else found

    monkeypatch.setattr(verifier, "_score", lose)
    num_lost = 0
    for _ in range(6):
        batch, expected = world.collector.collect(5), whole.collector.collect(5)
        assert not any(sample.score.is_lost for sample in windows(batch))
        num_lost += len(windows(expected)) - len(windows(batch))
    assert "nothing is learned from these responses: killed 3 times; out of memory" in caplog.text
    assert (num_lost > 0 or windows_per_step) and world.collector.accounting().is_balanced


def test_groups_with_contrast_over_all_steps_are_chosen_first() -> None:
    """A group that was half right and half wrong in earlier windows is chosen for its last ones."""
    world = make_world(MIXED * 20, windows_per_step=8)
    full = make_world(MIXED * 20)
    scores: dict[str, list[float]] = {}
    for _ in range(8):
        everything = full.collector.collect(5)
        for sample in windows(everything):
            if sample.window.is_finished:
                scores.setdefault(sample.sample_id.split("/")[0], []).append(sample.score.accuracy)
        contrast = [g for g in everything.groups if 0 < sum(scores.get(g.group_id, [])) < len(scores[g.group_id])]
        chosen = {group.group_id for group in world.collector.collect(5).groups}
        room = 8
        for group in contrast:
            fits = len(group.samples) <= room
            assert (group.group_id in chosen) == fits
            room -= len(group.samples) * fits
    assert any(0 < sum(values) < len(values) for values in scores.values())


def test_pausing_between_polls_changes_no_batch_and_new_weights_finish_the_window() -> None:
    plain, held = make_world(MIXED * 20), make_world(MIXED * 20, jitter=5)
    num_holds = 0

    def update() -> None:
        nonlocal num_holds
        num_holds += 1
        held.collector.hold()
        assert held.engine.num_unfinished == 0 and held.collector.accounting().is_balanced
        held.engine.policy_version = int(num_holds >= 3)

    expected, actual = plain.collector.collect(8), held.collector.collect(8, between_polls=update)
    tokens = [sample.completion.token_ids.tolist() for sample in windows(expected)]
    assert tokens == [sample.completion.token_ids.tolist() for sample in windows(actual)]
    assert held.engine.num_generated == plain.engine.num_generated and num_holds > 3
    versions = {run.version for sample in windows(actual) for run in sample.completion.versions}
    assert versions == {0, 1} and {group.policy_version for group in actual.groups} <= {0, 1}
    assert actual.training_version == 0


def test_a_batch_for_a_version_out_of_reach_is_refused() -> None:
    world = make_world([0.5] * 40)
    for version in (-1, 1):
        with pytest.raises(ValueError, match=f"policy version {version} cannot be sampled by version 0"):
            world.collector.collect(2, training_version=version)
    assert world.collector.collect(2, training_version=0).training_version == 0


def test_it_has_the_interface_of_a_collector() -> None:
    world = make_world([0.5] * 40)
    rollout = AsyncCollector(world.collector, max_ahead=0, timeout_s=5.0)
    for version in range(3):
        rollout.before_update()
        world.engine.policy_version = version
        rollout.after_update(version)
        batch = rollout.next_batch(4)
        assert len(windows(batch)) == 16 and batch.training_version == version
        with rollout.paused():
            assert world.engine.num_unfinished == 0
    assert rollout.generation_step == 3
    later = make_world([0.5] * 40)
    AsyncCollector(later.collector, max_ahead=0, timeout_s=5.0).load_state_dict(
        json.loads(json.dumps(rollout.state_dict(), default=np.ndarray.tolist))
    )
    rollout.close()
    assert later.collector.accounting() == world.collector.accounting()


def test_returned_batches_are_handed_out_again_in_order() -> None:
    world = make_world(MIXED * 20)
    batches = [world.collector.collect(3) for _ in range(3)]
    state = world.collector.state_dict(untrained=batches)
    after = world.collector.accounting()
    for num_left in (2, 1, 0):
        world.collector.give_back(batches[num_left])
        assert world.collector.state_dict(untrained=batches[:num_left]) == state
    accounting = world.collector.accounting()
    assert accounting.is_balanced and accounting.given_back == after.trained and accounting.trained == 0
    assert world.collector.state_dict() == state and world.collector.train_step == 0
    num_generated = world.engine.num_generated
    assert [world.collector.collect(3) for _ in range(3)] == batches
    assert world.engine.num_generated == num_generated and world.collector.accounting() == after


def test_the_verifier_sees_each_finished_response_once_and_failing_costs_nothing() -> None:
    world, expected = make_world(MIXED * 20), make_world(MIXED * 20)
    seen: list[str] = []
    score_many = world.verifier.score_many

    def count(items: list) -> dict:
        items = list(items)
        if len(seen) > 10 and not failed:
            failed.append(True)
            raise OSError("the verifiers are gone")
        seen.extend(key for key, *_ in items)
        return score_many(items)

    failed: list[bool] = []
    world.verifier.score_many = count
    with pytest.raises(OSError):
        while True:
            world.collector.collect(6)
    num_batches = world.collector.train_step
    batch = world.collector.collect(6)
    for _ in range(num_batches + 1):
        last = expected.collector.collect(6)
    assert contents(batch) == contents(last)
    assert len(seen) == len(set(seen)) == expected.collector.accounting().trained


def test_the_collection_that_was_interrupted_is_completed_first() -> None:
    world = make_world([0.5] * 80)

    def stop() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        world.collector.collect(5, between_polls=stop)
    assert world.collector.accounting().in_flight == 20
    assert len(windows(world.collector.collect(2))) == 20 and len(windows(world.collector.collect(2))) == 8


def test_statistics_add_up() -> None:
    world = make_world(MIXED * 30)
    num_tokens = num_windows = num_finished = 0
    held = 0
    for step in range(6):
        batch = world.collector.collect(5)
        statistics, summary = batch.statistics, batch.statistics.windows
        finished = [sample for sample in windows(batch) if sample.window.is_finished]
        assert summary.num_windows == 20 and summary.num_finished == len(finished) == statistics.num_responses
        assert statistics.num_continued == held
        held = 20 - len(finished)
        assert statistics.num_started >= (5 if step == 0 else 1) and statistics.num_begun_earlier <= len(batch.groups)
        assert statistics.num_begun_earlier + statistics.num_started == len(batch.groups)
        assert sum(statistics.outcomes.values()) == len(finished) and "unfinished" not in statistics.outcomes
        accuracies = [sample.score.accuracy for sample in finished]
        assert statistics.mean_accuracy == pytest.approx(sum(accuracies) / len(accuracies))
        assert statistics.num_truncated == sum(sample.completion.finish_reason == "length" for sample in finished)
        rounds = [-(-len(sample.completion.token_ids) // 8) for sample in finished]
        assert summary.windows_per_finished == pytest.approx(sum(rounds) / len(rounds))
        waiting = {group["group_id"] for group in world.collector.state_dict()["pool"]}
        assert statistics.num_unfinished == len(waiting)
        num_tokens += statistics.num_tokens
        num_windows += summary.num_windows
        num_finished += summary.num_finished
        assert summary.finished_share == len(finished) / 20
    assert num_tokens == world.engine.num_generated and num_finished < num_windows == 120


def test_progress_is_reported_after_every_poll() -> None:
    seen: list = []
    world = make_world(MIXED * 20, on_progress=seen.append)
    batch = world.collector.collect(6)
    assert (seen[-1].num_accepted, seen[-1].num_groups, seen[-1].num_in_flight) == (6, 6, 0)
    assert seen[-1].num_responses == batch.statistics.num_responses
    assert seen[-1].num_tokens == batch.statistics.num_tokens
    assert [p.num_accepted for p in seen] == sorted(p.num_accepted for p in seen) and len(seen) > 2


def test_a_resume_may_change_the_window_and_the_group_size() -> None:
    world = make_world([0.5] * 40)
    world.collector.collect(4)
    for changes in ({"window_tokens": 3}, {"window_tokens": 12}, {"group_size": 2}, {"group_size": 6}):
        later = world.restart(world.checkpoint(), settings=replace(world.settings, **changes))
        for _ in range(8):
            later.collector.collect(4)
            assert later.collector.accounting().is_balanced
    shorter = replace(world.settings, sampling=replace(world.settings.sampling, max_new_tokens=8))
    with pytest.raises(ValueError, match="unfinished response of 8 tokens, this run ends responses at 8"):
        world.restart(world.checkpoint(), settings=shorter)


def test_a_foreign_state_is_refused(make_world: Callable) -> None:
    """Both ways between the two collectors."""
    whole, split = make_world([0.5] * 20), window_world().make_window_world([0.5] * 20)
    with pytest.raises(ValueError, match="version 3, windows are read from windows-4"):
        split.collector.load_state_dict(whole.collector.state_dict())
    with pytest.raises(ValueError, match="version windows-4, this program reads 3"):
        whole.collector.load_state_dict(split.collector.state_dict())
    with pytest.raises(ValueError, match="another data set"):
        window_world().make_window_world([0.5] * 21).collector.load_state_dict(split.collector.state_dict())
