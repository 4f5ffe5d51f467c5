"""Feeds mutated files to readers, one at a time, and reports what they do."""

from __future__ import annotations

import logging
import random
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.fuzzing.target import Target, check_message

SECONDS = 1.0  # processor time for one input


@dataclass
class Report:
    """Counts over all inputs, and the findings."""

    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    slowest_seconds: float = 0.0
    by_target: Counter[str] = field(default_factory=Counter)
    findings: list[tuple[str, str, int, str]] = field(default_factory=list)  # kind, target, input, message

    def to_json(self) -> dict[str, Any]:
        kinds = Counter(kind for kind, *_ in self.findings)
        counts = {"tracebacks": kinds["traceback"], "hangs": kinds["hang"], "unreadable_messages": kinds["message"]}
        facts = {**vars(self), "findings": self.findings[:20]}
        return {**counts, **facts}


class _Hang(BaseException):
    """The time of an input is over."""


def fuzz(
    targets: Sequence[Target], num_inputs: int, seed: int, only: int | None = None, seconds: float = SECONDS
) -> Report:
    """Feed `num_inputs` inputs, spread over the targets by weight, and report."""
    report = Report()
    previous = signal.signal(signal.SIGPROF, _raise_hang)
    logging.disable(logging.CRITICAL)
    try:
        with tempfile.TemporaryDirectory(prefix="fuzz") as scratch:
            directories = _valid_directories(targets, Path(scratch))
            for number in range(num_inputs):
                rng = random.Random(f"{seed}/{number}")
                target = rng.choices(targets, [each.weight for each in targets])[0]
                if only is None or number == only:
                    _feed(target, directories[target.name], number, rng, report, seconds)
    finally:
        logging.disable(logging.NOTSET)
        signal.signal(signal.SIGPROF, previous)
    return report


def _valid_directories(targets: Sequence[Target], scratch: Path) -> Mapping[str, Path]:
    """Write each target's valid files, and read them: what is refused from the start tests nothing."""
    directories = {}
    for number, target in enumerate(targets):
        directories[target.name] = directory = scratch / str(number)
        directory.mkdir()
        target.write(directory)
        target.read(directory)
    return directories


def _feed(target: Target, directory: Path, number: int, rng: random.Random, report: Report, seconds: float) -> None:
    path = directory / target.file
    valid = path.read_bytes()
    content = rng.choice(target.mutations)(rng, valid)
    path.write_bytes(content)
    report.inputs += 1
    report.by_target[target.name] += 1
    began = time.process_time()
    found = None
    signal.setitimer(signal.ITIMER_PROF, seconds, seconds)
    try:
        target.read(directory)
        report.accepted += 1
    except (ValueError, OSError, RuntimeError) as error:
        signal.setitimer(signal.ITIMER_PROF, 0)
        found = _finding_of(error, directory, target)
        report.refused += 1
    except _Hang:
        found = ("hang", f"more than {seconds:g} s")
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        found = ("traceback", _last_frames(error))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        path.write_bytes(valid)
    spent = time.process_time() - began
    report.slowest_seconds = max(report.slowest_seconds, round(spent, 3))
    if found is None and spent > seconds:
        found = ("hang", f"{spent:.1f} s")
    if found is not None:
        report.findings.append((found[0], target.name, number, found[1]))


def _finding_of(error: Exception, directory: Path, target: Target) -> tuple[str, str] | None:
    """Return what is wrong with a refusal: only errors made for users count as one."""
    from megatron_dapo.checkpoints.store import CheckpointError

    if isinstance(error, RuntimeError) and not isinstance(error, CheckpointError):
        return "traceback", _last_frames(error)
    try:
        check_message(error, directory, target.lists)
    except AssertionError as problem:
        return "message", f"{problem}; {_last_frames(error)}"
    return None


def _last_frames(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    places = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames))
    return f"{type(error).__name__}: {str(error)[:200]!r} at {places}"


def _raise_hang(signum: int, frame: object) -> None:
    raise _Hang
