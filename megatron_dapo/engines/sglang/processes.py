"""The processes of one server: found, watched and ended as a whole, whatever state they are in. Standard library only,
for the engine's own processes import it as well.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# SGLang's load reports: a killed server cannot remove them.
_LEFTOVER = re.compile(r"/dev/shm/sglang_loads_\S+")
_SHARED_MEMORY, _LEFTOVER_FILES = Path("/dev/shm"), "sglang_loads_*"
_LEFTOVER_AGE_S = 60.0  # a younger file may belong to a server that has not mapped it yet
_TICK_S = 0.02
_TRACKER_S = 2.0  # multiprocessing's resource tracker removes semaphores once all others have ended.


@dataclass(frozen=True)
class ProcessId:
    """Identity of a process: a pid may be used again, a pid with its start time is not."""

    pid: int
    started: int  # clock ticks since boot

    @property
    def is_running(self) -> bool:
        status = _status(self.pid)
        return status is not None and status.started == self.started and status.state not in "ZX"


@dataclass(frozen=True)
class _Status:
    state: str
    parent: int
    session: int
    started: int


def leave_signals_to_starter() -> None:
    """Block SIGINT and SIGTERM in this process and those it starts.

    Slurm and some agents signal every process of a job, while the trainer still wants the tokens generated so far. It
    ends its engines itself, by SIGKILL.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))


def end_with_starter(scratch: Path | None = None) -> None:
    """End this process's session, and remove `scratch`, as soon as the other end of its standard input closes.

    The starter's end closes however the starter dies. PR_SET_PDEATHSIG would not do here: the kernel sends it already
    when the THREAD that started this process ends.
    """

    def watch() -> None:
        while os.read(0, 1):
            pass
        end_session(scratch)

    threading.Thread(target=watch, name="watch-starter", daemon=True).start()


def end_session(scratch: Path | None = None) -> None:
    """Kill every process of the caller's session, itself last, and remove `scratch` and what they leave.

    multiprocessing's resource tracker is spared: it removes their semaphores and then ends by itself.
    """
    if scratch is not None:
        shutil.rmtree(scratch, ignore_errors=True)
    session, caller = os.getsid(0), os.getpid()
    members = [pid for pid, status in _process_table().items() if status.session == session]
    others = [pid for pid in members if pid != caller and not _is_resource_tracker(pid)]
    _signal(others, signal.SIGSTOP)  # a process that runs on could make a file after its maps were read
    for file in {file for pid in members for file in leftovers(pid)}:
        file.unlink(missing_ok=True)
    _signal(others, signal.SIGKILL)
    os.kill(caller, signal.SIGKILL)


def leftovers(pid: int) -> set[Path]:
    """Shared-memory files of SGLang's that `pid` has mapped and that outlive a kill."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    return {Path(name) for name in _LEFTOVER.findall(maps)}


def remove_leftovers() -> None:
    """Remove this user's shared-memory files of servers that were killed together with all who would have removed them."""
    files = [file for file in _SHARED_MEMORY.glob(_LEFTOVER_FILES) if _is_old_and_ours(file)]
    if files:
        mapped = {file for pid in _process_table() for file in leftovers(pid)}
        for file in set(files) - mapped:
            file.unlink(missing_ok=True)


def _is_old_and_ours(file: Path) -> bool:
    try:
        status = file.stat()
    except OSError:
        return False
    return status.st_uid == os.getuid() and time.time() - status.st_mtime > _LEFTOVER_AGE_S


class ProcessTree:
    """A started server (a session leader) and all it has started since."""

    def __init__(self, leader: subprocess.Popen[bytes]) -> None:
        self._leader = leader
        self._workers: set[ProcessId] = set()
        self._seen: set[ProcessId] = set()
        self._files: set[Path] = set()

    @property
    def exit_code(self) -> int | None:
        """Exit code of the leader (negative: the signal that ended it), None while it runs.

        Asking does not reap it: its number stays taken until `kill`.
        """
        if self._leader.returncode is not None:
            return self._leader.returncode
        ended = os.waitid(os.P_PID, self._leader.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def record(self) -> None:
        """Remember the processes there are now. SGLang's workers among them have to live as long as the server."""
        self._look()
        self._workers = {p for p in self._seen if _command_line(p.pid).startswith(b"sglang::")}

    def ended_worker(self) -> ProcessId | None:
        """A recorded worker that is gone."""
        by_pid = sorted(self._workers, key=lambda worker: worker.pid)
        return next((worker for worker in by_pid if not worker.is_running), None)

    def pids(self) -> list[int]:
        """All processes of the server that run now."""
        self._look()
        return sorted(process.pid for process in self._seen if process.is_running)

    def kill(self, timeout_s: float) -> list[int]:
        """End everything, wait until it is gone and remove what it left behind. Return the pids that did not end."""
        began = time.monotonic()
        while True:
            self._look()
            running = {process for process in self._seen if process.is_running}
            age = time.monotonic() - began
            if not running or age > timeout_s:
                break
            pids = [process.pid for process in running if age > _TRACKER_S or not _is_resource_tracker(process.pid)]
            _signal(pids, signal.SIGKILL)
            time.sleep(_TICK_S)
        if self.exit_code is not None:
            self._leader.wait(timeout_s)  # it has ended: reaped at once
        for file in self._files:
            file.unlink(missing_ok=True)
        return sorted(process.pid for process in running)

    def _look(self) -> None:
        """Add what is there now. The leader is not reaped before `kill`, so no other session takes its number."""
        for process in _members(self._leader.pid, self._seen):
            self._seen.add(process)
            self._files |= leftovers(process.pid)


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _members(leader: int, known: Iterable[ProcessId]) -> set[ProcessId]:
    """Everything in the leader's session or descending from it or from a known process that still runs."""
    table = _process_table()
    roots = {process.pid for process in known if process.is_running} | {leader}
    members = {pid for pid, status in table.items() if status.session == leader or pid in roots}
    while True:
        more = {pid for pid, status in table.items() if status.parent in members} - members
        if not more:
            break
        members |= more
    return {ProcessId(pid, table[pid].started) for pid in members if pid in table}


def _process_table() -> dict[int, _Status]:
    table = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            status = _status(int(entry.name))
            if status is not None:
                table[int(entry.name)] = status
    return table


def _status(pid: int) -> _Status | None:
    try:
        line = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = line[line.rindex(")") + 2 :].split()  # the name before it may hold anything
    # Fields 3, 4, 6 and 22 of proc(5).
    return _Status(state=fields[0], parent=int(fields[1]), session=int(fields[3]), started=int(fields[19]))


def _is_resource_tracker(pid: int) -> bool:
    return b"multiprocessing.resource_tracker" in _command_line(pid)


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
