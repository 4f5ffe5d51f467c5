"""Turns of several runs in one process: their order, random states, log lines, and whose weights the engine has."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from megatron_dapo.telemetry.phases import PhaseTimer
from megatron_dapo.telemetry.terminal import TerminalHandler
from megatron_dapo.trainer.recorder import Phases
from megatron_dapo.trainer.turns import DuePublisher, RunTurn, SharedBase, take_turns


class Run:
    """A run of some steps, each of which draws a random number and logs."""

    def __init__(self, name: str, num_steps: int) -> None:
        torch.manual_seed(num_steps)
        self.turn, self.name, self.num_steps, self.drawn = RunTurn(name), name, num_steps, list[float]()
        self.loop = SimpleNamespace(turns=self._turns)
        self.settled: bool | None = None

    def _turns(self, is_settled: bool) -> Iterator[str]:
        self.settled = is_settled
        for number in range(self.num_steps):
            self.drawn.append(float(torch.rand(())))
            logging.getLogger("megatron_dapo.test").warning("step %d", number)
            yield ""
        yield f"{self.name} ended"


def test_runs_take_turns_with_their_random_states_until_each_ends(capsys: pytest.CaptureFixture[str]) -> None:
    handler, root = TerminalHandler(), logging.getLogger()
    root.addHandler(handler)
    runs = [Run("a", 1), Run("b", 3)]
    state = torch.get_rng_state()
    try:
        ends = [(run.name, reason) for run, reason in take_turns(runs)]
    finally:
        root.removeHandler(handler)
    assert ends == [("a", "a ended"), ("b", "b ended")]
    for run in runs:
        torch.manual_seed(run.num_steps)
        assert run.drawn == [float(torch.rand(())) for _ in range(run.num_steps)]
        assert run.settled
    torch.set_rng_state(state)
    lines = [line.partition(": ")[0] + line[-7:] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["a step 0", "b step 0", "b step 1", "b step 2"] and not handler.mark


def test_a_run_that_fails_is_named(caplog: pytest.LogCaptureFixture) -> None:
    state = torch.get_rng_state()
    with pytest.raises(KeyError), RunTurn("math"):
        torch.rand(3)
        raise KeyError("no verdict")
    assert "the run failed" in caplog.text and torch.equal(torch.get_rng_state(), state)


def test_a_run_alone_may_leave_a_save_in_flight() -> None:
    run = Run("a", 1)
    assert [reason for _, reason in take_turns([run])] == ["a ended"] and run.settled is False


def test_weights_are_brought_when_another_run_or_version_had_the_engine() -> None:
    base, brought = SharedBase(), list[str]()

    def publisher(name: str) -> DuePublisher:
        sync = SimpleNamespace(publish=lambda version: brought.append(f"{name}{version}"))
        return DuePublisher(sync, base, Phases(PhaseTimer(["weight_sync"])))

    a, b = publisher("a"), publisher("b")
    a.publish(0)
    b.publish(0)
    assert not brought
    for each in (a, a, b, a):
        each.bring()
    assert brought == ["a0", "b0", "a0"]
    a.publish(1)
    a.bring()
    b.bring()
    assert brought[3:] == ["a1", "b0"]


def test_weights_that_could_not_be_verified_are_brought_again() -> None:
    base, brought = SharedBase(), list[int]()

    def publish(version: int) -> None:
        brought.append(version)
        if len(brought) == 1:
            raise RuntimeError("not verified")

    own = DuePublisher(SimpleNamespace(publish=publish), base, Phases(PhaseTimer(["weight_sync"])))
    own.publish(4)
    with pytest.raises(RuntimeError, match="not verified"):
        own.bring()
    own.bring()
    own.bring()
    assert brought == [4, 4]
