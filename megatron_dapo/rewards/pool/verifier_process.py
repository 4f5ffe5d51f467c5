"""One killable verifier process: its pipes, the answers it was sent and has not scored, and its speed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from megatron_dapo.affinity import all_cpus
from megatron_dapo.rewards.result import VERIFIER_OUTCOMES

ENVIRONMENT_ALLOW_LIST = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH")
MAX_REPLY_BYTES = 2**20  # a longer line was not written by our worker
MAX_QUEUED = 64  # answers sent ahead to one process
_SUPERVISOR_S = 8.0  # in which a supervisor ends everything and itself
QUEUE_SECONDS = 0.005  # how much work is sent ahead, in seconds of its recent speed


def worker_environment(environ: Mapping[str, str], more: Sequence[str] = ()) -> dict[str, str]:
    """Return the environment of a worker: a short allow-list and the names in `more`, this process's import path, one thread."""
    allowed = {name: environ[name] for name in (*ENVIRONMENT_ALLOW_LIST, *more) if name in environ}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    import_path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    # Fix the hash seed: sympy's order of terms depends on it, and with that what it manages to simplify.
    return {**allowed, **threads, "PYTHONPATH": import_path, "PYTHONHASHSEED": "0"}


@dataclass
class Job:
    """One call of the pool: its answers still to be sent, the results so far, and the caller's future."""

    pending: deque[ScoringTask]
    convert: Callable[[Hashable, Mapping[str, Any]], Any]  # arguments: an answer's key and the reply to it
    results: dict[Hashable, Any]
    num_open: int
    future: Future[dict[Hashable, Any]] = field(default_factory=Future)


@dataclass(eq=False)
class ScoringTask:
    """One answer to be scored."""

    task_id: int
    key: Hashable
    message: bytes
    job: Job | None = None
    holder: VerifierProcess | None = None  # the worker it was last sent to; None while it is pending
    is_done: bool = False
    num_kills: int = 0  # kills that did not come from the pool
    is_alone: bool = False  # score it by itself: it was in a failed batch and may be the cause


@dataclass(eq=False)
class VerifierProcess:
    """A verifier process. Its owner reads and writes when the pipes are ready."""

    process: subprocess.Popen[bytes]
    queue: deque[ScoringTask] = field(default_factory=deque)  # sent and unanswered; the first one is being worked on
    unsent: bytearray = field(default_factory=bytearray)
    unread: bytearray = field(default_factory=bytearray)
    is_ready: bool = False
    concurrency: int = 0  # answers that it works on at a time; 0: one after the other
    is_batched: bool = False  # it works on several answers in one call, which fail together
    is_leaving: bool = False
    since: float = field(default_factory=time.monotonic)  # when it turned to its first queued answer, or was started
    seconds_per_answer: float = float("inf")
    killed: float = float("inf")

    @property
    def capacity(self) -> int:
        """Number of answers to send ahead: a few milliseconds of work, so that a slow answer delays few others."""
        if not self.is_ready or self.is_leaving or (self.queue and self.queue[0].is_alone):
            return 0
        if self.concurrency:
            return self.concurrency - len(self.queue)
        ahead = int(QUEUE_SECONDS / self.seconds_per_answer) if self.seconds_per_answer else MAX_QUEUED
        return min(max(ahead, 1), MAX_QUEUED) - len(self.queue)

    @classmethod
    def start(cls, hello: bytes, environment: Mapping[str, str]) -> VerifierProcess:
        """Start a process that reads `hello` first."""
        with all_cpus():
            process = subprocess.Popen(
                [sys.executable, "-m", "megatron_dapo.rewards.pool.worker"],
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

    def send(self, task: ScoringTask) -> None:
        """Queue an answer for writing."""
        if not self.queue:
            self.since = time.monotonic()
        task.holder = self
        self.queue.append(task)
        self.unsent += task.message

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
        return [bytes(line) for line in lines], is_gone or len(self.unread) > MAX_REPLY_BYTES

    def _read_all(self) -> bool:
        try:
            while chunk := os.read(self.stdout, 65536):
                self.unread += chunk
                if len(self.unread) > MAX_REPLY_BYTES:
                    return False
            return True
        except BlockingIOError:
            return False

    def answered(self) -> ScoringTask:
        """Remove and return the first answer of the queue, which has been scored, and update the speed."""
        now = time.monotonic()
        seconds = now - self.since
        # Fall at once after a fast answer but rise slowly, because replies that arrive together look instantaneous.
        self.seconds_per_answer = min(seconds, 0.8 * self.seconds_per_answer + 0.2 * seconds)
        self.since = now
        return self.queue.popleft()

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


def failure(outcome: str, message: str) -> dict[str, Any]:
    """Return the reply for a process that sent none."""
    return {"outcome": outcome, "extracted": None, "reward": None, "detail": {"error": message}}


def checked_reply(message: Any, expected_id: int | None) -> Mapping[str, Any]:
    """Return `message` if it is a well-formed reply to task `expected_id`. Raises ValueError otherwise."""
    if not isinstance(message, dict) or message.get("id") != expected_id or expected_id is None:
        raise ValueError(f"no reply to task {expected_id}")
    checks = (
        message.get("outcome") in VERIFIER_OUTCOMES,
        isinstance(message.get("extracted"), (str, type(None))),
        isinstance(message.get("reward"), (int, float, type(None))),
        isinstance(message.get("detail"), dict),
        isinstance(message.get("leaving"), bool),
    )
    if not all(checks):
        raise ValueError("malformed reply")
    return message
