"""Runs of grids as parallel subprocesses of the shipped commands, until all are on record or a limit is reached.

    pretrain-value --output-dir CRITIC      once for all runs that share the critic
    train --output-dir RUN                  or the variant's program; continues from the newest checkpoint
    keep(RUN)                               -> results.jsonl

After a kill, the next call continues: it skips runs on record, records finished runs that lack a record, and lets
`train` resume unfinished ones.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_dapo.ablation.runs import Run
from megatron_dapo.files.linux import signal_at_parents_death

COMMAND = (sys.executable, "-m", "megatron_dapo.cli.main")
_POLL_S = 0.1
_KILL_AFTER_S = 120.0  # A stopped run saves a checkpoint before it exits.

logger = logging.getLogger(__name__)

Tell = Callable[[str], None]  # takes one line for the user


@dataclass(frozen=True)
class Limits:
    """Limits of one call. A run in progress when a limit is reached saves a checkpoint and stops."""

    jobs: int = 1  # parallel runs
    seconds: float = float("inf")
    max_runs: float = float("inf")  # finished runs


@dataclass
class QueueResult:
    """Outcome of one call."""

    records: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)  # one line each
    was_stopped: bool = False  # A signal or a limit came while runs were left.


@dataclass
class _Job:
    run: Run
    log: Path
    process: subprocess.Popen
    slot: int
    is_pretraining: bool


class RunQueue:
    """Executes the runs of one `megatron-dapo ablate` call."""

    def __init__(
        self,
        keep: Callable[[Run], dict[str, Any]],
        limits: Limits,
        devices: Sequence[str] = (),
        tell: Tell = logger.info,
        command: Sequence[str] = COMMAND,
    ) -> None:
        """`keep`: puts a finished run on record and returns the record; raises ValueError if it has not finished.
        `devices`: GPUs to divide among the parallel runs. `command`: this package's command."""
        self._keep, self._limits = keep, limits
        self._devices, self._tell, self._command = tuple(devices), tell, tuple(command)
        self._waiting: list[Run] = []
        self._jobs: list[_Job] = []
        self._done = QueueResult()
        self._stop_at: float | None = None  # monotonic time; set when the runs get the stop signal

    def make(self, runs: Sequence[Run]) -> QueueResult:
        """Execute `runs` in order, as far as the limits allow. SIGINT or SIGTERM ends the call; a second one kills."""
        self._waiting = list(runs)
        begun = time.monotonic()
        previous = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            while self._jobs or (self._waiting and self._stop_at is None):
                if time.monotonic() - begun >= self._limits.seconds or self._is_full and not self._jobs:
                    self._stop()
                self._start_waiting()
                for job in [each for each in self._jobs if each.process.poll() is not None]:
                    self._jobs.remove(job)
                    self._finish(job)
                if self._stop_at is not None and time.monotonic() - self._stop_at > _KILL_AFTER_S:
                    self._kill()
                time.sleep(_POLL_S)
        finally:
            self._kill()
            for number, handler in previous.items():
                signal.signal(number, handler)
        self._done.was_stopped = self._stop_at is not None
        return self._done

    @property
    def _is_full(self) -> bool:
        under_way = sum(not job.is_pretraining for job in self._jobs)
        return len(self._done.records) + under_way >= self._limits.max_runs

    def _start_waiting(self) -> None:
        while self._stop_at is None and len(self._jobs) < self._limits.jobs and not self._is_full:
            busy = {job.run.critic_directory for job in self._jobs if job.is_pretraining}
            free = [run for run in self._waiting if run.critic_directory is None or run.critic_directory not in busy]
            if not free:
                return
            self._start(free[0])

    def _start(self, run: Run) -> None:
        pretrains = run.critic_directory is not None and not _is_pretrained(run.critic_directory)
        directory = run.critic_directory if pretrains and run.critic_directory else run.directory
        overrides = [part for override in run.overrides for part in ("--set", override)]
        if run.critic_directory is not None and not pretrains:
            overrides += ["--set", f"critic.path={run.critic_directory / 'critic'}"]
        verbs = [*self._command, "pretrain-value" if pretrains else "train"]
        program = [sys.executable, str(run.variant.program)] if run.variant.program else verbs
        command = [*program, str(run.variant.recipe), *overrides, "--output-dir", str(directory)]
        slot = min(set(range(self._limits.jobs)) - {job.slot for job in self._jobs})
        directory.mkdir(parents=True, exist_ok=True)
        log = directory / "ablate.log"
        with open(log, "ab") as stream:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=run_environment(os.environ, slot, self._limits.jobs, run.num_processes, self._devices),
                start_new_session=True,  # only this process passes on a terminal's Ctrl-C
                preexec_fn=signal_at_parents_death(signal.SIGTERM),
            )
        self._jobs.append(_Job(run, log, process, slot, pretrains))
        if not pretrains:
            self._waiting.remove(run)
        self._tell(f"{run.label}: {'pretraining its critic' if pretrains else 'training'} in {directory}")

    def _finish(self, job: _Job) -> None:
        code = job.process.returncode
        if code and self._stop_at is not None:
            return  # stopped on request; the next call resumes it
        try:
            if code:
                raise ValueError(f"exit code {code}: {_last_line(job.log)} (see {job.log})")
            if not job.is_pretraining:
                self._record(job.run)
        except (ValueError, OSError, KeyError) as error:
            self._fail(job, f"{job.run.label}: {error}")

    def _record(self, run: Run) -> None:
        record = self._keep(run)
        self._done.records.append(record)
        mean = sum(record["after"]) / len(record["after"])
        self._tell(
            f"{run.label}: held-out accuracy {mean:.3f} after {record['train_steps']} train steps, "
            f"{record['train_seconds']:.0f} s of training; {len(self._waiting)} runs left"
        )

    def _fail(self, job: _Job, reason: str) -> None:
        self._done.failures.append(reason)
        self._tell(reason)
        if job.is_pretraining:
            # It would fail the same way for every run that shares the critic.
            critic = job.run.critic_directory
            self._waiting = [run for run in self._waiting if run.critic_directory != critic]

    def _on_signal(self, signum: int, frame: object) -> None:
        if self._stop_at is None:
            self._tell("stopping: runs under way save a checkpoint; once more to end them at once")
            self._stop()
        else:
            self._kill()

    def _stop(self) -> None:
        if self._stop_at is None:
            self._stop_at = time.monotonic()
            for job in self._jobs:
                job.process.send_signal(signal.SIGTERM)

    def _kill(self) -> None:
        for job in self._jobs:
            if job.process.poll() is None:
                # The workers end with the command; they also ask the kernel for that.
                os.killpg(job.process.pid, signal.SIGKILL)


def run_environment(
    environment: Mapping[str, str], slot: int, jobs: int, num_processes: int, devices: Sequence[str]
) -> dict[str, str]:
    """Return the environment of one of several parallel runs: its GPUs, and its share of threads unless the user set it."""
    threads = max(1, (os.cpu_count() or 1) // (jobs * num_processes))
    own = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", **environment}
    if devices and jobs > 1:
        own["CUDA_VISIBLE_DEVICES"] = ",".join(devices[slot * num_processes : (slot + 1) * num_processes])
    return own


def _is_pretrained(directory: Path) -> bool:
    return (directory / "critic").is_dir() and (directory / "summary.json").is_file()


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][-300:] if lines else "no output"
