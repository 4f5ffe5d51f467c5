"""The process between the pool and a verifier process: ends everything that a user's function started.

Linux only; uses only the standard library.

    pool -- SIGTERM --> supervisor (adopts orphans) -> verifier process -> whatever the user's function starts

A function may fork twice and call setsid: such a process belongs to no group or session that the pool knows, and the
kernel gives it to the next ancestor that adopts orphans. That is the supervisor, so it can always find and kill it. It ends
when the verifier process ends, in the same way.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress

TOO_MANY_PROCESSES = 77  # exit code of a supervisor that ended everything for their number
TOO_MUCH_MEMORY = 78  # exit code of a supervisor that ended everything for their memory
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # prctl(2)
_TICK_S = 0.1  # interval of the counts of the processes
_END_S = 5.0


def start_supervised(max_processes: int, max_resident_mb: int = 0) -> None:
    """Fork: return in the child. The calling process watches it, ends what it leaves and ends as the child did.

    More than `max_processes` descendants end them all, with exit code TOO_MANY_PROCESSES; so do descendants that hold more
    than `max_resident_mb` MiB of memory together (0: no limit), with TOO_MUCH_MEMORY.
    """
    if not sys.platform.startswith("linux"):
        return
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Blocked, so that none is lost between two waits; the child gets its own mask back.
    awaited = {signal.SIGCHLD, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    pool, supervisor = os.getppid(), os.getpid()
    child = os.fork()
    if child == 0:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != supervisor:
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    _take_precedence()
    while True:
        received = signal.sigtimedwait(awaited, _TICK_S)
        status = _reap(child)
        if status is None and received is not None and received.si_signo == signal.SIGTERM:
            status = signal.SIGKILL
        if status is None and os.getppid() != pool:
            status = signal.SIGKILL
        if status is None:
            below = descendants(supervisor)
            if len(below) > max_processes:
                status = TOO_MANY_PROCESSES << 8
            elif max_resident_mb and _hold_more_than(max_resident_mb * 2**20, below):
                status = TOO_MUCH_MEMORY << 8
        if status is not None:
            end_descendants(supervisor)
            _end_like(status)


def _hold_more_than(limit: int, processes: Iterable[int]) -> bool:
    """Return True if processes hold more than `limit` bytes of memory together.

    Pages that several of them share count once, for which the kernel needs time: only if the plain sum is above the limit.
    """
    resident = sum(map(resident_pages, processes)) * os.sysconf("SC_PAGE_SIZE")
    return resident > limit and sum(_proportional_kib(pid) for pid in processes) * 1024 > limit


def resident_pages(pid: int) -> int:
    """Return the pages of memory that a process holds; 0 for one that has ended."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1])
    except (OSError, IndexError):
        return 0


def _proportional_kib(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("Pss:")), 0)
    except OSError:
        return 0


def _take_precedence() -> None:
    """Raise this process's priority above a user's function's, if root or a capability allows it.

    Otherwise processes that double twenty times a second would take all the time needed to end them.
    """
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        return
    with suppress(OSError):  # a container may have no real-time priorities
        os.setpriority(os.PRIO_PROCESS, 0, -20)


def _reap(child: int) -> int | None:
    """Reap every ended child, including adopted ones. Return the wait status of `child` if it was among them."""
    found = None
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                found = ended[1]
    except ChildProcessError:
        pass
    return found


def descendants(pid: int) -> list[int]:
    """Return the processes below `pid`, including ended ones that have not been reaped."""
    found, left = [], [pid]
    while left:
        parent = left.pop()
        children = [child for thread in _threads(parent) for child in _children(parent, thread)]
        found += children
        left += children
    return found


def _threads(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []


def _children(pid: int, thread: str) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as stream:
            return [int(child) for child in stream.read().split()]
    except OSError:
        return []


def end_descendants(pid: int) -> None:
    """Kill until none is left, because a killed process's children become children of this one."""
    end = time.monotonic() + _END_S
    while (alive := descendants(pid)) and time.monotonic() < end:
        for process in alive:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                pass
        _reap(0)


def _end_like(status: int) -> None:
    """End this process with the wait status of another one."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))
