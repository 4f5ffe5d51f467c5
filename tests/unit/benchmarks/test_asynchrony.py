"""The simulated engines and schedules against closed forms."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

MODULES = ("simulation", "published", "theirs", "ours", "schedules", "agents", "recorded")


@pytest.fixture(scope="module")
def twin(benchmarks_on_the_path: None) -> Iterator[SimpleNamespace]:
    """Return all names of the benchmark's modules in one namespace."""
    modules = [importlib.import_module(f"twin.{name}") for name in MODULES]
    names = {name: value for module in modules for name, value in vars(module).items() if name not in MODULES}
    yield SimpleNamespace(**names, **dict(zip(MODULES, modules, strict=True)))


def cost(twin: SimpleNamespace, **changes: float) -> object:
    given = {"weights": 0.01, "context": 0.0, "products": 0.0, "fixed": 0.0, "request": 0.0}
    return twin.Cost(**(given | changes))


def responses(twin: SimpleNamespace, *lengths: int, prompt: int = 0) -> list[object]:
    return [twin.Response(index, index, length, prompt=prompt) for index, length in enumerate(lengths)]


def finish(fleet: object) -> list[tuple[object, float]]:
    ends = []
    while fleet.num_unfinished:
        response = fleet.end_next()
        ends.append((response.key, fleet.now))
    return ends


def test_equal_lengths_take_one_step_a_token(twin: SimpleNamespace) -> None:
    fleet = twin.Fleet(1, cost(twin, fixed=0.002, request=0.001))
    fleet.submit(responses(twin, 100, 100, 100))
    assert [end for _, end in finish(fleet)] == pytest.approx([100 * (0.01 + 0.002 + 3 * 0.001)] * 3)
    assert fleet.busy_share == pytest.approx(1.0)
    assert fleet.mean_running == pytest.approx(3.0)


def test_contexts_grow_while_they_are_read(twin: SimpleNamespace) -> None:
    fleet = twin.Fleet(1, cost(twin, context=1e-6))
    fleet.submit(responses(twin, 1000, 1000, prompt=50))
    expected = sum(0.01 + 1e-6 * (2 * 50 + 2 * (step + 0.5)) for step in range(1000))
    assert finish(fleet)[-1][1] == pytest.approx(expected)


def test_a_step_is_bound_by_products_until_contexts_are_long(twin: SimpleNamespace) -> None:
    one = cost(twin, context=1e-6, products=0.006)  # 2 responses: 0.012 s against 0.01 + 2e-6 a step
    until = 1000  # steps after which reading takes longer
    assert one.seconds(2, 0.0, 500) == pytest.approx(500 * 0.012)
    assert one.seconds(2, 0.0, until + 300) == pytest.approx((until + 300) * 0.012 + 1e-6 * 300**2)
    assert one.step(2, 2000) == pytest.approx(0.012)
    assert one.step(2, 5000) == pytest.approx(0.015)


@pytest.mark.parametrize("steps", [0.5, 200.0, 999.0, 1000.0, 1001.0, 5000.0])
@pytest.mark.parametrize("context", [0.0, 1e-6])
def test_steps_are_the_inverse_of_seconds(twin: SimpleNamespace, steps: float, context: float) -> None:
    one = cost(twin, context=context, products=0.006, fixed=0.001)
    assert one.steps(2, 0.0, one.seconds(2, 0.0, steps)) == pytest.approx(steps)


def test_those_that_stay_go_on_faster(twin: SimpleNamespace) -> None:
    fleet = twin.Fleet(1, cost(twin, request=0.005))
    fleet.submit(responses(twin, 10, 30))
    assert finish(fleet) == [(0, pytest.approx(10 * 0.02)), (1, pytest.approx(10 * 0.02 + 20 * 0.015))]


def test_responses_wait_for_a_slot_in_turn(twin: SimpleNamespace) -> None:
    fleet = twin.Fleet(1, cost(twin), slots=2)
    fleet.submit(responses(twin, 10, 20, 5))
    assert finish(fleet) == [(0, pytest.approx(0.1)), (2, pytest.approx(0.15)), (1, pytest.approx(0.2))]


def test_the_clock_may_stop_between_two_ends(twin: SimpleNamespace) -> None:
    whole, parts = (twin.Fleet(2, cost(twin, context=1e-6, request=1e-3)) for _ in range(2))
    for fleet in (whole, parts):
        fleet.submit(responses(twin, 40, 77, 130, 11, 95))
    ends, now = [], 0.0
    while parts.num_unfinished:
        now += 0.0173
        ends += [(one.key, None) for one in parts.advance(now)]
    assert [key for key, _ in ends] == [key for key, _ in finish(whole)]
    assert parts.num_tokens == whole.num_tokens == 353


def test_a_pause_computes_contexts_again(twin: SimpleNamespace) -> None:
    fleet = twin.Fleet(1, cost(twin, prefill=0.001))
    fleet.submit(responses(twin, 100, prompt=20))
    assert fleet.advance(0.02 + 0.5) == []  # prompt, 50 tokens
    fleet.pause(2.0)
    assert finish(fleet) == [(0, pytest.approx(0.52 + 2.0 + 0.07 + 0.5))]
    kept = twin.Fleet(1, cost(twin, prefill=0.001))
    kept.submit(responses(twin, 100, prompt=20))
    kept.advance(0.52)
    kept.pause(2.0, keeps_cache=True)
    assert finish(kept) == [(0, pytest.approx(0.52 + 2.0 + 0.5))]


def test_stopped_responses_keep_their_tokens(twin: SimpleNamespace) -> None:
    fleet = twin.Fleet(2, cost(twin), slots=1)
    fleet.submit(responses(twin, 100, 30, 50))
    assert [one.key for one in fleet.advance(0.4)] == [1]
    assert sorted((one.key, tokens) for one, tokens in fleet.stop()) == [(0, 40), (2, 0)]
    assert fleet.num_unfinished == 0
    assert fleet.num_tokens == 70


def test_a_group_stays_on_one_engine_within_its_share(twin: SimpleNamespace) -> None:
    fleet = twin.Fleet(2, cost(twin), keeps_groups=True)
    fleet.submit([twin.Response((group, index), group, 10) for group in range(8) for index in range(4)])
    assert [len(engine.running) for engine in fleet.engines] == [16, 16]


def test_lengths_have_the_mean_of_their_distribution(twin: SimpleNamespace) -> None:
    lengths = twin.Lengths(1000, 0.8, 4000, prompt_sigma=0.4)
    drawn = [length for group in range(2000) for length in lengths.of_group(group, 8)]
    assert sum(drawn) / len(drawn) == pytest.approx(lengths.mean, rel=0.03)
    assert max(drawn) == 4000


def constant(twin: SimpleNamespace, **changes: object) -> dict[str, object]:
    """Settings of 4 engines with 2 groups of 4 responses each, of 1000 tokens: 10 s to generate, 6 s to train."""
    given = {"engines": 4, "cost": cost(twin), "lengths": twin.Lengths(1000, 0.0, 2000, prompt=0), "prompts": 8}
    return {**given, "group_size": 4, "sync": 1.0, **changes}


def test_verls_synchronous_stream_adds_generation_and_training(twin: SimpleNamespace) -> None:
    outcome = twin.stream(twin.theirs.Settings(**constant(twin, update=6.0, is_partial=False)))
    assert outcome.step == pytest.approx(10 + 6 + 1)
    assert (outcome.wait, outcome.mean_age) == (pytest.approx(10.0), 0)


def test_one_step_off_takes_the_slower_side(twin: SimpleNamespace) -> None:
    outcome = twin.one_step_off(twin.theirs.Settings(**constant(twin, update=6.0)))
    assert (outcome.step, outcome.wait) == (pytest.approx(11.0), pytest.approx(4.0))


def test_whole_batches_overlap_as_the_slower_side_allows(twin: SimpleNamespace) -> None:
    """A collection takes 10 s and is held for 1 s while weights are replaced; the trainer waits for the rest."""
    outcome = twin.disaggregated(twin.ours.Settings(**constant(twin, train=6.0, max_staleness=1)))
    assert outcome.step == pytest.approx(10 + 1, abs=0.3)
    assert outcome.wait == pytest.approx(4.0, abs=0.3)
    assert outcome.oldest == 1


def test_two_batches_ahead_hide_generation(twin: SimpleNamespace) -> None:
    outcome = twin.disaggregated(twin.ours.Settings(**constant(twin, train=6.0, max_staleness=2, oversample=3.0)))
    assert outcome.step == pytest.approx(6 + 1, abs=0.3)
    assert outcome.oldest == 2


@pytest.mark.parametrize("mode", ["colocated", "disaggregated"])
def test_on_policy_nothing_overlaps(twin: SimpleNamespace, mode: str) -> None:
    outcome = getattr(twin, mode)(twin.ours.Settings(**constant(twin, train=6.0)))
    assert outcome.step == pytest.approx(10 + 6 + 1, abs=0.3)
    assert (outcome.oldest, outcome.length_bias) == (0, 0.0)


def test_a_run_repeats_exactly(twin: SimpleNamespace) -> None:
    lengths = twin.Lengths(1000, 0.8, 8000)
    settings = twin.ours.Settings(**constant(twin, lengths=lengths, train=6.0, max_staleness=1, oversample=2.0))
    assert twin.disaggregated(settings) == twin.disaggregated(settings)


def modelled(twin: SimpleNamespace, schedule: object, **changes: object) -> object:
    return twin.schedules.simulate(twin.ours.Settings(**constant(twin, train=6.0, **changes)), schedule)


def test_parts_train_while_the_rest_generates(twin: SimpleNamespace) -> None:
    """A step of the engine lasts as long as its running responses ask for."""
    engine = {"max_staleness": 0, "engines": 1, "cost": cost(twin, weights=1e-9, products=0.01 / 32)}
    whole, parts = (modelled(twin, twin.schedules.Schedule(number), **engine) for number in (1, 2))
    assert whole.step == pytest.approx(10 + 6 + 1)
    assert parts.step == pytest.approx(whole.step)  # equal responses end together: there is nothing to stream
    uneven = {**engine, "lengths": twin.Lengths(1000, 0.5, 4000, prompt_sigma=0.5, prompt=0)}
    whole, parts, guarded = (
        modelled(twin, schedule, **uneven)
        for schedule in (twin.schedules.Schedule(), twin.schedules.Schedule(8), twin.schedules.Schedule(8, "guarded"))
    )
    assert guarded.step < parts.step < whole.step
    assert guarded.oldest == parts.oldest == 0


@pytest.mark.parametrize(("parts", "order"), [(1, "start"), (4, "start"), (4, "guarded")])
@pytest.mark.parametrize("max_staleness", [1, 2])
def test_the_model_repeats_the_collectors(twin: SimpleNamespace, max_staleness: int, parts: int, order: str) -> None:
    lengths = twin.Lengths(1000, 0.6, 6000, prompt=0)
    given = constant(twin, lengths=lengths, train=12.0, max_staleness=max_staleness, oversample=1.0 + max_staleness)
    settings = twin.ours.Settings(**given, parts=parts, order=order)
    schedule = twin.schedules.Schedule(parts, order)
    driven, modelled = twin.disaggregated(settings), twin.schedules.simulate(settings, schedule)
    assert modelled.step == pytest.approx(driven.step, rel=0.05)
    assert modelled.ages == pytest.approx(driven.ages, abs=0.15)


def test_windows_end_before_their_responses(twin: SimpleNamespace) -> None:
    """Responses of 1,024 tokens in windows of 512: each collection is half as long."""
    lengths = twin.Lengths(1024, 0.0, 2048, prompt=0)
    whole, windows = (
        twin.colocated(twin.ours.Settings(**constant(twin, lengths=lengths, train=6.0, window=window)))
        for window in (0, 512)
    )
    assert whole.wait == pytest.approx(10.24, abs=0.3)
    assert windows.wait == pytest.approx(5.12, abs=0.3)


def test_windows_ahead_take_the_slower_side(twin: SimpleNamespace) -> None:
    """Windows of 5.12 s: training for 9 s hides them, one for 2 s leaves the trainer the rest."""
    lengths = twin.Lengths(1024, 0.0, 2048, prompt=0)
    given = constant(twin, lengths=lengths, window=512, max_staleness=1)
    hidden, shown = (twin.disaggregated(twin.ours.Settings(**given, train=train)) for train in (9.0, 2.0))
    assert (hidden.step, hidden.wait) == (pytest.approx(10.0, abs=0.3), pytest.approx(0.0, abs=0.3))
    assert shown.step == pytest.approx(5.12 + 1, abs=0.3)
    assert shown.oldest == hidden.oldest == 1


def test_open_episodes_fill_the_slots_by_the_rule(twin: SimpleNamespace) -> None:
    """Turns of 1 s, tools of 3 s: four episodes a slot."""
    episodes = twin.agents.Episodes(
        cost(twin), slots=8, turn_tokens=100, turn_sigma=0.0, tool_seconds=3.0, tool_sigma=0.0, num_finished=3000
    )
    assert twin.agents.rule(episodes) == 32
    assert twin.agents.occupancy(episodes, 16).idle_share == pytest.approx(0.5, abs=0.03)
    assert twin.agents.occupancy(episodes, 32).idle_share < 0.15


def test_tail_rounds_are_shorter_and_throw_away_what_they_put_off(twin: SimpleNamespace) -> None:
    lengths = twin.Lengths(1000, 0.8, 16000, prompt_sigma=0.4, prompt=0)
    given = constant(twin, lengths=lengths, prompts=16, train=6.0, num_steps=28)
    plain = twin.disaggregated(twin.ours.Settings(**given))
    tail = twin.disaggregated(twin.ours.Settings(**given, tail_rounds=True, oversample=1.25))
    assert (tail.oldest, plain.thrown_away) == (0, 0.0)
    assert tail.step < 0.95 * plain.step and 0.1 < tail.thrown_away < 0.4
    assert tail.length_bias < -0.005 and abs(plain.length_bias) < 1e-6


def record(group: int, index: int, step: int, age: int, length: int) -> dict[str, object]:
    versions = [{"start": 0, "end": length, "version": step - 1 - age}]
    return {"sample_id": f"{group:012d}/{index}", "train_step": step, "response_ids": [0] * length, "versions": versions}


@pytest.mark.parametrize("age", [0, 1])
def test_a_run_is_compared_with_its_twin_by_the_ages_of_tokens(twin: SimpleNamespace, tmp_path: Path, age: int) -> None:
    """On policy every token is of age 0; a record that says otherwise is as far off as can be."""
    rollout = {"engine": "embedded", "prompts_per_step": 2, "group_size": 2, "max_response_tokens": 64, "max_staleness": 0}
    rollout |= {"oversample": 1.0, "ahead": 0.0, "tail_rounds": False, "order": "start"}
    records = [
        record(2 * step + group, index, 1 + step, age, 10 + 7 * index + step)
        for step in range(5)
        for group in range(2)
        for index in range(2)
    ]
    (tmp_path / "config.json").write_text(json.dumps({"config": {"rollout": rollout, "sglang": {}}}))
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    found = twin.compare_ages(tmp_path)
    assert found["simulated"]["0"] == 1.0 and found["total_variation"] == float(age) and found["steps"] == 3
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records[::2]))
    with pytest.raises(ValueError, match="50% of the trained responses are on record"):
        twin.compare_ages(tmp_path)
