"""A killable worker process: its pipes, and its end with everything that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatron_dapo.affinity import all_cpus

if TYPE_CHECKING:
    from typing_extensions import Self

ENVIRONMENT_ALLOW_LIST = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH")
MAX_LINE_BYTES = 2**20  # a longer line was not written by our worker
_SUPERVISOR_S = 8.0  # time in which a supervisor ends everything and itself


def worker_environment(environ: Mapping[str, str], more: Sequence[str] = ()) -> dict[str, str]:
    """Return the environment of a worker: a short allow-list and the names in `more`, this process's import path, one thread."""
    allowed = {name: environ[name] for name in (*ENVIRONMENT_ALLOW_LIST, *more) if name in environ}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    import_path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    # Fix the hash seed: sympy's order of terms depends on it, and with that what it manages to simplify.
    return {**allowed, **threads, "PYTHONPATH": import_path, "PYTHONHASHSEED": "0"}


@dataclass(eq=False)
class WorkerProcess:
    """A worker process. Its owner reads and writes when the pipes are ready."""

    process: subprocess.Popen[bytes]
    unsent: bytearray = field(default_factory=bytearray)
    unread: bytearray = field(default_factory=bytearray)
    is_ready: bool = False  # it has answered the hello
    since: float = field(default_factory=time.monotonic)  # start time
    killed: float = float("inf")

    @classmethod
    def start(cls, command: Sequence[str], hello: bytes, environment: Mapping[str, str]) -> Self:
        """Start a process that reads `hello` first. It must put itself below a supervisor (`start_supervised`)."""
        with all_cpus():
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                env=dict(environment),
                start_new_session=True,  # its own group, so that its children die with it
            )
        worker = cls(process)
        # One thread serves all processes: it must never wait for the pipe of one.
        os.set_blocking(worker.stdin, False)
        os.set_blocking(worker.stdout, False)
        worker.unsent += hello
        return worker

    @property
    def stdin(self) -> int:
        """File descriptor of the pipe it reads."""
        assert self.process.stdin is not None
        return self.process.stdin.fileno()

    @property
    def stdout(self) -> int:
        """File descriptor of the pipe it writes."""
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def write(self) -> None:
        """Write as much of the unsent bytes as the pipe takes."""
        try:
            written = os.write(self.stdin, self.unsent)
            del self.unsent[:written]
        except BlockingIOError:
            pass
        except BrokenPipeError:  # the process is gone; `read` reports it
            self.unsent.clear()

    def read(self) -> tuple[list[bytes], bool]:
        """Return the whole lines received, and True if the process is gone or writes too long a line."""
        is_gone = self._read_all()
        lines = self.unread.split(b"\n")
        self.unread = lines.pop()
        return [bytes(line) for line in lines], is_gone or len(self.unread) > MAX_LINE_BYTES

    def _read_all(self) -> bool:
        try:
            while chunk := os.read(self.stdout, 65536):
                self.unread += chunk
                if len(self.unread) > MAX_LINE_BYTES:
                    return False
            return True
        except BlockingIOError:
            return False

    def kill(self) -> None:
        """Let the supervisor kill everything that the process has started; `kill_supervisor` is for one that does not."""
        self.killed = time.monotonic()
        for number in (signal.SIGTERM, signal.SIGCONT):  # a user's function may have stopped it
            self.process.send_signal(number)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()

    def has_ended(self) -> bool:
        """Return True once a killed process is gone. After a few seconds its supervisor and its group are killed by force."""
        if self.process.poll() is not None:
            return True
        if time.monotonic() > self.killed + _SUPERVISOR_S:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        return False

    def exit_code(self) -> int | None:
        """Return the exit status, negative for a signal; None if the process does not end within 0.2 s."""
        try:
            return self.process.wait(0.2)
        except subprocess.TimeoutExpired:
            return None
