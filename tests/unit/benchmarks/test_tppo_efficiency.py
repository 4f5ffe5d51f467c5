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


def test_windows_lose_no_token_and_a_window_as_long_as_the_maximum_changes_nothing(benchmark) -> None:
    base = setting(benchmark, FLAT, num_responses=2048, per_engine=64)
    whole = benchmark.simulate(replace(base, window=24576))
    assert whole["speedup"] == pytest.approx(1.0, rel=0.02)
    steps = benchmark.window_steps(base, torch.Generator().manual_seed(0))
    assert len(steps) == benchmark.COUNTED_STEPS
    assert all(step.tokens <= 2048 * 8192 for step in steps)


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
