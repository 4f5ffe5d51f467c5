"""Splits of a run's devices: lengths and rates from what was measured, and steps against the simulated twin of the collectors."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_dapo.plan.device import GPUS
from megatron_dapo.plan.rollout import EngineRates, Lengths
from megatron_dapo.plan.split import Measured, Proposal, Split, SplitLimits, calibrated, measured_lengths, propose
from tests.examples import first

# A decoding step of 10 ms, whatever runs; prefill and requests cost next to nothing.
FLAT = EngineRates((10e-3 - 2.5e-3) * 0.78 * GPUS["H20"].memory_bytes_s, 0.0, 1e-3, 1, GPUS["H20"])
EQUAL = Lengths((1000,), 0.0)


def faster(rates: EngineRates, factor: float) -> EngineRates:
    gpu = rates.gpu
    return replace(rates, gpu=replace(gpu, flops=gpu.flops * factor, memory_bytes_s=gpu.memory_bytes_s * factor))


@pytest.mark.parametrize(("mean", "most"), [(300.0, 900.0), (2674.0, 22463.0), (1500.0, 8192.0), (7000.0, 8192.0)])
def test_lengths_have_the_measured_mean_and_longest(mean: float, most: float) -> None:
    found = measured_lengths(32768, mean, most, 0.0, 512, 200.0)
    assert found.mean == pytest.approx(mean, rel=0.01) and max(found.responses) == round(most)
    # One of 512 responses is about that long.
    assert sum(length > 0.9 * most for length in found.responses) / len(found.responses) < max(0.02, (mean / most) ** 2)


def test_responses_that_reach_the_limit_set_the_spread() -> None:
    found = measured_lengths(8192, 2000.0, 8192.0, 0.05, 1024, 0.0)
    assert found.mean == pytest.approx(2000, rel=0.01)
    assert sum(length == 8192 for length in found.responses) / len(found.responses) == pytest.approx(0.05, abs=0.01)
    assert measured_lengths(8192, 700.0, 700.0, 0.0, 64, 0.0).responses == (700,)


@pytest.mark.parametrize("factor", [0.03, 0.5, 0.8, 1.0, 3.0])
def test_rates_are_those_of_the_measured_collection(factor: float) -> None:
    now, limits = Split(4, 2, 3.0), SplitLimits(64, 1)
    unknown = Measured(0.0, 0.0, 3.0, 1.0, 0.0, 64, EQUAL)
    measured = Proposal.of(faster(FLAT, factor), unknown, now, limits, 1.0, 0.0).seconds
    _, found, is_told = calibrated(FLAT, replace(unknown, collect=measured.collect), now, limits, 1.0, 0.0)
    assert is_told and found == pytest.approx(factor, rel=0.02)


def test_a_run_whose_trainer_sets_the_pace_does_not_tell_the_engines_rates() -> None:
    """Two batches ahead, collections follow the updates: they take a step each, by fast engines as by slow ones."""
    measured = Measured(13.0, 0.0, 12.0, 1.0, 13.0, 64, EQUAL)
    now, limits = Split(4, 2, 12.0), SplitLimits(1000, 2)
    rates, factor, is_told = calibrated(FLAT, measured, now, limits, 3.0, 0.0)
    assert not is_told and 0.5 < factor <= 1.0
    assert Proposal.of(rates, measured, now, limits, 3.0, 0.0).seconds.step == pytest.approx(13, rel=0.05)


def test_equal_responses_by_hand() -> None:
    """A server takes 10 s for any number of responses; four devices train for 12 s. One device less trains for 16 s."""
    measured = Measured(13.0, 0.0, 12.0, 1.0, 10.0, 64, EQUAL)
    splits = [Split(4, 2, 12.0), Split(3, 3, 16.0), Split(5, 1, 9.6)]
    found = {one.split.trainer: one for one in propose(FLAT, measured, splits, SplitLimits(64, 1))}
    assert found[4].seconds.step == pytest.approx(13, rel=0.02) and found[4].waits == "engines"
    assert found[3].seconds.step == pytest.approx(17, rel=0.02) and found[3].seconds.engine_idle == pytest.approx(7, abs=0.5)
    # 10.8 s with all 64 and an update; more of them at a time wait for a place.
    assert found[5].seconds.step == pytest.approx(11.8, rel=0.02) and (found[5].oversample, found[5].waits) == (1.0, "trainer")
    assert list(found) == [5, 4, 3]


def test_windows_have_no_settings_to_choose() -> None:
    measured = Measured(13.0, 0.0, 12.0, 1.0, 10.0, 64, EQUAL)
    [found] = propose(FLAT, measured, [Split(5, 1, 9.6)], SplitLimits(64, 1, has_windows=True))
    assert (found.oversample, found.ahead) == (1.0, 0.0) and found.waits == "trainer"


RATES = EngineRates(15.2e9 / 4, 57344 / 4, 7.07e9, 4, GPUS["H20"])  # verl's 7B setting on four GPUs a server
PROMPTS, GROUP_SIZE, DEVICES, SYNC, WORK = 32, 16, 8, 4.0, 212.0


def driven(twin: SimpleNamespace, rates: EngineRates, servers: int, **settings: Any) -> tuple[Any, float]:
    """Drive the collectors on simulated engines; return the outcome and the seconds of a collection."""
    given = twin.ours.Settings(
        engines=servers,
        cost=twin.simulation.Cost.of(rates),
        lengths=twin.simulation.Lengths(2000, 0.8, 28672, prompt_sigma=0.4),
        prompts=PROMPTS,
        group_size=GROUP_SIZE,
        train=WORK / (DEVICES - servers),
        sync=SYNC,
        **settings,
    )
    run = twin.ours.Run(given, is_colocated=False)
    outcome = run.outcome()
    return outcome, fmean(run.watched.seconds[given.num_warm : given.num_steps])


@pytest.mark.parametrize(("servers", "max_staleness", "oversample"), first(1, [(2, 2, 3.0), (2, 1, 1.0)]))
def test_other_splits_are_within_a_tenth_of_the_twin(
    twin: SimpleNamespace, servers: int, max_staleness: int, oversample: float
) -> None:
    """One run is measured, with engines at 0.8 of the rates that a plan takes; its own settings and those proposed for other
    splits are then driven."""
    rates = faster(RATES, 0.8)
    outcome, collect = driven(twin, rates, servers, max_staleness=max_staleness, oversample=oversample)
    lengths = twin.simulation.Lengths(2000, 0.8, 28672, prompt_sigma=0.4)
    steps = [[lengths.of_group(step * PROMPTS + group, GROUP_SIZE) for group in range(PROMPTS)] for step in range(12)]
    mean = fmean(length for step in steps for group in step for length in group)
    most = fmean(max(map(max, step)) for step in steps)
    now = Split(DEVICES - servers, servers, WORK / (DEVICES - servers))
    drawn = measured_lengths(28672, mean, most, 0.0, PROMPTS * GROUP_SIZE, 200.0)
    measured = Measured(outcome.step, outcome.wait, now.train, SYNC, collect, PROMPTS * GROUP_SIZE, drawn)
    limits = SplitLimits(10**6, max_staleness)
    found, *_ = calibrated(RATES, measured, now, limits, oversample, 0.0)
    mine = Proposal.of(found, measured, now, limits, oversample, 0.0).seconds
    assert mine.step == pytest.approx(outcome.step, rel=0.1)
    for one in propose(found, measured, [Split(DEVICES - n, n, WORK / (DEVICES - n)) for n in (1, 3, 4, 6)], limits):
        given = {"max_staleness": max_staleness, "oversample": one.oversample, "ahead": one.ahead}
        simulated, _ = driven(twin, rates, one.split.servers, **given)
        assert one.seconds.step == pytest.approx(simulated.step, rel=0.1), one
        assert one.seconds.wait == pytest.approx(simulated.wait, abs=0.1 * simulated.step), one
