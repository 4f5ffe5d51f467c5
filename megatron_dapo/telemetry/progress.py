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
from rich.table import Column

from megatron_dapo.telemetry.terminal import end_status, logging_console

logger = logging.getLogger(__name__)

_LOG_S = 60.0  # interval of log lines within a step, so that an hour-long step is not silent


@dataclass(frozen=True)
class StepReport:
    finished: int  # train steps
    accuracy: float  # mean over all generated responses
    reward: float  # mean of the trained responses
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


def figures(report: StepReport, alarm: float, eta: float | None) -> list[str]:
    """Return a step's figures as texts, the most important first. `alarm`: the mismatch above which it is marked."""
    above = f" (above {alarm:g})" if report.mismatch > alarm or not math.isfinite(report.mismatch) else ""
    return [
        f"acc {report.accuracy:.2f}",
        f"reward {report.reward:.2f}",
        f"ETA {duration(eta)}",
        f"{report.tokens_per_s:,.0f} tok/s",
        f"filtered {report.filtered_share:.0%}",
        f"mismatch {report.mismatch:.1e}{above}",
    ]


class WithinStep:
    """Share of the current step that is done: from the seconds of each phase in the previous step, and from counts if a
    phase has some.

    In the first step, all phases count equally, and those without counts as half done.
    """

    def __init__(self) -> None:
        self._before: dict[str, float] = {}  # phase -> seconds in the previous step
        self._seconds: dict[str, float] = {}  # phase -> seconds in the current step
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
        # One column of text: a narrow terminal cuts its end, and not a part of every figure.
        cut = Column(no_wrap=True, overflow="ellipsis", ratio=1)
        self._progress = Progress(
            MofNCompleteColumn(),
            BarColumn(bar_width=12),
            _StepBar(self._within),
            TextColumn("{task.fields[phase]:<16}"),
            TextColumn("{task.fields[figures]}", markup=False, table_column=cut),
            console=console,
            transient=True,
            expand=True,
        )
        self._task = self._progress.add_task("train", total=total, completed=finished, phase="", figures="")
        self._figures: list[str] = []
        self._track = ""
        self._progress.start()

    def phase(self, text: str, done: float = 0.0, total: float = 0.0) -> None:
        """Show the current phase, e.g. ("generate", 17, 32)."""
        self._within.enter(text, done, total)
        self._progress.update(self._task, phase=f"{text} {done:.0f}/{total:.0f}" if total else text)

    def step(self, report: StepReport) -> None:
        self._within.finish_step()
        self._figures = figures(report, self._alarm, self._eta.seconds(report.finished))
        self._show(completed=report.finished)

    def track(self, verdict: str) -> None:
        """Show how the run compares to its reference: the words of the verdict before the figures."""
        self._track = verdict.partition(":")[0]
        self._show()

    def _show(self, **more: Any) -> None:
        self._progress.update(self._task, figures=" · ".join(filter(None, [self._track, *self._figures])), **more)

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
        texts = figures(report, self._alarm, self._eta.seconds(report.finished))
        logger.info("step %d/%d  %s", report.finished, self._total, "  ".join(texts))

    def track(self, verdict: str) -> None:
        """Do nothing: the whole verdict has a separate log line."""

    def close(self) -> None:
        """Do nothing: log lines stay."""


ProgressView = LiveProgress | LogProgress


def progress_view(
    total: int, alarm: float, finished: int = 0, console: Console | None = None, is_alone: bool = True
) -> ProgressView:
    """Return a live line on a terminal, log lines otherwise and if the run shares the terminal with others. `alarm`: the
    mismatch above which the figure is marked."""
    end_status()
    console = console or logging_console()
    if is_alone and console.is_terminal and not console.is_dumb_terminal:
        return LiveProgress(total, alarm, finished, console)
    return LogProgress(total, alarm, finished)
