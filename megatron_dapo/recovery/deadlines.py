"""No wait without a name and an end: half-way a log line says who is pending, at the end stacks are dumped and the
process exits."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_dapo.recovery.failure import Failure, record_failure

logger = logging.getLogger(__name__)

EXIT_CODE = 75  # EX_TEMPFAIL: worth starting again from the last checkpoint

Detail = Callable[[], str]
OnExpired = Callable[[str], None]


class DeadlineError(TimeoutError):
    """A polled wait took longer than it may."""


class Deadline:
    """The end of a wait that is polled: ask `remaining`, call `check` in each turn.

    `clock` returns seconds; tests pass their own.
    """

    def __init__(self, name: str, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.seconds = seconds
        self._clock = clock
        self._start = clock()
        self._warned = False

    @property
    def elapsed(self) -> float:
        return self._clock() - self._start

    @property
    def remaining(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.seconds - self.elapsed)

    def check(self, pending: Detail) -> None:
        """Log once at half time, raise DeadlineError at the end; `pending` says what is still awaited."""
        if self.elapsed >= self.seconds:
            raise DeadlineError(_message(self.name, self.elapsed, self.seconds, pending))
        if not self._warned and self.elapsed >= self.seconds / 2:
            self._warned = True
            logger.warning("%s", _message(self.name, self.elapsed, self.seconds, pending))


@contextmanager
def watch(name: str, seconds: float, detail: Detail, on_expired: OnExpired) -> Iterator[None]:
    """Guard a block that cannot be polled (a collective, a native call).

    At half time a warning says what is pending (`detail()`); at the deadline `on_expired(message)` is called in another
    thread, usually `exit_with_stacks(...)`: the blocked thread cannot be woken.
    """
    start = time.monotonic()
    done = threading.Event()

    def run() -> None:
        if done.wait(seconds / 2):
            return
        logger.warning("%s", _message(name, time.monotonic() - start, seconds, detail))
        if not done.wait(seconds / 2):
            on_expired(_message(name, time.monotonic() - start, seconds, detail))

    thread = threading.Thread(target=run, name=f"deadline of {name}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def exit_with_stacks(run_folder: Path, rank: int) -> OnExpired:
    """What a worker does at a deadline: stacks of all threads to stderr and a file, the reason to failure.json, exit
    non-zero."""

    def on_expired(message: str) -> None:
        stacks = run_folder / f"stacks_rank_{rank}.txt"
        run_folder.mkdir(parents=True, exist_ok=True)
        with open(stacks, "w", encoding="utf-8") as stream:
            faulthandler.dump_traceback(file=stream, all_threads=True)
        faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
        record_failure(
            run_folder, Failure(rank=rank, kind="deadline", message=message, detail=stacks.read_text(encoding="utf-8"))
        )
        sys.__stderr__.write(f"rank {rank}: {message}; stacks are in {stacks}\n")
        sys.__stderr__.flush()
        os._exit(EXIT_CODE)

    return on_expired


def _message(name: str, elapsed: float, seconds: float, detail: Detail) -> str:
    try:
        pending = detail()
    except Exception as error:  # the description must not hide the wait it describes
        pending = f"(no detail: {error!r})"
    return f"waiting for {name} since {elapsed:.1f} s (limit {seconds:.1f} s): {pending}"
