"""The collector under any pattern of accepting, rejecting, aborting, crashing and running dry."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_dapo.rollout.batch import CollectionExhausted, RolloutBatch
from megatron_dapo.rollout.collector import sample_seed
from megatron_dapo.types import IS_LOST
from tests.examples import examples, first

MIXED = [0.0, 0.05, 0.3, 0.5, 0.7, 0.95, 1.0]
property_test = settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def ids(batch: RolloutBatch) -> list[tuple[str, str]]:
    return [(group.group_id, group.prompt.prompt_id) for group in batch.groups]


def assert_whole_and_fresh(batch: RolloutBatch, max_staleness: int) -> None:
    """Check that each token has its log-prob and version, and none is too old for the policy it trains."""
    for group in batch.groups:
        for sample in group.samples:
            completion = sample.completion
            assert completion.finish_reason == "stop"
            assert len(completion.logprobs) == len(completion.token_ids) > 0
            bounds = [0, *(run.end for run in completion.versions)]
            assert [run.start for run in completion.versions] == bounds[:-1] and bounds[-1] == len(completion.token_ids)
            ages = [batch.training_version - run.version for run in completion.versions]
            assert ages == sorted(ages, reverse=True) and 0 <= ages[-1] <= ages[0] <= max_staleness
        versions = [run.version for sample in group.samples for run in sample.completion.versions]
        assert group.policy_version == min(versions)


def tokens(batch: RolloutBatch) -> list:
    return [(name, [s.completion.token_ids.tolist() for s in g.samples]) for name, g in zip(ids(batch), batch.groups)]


def contents(batch: RolloutBatch) -> list:
    return [(group.group_id, group.prompt.prompt_id, group.samples) for group in batch.groups]


def test_a_batch_has_exactly_the_requested_groups_and_all_disagree(make_world: Callable) -> None:
    world = make_world(MIXED * 20)
    for _ in range(3):
        batch = world.collector.collect(8)
        assert len(batch.groups) == 8 and not batch.exhausted and not batch.should_stop
        for group in batch.groups:
            accuracies = {sample.score.accuracy for sample in group.samples}
            assert accuracies == {0.0, 1.0} and len(group.samples) == 4
            assert [sample.sample_id for sample in group.samples] == [f"{group.group_id}/{i}" for i in range(4)]
        accounting = world.collector.accounting()
        assert accounting.is_balanced and accounting.queued_again == accounting.in_flight == accounting.buffered == 0
    assert world.collector.train_step == 3 and world.collector.generation_step > 3


@pytest.mark.parametrize("jitter", range(1, 6))
def test_without_oversampling_the_batch_does_not_depend_on_the_engine_s_timing(
    make_world: Callable, jitter: int
) -> None:
    expected, actual = make_world(MIXED * 20), make_world(MIXED * 20, jitter=jitter)
    for _ in range(4):
        assert contents(expected.collector.collect(6)) == contents(actual.collector.collect(6))
    assert expected.stream.state_dict() == actual.stream.state_dict()
    # It is the shortest run of prompts that holds six groups: nothing is generated that cannot be needed.
    assert expected.collector.accounting().drawn == actual.collector.accounting().drawn


def test_a_rejected_group_costs_one_replacement(make_world: Callable) -> None:
    world = make_world(MIXED * 20)
    for _ in range(5):
        statistics = world.collector.collect(5).statistics
        assert (
            statistics.num_started
            == 5 + statistics.filter_decisions["all_right"] + statistics.filter_decisions["all_wrong"]
        )
    assert world.engine.max_groups_in_flight == 5


@property_test
@given(
    pass_rates=st.lists(st.sampled_from(MIXED), min_size=1, max_size=25),
    num_groups=st.integers(1, 6),
    group_size=st.integers(1, 4),
    oversample=st.sampled_from([1.0, 1.5, 3.0]),
    max_num_gen_batches=st.sampled_from([0, 1, 10]),
    max_staleness=st.integers(0, 2),
    abort_rate=st.sampled_from([0.0, 0.05]),
    partial_rollout=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_every_prompt_of_an_epoch_is_trained_or_filtered_exactly_once(
    make_world: Callable,
    pass_rates: list[float],
    num_groups: int,
    group_size: int,
    oversample: float,
    max_num_gen_batches: int,
    max_staleness: int,
    abort_rate: float,
    partial_rollout: bool,
    seed: int,
) -> None:
    """Across aborts, staleness, signals in the middle of a collection, crashes and resumes from older checkpoints."""
    chance = random.Random(seed)
    world = make_world(
        pass_rates,
        group_size=group_size,
        oversample=oversample,
        max_num_gen_batches=max_num_gen_batches,
        max_staleness=max_staleness,
        abort_rate=abort_rate,
        partial_rollout=partial_rollout,
        jitter=seed,
        filter_groups=group_size > 1,
    )
    trained: list[str] = []
    saved = (world.checkpoint(), 0)
    for _ in range(2000):
        world.engine.polls_until_crash = chance.choice([None, None, None, 0, 2, 5])
        try:
            batch = world.collector.collect(num_groups)
        except ConnectionError:
            assert world.collector.accounting().is_balanced
            event = chance.choice(["continue", "signal", "crash"])
            if event == "signal":  # state saved in the middle of the collection
                saved = (world.checkpoint(), len(trained))
            if event != "continue":
                del trained[saved[1] :]
                world = world.restart(saved[0], jitter=chance.randrange(2**32))
            assert world.collector.accounting().is_balanced
            continue
        if chance.random() < 0.1:
            world.collector.give_back(batch)
            saved = (world.checkpoint(), len(trained))
            world = world.restart(saved[0])
            assert world.collector.accounting().is_balanced
            continue
        trained += [group.prompt.prompt_id for group in batch.groups]
        assert batch.training_version == world.engine.policy_version
        assert_whole_and_fresh(batch, max_staleness)
        world.engine.policy_version += chance.choice([1, 1, 0])
        accounting = world.collector.accounting()
        assert accounting.is_balanced and accounting.in_flight == 0 and accounting.trained == len(trained)
        if chance.random() < 0.5:
            saved = (world.checkpoint(), len(trained))
        if batch.exhausted == "prompts" and not batch.groups:
            break
    else:
        pytest.fail("the run does not end")
    accounting = world.collector.accounting()
    assert accounting.buffered == accounting.unfinished == 0
    assert max(Counter(trained).values(), default=0) <= 1
    assert len(trained) + accounting.filtered == len(pass_rates)
    assert accounting.drawn == len(pass_rates) + accounting.queued_again


@pytest.mark.parametrize("trial", first(3, range(8)))
@pytest.mark.parametrize(
    ("oversample", "max_staleness", "partial_rollout"), [(1.0, 0, False), (2.0, 1, False), (2.0, 2, True)]
)
def test_resuming_gives_the_batches_of_the_uninterrupted_run(
    make_world: Callable, trial: int, oversample: float, max_staleness: int, partial_rollout: bool
) -> None:
    """Kill anywhere and resume from the last step's checkpoint, also across the end of an epoch."""
    chance = random.Random(trial)

    # An engine that starts afresh with each step: its timing is then a function of the step, as the real engine's is.
    def reseed(world: object, step: int) -> None:
        world.engine._random.seed(step)

    arguments = {
        "oversample": oversample,
        "max_staleness": max_staleness,
        "partial_rollout": partial_rollout,
        "max_epochs": None,
    }
    reference = make_world(MIXED * 4, **arguments)
    expected = []
    for step in range(8):
        reseed(reference, step)
        expected.append(contents(reference.collector.collect(5)))
        reference.engine.policy_version += 1
    world, step, actual = make_world(MIXED * 4, **arguments), 0, []
    checkpoint = world.checkpoint()
    while step < 8:
        reseed(world, step)
        world.engine.polls_until_crash = chance.choice([None, 0, 1, 3, 6])
        try:
            batch = world.collector.collect(5)
        except ConnectionError:
            world = world.restart(checkpoint)
            continue
        actual.append(contents(batch))
        world.engine.policy_version += 1
        step += 1
        checkpoint = world.checkpoint()
        if chance.random() < 0.3:
            world = world.restart(checkpoint)
    assert actual == expected
    assert reference.checkpoint() == checkpoint


@pytest.mark.parametrize("partial_rollout", [False, True])
@pytest.mark.parametrize(("oversample", "max_staleness"), [(1.5, 1), (2.0, 1), (3.0, 2)])
def test_a_batch_is_the_next_groups_in_order_of_their_start_whichever_end_first(
    make_world: Callable, oversample: float, max_staleness: int, partial_rollout: bool
) -> None:
    """The batches are those without oversampling, however fast the engine finished which: length selects nothing."""
    changes = {"oversample": oversample, "max_staleness": max_staleness, "partial_rollout": partial_rollout}
    plain = make_world(MIXED * 40, max_epochs=None)
    expected = [tokens(plain.collector.collect(5)) for _ in range(8)]
    num_carried = 0
    for jitter in range(4):
        world = make_world(MIXED * 40, max_epochs=None, jitter=jitter, **changes)
        for batch_of_plain in expected:
            batch = world.collector.collect(5)
            assert tokens(batch) == batch_of_plain
            assert_whole_and_fresh(batch, max_staleness)
            num_carried += batch.statistics.num_begun_earlier
            state = world.collector.state_dict()
            later = [*state["open_groups"], *state["buffer"]["groups"]]
            assert all(group["group_id"] > batch.groups[-1].group_id for group in later)
            world.engine.policy_version += 1
    assert num_carried > 10


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_surplus_is_carried_over_within_the_bound_and_queued_again_beyond_it(
    make_world: Callable, max_staleness: int
) -> None:
    world = make_world([0.5] * 400, group_size=2, oversample=3.0, max_staleness=max_staleness, jitter=3)
    left_over = num_carried = num_stale = 0
    for _ in range(12):
        statistics = world.collector.collect(4).statistics
        assert statistics.num_begun_earlier == min(4, left_over)
        num_carried += statistics.num_begun_earlier
        num_stale += statistics.num_stale
        left_over = statistics.num_buffered
        assert world.collector.accounting().is_balanced and len(world.buffer) == left_over
        world.engine.policy_version += 1
    assert num_carried > 0 if max_staleness else num_stale > num_carried == 0


def test_given_up_prompts_go_first_in_the_next_collection_in_order_of_their_start(make_world: Callable) -> None:
    world = make_world([0.5] * 400, group_size=2, oversample=4.0)
    started: list[str] = []
    original = world.stream.next
    world.stream.next = lambda: (started.append(original()), started[-1])[1]
    num_given_up = 0
    for _ in range(12):
        waiting = world.stream.state_dict()["requeued"]
        before, started[:] = list(started), []
        statistics = world.collector.collect(4).statistics
        assert started[: len(waiting)] == waiting[: len(started)]
        assert waiting == [name for name in before if name in waiting]
        waiting = world.stream.state_dict()["requeued"]
        assert len(waiting) == statistics.num_aborted + statistics.num_stale
        num_given_up += len(waiting)
        world.engine.policy_version += 1
    assert num_given_up > 0


def test_an_aborted_response_restarts_its_group(make_world: Callable) -> None:
    world = make_world([0.5] * 40, group_size=4, abort_rate=0.1)
    batch = world.collector.collect(12)
    assert len(batch.groups) == 12 and batch.statistics.num_aborted > 0
    assert all(sample.completion.finish_reason == "stop" for group in batch.groups for sample in group.samples)
    assert world.collector.accounting().queued_again == batch.statistics.num_aborted


def test_exhausted_prompts_train_what_there_is_and_then_stop(make_world: Callable) -> None:
    world = make_world([0.5] * 10, group_size=16)
    assert len(world.collector.collect(8).groups) == 8
    partial = world.collector.collect(8)
    assert len(partial.groups) == 2 and partial.exhausted == "prompts" and not partial.should_stop
    end = world.collector.collect(8)
    assert end.groups == () and end.exhausted == "prompts" and end.should_stop
    assert world.collector.train_step == 2


def test_stop_keeps_the_groups_for_a_later_run(make_world: Callable) -> None:
    world = make_world([0.5] * 10, group_size=16, on_exhausted="stop")
    world.collector.collect(8)
    batch = world.collector.collect(8)
    assert batch.groups == () and batch.should_stop and batch.statistics.num_buffered == 2
    later = world.restart(
        world.checkpoint(), settings=world.settings.model_copy(update={"on_exhausted": "train_partial"})
    )
    assert len(later.collector.collect(8).groups) == 2


def test_error_names_the_counts_and_loses_nothing(make_world: Callable) -> None:
    world = make_world([0.0] * 30 + [1.0] * 30, on_exhausted="error", max_num_gen_batches=3)
    with pytest.raises(
        CollectionExhausted,
        match=r"only 0 of 5 groups: rounds are exhausted after 15 groups \(kept 0, all_right \d+, all_wrong \d+\)",
    ):
        world.collector.collect(5)
    assert world.collector.accounting().is_balanced and world.collector.accounting().filtered == 15
    assert world.collector.train_step == 0 and world.collector.generation_step == 3


@pytest.mark.parametrize("on_exhausted", ["train_partial", "stop", "error"])
def test_without_a_limit_of_rounds_a_collection_that_keeps_no_group_ends(make_world: Callable, on_exhausted) -> None:
    world = make_world([0.0, 1.0], max_epochs=None, max_num_gen_batches=0, on_exhausted=on_exhausted)
    message = "max_num_gen_batches = 0 sets no limit, but the last 100 rounds kept no group"
    if on_exhausted == "error":
        with pytest.raises(CollectionExhausted, match=message):
            world.collector.collect(2)
    else:
        batch = world.collector.collect(2)
        assert (batch.groups, batch.exhausted, batch.should_stop) == ((), "rounds", True)
    assert world.collector.generation_step == 100 and world.collector.accounting().is_balanced


def test_rounds_count_the_groups_started_and_schedules_have_their_own_counter(make_world: Callable) -> None:
    world = make_world([0.0, 0.0, 0.5] * 100, group_size=16, max_num_gen_batches=2)
    batch = world.collector.collect(10)
    assert batch.exhausted == "rounds" and batch.statistics.num_started == 20 and 0 < len(batch.groups) < 10
    assert not batch.should_stop
    assert (world.collector.train_step, world.collector.generation_step) == (1, 2)
    assert {group.generation_step for group in batch.groups} <= {1, 2}
    later = world.collector.collect(10)
    assert (world.collector.train_step, world.collector.generation_step) == (2, 4)
    assert {group.generation_step for group in later.groups} <= {3, 4}


def test_partial_batches_are_warned_about_once(make_world: Callable, caplog: pytest.LogCaptureFixture) -> None:
    world = make_world([0.0, 0.0, 0.5] * 100, group_size=16, max_num_gen_batches=1)
    for _ in range(3):
        assert world.collector.collect(10).exhausted == "rounds"
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "of 10 groups are trained: rounds are exhausted after 10 groups" in warning
    assert "raise rollout.max_num_gen_batches (now 1)" in warning and "on_exhausted" not in warning


def test_a_length_penalty_changes_rewards_but_never_the_filter(make_world: Callable) -> None:
    plain = make_world(MIXED * 10)
    shaped = make_world(MIXED * 10, addends={"overlong": lambda completion, text, score: -completion.num_tokens / 10})
    expected, actual = plain.collector.collect(6), shaped.collector.collect(6)
    assert ids(expected) == ids(actual)
    for group in actual.groups:
        for sample in group.samples:
            assert sample.reward_parts == {
                "verifier": sample.score.reward,
                "overlong": -len(sample.completion.token_ids) / 10,
            }


def test_seeds_are_unique_and_depend_on_run_group_and_index(make_world: Callable) -> None:
    world = make_world(MIXED * 20)
    world.collector.collect(10)
    assert len(set(world.engine.seeds.values())) == len(world.engine.seeds)
    assert all(0 <= seed < 2**63 for seed in world.engine.seeds.values())
    assert sample_seed(1, "000000000002", 3) == sample_seed(1, "000000000002", 3)
    assert len({sample_seed(r, g, i) for r in (1, 2) for g in ("1", "11") for i in (1, 11)}) == 8


def test_statistics_add_up(make_world: Callable) -> None:
    world = make_world(MIXED * 20, oversample=2.0, max_staleness=1)
    batch = world.collector.collect(6)
    statistics = batch.statistics
    scored = sum(statistics.filter_decisions.values())
    assert statistics.num_started == scored + statistics.num_aborted
    assert statistics.filter_decisions["kept"] == len(batch.groups) + statistics.num_buffered
    assert statistics.num_responses == 4 * scored == sum(statistics.outcomes.values())
    assert statistics.kept_lengths.num_responses == 4 * statistics.filter_decisions["kept"]
    lengths = [len(s.completion.token_ids) for g in [*batch.groups, *world.buffer.take(99, 0)] for s in g.samples]
    assert statistics.num_kept_tokens == sum(lengths) and statistics.kept_lengths.max == max(lengths)
    assert statistics.mean_accuracy == statistics.outcomes["correct"] / statistics.num_responses
    assert statistics.mean_reward == pytest.approx(2 * statistics.mean_accuracy - 1)


def test_duplicates_within_a_group_are_counted(make_world: Callable) -> None:
    world = make_world([0.5] * 20, filter_groups=False)
    finish = world.engine._finish
    world.engine._finish = lambda running: replace(finish(running), token_ids=(5, 1), logprobs=(-1.0, -1.0))
    statistics = world.collector.collect(3).statistics
    assert statistics.num_duplicates == 9


def test_progress_is_reported_after_every_poll(make_world: Callable) -> None:
    seen = []
    world = make_world(MIXED * 20, on_progress=seen.append)
    batch = world.collector.collect(6)
    assert seen[-1].num_accepted == 6 == seen[-1].num_groups
    assert (
        seen[-1].num_responses == batch.statistics.num_responses and seen[-1].num_tokens == batch.statistics.num_tokens
    )
    assert seen[-1].num_filtered == batch.statistics.num_started - 6
    assert [p.num_responses for p in seen] == sorted(p.num_responses for p in seen)


def test_a_group_spanning_versions_counts_as_its_oldest(make_world: Callable) -> None:
    world = make_world([0.5] * 20, group_size=8, max_staleness=1, filter_groups=False)
    polls = iter(range(1000))
    poll = world.engine.poll

    def updating_poll() -> list:
        world.engine.policy_version = min(1, next(polls))
        return poll()

    world.engine.poll = updating_poll
    batch = world.collector.collect(4)
    for group in batch.groups:
        assert group.policy_version == min(v.version for s in group.samples for v in s.completion.versions)
    assert 0 in {group.policy_version for group in batch.groups}


def test_a_foreign_or_wrong_state_is_refused(make_world: Callable) -> None:
    world = make_world([0.5] * 20)
    with pytest.raises(ValueError, match="version None"):
        world.collector.load_state_dict({})
    state = world.collector.state_dict()
    with pytest.raises(ValueError, match="another data set"):
        make_world([0.5] * 21).collector.load_state_dict(state)


def test_soft_dynamic_sampling_trains_what_passes_of_the_groups_it_starts(make_world: Callable) -> None:
    world = make_world(MIXED * 20, max_epochs=None, dynamic_sampling="soft")
    sizes = set()
    for _ in range(12):
        batch = world.collector.collect(8)
        statistics = batch.statistics
        assert statistics.num_started == 8 == sum(statistics.filter_decisions.values())
        assert len(batch.groups) == statistics.filter_decisions["kept"] > 0 and not batch.exhausted
        accounting = world.collector.accounting()
        assert accounting.is_balanced and accounting.buffered == accounting.queued_again == 0
        sizes.add(len(batch.groups))
        world.engine.policy_version += 1
    assert len(sizes) > 1
    batch = world.collector.collect(8)
    world.collector.give_back(batch)
    again = world.restart(world.checkpoint()).collector.collect(8)
    assert contents(again) == contents(batch) and again.statistics.num_started == 0


def test_soft_dynamic_sampling_goes_on_until_one_group_passes(make_world: Callable) -> None:
    world = make_world([0.0] * 30 + [0.5], max_epochs=None, group_size=16, dynamic_sampling="soft")
    batch = world.collector.collect(4)
    assert len(batch.groups) == 1 and batch.statistics.num_started % 4 == 0


@pytest.mark.parametrize("filter_groups", [True, False])
def test_a_group_with_a_lost_score_is_replaced_with_the_reason_and_teaches_nothing(
    make_world: Callable, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, filter_groups: bool
) -> None:
    """Every seventh verdict is lost, as if the kernel had killed its process: neither right nor wrong."""
    world, numbers = make_world(MIXED * 20, filter_groups=filter_groups), iter(range(10**6))
    reason = {"error": "killed 3 times; out of memory", IS_LOST: True}
    verifier = world.collector._scorer.scorer
    score = verifier._score
    lose = lambda *item: replace(score(*item), outcome="error", detail=reason) if next(numbers) % 7 == 6 else score(*item)  # noqa: E731
    monkeypatch.setattr(verifier, "_score", lose)
    batch = world.collector.collect(6)
    assert len(batch.groups) == 6 and not any(sample.score.is_lost for group in batch.groups for sample in group.samples)
    lost = batch.statistics.filter_decisions["unscored"]
    assert lost > 0 and caplog.text.count("nothing is learned from these responses: killed 3 times; out of memory") == lost
    assert world.collector.accounting().is_balanced
