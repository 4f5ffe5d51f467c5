"""Which model is on the device in which phase."""

from __future__ import annotations

import logging
from contextlib import nullcontext

import pytest

from megatron_dapo.megatron.host_memory import Moved
from megatron_dapo.telemetry.metrics import PHASES
from megatron_dapo.telemetry.phases import PhaseTimer
from megatron_dapo.trainer.model_moves import CRITIC, NEEDED, POLICY, REFERENCE, ModelMoves
from megatron_dapo.trainer.phases import Phases


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


def test_every_phase_that_moves_is_one() -> None:
    assert set(NEEDED) <= set(PHASES) and "offload" in PHASES


def test_a_train_step_has_one_of_policy_and_critic_on_the_device(models: dict[str, FakeModel]) -> None:
    moves, seen = ModelMoves(models), {}
    moves("weight_sync")
    for phase in ("generate", "values", "logprobs", "advantages", "train", "train_critic", "weight_sync", "checkpoint"):
        moves(phase)
        seen[phase] = {name: sorted(model.here) for name, model in models.items() if model.here}
    everything = ["gradients", "optimizer", "weights"]
    assert seen["generate"] == {}
    assert seen["values"] == {CRITIC: ["weights"]}
    assert seen["logprobs"] == seen["advantages"] == {POLICY: ["weights"], REFERENCE: ["weights"]}
    assert seen["train"] == {POLICY: everything, REFERENCE: ["weights"]}
    assert seen["train_critic"] == {CRITIC: everything}
    assert seen["weight_sync"] == seen["checkpoint"] == {POLICY: ["weights"]}


def test_the_optimizer_makes_room_for_engines_that_wake_up_for_new_weights(models: dict[str, FakeModel]) -> None:
    """Without a critic whose update comes between."""
    moves = ModelMoves({POLICY: models[POLICY]})
    moves("train")
    assert models[POLICY].here == {"gradients", "optimizer", "weights"}
    moves("weight_sync")
    assert models[POLICY].here == {"weights"}


def test_waiting_for_the_other_models_processes_moves_nothing(models: dict[str, FakeModel]) -> None:
    policy, critic = ModelMoves({POLICY: models[POLICY]}), ModelMoves({CRITIC: models[CRITIC]})
    for moves in (policy, critic):
        moves("generate")
    for phase in ("values", "logprobs", "train", "train_critic"):
        critic(phase)
    for phase in ("values", "train_critic"):  # the critic's ranks wait in "train", the policy's in "train_critic"
        policy(phase)
    assert models[CRITIC].here and not models[POLICY].here
    policy("train")
    moved = models[POLICY].moved
    policy("train_critic")
    assert models[POLICY].moved == moved


def test_what_moved_in_a_step_is_said_once(models: dict[str, FakeModel], caplog: pytest.LogCaptureFixture) -> None:
    moves = ModelMoves(models)
    with caplog.at_level(logging.INFO):
        for phase in ("generate", "values", "train_critic", "generate"):
            moves(phase)
    first, second = [record.getMessage() for record in caplog.records]
    assert "9.0 MiB left the device and 0.0 MiB came back, in 1.500 s" in first
    assert "3.0 MiB left the device and 3.0 MiB came back" in second


def test_moving_has_a_phase_of_its_own_before_the_phase() -> None:
    ticks = iter(range(100))
    phases = Phases(PhaseTimer(list(PHASES), lambda: next(ticks)), lambda name: nullcontext())
    order: list[str] = []
    phases.moves = lambda name: order.append(f"{phases.timer.current}: {name}")
    with phases.phase("train"):
        order.append(phases.timer.current)
    times = phases.timer.finish_step()
    assert order == ["offload: train", "train"] and times["offload"] > 0 and times["train"] > 0
