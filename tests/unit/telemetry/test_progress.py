"""The display shows the numbers, on a terminal and in a log."""

from __future__ import annotations

import io
import logging
from dataclasses import replace

import pytest
from rich.console import Console

from megatron_dapo.telemetry.progress import (
    Eta,
    LiveProgress,
    LogProgress,
    StepReport,
    WithinStep,
    duration,
    figures,
    progress_view,
)

REPORT = StepReport(finished=3, accuracy=0.42, reward=0.125, tokens_per_s=12345.6, filtered_share=0.25, mismatch=1e-6)
FIGURES = ("12,346 tok/s", "filtered 25%", "acc 0.42", "reward 0.12", "mismatch 1.0e-06", "ETA")


def test_live_line_shows_everything() -> None:
    stream = io.StringIO()
    view = progress_view(10, alarm=0.05, console=Console(file=stream, force_terminal=True, width=220))
    assert isinstance(view, LiveProgress)
    view.phase("generate", 17, 32)
    view.step(REPORT)
    view.track("off track since train step 2: eval/avg_at_k 0.1, reference 0.3")
    view.close()
    for text in ("3/10", "generate 17/32", *FIGURES, "since"):
        assert text in stream.getvalue(), text


def test_the_bar_of_a_step_moves_while_nothing_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    now, stream = [0.0], io.StringIO()
    view = LiveProgress(10, alarm=0.05, console=Console(file=stream, force_terminal=True, width=220))
    monkeypatch.setattr("megatron_dapo.telemetry.progress.time.monotonic", lambda: now[0])
    view.phase("train")
    now[0] = 10.0
    view.step(REPORT)
    view.phase("train")
    drawn = set()
    for now[0] in (11.0, 15.0, 19.0):
        stream.truncate(0)
        view._progress.refresh()
        drawn.add(stream.getvalue())
    view.close()
    assert len(drawn) == 3, "each refresh draws a longer bar"


def test_log_line_shows_everything(caplog: pytest.LogCaptureFixture) -> None:
    view = progress_view(10, alarm=0.05, console=Console(file=io.StringIO()))
    assert isinstance(view, LogProgress)
    with caplog.at_level(logging.INFO):
        view.phase("generate", 1, 2)
        view.step(REPORT)
        view.close()
    for text in ("step 3/10", *FIGURES):
        assert text in caplog.text


def test_eta_counts_this_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("megatron_dapo.telemetry.progress.time.monotonic", lambda: now[0])
    eta = Eta(total=100, finished=90)
    assert eta.seconds(90) is None
    now[0] = 20.0
    assert eta.seconds(95) == 20.0


@pytest.mark.parametrize(("seconds", "text"), [(None, "-"), (0, "0:00"), (59.6, "1:00"), (3723, "1:02:03")])
def test_duration(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "words"), [(5e-5, "mismatch 5.0e-05"), (0.06, "mismatch 6.0e-02 (above 0.05)"), (float("nan"), "mismatch nan (above 0.05)")]
)
def test_a_mismatch_above_the_alarm_says_so(value: float, words: str) -> None:
    assert figures(replace(REPORT, mismatch=value), 0.05, None)[-1] == words


def test_a_narrow_terminal_keeps_the_first_figures() -> None:
    stream = io.StringIO()
    view = LiveProgress(24, alarm=0.05, console=Console(file=stream, force_terminal=True, width=80))
    view.phase("checkpoint")
    view.step(REPORT)
    view.close()
    last = stream.getvalue()
    for text in ("3/24", "checkpoint", "acc 0.42 · reward 0.12"):
        assert text in last, text


def test_the_share_of_a_step_follows_the_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("megatron_dapo.telemetry.progress.time.monotonic", lambda: now[0])
    within = WithinStep()
    shares = []

    def work(phase: str, seconds: float, counts: int = 0) -> None:
        for part in range(4):
            within.enter(phase, part + 1 if counts else 0, counts)
            now[0] += seconds / 4
            shares.append(within.share())

    work("generate", 30.0, counts=4)
    work("train", 10.0)
    assert shares == sorted(shares) and 0 < shares[0] < shares[-1] < 1
    within.finish_step()
    assert within.share() == 0.0
    shares.clear()
    work("generate", 30.0, counts=4)
    # Three quarters of the step before were generation, whose counts say more than the clock.
    assert shares == pytest.approx([0.1875, 0.375, 0.5625, 0.75])
    shares.clear()
    work("train", 40.0)
    assert shares == pytest.approx([0.9875] * 4), "a phase that takes longer than before is never done"


def test_a_long_step_says_where_it_is(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    monkeypatch.setattr("megatron_dapo.telemetry.progress.time.monotonic", lambda: now[0])
    view = LogProgress(10, alarm=0.05, finished=3)
    with caplog.at_level(logging.INFO):
        for second in range(0, 150, 10):
            now[0] = float(second)
            view.phase("generate", second, 512)
    assert caplog.messages == ["step 4/10: generate 60/512", "step 4/10: generate 120/512"]
