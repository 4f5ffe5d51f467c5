"""Evidence from Linux about a process: how it ended, whether it makes progress, and what blocks it in the kernel.

Everything is read from /proc, /sys and the process's pidfd; nothing here can hang on a file system of the run. Values
that a kernel does not offer, or does not show to this user, are absent rather than an error.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import socket
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_PIDFD_GET_INFO = (3 << 30) | (64 << 16) | (0xFF << 8) | 11  # ioctl(2) of a pidfd, Linux 6.13 and later
_PIDFD_INFO_EXIT = 1 << 3  # Linux 6.15 and later
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_CGROUP = Path("/sys/fs/cgroup")
_OOM_S = 10.0  # longest time from an OOM kill to the end of a process with much memory to free
# System calls that read, write, flush or close the file of their first argument: read, write, close, pread64, pwrite64, readv,
# writev, fsync, fdatasync.
_FILE_CALLS = {"x86_64": {0, 1, 3, 17, 18, 19, 20, 74, 75}, "aarch64": {63, 64, 57, 67, 68, 65, 66, 82, 83}}
_NO_FILES = ("/dev/", "/proc/", "/sys/", "/memfd:")  # path prefixes that are not on a file system of the run
_KMSG_BYTES = 8192  # the longest record of the kernel's log


def read_text(path: str | Path) -> str:
    """Return the text of a small file of the kernel, "" if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except OSError:
        return ""


def exit_status(pidfd: int, pid: int) -> int | None:
    """Return the wait status of a process that has ended (os.WTERMSIG and so on apply), None if it is unknown.

    The process is not a child of the caller, and its parent may have reaped it. New kernels keep the status in the
    pidfd; on older ones it is readable only until then.
    """
    info = bytearray(64)
    struct.pack_into("<Q", info, 0, _PIDFD_INFO_EXIT)
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
        if struct.unpack_from("<Q", info)[0] & _PIDFD_INFO_EXIT:
            return struct.unpack_from("<i", info, 60)[0]
    except OSError:
        pass
    fields = _stat_fields(f"/proc/{pid}/stat")
    return int(fields[49]) if fields and fields[0] == "Z" else None


def signal_name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


@dataclass(frozen=True)
class Activity:
    """Counters of a process that grow while it works."""

    state: str  # R, S, D (blocked in the kernel), T (stopped), Z, ...; "" if it is gone
    cpu_s: float  # CPU and run-queue time of all threads
    bytes_moved: int  # read and written, of files and pipes
    faults: int  # pages read from a disk


def activity(pid: int) -> Activity:
    """Return the counters of a process and of its descendants in the same session.

    Servers and verifiers run in other sessions: one that spins must not make a hung trainer look busy.
    """
    fields = _stat_fields(f"/proc/{pid}/stat")
    if not fields:
        return Activity("", 0.0, 0, 0)
    return Activity(fields[0], *_work(pid, fields))


def _work(pid: int, fields: list[str]) -> tuple[float, int, int]:
    # utime and stime, including ended children such as compilers.
    cpu_s = sum(map(int, fields[11:15])) / _TICKS_PER_S
    # On a crowded machine a rank that wants to run may hardly get a CPU: waiting for one counts as work.
    delay = read_text(f"/proc/{pid}/schedstat").split()
    cpu_s += int(delay[1]) / 1e9 if len(delay) == 3 else 0.0
    counters = dict(re.findall(r"(\w+): (\d+)", read_text(f"/proc/{pid}/io")))
    moved = sum(int(counters.get(name, 0)) for name in ("rchar", "wchar", "read_bytes", "write_bytes"))
    faults = int(fields[9])
    for child in _children(pid):
        of_child = _stat_fields(f"/proc/{child}/stat")
        if of_child and of_child[3] == fields[3]:
            work = _work(child, of_child)
            cpu_s, moved, faults = cpu_s + work[0], moved + work[1], faults + work[2]
    return cpu_s, moved, faults


def tcp_queues() -> dict[str, str]:
    """Return the unacknowledged and unread data of this machine's TCP connections, by the socket's inode."""
    queues: dict[str, str] = {}
    for name in ("tcp", "tcp6"):
        for line in read_text(f"/proc/net/{name}").splitlines()[1:]:
            if " 00000000:00000000 " not in line:
                fields = line.split()
                queues[f"socket:[{fields[9]}]"] = fields[4]
    return queues


def bytes_in_flight(pid: int, queues: Mapping[str, str]) -> dict[str, str]:
    """Return the entries of `tcp_queues` that belong to a process."""
    own = set()
    for number in _listed(f"/proc/{pid}/fd") if queues else ():
        try:
            own.add(os.readlink(f"/proc/{pid}/fd/{number}"))
        except OSError:
            continue
    return {socket: queue for socket, queue in queues.items() if socket in own}


def parent(pid: int) -> int | None:
    """Return the id of a process's parent, None if the process is gone."""
    fields = _stat_fields(f"/proc/{pid}/stat")
    return int(fields[1]) if fields else None


def _children(pid: int) -> list[int]:
    pids: list[int] = []
    for task in _listed(f"/proc/{pid}/task"):
        pids += map(int, read_text(f"/proc/{pid}/task/{task}/children").split())
    return pids


def _stat_fields(path: str) -> list[str]:
    """Return the fields of a stat file after the name: [0] is the state."""
    return read_text(path).rpartition(")")[2].split()


def _listed(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def held_in_kernel(pid: int) -> list[str]:
    """Return a line for each thread that a file system may block: what it does in the kernel, and with which file.

    These are threads in uninterruptible sleep (state D), and the main thread if it sleeps in a call on a file, as file
    systems in user space let their callers sleep interruptibly (state S).
    """
    lines = []
    for task in _listed(f"/proc/{pid}/task"):
        base = f"/proc/{pid}/task/{task}"
        state, call = (_stat_fields(f"{base}/stat") or [""])[0], read_text(f"{base}/syscall").split()
        file = _file_of_call(pid, call)
        is_file_call = bool(call) and call[0].isdigit() and int(call[0]) in _FILE_CALLS.get(os.uname().machine, ())
        waits_for_file = is_file_call and bool(file) and not file.startswith(_NO_FILES)
        if state == "D" or (state == "S" and task == str(pid) and waits_for_file):
            # The kernel's stack needs root; the name of the function it sleeps in does not.
            stack = re.findall(r"\] (\w+)", read_text(f"{base}/stack"))
            doing = " < ".join(stack[:6]) or read_text(f"{base}/wchan") or f"sleep in state {state}"
            lines.append(f"thread {task}: {doing}{f', with {file}' if file else ''}")
    return lines


def _file_of_call(pid: int, call: list[str]) -> str:
    """Return the path of the file that a system call is about, "" unless its first argument is a file's descriptor.

    call: number and arguments. A path argument is in the process's memory, and reading that might hang as well.
    """
    try:
        path = os.readlink(f"/proc/{pid}/fd/{int(call[1], 16)}")
    except (OSError, ValueError, IndexError):
        return ""
    return path if path.startswith("/") else ""


def oom_kills(counter: Path = Path("/proc/vmstat")) -> int:
    """Return the processes that the kernel has killed for lack of memory, in a cgroup or, by default, on this machine."""
    match = re.search(r"oom_kill (\d+)", read_text(counter))
    return int(match.group(1)) if match else 0


class OutOfMemory:
    """OOM kills, as the kernel counts them for the cgroup of a process.

    The counter is that of the victim's cgroup, whichever limit was hit. Without one, the machine's counter is used.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._counter = _oom_counter(pid)
        self._seen = [(0.0, self._count())]  # (time, count), oldest first
        self._log = _open_kernel_log()

    def look(self, now: float) -> None:
        """Note the count: only a kill in the last seconds explains a death."""
        self._seen = [each for each in self._seen if now - each[0] < _OOM_S] or self._seen[-1:]
        self._seen.append((now, self._count()))

    def kill(self) -> str:
        """Return a sentence about a kill within the last seconds, assumed to be that of the process; "" if none."""
        lines = [line for line in self._log_lines() if f"Killed process {self._pid} " in line]
        if (count := self._count()) > self._seen[0][1]:
            scope = (
                "the machine's memory"
                if self._counter.name == "vmstat"
                else f"the limit of its cgroup{_limit(self._counter)}"
            )
            return f"the kernel killed it at {scope} (oom_kill {count})"
        return f"the kernel's log says: {lines[-1]}" if lines else ""

    def _count(self) -> int:
        return oom_kills(self._counter)

    def _log_lines(self) -> list[str]:
        lines: list[str] = []
        while self._log >= 0:
            try:
                lines.append(os.read(self._log, _KMSG_BYTES).decode(errors="replace").partition(";")[2].splitlines()[0])
            except BrokenPipeError:  # records were overwritten before they were read: continue with the next
                continue
            except (OSError, IndexError):
                break
        return lines


def _open_kernel_log() -> int:
    try:
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
        os.lseek(log, 0, os.SEEK_END)
        return log
    except OSError:
        return -1


def _oom_counter(pid: int) -> Path:
    """Return the file with the counter `oom_kill` of a process's cgroup, version 1 or 2, or the machine's."""
    for line in read_text(f"/proc/{pid}/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root, name = _CGROUP, "memory.events"
        elif "memory" in controllers.split(","):
            root, name = _CGROUP / "memory", "memory.oom_control"
        else:
            continue
        directory = root / path.lstrip("/")
        # In a container the path may be the host's: then use the root of the mount.
        for each in [directory, *directory.parents]:
            if each.is_relative_to(root) and (each / name).is_file():
                return each / name
    return Path("/proc/vmstat")


def _limit(counter: Path) -> str:
    """Return " of 2.0 GiB", the memory limit of a counter's cgroup or of the nearest above it that has one."""
    for directory in counter.parents:
        text = (read_text(directory / "memory.max") or read_text(directory / "memory.limit_in_bytes")).strip()
        if text.isdigit() and int(text) < 1 << 60:
            return f" of {int(text) / 2**30:.1f} GiB"
    return ""


def interfaces_up() -> set[str]:
    """Return this machine's network interfaces that are up and have a carrier, except loopback."""
    names = _listed("/sys/class/net")
    return {name for name in names if name != "lo" and read_text(f"/sys/class/net/{name}/carrier").strip() == "1"}


def neighbors(node: str) -> list[str]:
    """Return IPv4 addresses of machines on the local network that leads to the address `node`, from the kernel's
    table."""
    try:
        target = int.from_bytes(socket.inet_aton(node), sys.byteorder)
    except OSError:  # IPv6
        return []
    if node.startswith("127."):  # loopback: this table has only the default route for it
        return []
    routes = []
    for line in read_text("/proc/net/route").splitlines()[1:]:
        device, destination, _, _, _, _, metric, mask, *_ = line.split()
        if target & int(mask, 16) == int(destination, 16):
            routes.append((-int(mask, 16).bit_count(), int(metric), device))
    entries = [line.split() for line in read_text("/proc/net/arp").splitlines()[1:]] if routes else []
    # Flag 2: the machine has answered for its address.
    return [fields[0] for fields in entries if fields[5] == min(routes)[2] and int(fields[2], 16) & 2]


def sectors_written(device: int) -> int | None:
    """Return the sectors that a block device has written, None for a file system without one (NFS, overlay)."""
    fields = read_text(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat").split()
    return int(fields[6]) if len(fields) >= 7 else None
