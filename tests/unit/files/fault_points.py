"""Faults at a write point of a process: `arm` it there, in a file process too."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable

CALLS = ("write", "fsync", "open", "replace", "mkdir", "unlink")
_REAL = {name: getattr(os, name) for name in CALLS}
_seen: list[str] = []


def arm(point: int, kind: str = "full") -> None:
    """Have the `point`-th call of the os functions from now on fail for want of space, or "kill" its process."""
    _seen.clear()

    def wrap(name: str, real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            _seen.append(name)
            if len(_seen) == point and kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if len(_seen) == point:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*args, **kwargs)

        return call

    for name, real in _REAL.items():
        setattr(os, name, wrap(name, real))


def disarm() -> list[str]:
    """Take the fault out and return the names of the functions that were called meanwhile."""
    for name, real in _REAL.items():
        setattr(os, name, real)
    return list(_seen)


def slow_down(seconds: float) -> None:
    """Have each write of this process take so much longer."""

    def write(*arguments: object) -> object:
        time.sleep(seconds)
        return _REAL["write"](*arguments)

    os.write = write
