"""The simulation of windows against cases worked out by hand, and the comparison of two runs' records."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
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


def test_overlapping_windows_take_the_slower_side(benchmark) -> None:
    """Each pair is windows that are trained and the next ones, which are generated meanwhile."""
    steps = [benchmark.StepCost(rollout, 1, work, 0.0, again=2.0) for rollout, work in ((10.0, 4.0), (9.0, 20.0), (7.0, 1.0))]
    # 4 < 9: new weights stop the next windows, whose contexts are computed again; 20 > 7: they are there.
    assert benchmark.overlapping_step(steps, 1.0) == pytest.approx(((9 + 2) + 20) / 2)
    assert benchmark.overlapping_step(steps, 0.1) == pytest.approx(((9 + 2) + (7 + 2)) / 2)


def test_equal_lengths_gain_nothing_a_token(benchmark) -> None:
    tail = benchmark.Tail(24576.0, 0.0)
    found = benchmark.simulate(setting(benchmark, FLAT, tail=tail))
    # All at the maximum: a window step is a third of a whole one and makes a third of its tokens.
    assert found["speedup"] == pytest.approx(3.0)
    assert found["speedup_tokens"] == pytest.approx(1.0)
    assert found["idle_share_full"] == pytest.approx(0.0)
    short = benchmark.simulate(setting(benchmark, FLAT, tail=benchmark.Tail(100.0, 0.0)))
    assert short["speedup"] == pytest.approx(1.0) == short["speedup_step"]
