"""Worker processes of environments, with a hard deadline for each reset, step and close.

    start, act, end, poll        the engine's thread
            |  inbox, replies
       owner's thread  -- JSON lines -->  worker processes (`environments.remote.worker`), several episodes each

A worker that misses a deadline, ends or writes anything else is killed with all that it has started. Its episodes are then
lost: those that wait for a reply get it at once, the others at their next `act`. A lost episode says nothing about the
policy; the engine plays it again with the same seed.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import json
import logging
import os
import shutil
import stat
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dapo.environments import remote
from megatron_dapo.environments.episode_process import (
    EnvironmentProcess,
    OpenEpisode,
    act_line,
    reply_of,
    start_line,
)
from megatron_dapo.environments.protocol import Action, Reply, Task
from megatron_dapo.environments.remote.worker import OUT_OF_MEMORY
from megatron_dapo.untrusted import one_line
from megatron_dapo.workers.owner import WorkerOwner
from megatron_dapo.workers.process import worker_environment
from megatron_dapo.workers.supervisor import TOO_MANY_PROCESSES, TOO_MUCH_MEMORY

logger = logging.getLogger(__name__)

MAX_FAILED_STARTS = 3
_START_SECONDS = 120.0  # The user's file may import torch.
_LATE_S = 1.0  # grace after a step's limit, which a worker keeps for tools, before it is ended by force
# A worker that holds more than this share of its memory limit is replaced when one of its episodes ends.
_HIGH_SHARE = 0.75
_SCRATCH = "megatron-dapo-episodes-"


@dataclass(frozen=True)
class WorkerSettings:
    """What runs in the workers and its limits, from the section [environment]."""

    kind: str  # "environment", "function", "either" or "command"
    place: str = ""  # environment.path or environment.function
    command: tuple[str, ...] = ()  # an external program and its arguments
    python: str = ""  # interpreter; "": this one
    num_processes: int = 1
    episodes_per_process: int = 16
    max_episodes_per_process: int = 1000  # the process is then replaced
    reset_seconds: float = 30.0
    step_seconds: float = 30.0
    episode_seconds: float = 600.0  # limit of an environment's time in an episode
    memory_limit_mb: int = 2048
    max_processes: int = 64
    on_step_timeout: str = "observe"
    with_state: bool = False  # replies have the environments' states
    max_branches: int = 16  # conversations that a function may begin in an episode
    variables: tuple[str, ...] = ()  # environment variables that workers get besides a short allow-list

    @property
    def name(self) -> str:
        """Name for messages."""
        return one_line(" ".join(self.command), 100) if self.kind == "command" else self.place

    @property
    def max_resident_mb(self) -> int:
        """Memory of a worker and everything it has started: each of its episodes may have as large a process."""
        return self.memory_limit_mb * self.episodes_per_process

    @property
    def hello(self) -> bytes:
        return json.dumps(
            {
                "kind": self.kind,
                "place": self.place,
                "command": self.command,
                "memory_limit_mb": self.memory_limit_mb,
                "max_resident_mb": self.max_resident_mb,
                "max_processes": self.max_processes,
                "on_step_timeout": self.on_step_timeout,
                "step_seconds": self.step_seconds,
                "with_state": self.with_state,
                "max_branches": self.max_branches,
            }
        ).encode() + b"\n"  # fmt: skip


class WorkerPool:
    """Environments in worker processes: an `EnvironmentPool`.

    ValueError in one line if the first worker cannot load the user's code.

    Args:
        on_reply: called in the owner's thread after each reply, e.g. to end another wait of the engine.
    """

    def __init__(self, settings: WorkerSettings, on_reply: Callable[[], None] = lambda: None) -> None:
        self._arrived = threading.Condition()
        self._replies: list[tuple[int, Reply]] = []
        self._numbers = itertools.count(1)
        self._open: dict[str, int] = {}  # an id may begin again: replies to its earlier number are dropped
        self._on_reply = on_reply
        self._owner = _EnvironmentOwner(settings, self._take)
        try:
            self.hello = self._owner.started.result()  # the first worker's
        except BaseException:
            self.close()
            raise

    @property
    def counts(self) -> Mapping[str, int]:
        """Processes since the pool was opened: started, killed (a deadline), crashed (an unexpected exit), replaced."""
        return self._owner.counts

    def processes(self) -> list[int]:
        """Return the ids of the running workers' supervisors."""
        return [worker.process.pid for worker in self._owner.workers()]

    def start(self, episode_id: str, task: Task) -> None:
        """Begin an episode; `episode_id` must not be open."""
        assert episode_id not in self._open, f"episode {episode_id} is open"
        try:
            json.dumps(dict(task.fields), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"the task of episode {episode_id} is not JSON: {error}") from None
        self._open[episode_id] = next(self._numbers)
        self._owner.submit("start", self._open[episode_id], (episode_id, task))

    def act(self, episode_id: str, action: Action) -> None:
        """Send the policy's turn to an open episode."""
        assert episode_id in self._open, f"episode {episode_id} is not open"
        self._owner.submit("act", self._open[episode_id], action)

    def end(self, episode_id: str) -> None:
        """Close an episode and clean up; a reply that is still open never comes."""
        if episode_id in self._open:
            self._owner.submit("end", self._open.pop(episode_id), None)

    def poll(self, timeout: float = 0.0) -> list[Reply]:
        """Return the replies since the last call; wait at most `timeout` seconds for the first.

        RuntimeError if workers can no longer be started.
        """
        with self._arrived:
            self._arrived.wait_for(lambda: self._owner.broken or any(map(self._is_due, self._replies)), timeout)
            arrived, self._replies = self._replies, []
        replies = [reply for number, reply in arrived if self._is_due((number, reply))]
        if self._owner.broken and not replies:
            raise RuntimeError(str(self._owner.broken))
        for reply in replies:
            if reply.done or reply.lost:
                del self._open[reply.episode_id]
        return replies

    def close(self) -> None:
        """End every episode and every process."""
        self._owner.stop()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _is_due(self, numbered: tuple[int, Reply]) -> bool:
        """Return False for a reply that crossed the end of its episode."""
        number, reply = numbered
        return self._open.get(reply.episode_id) == number

    def _take(self, number: int, reply: Reply | None) -> None:
        with self._arrived:
            self._replies += [] if reply is None else [(number, reply)]
            self._arrived.notify_all()
        self._on_reply()


class _EnvironmentOwner(WorkerOwner[EnvironmentProcess]):
    """The thread of a pool."""

    def __init__(self, settings: WorkerSettings, put: Callable[[int, Reply | None], None]) -> None:
        super().__init__("environment")
        self.started: Future[Mapping[str, Any]] = Future()
        self.counts: Counter[str] = Counter()
        self.broken: BaseException | None = None
        self._settings, self._put = settings, put
        python = settings.python if settings.kind != "command" and settings.python else sys.executable
        self._command = [python, str(Path(remote.__file__).with_name("start.py"))]
        # glibc reserves 64 MiB of address space a thread, which the memory limit counts.
        self._environment = {"MALLOC_ARENA_MAX": "2", **worker_environment(os.environ, settings.variables)}
        if python != sys.executable:
            del self._environment["PYTHONPATH"]  # packages of another interpreter
        self._inbox: list[tuple[str, int, Any]] = []  # shared with the engine's thread
        self._open: dict[int, OpenEpisode] = {}  # episodes that have not been ended
        self._pending: deque[OpenEpisode] = deque()  # episodes that wait for a worker
        self._deadlines: list[tuple[float, int, EnvironmentProcess]] = []  # a heap, with outdated entries
        self._num_failed_starts = 0
        self._scratch, self._scratch_lock = _make_scratch()
        self._thread.start()

    def workers(self) -> list[EnvironmentProcess]:
        """Return the workers, from another thread."""
        return list(self._workers)

    def submit(self, operation: str, number: int, content: Any) -> None:
        """Queue an operation of the engine's thread on an episode."""
        with self._lock:
            self._inbox.append((operation, number, content))
        self.wake()

    # ---- operations

    def _begin_step(self) -> None:
        with self._lock:
            arrived, self._inbox = self._inbox, []
        for operation, number, content in arrived:
            if operation == "start":
                episode_id, task = content
                self._open[number] = OpenEpisode(number, episode_id, task, self._scratch / str(number))
                self._pending.append(self._open[number])
            elif operation == "act":
                self._act(number, content)
            else:
                self._end(number)
        self._place()
        for worker in list(self._workers):
            if worker.unsent:
                self._write(worker)

    def _place(self) -> None:
        """Give pending episodes to the workers with the fewest, and start workers while there are fewer than episodes."""
        staying = [worker for worker in self._workers if not worker.is_leaving]
        num_wanted = max(1, sum(len(worker.episodes) for worker in staying) + len(self._pending))
        for _ in range(min(num_wanted, self._settings.num_processes) - len(staying)):
            if self.broken is None:
                self._start_worker()
        ready = [worker for worker in staying if worker.is_ready]
        while self._pending and ready:
            worker = min(ready, key=lambda one: len(one.episodes))
            if len(worker.episodes) >= self._settings.episodes_per_process:
                break
            self._send_start(worker, self._pending.popleft())
            if worker.num_begun >= self._settings.max_episodes_per_process:
                worker.is_leaving = True
                self.counts["replaced"] += 1
                ready.remove(worker)

    def _start_worker(self) -> None:
        try:
            worker = EnvironmentProcess.start(self._command, self._settings.hello, self._environment)
        except OSError as error:
            self._failed_to_start(f"environment.python = {self._command[0]!r} cannot be run: {error.strerror}")
            return
        self._add(worker)
        self.counts["started"] += 1

    def _send_start(self, worker: EnvironmentProcess, episode: OpenEpisode) -> None:
        episode.directory.mkdir(mode=0o700)
        worker.episodes[episode.number] = episode
        worker.num_begun += 1
        self._send(worker, episode, start_line(episode), "acting", self._settings.reset_seconds)

    def _send(
        self, worker: EnvironmentProcess, episode: OpenEpisode, line: Mapping[str, Any], state: Any, seconds: float
    ) -> None:
        left = seconds if state == "ending" else min(seconds, self._settings.episode_seconds - episode.seconds)
        episode.state, episode.deadline = state, time.monotonic() + max(left, 0.0) + _LATE_S
        heapq.heappush(self._deadlines, (episode.deadline, episode.number, worker))
        worker.send(line)

    def _act(self, number: int, action: Action) -> None:
        episode = self._open.get(number)
        if episode is None:  # it was lost, and the reply that says so crossed this one
            return
        if episode.lost:
            self._lose(episode, episode.lost)
            return
        worker = self._worker_of(episode)
        self._send(worker, episode, act_line(episode, action), "acting", self._settings.step_seconds)

    def _end(self, number: int) -> None:
        episode = self._open.pop(number, None)
        if episode is None or episode.lost:
            return
        if episode.state == "pending":
            self._pending.remove(episode)
            return
        line = {"op": "end", "episode": episode.number}
        self._send(self._worker_of(episode), episode, line, "ending", self._settings.step_seconds)

    def _worker_of(self, episode: OpenEpisode) -> EnvironmentProcess:
        return next(worker for worker in self._workers if episode.number in worker.episodes)

    def _lose(self, episode: OpenEpisode, reason: str) -> None:
        self._open.pop(episode.number, None)
        self._put(episode.number, Reply(episode.episode_id, lost=reason, is_cause=episode.is_cause))

    # ---- lines of workers

    def _handle_line(self, worker: EnvironmentProcess, line: bytes) -> None:
        try:
            message = json.loads(line)
            if not isinstance(message, dict):
                raise ValueError("no object")
            if not worker.is_ready:
                self._handle_hello(worker, message)
                return
            episode = worker.episodes.get(message.get("episode", 0))
            if episode is None:
                raise ValueError("no open episode has this number")
            self._handle_reply(worker, episode, message)
        except (ValueError, TypeError) as error:
            text = one_line(line.decode(errors="replace"), 100)
            expected = "" if worker.is_ready else ', not {"ready": ...}'
            self._worker_is_gone(worker, f"its worker wrote {text!r}{expected} ({one_line(error, 200)})")

    def _handle_hello(self, worker: EnvironmentProcess, message: Mapping[str, Any]) -> None:
        if "failed" in message:
            self._remove(worker)
            self._failed_to_start(one_line(message["failed"], 500))
            return
        if "ready" not in message:
            raise ValueError("it is not ready")
        worker.is_ready = True
        self._num_failed_starts = 0
        if not self.started.done():
            self.started.set_result(message)

    def _handle_reply(self, worker: EnvironmentProcess, episode: OpenEpisode, message: Mapping[str, Any]) -> None:
        if episode.state == "ending":
            if "ended" in message:
                self._ended(worker, episode, message)
            return  # another reply crossed the end
        if episode.state == "timed_out":
            return  # it came too late
        if episode.state != "acting":
            raise ValueError("nothing was sent that it answers")
        reply = reply_of(message, episode)
        episode.has_begun = True
        episode.seconds += reply.seconds
        episode.state, episode.deadline = "idle", float("inf")
        if reply.done or reply.lost:
            self._end(episode.number)
        self._put(episode.number, reply)

    def _ended(self, worker: EnvironmentProcess, episode: OpenEpisode, message: Mapping[str, Any]) -> None:
        del worker.episodes[episode.number]
        _remove_directory(episode.directory)
        memory_mb, limit_mb = message.get("memory_mb", 0), self._settings.memory_limit_mb
        has_grown = isinstance(memory_mb, int) and memory_mb > _HIGH_SHARE * limit_mb
        if has_grown and not worker.is_leaving:
            logger.warning(
                "environment %s: a process holds %d MiB after %d episodes, it is replaced before it meets "
                "environment.memory_limit_mb = %d",
                *(self._settings.name, memory_mb, worker.num_begun, limit_mb),
            )
        if (has_grown or message.get("stuck")) and not worker.is_leaving:
            worker.is_leaving = True
            self.counts["replaced"] += 1
        if worker.is_leaving and not worker.episodes:
            self._remove(worker)

    # ---- deadlines and deaths

    def _seconds_to_next_deadline(self) -> float | None:
        while self._deadlines and self._is_outdated(*self._deadlines[0]):
            heapq.heappop(self._deadlines)
        ends = [self._deadlines[0][0]] if self._deadlines else []
        ends += [worker.since + _START_SECONDS for worker in self._workers if not worker.is_ready]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def _is_outdated(self, deadline: float, number: int, worker: EnvironmentProcess) -> bool:
        return number not in worker.episodes or worker.episodes[number].deadline != deadline

    def _enforce_deadlines(self) -> None:
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            entry = heapq.heappop(self._deadlines)
            worker = entry[2]
            if not self._is_outdated(*entry) and worker in self._workers:
                self._serve(worker)  # this thread may have been late itself: a reply already in the pipe counts
                if not self._is_outdated(*entry) and worker in self._workers:
                    self._is_late(worker, worker.episodes[entry[1]])
        for worker in list(self._workers):
            if not worker.is_ready and now >= worker.since + _START_SECONDS:
                self._worker_is_gone(worker, f"its worker did not start in {_START_SECONDS:g} s")

    def _is_late(self, worker: EnvironmentProcess, late: OpenEpisode) -> None:
        settings = self._settings
        if late.state == "acting" and late.has_begun and settings.episode_seconds - late.seconds < settings.step_seconds:
            # The step itself may still be in time, so nothing says that the machine failed: `end` gives it step_seconds.
            late.state, late.deadline = "timed_out", float("inf")
            self._put(late.number, Reply(late.episode_id, timed_out=True, seconds=settings.episode_seconds - late.seconds))
            return
        self.counts["killed"] += 1
        if late.state == "ending":
            reason = f"close took longer than environment.step_seconds = {settings.step_seconds:g}"
        elif not late.has_begun:
            reason = f"reset took longer than environment.reset_seconds = {settings.reset_seconds:g}"
        else:
            reason = f"step took longer than environment.step_seconds = {settings.step_seconds:g}"
        del worker.episodes[late.number]
        worker.directories.append(late.directory)
        if late.state != "ending":
            self._lose(late, reason)
        for other in worker.episodes.values():
            other.is_cause = False
        self._lose_all(worker, f"its worker was killed, because another episode's {reason}")

    def _worker_is_gone(self, worker: EnvironmentProcess, reason: str | None = None) -> None:
        if reason is None:
            reason = self._exit_reason(worker.exit_code())  # Read it before the worker is killed.
        if not worker.is_ready:
            self._remove(worker)
            self._failed_to_start(f"{self._settings.name}: {reason}")
            return
        self.counts["crashed"] += 1
        self._lose_all(worker, reason)

    def _exit_reason(self, exit_code: int | None) -> str:
        if exit_code == OUT_OF_MEMORY:
            return (
                f"its worker met its limit of memory (environment.memory_limit_mb = {self._settings.memory_limit_mb})"
            )
        if exit_code == TOO_MUCH_MEMORY:
            return (
                f"{self._settings.name}: its worker and the processes that it had started held more than "
                f"{self._settings.max_resident_mb} MiB of memory (environment.memory_limit_mb for each of its episodes)"
            )
        if exit_code == TOO_MANY_PROCESSES:
            return f"its worker had more than environment.max_processes = {self._settings.max_processes} processes"
        if exit_code is not None and exit_code < 0:
            return f"its worker was killed by signal {-exit_code}"
        return f"its worker ended with exit status {exit_code}"

    def _lose_all(self, worker: EnvironmentProcess, reason: str) -> None:
        """Kill a worker. Its episodes that wait for a reply are lost now, the others at their next `act`."""
        for episode in worker.episodes.values():
            worker.directories.append(episode.directory)
            if episode.state == "acting":
                self._lose(episode, reason)
            else:
                episode.lost = reason
        worker.episodes.clear()
        self._remove(worker)

    def _failed_to_start(self, message: str) -> None:
        self._num_failed_starts += 1
        if not self.started.done():
            self.broken = ValueError(message)
            self.started.set_exception(self.broken)
        elif self._num_failed_starts >= MAX_FAILED_STARTS:
            self.broken = RuntimeError(f"{self._num_failed_starts} workers in a row did not start: {message}")
            logger.error("%s", self.broken)
            self._put(0, None)

    def _forget(self, worker: EnvironmentProcess) -> None:
        for directory in worker.directories:
            _remove_directory(directory)

    def _close(self, failure: BaseException) -> None:
        self.broken = self.broken or failure
        if not self.started.done():
            self.started.set_exception(failure)
        self._put(0, None)
        _remove_directory(self._scratch)
        os.close(self._scratch_lock)


# ---- directories


def _make_scratch() -> tuple[Path, int]:
    """Make the directory of this pool's episodes, and remove those of pools that were killed.

    Returns it with an open and locked file descriptor, which the kernel releases with the process.
    """
    root = Path(tempfile.gettempdir())
    for old in root.glob(f"{_SCRATCH}*"):
        with suppress(OSError):
            descriptor = os.open(old, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(descriptor).st_uid == os.getuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # OSError: its pool is alive
                    _remove_directory(old)
            finally:
                os.close(descriptor)
    while True:
        scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH))
        with suppress(FileNotFoundError):  # another pool took it for an old one before it was locked
            descriptor = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if scratch.exists():
                return scratch, descriptor
            os.close(descriptor)


def _remove_directory(directory: Path) -> None:
    """Remove a directory that may contain ones without write permission."""
    try:
        shutil.rmtree(directory)
    except FileNotFoundError:
        pass
    except OSError:
        for path, _, _ in os.walk(directory):
            with suppress(OSError):
                os.chmod(path, stat.S_IRWXU)
        shutil.rmtree(directory, ignore_errors=True)
