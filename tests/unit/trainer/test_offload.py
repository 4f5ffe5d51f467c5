"""Models that take turns on the device."""

from __future__ import annotations

import logging

import pytest

from megatron_dapo.megatron.host_memory import Moved
from megatron_dapo.telemetry.metrics import PHASES
from megatron_dapo.telemetry.phases import PhaseTimer
from megatron_dapo.trainer.offload import CRITIC, POLICY, REFERENCE, DeviceModels
from megatron_dapo.trainer.recorder import Phases


class FakeModel:
    """Notes what of it is on the device; everything weighs a mebibyte."""

    def __init__(self) -> None:
        self.here = {"gradients", "optimizer", "weights"}
        self.moved = Moved()

    def offload(self, keep=()) -> None:
        leaving = self.here - set(keep)
        self.moved += Moved(offloaded=len(leaving) << 20, seconds=0.5 * bool(leaving))
        self.here -= leaving

    def onload(self, kinds) -> None:
        self.moved += Moved(onloaded=len(set(kinds) - self.here) << 20)
        self.here |= set(kinds)


@pytest.fixture
def models() -> dict[str, FakeModel]:
    return {name: FakeModel() for name in (POLICY, REFERENCE, CRITIC)}


def device_models(models: dict[str, FakeModel]) -> DeviceModels:
    return DeviceModels(models, Phases())


def on_device(models: dict[str, FakeModel]) -> dict[str, list[str]]:
    return {name: sorted(model.here) for name, model in models.items() if model.here}


EVERYTHING = ["gradients", "optimizer", "weights"]


def test_a_train_step_has_one_of_policy_and_critic_on_the_device(models: dict[str, FakeModel]) -> None:
    moves = device_models(models)
    moves.offload_all()
    assert on_device(models) == {}
    with moves.on_device(CRITIC):
        assert on_device(models) == {CRITIC: ["weights"]}
    with moves.on_device(CRITIC, training=CRITIC):
        assert on_device(models) == {CRITIC: EVERYTHING}
    with moves.on_device(POLICY, REFERENCE):
        assert on_device(models) == {POLICY: ["weights"], REFERENCE: ["weights"]}
    with moves.on_device(POLICY, REFERENCE, training=POLICY):
        assert on_device(models) == {POLICY: EVERYTHING, REFERENCE: ["weights"]}
    with moves.on_device(POLICY):
        assert on_device(models) == {POLICY: ["weights"]}


def test_a_model_stays_until_another_one_needs_the_room(models: dict[str, FakeModel]) -> None:
    moves = device_models(models)
    moves.offload_all()
    with moves.on_device(CRITIC):
        pass
    before = models[CRITIC].moved
    with moves.on_device(CRITIC, training=CRITIC):
        pass
    assert models[CRITIC].moved.onloaded - before.onloaded == 2 << 20, "the weights were there"


def test_the_optimizer_makes_room_for_engines_that_wake_up_for_new_weights(models: dict[str, FakeModel]) -> None:
    """The run has no critic whose update would come between."""
    moves = device_models({POLICY: models[POLICY]})
    with moves.on_device(POLICY, REFERENCE, training=POLICY):
        assert models[POLICY].here == {"gradients", "optimizer", "weights"}
    with moves.on_device(POLICY):
        assert models[POLICY].here == {"weights"}


def test_a_model_of_other_processes_moves_nothing(models: dict[str, FakeModel]) -> None:
    moves = device_models({POLICY: models[POLICY]})
    before = models[POLICY].moved
    with moves.on_device(CRITIC, training=CRITIC):
        assert models[POLICY].here == {"gradients", "optimizer", "weights"} and models[POLICY].moved == before


def test_the_moves_of_a_step_are_logged_once(models: dict[str, FakeModel], caplog: pytest.LogCaptureFixture) -> None:
    moves = device_models(models)
    with caplog.at_level(logging.INFO):
        moves.offload_all()
        moves.log_moved()
        with moves.on_device(CRITIC), moves.on_device(CRITIC, training=CRITIC):
            moves.offload_all()
        moves.log_moved()
        device_models({}).log_moved()
    first, second = [record.getMessage() for record in caplog.records]
    assert "9.0 MiB left the device and 0.0 MiB came back, in 1.500 s" in first
    assert "3.0 MiB left the device and 3.0 MiB came back" in second


def test_moving_has_a_phase_of_its_own_inside_the_phase_that_needs_the_model(models: dict[str, FakeModel]) -> None:
    ticks = iter(range(100))
    phases = Phases(PhaseTimer(list(PHASES), lambda: next(ticks)))
    moves, inside = DeviceModels(models, phases), []
    models[POLICY].onload = lambda kinds: inside.append(phases.timer.current)
    with phases.phase("train"), moves.on_device(POLICY):
        inside.append(phases.timer.current)
    times = phases.timer.finish_step()
    assert inside == ["offload", "train"] and times["offload"] > 0 and times["train"] > 0
