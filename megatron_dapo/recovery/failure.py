"""The first root cause of a failed run, in failure.json and as the last line printed.

Once one rank fails, the others fail because of it. The first to record wins; every rank's own record is kept beside it.
An error that says of itself that its cause is elsewhere (`is_consequence`) never wins.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

Kind = Literal["exception", "consequence", "deadline", "signal"]


@dataclass(frozen=True)
class Failure:
    """Why a process ended."""

    rank: int
    kind: Kind
    message: str  # one line
    detail: str = ""  # traceback or stacks
    time: float = field(default_factory=time.time)  # seconds since 1970


def failure_of(rank: int, error: BaseException) -> Failure:
    """The record of an exception."""
    lines = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    message = " ".join(f"{type(error).__name__}: {error}".split())
    kind: Kind = "consequence" if getattr(error, "is_consequence", False) else "exception"
    return Failure(rank=rank, kind=kind, message=message, detail=lines)


def record_failure(run_folder: Path, failure: Failure) -> bool:
    """Write this rank's record, and failure.json if it is the first. Returns whether it was."""
    run_folder.mkdir(parents=True, exist_ok=True)
    own = run_folder / f"failure_rank_{failure.rank}.json"
    partial = own.with_suffix(".tmp")
    partial.write_text(json.dumps(asdict(failure), indent=1), encoding="utf-8")
    os.replace(partial, own)
    if failure.kind == "consequence":
        return False
    try:
        os.link(own, run_folder / "failure.json")  # fails if another rank was first
    except FileExistsError:
        return False
    return True


def read_failure(run_folder: Path) -> Failure | None:
    """The first root cause (where only consequences are on record, the first of them), or None where nothing is."""
    path = run_folder / "failure.json"
    if path.is_file():
        return _read(path)
    return min(map(_read, run_folder.glob("failure_rank_*.json")), key=lambda failure: failure.time, default=None)


def _read(path: Path) -> Failure:
    return Failure(**json.loads(path.read_text(encoding="utf-8")))


def clear_failures(run_folder: Path) -> None:
    """Forget an earlier attempt's failures; rank 0 calls it before the work starts."""
    for path in [run_folder / "failure.json", *run_folder.glob("failure_rank_*.json")]:
        path.unlink(missing_ok=True)


def last_line(failure: Failure) -> str:
    """The line to print last."""
    return f"first failure: rank {failure.rank}, {failure.kind}: {failure.message}"
