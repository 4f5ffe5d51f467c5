"""Uninterrupted runs, and runs of the same configuration that are killed and restarted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from whole_runs import RUN_TIMEOUT_S

from tools.resume_proof.compare_runs import run_differences
from tools.resume_proof.kill_points import (
    ResumeProofSettings,
    RunProcess,
    RunWasOver,
    after_seconds,
    kill_at,
    make_reference,
    resume_and_compare,
)


@dataclass(frozen=True)
class Finished:
    """A run that was never interrupted, and what it takes to make another of the same configuration."""

    settings: ResumeProofSettings
    directory: Path
    seconds: float  # time after start-up

    def run(self, directory: Path, *extra: str, command: Sequence[str] = ()) -> RunProcess:
        """`extra`: overrides; `command`: further options of the command line."""
        return RunProcess(self.settings, directory, extra, command)


def finish(recipe: Path, layout: str, directory: Path, *overrides: str) -> Finished:
    """Run to the end in `directory`, keeping every checkpoint."""
    settings = ResumeProofSettings(recipe, layout, directory, overrides, run_timeout_s=RUN_TIMEOUT_S)
    reference, _, seconds = make_reference(settings)
    return Finished(settings, reference, seconds)


def kill_and_resume(finished: Finished, directory: Path, *overrides: str) -> None:
    """Another run, killed (kill -9) at a random moment and started again, is the same run; `overrides` besides."""
    settings = replace(finished.settings, overrides=(*finished.settings.overrides, *overrides))
    seconds = random.uniform(0.1, 0.95) * finished.seconds
    try:
        killed = kill_at(settings, directory, after_seconds(seconds)[1])
    except RunWasOver:
        assert next(run_differences(finished.directory, directory), "") == ""
        return
    assert not killed.left, "outlived the kill"
    assert not (directory / "summary.json").exists()
    difference = resume_and_compare(settings, finished.directory, directory)[1]
    assert difference == "", f"killed {seconds:.3f} s after start-up"


def signaled(run: RunProcess, signum: int, after_steps: int) -> int:
    """Return the exit code of a run that got a signal once so many steps were on record."""
    metrics = run.directory / "metrics.jsonl"
    came_so_far = run.wait_until(lambda: metrics.is_file() and metrics.read_bytes().count(b"\n") >= after_steps)
    assert came_so_far, run.exit_reason()
    run.process.send_signal(signum)
    return run.wait()
