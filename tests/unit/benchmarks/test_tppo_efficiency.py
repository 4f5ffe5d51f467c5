"""The simulation of windows against cases worked out by hand, and the comparison of two runs' records."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_dapo.types import Completion, VersionRange

STEEP = [(1, 1.0), (2, 2.0), (4, 4.0)]  # a tick costs as much as responses run: no slot is ever wasted
FLAT = [(1, 1.0), (4, 1.0)]


@pytest.fixture(scope="module")
def benchmark(repository: Path) -> Iterator[SimpleNamespace]:
    """Return all names of the benchmark's modules in one namespace."""
    sys.path.insert(0, str(repository / "benchmarks"))
    names = (
        "tppo.engines",
        "tppo.clusters",
        "tppo.long_tail",
        "tppo.simulation",
        "tppo.engine_runs",
        "tppo.training_runs",
        "tppo_efficiency",
    )
    modules = [importlib.import_module(name) for name in names]
    yield SimpleNamespace(**{name: value for module in modules for name, value in vars(module).items()})
    sys.path.remove(str(repository / "benchmarks"))


def setting(benchmark, curve, **changes):
    given = {"num_responses": 64, "per_engine": 4, "window": 8192, "prefill_cost": 0.0} | changes
    return benchmark.Setting(curve, **given)


def test_ticks_between_and_beyond_the_points(benchmark) -> None:
    ticks = benchmark.tick_lengths([(1, 1.0), (3, 2.0), (4, 5.0)], 6)
    assert ticks.tolist() == pytest.approx([0.0, 1.0, 1.5, 2.0, 5.0, 8.0, 11.0])


def test_an_engine_by_hand(benchmark) -> None:
    new_tokens = torch.tensor([[2, 10, 5]])
    ticks = torch.tensor([0.0, 1.0, 3.0, 10.0], dtype=torch.float64)
    seconds, busy = benchmark.engine_times(new_tokens, ticks)
    # three run for 2 ticks, two for 3 more, one for 5 more
    assert seconds.tolist() == [2 * 10 + 3 * 3 + 5 * 1]
    assert busy.tolist() == [3 * 20 + 2 * 9 + 1 * 5]
    length, idle = benchmark.rollout_cost(
        new_tokens[0],
        torch.tensor([0, 6, 0]),
        setting(benchmark, FLAT, per_engine=3, num_responses=3, prefill_cost=0.5),
        ticks,
    )
    assert length == pytest.approx(34 + 6 * 0.5 * 10 / 3)
    assert idle == pytest.approx(1 - 83 / (3 * length))


def test_equal_lengths_gain_nothing_a_token(benchmark) -> None:
    tail = benchmark.Tail(24576.0, 0.0)
    found = benchmark.simulate(setting(benchmark, FLAT, tail=tail))
    # All at the maximum: a window step is a third of a whole one and makes a third of its tokens.
    assert found["speedup"] == pytest.approx(3.0)
    assert found["speedup_tokens"] == pytest.approx(1.0)
    assert found["idle_share_full"] == pytest.approx(0.0)
    short = benchmark.simulate(setting(benchmark, FLAT, tail=benchmark.Tail(100.0, 0.0)))
    assert short["speedup"] == pytest.approx(1.0) == short["speedup_step"]


def test_where_slots_cost_nothing_idle_a_tail_costs_nothing(benchmark) -> None:
    found = benchmark.simulate(setting(benchmark, STEEP, per_engine=512, num_responses=2048))
    # Nearly: an engine that happens to hold more tokens than the others is waited for.
    assert found["speedup_tokens"] < 1.2
    flat = benchmark.simulate(setting(benchmark, FLAT, per_engine=64, num_responses=2048))
    assert 1.8 < flat["speedup_tokens"] < flat["speedup"] <= 3.0


def test_windows_lose_no_token_and_a_window_as_long_as_the_maximum_changes_nothing(benchmark) -> None:
    base = setting(benchmark, FLAT, num_responses=2048, per_engine=64)
    whole = benchmark.simulate(replace(base, window=24576))
    assert whole["speedup"] == pytest.approx(1.0, rel=0.02)
    steps = benchmark.window_steps(base, torch.Generator().manual_seed(0))
    assert len(steps) == benchmark.COUNTED_STEPS
    assert all(step.tokens <= 2048 * 8192 for step in steps)


def test_engines_that_responses_do_not_divide_over_are_refused(benchmark) -> None:
    with pytest.raises(ValueError, match="do not divide"):
        setting(benchmark, FLAT, num_responses=10, per_engine=4)


def test_stored_curves_are_relative_and_name_their_origin(benchmark, repository: Path) -> None:
    curves = benchmark.stored_curves()
    assert {"embedded", "roofline", "flat"} <= set(curves)
    assert all(curve[0][1] == pytest.approx(1.0, abs=0.02) for curve in curves.values())
    stored = json.loads((repository / "benchmarks/results/tppo_engine_curve.json").read_text(encoding="utf-8"))
    assert all(entry["origin"] for entry in stored.values())


def record(directory: Path, seconds: float, tokens: int, longest: int, accuracies: list[float]) -> Path:
    directory.mkdir()
    step = {"time/step": seconds + 3, "time/evaluate": 2.0, "time/checkpoint": 1.0, "time/generate": seconds / 2}
    step |= {"time/train": seconds / 4, "throughput/generated_tokens": tokens, "actor/trained_tokens": tokens}
    step |= {"rollout/response_tokens_max": longest}
    (directory / "metrics.jsonl").write_text("\n".join(json.dumps(step) for _ in accuracies[1:]), encoding="utf-8")
    lines = [json.dumps({"train_step": i, "eval/avg_at_k": accuracy}) for i, accuracy in enumerate(accuracies)]
    (directory / "evaluations.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return directory


def test_two_runs_compared(benchmark, tmp_path: Path) -> None:
    full = benchmark.run_report(record(tmp_path / "full", 8.0, 1000, 50, [0.5, 0.7, 0.9]), 40, None)
    windows = benchmark.run_report(record(tmp_path / "windows", 4.0, 600, 50, [0.5, 0.6, 0.7, 0.8, 0.9]), 40, 20)
    found = benchmark.compare(full, windows, target=0.8)
    assert found["measured_speedup"] == pytest.approx(2.0) == pytest.approx(found["measured_speedup_step"])
    assert found["measured_speedup_tokens"] == pytest.approx(600 / 2 / (1000 / 4))
    assert found["idle_share"] == {"full": pytest.approx(1 - 1000 / 2000), "windows": pytest.approx(1 - 600 / 800)}
    assert found["seconds_to_target"] == {"full": pytest.approx(12.0), "windows": pytest.approx(12.0)}
    assert found["time_to_accuracy_ratio"] == pytest.approx(1.0)
    assert found["steps_to_target"] == {"full": pytest.approx(1.5), "windows": pytest.approx(3.0)}
    assert found["steps_to_accuracy_ratio"] == pytest.approx(0.5)
    assert benchmark.compare(full, windows, target=0.95)["time_to_accuracy_ratio"] is None


def test_runs_are_read_with_the_sizes_they_had(benchmark, tmp_path: Path) -> None:
    directories = [record(tmp_path / name, 8.0, 1000, 50, [0.5, 0.7, 0.9]) for name in ("full", "windows")]
    for directory in directories:
        config = {"rollout": {"prompts_per_step": 10, "group_size": 4}, "window": {"tokens": 30}}
        (directory / "config.json").write_text(json.dumps({"config": config}), encoding="utf-8")
    found = benchmark.compare_runs(*directories, target=0.8)
    assert found["idle_share"] == {"full": pytest.approx(0.5), "windows": pytest.approx(1 - 1000 / 1200)}


def test_a_directory_without_a_run_is_named(benchmark, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="two are needed"):
        benchmark.run_report(tmp_path, 40, None)


class CountingEngine:
    """Gives back every response at its limit at once, with its prefix; a token a tick and a second a tick."""

    def __init__(self) -> None:
        self.seconds, self._done = 0.0, []

    @property
    def num_unfinished(self) -> int:
        return len(self._done)

    def submit(self, requests) -> None:
        held = [len(request.prefix.token_ids) if request.prefix else 0 for request in requests]
        new = [request.sampling.max_new_tokens - start for request, start in zip(requests, held, strict=True)]
        self.seconds += max(new)
        for request in requests:
            count = request.sampling.max_new_tokens
            versions = (VersionRange(0, count, 0),)
            self._done.append(Completion(request.request_id, (1,) * count, (0.0,) * count, "length", versions))

    def poll(self):
        done, self._done = self._done, []
        return done


def test_the_rollout_of_an_engine_in_windows(benchmark) -> None:
    engine = CountingEngine()
    measured = benchmark.MeasuredEngine(engine, lambda: engine.seconds, "counts")
    tail = benchmark.Tail(20.0, 0.0)  # all responses have 20 tokens: windows of 8, 8 and 4
    pool = benchmark.EnginePool(measured, tail, window=8, count=3, generator=torch.Generator().manual_seed(0))
    assert [pool.step() for _ in range(4)] == [(8.0, 24, 8), (8.0, 24, 8), (4.0, 12, 4), (8.0, 24, 8)]


def test_rollouts_compared(benchmark) -> None:
    found = benchmark.compare_rollouts([(10.0, 300, 50), (14.0, 300, 70)], [(5.0, 200, 25)], count=10)
    assert found["measured_speedup"] == pytest.approx(12 / 5)
    assert found["measured_speedup_tokens"] == pytest.approx(40 / 25)
    assert found["idle_share_of_ticks"] == {"full": pytest.approx(0.5), "windows": pytest.approx(0.2)}


def test_the_most_context_an_engine_keeps_against_every_tick(benchmark) -> None:
    generator = torch.Generator().manual_seed(3)
    new, context = (torch.randint(1, 40, (24,), generator=generator) for _ in range(2))
    most = 0
    for first in range(0, 24, 6):
        for tick in range(1, 41):  # tokens each running response has generated by then
            running = [i for i in range(first, first + 6) if new[i] >= tick]
            most = max(most, sum(int(context[i]) + tick for i in running))
    assert benchmark.peak_context(new, context, 6) == most


def test_the_roofline_agrees_with_published_ticks(benchmark, repository: Path) -> None:
    curves = json.loads((repository / "benchmarks/results/tppo_engine_curve.json").read_text("utf-8"))
    engine = benchmark.Roofline(gpus=2)
    # The mean context of a token of log-normal responses of 7,000 tokens in the mean (the benchmark's tail, scaled).
    lengths = benchmark.Tail().draw(100_000, torch.Generator().manual_seed(0)).double()
    context = 7000 / float(lengths.mean()) * float((lengths**2).sum() / lengths.sum()) / 2
    for point in curves["published"]["points"]:
        computed = engine.tick(1) * (
            engine.tick(point["running"]) / engine.tick(1) + point["running"] * context * engine.context_cost
        )
        assert computed == pytest.approx(point["seconds_a_tick"], rel=1 / 7)


def test_a_cluster_of_few_small_engines_lacks_room_and_more_engines_save_more(benchmark) -> None:
    base = replace(benchmark.headline("flat", 0.1, 16), num_responses=1024)
    small, large = (benchmark.cluster_row(benchmark.Cluster("H100", gpus, 2), base) for gpus in (16, 64))
    assert (small["responses_an_engine"], large["responses_an_engine"]) == (128, 32)
    assert small["speedup"] < large["speedup"]
    assert not small["is_room_enough"] and large["is_room_enough"]
    assert {"published_speedup"} <= set(large)
    assert "published_speedup" not in benchmark.cluster_row(benchmark.Cluster("H200", 64, 2), base)


def test_the_long_tailed_task(benchmark) -> None:
    problems = benchmark.long_tail_problems(5, 64)
    assert sum(len(problem.steps) >= 9 for problem in problems) == 8
    assert sum(len(problem.steps) == 2 for problem in problems) == 56
    assert len({problem.key for problem in problems}) == 64
