"""One run a folder, processes that end with the one that started them, and stacks of a running one."""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

_PR_SET_PDEATHSIG = 1  # prctl(2)


def end_with_parent(signum: int) -> Callable[[], None]:
    """A function that asks the kernel to send the calling process `signum` when its parent dies, however it dies.

    It may run between fork and exec: the C library is found here, not there. Only Linux has this; elsewhere it does
    nothing.
    """
    if not sys.platform.startswith("linux"):
        return lambda: None
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)

    return ask


class FolderLock:
    """Held by rank 0 while it lives, so that no second run writes into the folder. Any death releases it."""

    def __init__(self, run_folder: Path) -> None:
        """Take the lock. RuntimeError, naming the process, where another run holds it."""
        run_folder.mkdir(parents=True, exist_ok=True)
        self._stream = _lock(run_folder)
        self._stream.truncate(0)
        self._stream.write(str(os.getpid()))
        self._stream.flush()

    def release(self) -> None:
        self._stream.close()


def require_unused(run_folder: Path) -> None:
    """RuntimeError where a run works in `run_folder` now."""
    if (run_folder / _LOCK).is_file():
        _lock(run_folder).close()


_LOCK = "run.lock"


def _lock(run_folder: Path) -> TextIO:
    stream = open(run_folder / _LOCK, "a+", encoding="utf-8")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.seek(0)
        holder = stream.read() or "unknown"
        stream.close()
        raise RuntimeError(
            f"run folder {run_folder} is in use by process {holder}: wait for that run, stop it, or choose another "
            "run.output_dir"
        ) from None
    return stream


def stacks_on_request(file: Path) -> None:
    """From now on SIGUSR1 appends the stacks of all threads to `file`, also while native code runs."""
    file.parent.mkdir(parents=True, exist_ok=True)
    # Stays open for the life of the process: faulthandler keeps the descriptor only.
    stream = open(file, "w", encoding="utf-8")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=stream, all_threads=True)
