"""Deadlines on lack of progress: at half time a log line says what is pending, at the end the process exits with stacks."""

from __future__ import annotations

import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_dapo.parallel.coordination import Progress
from megatron_dapo.recovery.failure import Failure, record_failure

logger = logging.getLogger(__name__)

EXIT_CODE = 75  # EX_TEMPFAIL: worth starting again from the last checkpoint
_REPORT_S = 20.0  # stacks and records may take this long before the process ends without them


@contextmanager
def watch(
    name: str, seconds: float, on_expired: Callable[[str], None], progress: Progress | None = None
) -> Iterator[None]:
    """Guard a block that cannot be polled (a collective, a native call) by a deadline on lack of progress.

    After seconds / 2 without progress a warning names the block; after `seconds` another thread calls
    `on_expired(message)`, usually `exit_with_stacks`, since the blocked thread cannot be woken. Entering the block counts
    as progress, and so does `progress.mark()`: with it the block itself may last any time.
    """
    progress = progress or Progress()
    progress.mark()
    done = threading.Event()

    def message() -> str:
        return f"waiting for {name}: no progress for {progress.idle_s:.1f} s (limit {seconds:.1f} s)"

    def run() -> None:
        has_warned = False
        while (idle := progress.idle_s) < seconds:
            if idle < seconds / 2:
                has_warned = False  # there was progress: the next silence gets a warning of its own
            elif not has_warned:
                has_warned = True
                logger.warning("%s", message())
            if done.wait((seconds if has_warned else seconds / 2) - idle):
                return
        on_expired(message())

    thread = threading.Thread(target=run, name=f"deadline of {name}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()  # no warning about a block that has ended


def exit_after(seconds: float, code: int) -> None:
    """End the process after `seconds`, also while another thread hangs in a write to a full disk or a dead file system."""
    timer = threading.Timer(seconds, os._exit, [code])
    timer.daemon = True
    timer.start()


def exit_with_stacks(output_dir: Path, rank: int, message: str) -> None:
    """End this worker at a deadline: stacks of all threads to stderr and a file, the reason to failure.json, exit code 75.

    Every write may hang on a broken file system, so the exit is armed before the first, and stderr comes before files.
    """
    exit_after(_REPORT_S, EXIT_CODE)
    stacks = _stacks()
    file = output_dir / f"stacks_rank_{rank}.txt"
    _say(f"{stacks}\nrank {rank}: {message}; stacks are in {file}\n")
    output_dir.mkdir(parents=True, exist_ok=True)
    file.write_text(stacks, encoding="utf-8")
    record_failure(output_dir, Failure(rank=rank, kind="deadline", message=message, detail=stacks))
    os._exit(EXIT_CODE)


def _stacks() -> str:
    """Return the Python stacks of all threads. Unlike faulthandler's, writing them releases the GIL if the write hangs."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames().items()
    return "\n".join(
        f"thread {names.get(number, number)}:\n{''.join(traceback.format_stack(frame))}" for number, frame in frames
    )


def _say(text: str) -> None:
    # The descriptor itself: the lock of sys.stderr may be held by the thread that hangs.
    os.write(2, text.encode("utf-8", errors="replace"))
