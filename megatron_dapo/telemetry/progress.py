"""Progress of a run: a live line on a terminal, log lines otherwise."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.progress_bar import ProgressBar

logger = logging.getLogger(__name__)

_LOG_S = 60.0  # between log lines within a step, so that an hour-long step is not silent


@dataclass(frozen=True)
class StepReport:
    finished: int  # train steps
    accuracy: float  # over all generated responses
    tokens_per_s: float
    filtered_share: float
    mismatch: float  # mean |old_logprobs - rollout_logprobs|, nats


class Eta:
    """Estimate of the seconds left, from the steps of this process only; steps before a resume do not count."""

    def __init__(self, total: int, finished: int = 0) -> None:
        self._total, self._first, self._start = total, finished, time.monotonic()

    def seconds(self, finished: int) -> float | None:
        """Return the seconds left after `finished` steps; None before this process has finished one."""
        made = finished - self._first
        return (time.monotonic() - self._start) / made * (self._total - finished) if made > 0 else None


def duration(seconds: float | None) -> str:
    """Format seconds as 1:02:03 or 2:03, or "-" for None."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def mismatch_meter(value: float, alarm: float, width: int = 8) -> str:
    """Draw a bar on a logarithmic scale: empty at a millionth of the alarm, full at the alarm."""
    if not math.isfinite(value):
        return "!" * width
    decades = math.log10(value / alarm) + 6 if value > 0 else 0.0
    filled = min(width, max(0, round(decades / 6 * width)))
    return "#" * filled + "." * (width - filled)


class WithinStep:
    """Share of the current step that is done: from the seconds of each phase in the previous step, and from counts if a
    phase has some.

    In the first step, all phases count equally, and those without counts as half done.
    """

    def __init__(self) -> None:
        self._before: dict[str, float] = {}  # phase -> seconds in the previous step
        self._seconds: dict[str, float] = {}  # in this step so far
        self._phase, self._since, self._counted = "", time.monotonic(), 0.0

    def enter(self, phase: str, done: float, total: float) -> None:
        """Note the phase and how much of its count is done; `total` 0: it counts nothing."""
        now = time.monotonic()
        if phase != self._phase:
            self._turn(now)
            self._phase = phase
        self._counted = min(1.0, done / total) if total else 0.0

    def finish_step(self) -> None:
        self._turn(time.monotonic())
        self._before, self._seconds, self._phase = self._seconds, {}, ""

    def _turn(self, now: float) -> None:
        if self._phase:
            self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._since
        self._since, self._counted = now, 0.0

    def share(self) -> float:
        """Return the share in [0, 1]. A phase that takes longer than in the previous step stays at 95 %."""
        if not self._phase:
            return 0.0
        usual = self._before or dict.fromkeys([*self._seconds, self._phase, "next"], 1.0)
        total = sum(usual.values()) or 1.0
        # Finished phases count with their usual time, however long they took now.
        past = sum(seconds for name, seconds in usual.items() if name in self._seconds and name != self._phase)
        current = usual.get(self._phase, 0.0)
        spent = self._seconds.get(self._phase, 0.0) + time.monotonic() - self._since
        by_time = min(0.95, spent / current) if self._before and current else 0.5
        return min(1.0, (past + current * (self._counted or by_time)) / total)


class _StepBar(ProgressColumn):
    """A short bar of the current step, redrawn at each refresh, so it moves even while nothing is reported."""

    def __init__(self, within: WithinStep) -> None:
        super().__init__()
        self._within = within

    def render(self, task: Task) -> ProgressBar:
        return ProgressBar(total=1.0, completed=self._within.share(), width=10)


class LiveProgress:
    """Progress as a live line at the bottom of a terminal: a bar of the run, and a bar of the current step."""

    def __init__(self, total: int, alarm: float, finished: int = 0, console: Console | None = None) -> None:
        self._eta = Eta(total, finished)
        self._alarm = alarm
        self._within = WithinStep()
        fields: dict[str, Any] = dict.fromkeys(("phase", "speed", "filtered", "accuracy", "mismatch", "eta", "track"), "")
        columns = [TextColumn("{task.fields[" + name + "]}") for name in fields]
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            _StepBar(self._within),
            *columns,
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task("train", total=total, completed=finished, **fields)
        self._progress.start()

    def phase(self, text: str, done: float = 0.0, total: float = 0.0) -> None:
        """Show the current phase, e.g. ("generate", 17, 32)."""
        self._within.enter(text, done, total)
        self._progress.update(self._task, phase=f"{text} {done:.0f}/{total:.0f}" if total else text)

    def step(self, report: StepReport) -> None:
        self._within.finish_step()
        self._progress.update(
            self._task,
            completed=report.finished,
            speed=f"{report.tokens_per_s:,.0f} tok/s",
            filtered=f"filtered {report.filtered_share:.0%}",
            accuracy=f"acc {report.accuracy:.2f}",
            mismatch=f"mismatch {report.mismatch:.1e} {mismatch_meter(report.mismatch, self._alarm)}",
            eta=f"ETA {duration(self._eta.seconds(report.finished))}",
        )

    def track(self, verdict: str) -> None:
        """Show how the run compares to its reference: the words of the verdict before the figures."""
        self._progress.update(self._task, track=verdict.partition(":")[0])

    def close(self) -> None:
        self._progress.stop()


class LogProgress:
    """Progress as a log line per step, and one a minute within a step."""

    def __init__(self, total: int, alarm: float, finished: int = 0) -> None:
        self._total, self._alarm, self._eta = total, alarm, Eta(total, finished)
        self._finished, self._said = finished, time.monotonic()

    def phase(self, text: str, done: float = 0.0, total: float = 0.0) -> None:
        """Show the current phase, e.g. ("generate", 17, 32)."""
        now = time.monotonic()
        if now - self._said >= _LOG_S:
            self._said = now
            how_far = f" {done:,.0f}/{total:,.0f}" if total else ""
            logger.info("step %d/%d: %s%s", self._finished + 1, self._total, text, how_far)

    def step(self, report: StepReport) -> None:
        self._finished, self._said = report.finished, time.monotonic()
        logger.info(
            "step %d/%d  acc %.2f  %s tok/s  filtered %.0f%%  mismatch %.1e [%s]  ETA %s",
            report.finished,
            self._total,
            report.accuracy,
            f"{report.tokens_per_s:,.0f}",
            100 * report.filtered_share,
            report.mismatch,
            mismatch_meter(report.mismatch, self._alarm),
            duration(self._eta.seconds(report.finished)),
        )

    def track(self, verdict: str) -> None:
        """Do nothing: the whole verdict has a separate log line."""

    def close(self) -> None:
        """Do nothing: log lines stay."""


ProgressView = LiveProgress | LogProgress


def progress_view(total: int, alarm: float, finished: int = 0, console: Console | None = None) -> ProgressView:
    """Return a live line on a terminal, log lines otherwise. `alarm` is the mismatch at which the meter is full."""
    console = console or Console(stderr=True)
    return LiveProgress(total, alarm, finished, console) if console.is_terminal else LogProgress(total, alarm, finished)
