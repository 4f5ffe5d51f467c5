"""The sampler of a node: a small process that records the node's metrics once a second, with the phases of its ranks.

    first rank of the node     starts it; the kernel ends it when that rank dies, for any reason
    every rank of the node     hands it the page of its heartbeat (shared memory): phase, train step, seconds by phase
    RUN/nodes/node_K.jsonl     lines for `nodes.records`, and every few seconds one with the seconds of its ranks

It imports only the standard library and runs at low priority. A hanging or full file system loses samples but
blocks no rank.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_dapo.affinity import all_cpus
from megatron_dapo.files.durable import DirectoryReplaced, HeldDirectory
from megatron_dapo.files.linux import end_with_parent, ignore_launcher_signals, require_same_user, start_helper
from megatron_dapo.nodes.counters import NodeCounters
from megatron_dapo.watch.watched_rank import MESSAGE_BYTES, StatusPage

SAMPLE_S = 1.0
MAX_BYTES = 1 << 21  # size of a node's newest file; the one before it is kept too: more than two hours of samples
_NICE = 10
_CHANGING = "changing"
_MIN_FLUSH_S, _MAX_FLUSH_S = 1.0, 10.0  # interval of the writes: a shared file system serves many nodes


@dataclass(frozen=True)
class SamplerSettings:
    """A node's sampler, as its first rank starts it."""

    directory: str  # RUN/nodes
    node: int
    name: str
    role: str  # nodes are compared with nodes of the same role
    address: str  # abstract socket to which ranks hand their pages
    period_s: float  # interval of the reads; samples must be on disk by then


class SampleFile:
    """The samples of one node on disk, at most two files of `max_bytes`. Lines that cannot be written are lost."""

    def __init__(self, path: Path, header: str, max_bytes: int = MAX_BYTES) -> None:
        """`path`: in a subdirectory of the run's, which exists."""
        self._run_directory = HeldDirectory(path.parents[1])
        self._path, self._header, self._max_bytes = path, header, max_bytes
        self._has_header = False

    def append(self, lines: str) -> None:
        """Append whole lines, in a new file if this one has grown too large."""
        try:
            self._run_directory.require()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.exists() and self._path.stat().st_size + len(lines) > self._max_bytes:
                self._path.replace(self._path.with_name(self._path.name + ".1"))
                self._has_header = False
            with open(self._path, "a", encoding="utf-8") as stream:
                # The newline ends a line that a kill cut short.
                stream.write(lines if self._has_header else f"\n{self._header}{lines}")
            self._has_header = True
        except (OSError, DirectoryReplaced):
            self._has_header = False


class NodeSampler:
    """Samples one node until the process that started it ends."""

    def __init__(self, settings: SamplerSettings) -> None:
        self._settings = settings
        self._counters = NodeCounters()
        metrics = [*NodeCounters.METRICS]
        header = {"node": settings.node, "name": settings.name, "role": settings.role, "metrics": metrics}
        self._file = SampleFile(Path(settings.directory) / f"node_{settings.node}.jsonl", json.dumps(header) + "\n")
        self.pages: dict[int, StatusPage] = {}  # rank of this node -> its page
        self._lines: list[str] = []
        self._phase = ""
        self._flush_s = flush_seconds(settings.period_s)
        self._flushed = time.monotonic()

    def run(self) -> None:
        """Sample once a second, at the start of each second of the clock, like the other nodes."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind("\0" + self._settings.address)
        listener.listen(256)
        starter = os.getppid()
        due = time.time()
        while os.getppid() == starter:
            if select.select([listener], [], [], max(0.0, due - time.time()))[0]:
                self._admit(listener.accept()[0])
                continue
            self.sample(time.time())
            due = float(int(time.time() / SAMPLE_S + 1) * SAMPLE_S)

    def _admit(self, connection: socket.socket) -> None:
        """Take the page that a rank of this user hands over."""
        with connection:
            connection.settimeout(SAMPLE_S)
            with suppress(OSError, ValueError, KeyError):
                require_same_user(connection)
                text, (page,), _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 1)
                self.pages[int(json.loads(text)["rank"])] = StatusPage(page)
                os.close(page)

    def sample(self, now: float) -> None:
        """Record one second. `now`: seconds since 1970."""
        values = self._counters.look(now)
        pages = {rank: page.read() for rank, page in sorted(self.pages.items())}
        # The phase may have changed within the second before a sample; nodes that change phases fast are alike in that.
        phases = {str(page.get("phase", "")) for page in pages.values()}
        phase = phases.pop() if len(phases) == 1 else ""
        is_steady, self._phase = phase == self._phase, phase
        step = max((int(page.get("step", -1)) for page in pages.values()), default=-1)
        numbers = [float(f"{values[name]:.6g}") if name in values else None for name in NodeCounters.METRICS]
        entry = {"t": round(now, 3), "phase": phase if is_steady else _CHANGING, "step": step, "v": numbers}
        self._lines.append(json.dumps(entry))
        if time.monotonic() - self._flushed >= self._flush_s - SAMPLE_S / 2:
            seconds = {rank: page.get("seconds", {}) for rank, page in pages.items()}
            self._lines.append(json.dumps({"t": round(now, 3), "seconds_of_ranks": seconds}))
            self._file.append("\n".join(self._lines) + "\n")
            self._lines, self._flushed = [], time.monotonic()


def flush_seconds(period_s: float) -> float:
    """Return the seconds between two writes of samples that are read every `period_s`."""
    return min(max(period_s / 8, _MIN_FLUSH_S), _MAX_FLUSH_S)


def become_helper(nice: int) -> None:
    """Run at low priority, end with the process that started this one, and leave a launcher's signals to that
    process."""
    ignore_launcher_signals()
    end_with_parent()
    os.nice(nice)


def main() -> None:
    become_helper(_NICE)
    NodeSampler(SamplerSettings(**json.loads(sys.argv[1]))).run()


def start_sampler(settings: SamplerSettings) -> subprocess.Popen:
    with all_cpus():
        return start_helper("megatron_dapo.nodes.sampler", json.dumps(asdict(settings)))


if __name__ == "__main__":
    main()
