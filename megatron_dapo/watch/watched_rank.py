"""One rank from the side of its node's watcher: its process, its page of shared memory, its connection, its stacks."""

from __future__ import annotations

import json
import mmap
import os
import signal
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from megatron_dapo.files.durable import FILE_PROCESS
from megatron_dapo.watch.evidence import OutOfMemory, activity, bytes_in_flight, held_in_kernel
from megatron_dapo.watch.verdict import RankView

STATUS_BYTES = 1 << 14  # shared memory for a rank's status
MESSAGE_BYTES = 1 << 16  # the longest message between a rank and its watcher
LOOK_CLOSER_S = 4.0  # The watcher looks closer after this silence.
PROBE_AFTER_S = 3.0  # The watcher checks whether the kernel blocks the rank after this silence.
WORKING_SHARE = 0.1  # share of a core; less is polling
_WORKING_BYTES = 1 << 15  # bytes from one check to the next; less is traffic of event loops
_WORKING_FAULTS = 8
_STALE_S = 4.0  # A sample of the main thread is stale after this.


class StatusPage:
    """What a rank reports about itself: phase, wait, progress. Shared memory, read up to date even after a SIGKILL."""

    def __init__(self, descriptor: int, is_writable: bool = False) -> None:
        """descriptor: of the memory; it may be closed afterwards."""
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
        self._memory, self._lock = mmap.mmap(descriptor, STATUS_BYTES, prot=protection), threading.Lock()
        self._last: dict[str, Any] = {"phase": "start"}

    def read(self) -> dict[str, Any]:
        length = int.from_bytes(self._memory[:4], "little")
        with suppress(ValueError):  # being written: the last one still holds
            self._last = json.loads(self._memory[4 : 4 + length])
        return self._last

    def write(self, status: Mapping[str, Any]) -> None:
        """Replace the status; the numbers of collectives are left out if they do not fit."""
        text = json.dumps(status).encode()
        if len(text) > STATUS_BYTES - 4:
            text = json.dumps({**status, "groups": {}}).encode()
        with self._lock:
            # In one write: the reader treats a page it cannot parse as one being written.
            self._memory[: 4 + len(text)] = len(text).to_bytes(4, "little") + text


class WatchedRank:
    def __init__(self, hello: Mapping[str, Any], connection: socket.socket, page: int, stacks: int, now: float) -> None:
        self.rank, self.pid, self.node = int(hello["rank"]), int(hello["pid"]), str(hello["node"])
        self.connection: socket.socket | None = connection
        self.stacks = stacks
        self.pidfd = os.pidfd_open(self.pid)
        self._page = StatusPage(page)
        os.close(page)
        self._stacks_at = 0
        self._seen = activity(self.pid)
        self._seen_at = self.moved_at = self._marked_at = now
        self._mark: object = None
        self._in_flight: dict[str, str] | None = None
        self._beats, self._beat_at = 0, now
        self.out_of_memory = OutOfMemory(self.pid)
        self.stopped_since = 0.0
        self.is_over = self.is_complete = self.is_reported = False
        self.flight_record = self.last_stacks = ""

    @property
    def page(self) -> dict[str, Any]:
        """What the rank has written about itself: phase, wait, doing, progress, groups, sequence."""
        return self._page.read()

    def view(self, now: float, node_rank: int = 0) -> RankView:
        page, idle_s = self.page, now - self.moved_at
        wait, doing = str(page.get("wait", "")), str(page.get("doing", ""))
        if page.get("beats") and now - self._beat_at > _STALE_S:
            wait, doing = "", "native code that holds the interpreter"  # no thread of the rank could sample
        is_silent = idle_s > PROBE_AFTER_S and not self.stopped_since
        return RankView(
            self.rank,
            self.node,
            node_rank,
            str(page["phase"]),
            wait,
            doing,
            idle_s,
            stalled_s=now - self._marked_at,
            is_on_gpu=bool(page.get("is_on_gpu")),
            groups=page.get("groups", {}),
            stopped_s=now - self.stopped_since if self.stopped_since else 0.0,
            held=tuple(self.held()) if is_silent else (),
            file_operation=self.file_operation if is_silent else "",
            is_sampled=bool(page.get("beats")),
        )

    def look(self, now: float, queues: Mapping[str, str] | None) -> None:
        """Note whether it has made progress since the last look, and whether it is stopped.

        queues: of the machine's TCP connections, None if they were not read.
        """
        self.out_of_memory.look(now)
        page, seen = self.page, activity(self.pid)
        mark = (page.get("phase"), page.get("progress"), page.get("sequence"))
        share = (seen.cpu_s - self._seen.cpu_s) / max(now - self._seen_at, 1e-3)
        moved = (
            share >= WORKING_SHARE
            or seen.bytes_moved - self._seen.bytes_moved >= _WORKING_BYTES
            or seen.faults - self._seen.faults >= _WORKING_FAULTS
        )
        if moved or mark != self._mark or (queues is not None and self._queues_move(queues, now)):
            self.moved_at = now
        if mark != self._mark:
            self._marked_at = now
        if page.get("beats", 0) != self._beats:
            self._beats, self._beat_at = page.get("beats", 0), now
        self._seen, self._seen_at, self._mark = seen, now, mark
        # "t" is a stop by a debugger, which is intentional.
        self.stopped_since = 0.0 if seen.state != "T" else self.stopped_since or now

    def _queues_move(self, queues: Mapping[str, str], now: float) -> bool:
        # A slow link moves few bytes, but the queues of its connections change; in a deadlock they are empty.
        is_silent = now - self.moved_at > LOOK_CLOSER_S
        before, self._in_flight = self._in_flight, bytes_in_flight(self.pid, queues) if is_silent else None
        return None not in (before, self._in_flight) and before != self._in_flight

    def shift(self, seconds: float) -> None:
        """Discount time in which the watcher itself did not run."""
        self.moved_at += seconds
        self._marked_at += seconds
        self._seen_at += seconds
        self._beat_at += seconds
        self.stopped_since += seconds if self.stopped_since else 0.0

    @property
    def file_operation(self) -> str:
        """Its file process and the current operation there, "" if there is none."""
        pid, doing = self.page.get("file_process") or (0, "")
        return f"{FILE_PROCESS} {pid}, at {doing}" if doing else ""

    def held_file_process(self) -> list[str]:
        """Return a line for each thread of its file process blocked in the kernel: operation, place and file."""
        pid, operation = (self.page.get("file_process") or [0])[0], self.file_operation
        return [f"{operation}: {line}" for line in held_in_kernel(pid)] if operation else []

    def held(self) -> list[str]:
        """Return the same for the rank and its file process."""
        return held_in_kernel(self.pid) + self.held_file_process()

    def new_stacks(self) -> str:
        """Return what was written to the stacks' file since the last call."""
        end = os.fstat(self.stacks).st_size
        text = os.pread(self.stacks, end - self._stacks_at, self._stacks_at).decode(errors="replace")
        self._stacks_at = end
        self.last_stacks = text or self.last_stacks
        return text

    def send(self, message: Mapping[str, Any]) -> None:
        with suppress(OSError):
            if self.connection is not None:
                self.connection.send(json.dumps(message).encode(), socket.MSG_DONTWAIT)

    def signal(self, number: int) -> None:
        with suppress(OSError):
            signal.pidfd_send_signal(self.pidfd, number)
