"""The alarm on a growing metric: hears growth, not noise, and not an outlier."""

from __future__ import annotations

import json
import math
import random

import pytest

from megatron_dapo.telemetry.trend import TrendAlarm


def alarms(values: list[float], floor: float = 0.0) -> list[int]:
    alarm = TrendAlarm(2.0, floor)
    return [step for step, value in enumerate(values) if alarm.observe(value) is not None]


def noisy(seed: int, level: list[float], sigma: float = 0.3) -> list[float]:
    chance = random.Random(seed)
    return [value * math.exp(chance.gauss(0, sigma)) for value in level]


@pytest.mark.parametrize("seed", range(20))
def test_noise_around_a_level_is_no_alarm(seed: int) -> None:
    assert alarms(noisy(seed, [0.01] * 1000)) == []
    assert alarms(noisy(seed, [0.03 - 0.00002 * step for step in range(1000)])) == [], "nor is a falling level"


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("growth", "num_steps"), [(3.3, 30), (3.0, 100), (6.0, 300)])
def test_growth_is_heard_while_it_lasts(seed: int, growth: float, num_steps: int) -> None:
    ramp = [0.011 * (1 + (growth - 1) * step / num_steps) for step in range(num_steps)]
    heard = alarms(noisy(seed, [0.011] * 50 + ramp + [ramp[-1]] * 10))
    assert heard and 50 < heard[0] < 50 + num_steps + 10


def test_growth_from_the_first_step_is_heard() -> None:
    """A gap reported to grow from 0.011 to 0.036 over 30 steps before a run was lost."""
    assert alarms([0.011 + 0.025 * step / 30 for step in range(31)]) == [30]


def test_an_outlier_is_no_trend() -> None:
    assert alarms([0.01] * 60 + [0.05] + [0.01] * 60) == []


def test_levels_up_to_the_floor_never_alarm() -> None:
    ramp = [1e-6 * 1.05**step for step in range(200)]
    heard = alarms(ramp, floor=1e-3)
    assert heard and ramp[heard[0]] > 1e-3 and alarms(ramp)[0] < heard[0]


def test_it_sounds_once_and_again_when_the_new_level_has_grown() -> None:
    assert len(alarms([0.01] * 60 + [0.04] * 200)) == 1
    heard = alarms([0.01] * 60 + [0.04] * 200 + [0.16] * 200)
    assert len(heard) == 2 and heard[1] > 260


def test_the_warning_says_how_far() -> None:
    alarm = TrendAlarm(2.0, 0.0)
    warnings = [alarm.observe(value) for value in [0.01] * 60 + [0.04] * 20]
    [warning] = [one for one in warnings if one is not None]
    assert warning.before == pytest.approx(0.01) and 0.02 < warning.now < 0.04 and warning.num_steps <= 60


def test_a_value_that_is_not_finite_is_an_alarm_and_leaves_the_rest_alone() -> None:
    alarm = TrendAlarm(2.0, 0.0)
    for value in [0.01] * 30:
        assert alarm.observe(value) is None
    assert math.isnan(alarm.observe(math.nan).now)
    assert all(alarm.observe(0.01) is None for _ in range(30))


def test_restored_state_continues_exactly() -> None:
    values = noisy(1, [0.01] * 50 + [0.01 * 1.03**step for step in range(80)])
    whole = alarms(values)
    assert whole
    for cut in (5, 40, whole[0], 100):
        first, second = TrendAlarm(2.0, 0.0), TrendAlarm(2.0, 0.0)
        heard = [step for step in range(cut) if first.observe(values[step]) is not None]
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        heard += [step for step in range(cut, len(values)) if second.observe(values[step]) is not None]
        assert heard == whole
