"""The first root cause of a failed run, in failure.json and as the last line printed.

Once one rank fails, the others fail because of it. The first to record wins; every rank's own record is kept beside it.
An error that another rank caused (`is_consequence`) never wins.
"""

from __future__ import annotations

import json
import math
import os
import time
import traceback
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

_ATTEMPT = "attempt"  # file with the number of the last start

Kind = Literal["exception", "consequence", "deadline", "signal"]


@dataclass(frozen=True)
class Failure:
    """The end of a process and its reason."""

    rank: int
    kind: Kind
    message: str  # one line
    detail: str = ""  # traceback or stacks
    time: float = field(default_factory=time.time)  # seconds since 1970
    attempt: int = 1  # start of the run in its output directory, from 1


def failure_of(rank: int, error: BaseException) -> Failure:
    """The record of an exception."""
    lines = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    message = " ".join(f"{type(error).__name__}: {error}".split())
    kind: Kind = "consequence" if getattr(error, "is_consequence", False) else "exception"
    return Failure(rank=rank, kind=kind, message=message, detail=lines)


def record_failure(run_directory: Path, failure: Failure) -> bool:
    """Write this rank's record, and failure.json if it is the first; return whether it was.

    The record takes the number of the attempt under way.
    """
    run_directory.mkdir(parents=True, exist_ok=True)
    # 0 before the first start is counted: a rank may fail earlier than rank 0 counts it.
    failure = replace(failure, attempt=max(1, _attempt(run_directory)))
    own = run_directory / f"failure_rank_{failure.rank}.json"
    partial = own.with_suffix(".tmp")
    partial.write_text(json.dumps(asdict(failure), indent=1), encoding="utf-8")
    os.replace(partial, own)  # readers never see half a record
    if failure.kind == "consequence":
        return False
    try:
        os.link(own, run_directory / "failure.json")  # fails if another rank was first
    except FileExistsError:
        return False
    return True


def read_failure(run_directory: Path) -> Failure | None:
    """The first root cause (where only consequences are on record, the first of them), or None where nothing is."""
    path = run_directory / "failure.json"
    if path.is_file():
        return _read(path)
    return min(map(_read, run_directory.glob("failure_rank_*.json")), key=lambda failure: failure.time, default=None)


def _read(path: Path) -> Failure:
    return Failure(**json.loads(path.read_text(encoding="utf-8")))


def begin_attempt(run_directory: Path, started: float) -> int:
    """Count a start of the run, forget the failures of earlier ones, and return its number.

    Rank 0 calls it before the work starts. started: when its process started, in seconds since 1970; a record of another
    rank that failed since then is one of this attempt and stays.
    """
    run_directory.mkdir(parents=True, exist_ok=True)
    clear_failures(run_directory, before=started)
    number = _attempt(run_directory) + 1
    partial = run_directory / f"{_ATTEMPT}.tmp"
    partial.write_text(str(number), encoding="utf-8")
    os.replace(partial, run_directory / _ATTEMPT)
    return number


def clear_failures(run_directory: Path, before: float = math.inf) -> None:
    """Remove the records of failures before the time `before`, in seconds since 1970; by default all."""
    for path in [run_directory / "failure.json", *run_directory.glob("failure_rank_*.json")]:
        if path.is_file() and _read(path).time < before:
            path.unlink(missing_ok=True)


def _attempt(run_directory: Path) -> int:
    """Return the number of the attempt under way, 0 before the first."""
    try:
        return int((run_directory / _ATTEMPT).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return 0


def last_line(failure: Failure) -> str:
    """The line to print last."""
    attempt = f"attempt {failure.attempt}, " if failure.attempt > 1 else ""
    return f"first failure: {attempt}rank {failure.rank}, {failure.kind}: {failure.message}"
