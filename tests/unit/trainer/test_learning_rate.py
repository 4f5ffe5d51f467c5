import pytest

from megatron_dapo.trainer.learning_rate import LearningRateSchedule


def test_warmup_reaches_the_peak_and_stays():
    schedule = LearningRateSchedule(peak=1e-6, warmup_steps=20, total_steps=100)
    assert schedule.at(0) == pytest.approx(5e-8)
    assert schedule.at(19) == schedule.at(20) == schedule.at(5000) == 1e-6


@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_decay_is_monotone_and_ends_at_the_minimum(shape):
    schedule = LearningRateSchedule(peak=1.0, warmup_steps=2, total_steps=12, shape=shape, minimum=0.1)
    rates = [schedule.at(step) for step in range(2, 13)]
    assert rates[0] == 1.0 and rates[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in zip(rates, rates[1:]))
    assert schedule.at(100) == pytest.approx(0.1)


def test_half_way_values():
    assert LearningRateSchedule(1.0, 0, 10, "linear").at(5) == pytest.approx(0.5)
    assert LearningRateSchedule(1.0, 0, 12, "cosine").at(4) == pytest.approx(0.75)


def test_unknown_shape_names_what_exists():
    with pytest.raises(ValueError, match="constant"):
        LearningRateSchedule(1.0, 0, 1, "step")
