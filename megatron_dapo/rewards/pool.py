"""A pool of killable verifier processes with a hard deadline per answer.

    score_many / score_many_async / submit          any thread, any event loop
            |  tasks, one queue a call
       dispatcher thread  -- round robin over calls, JSON lines -->  worker processes (`rewards.worker`)
            |  <-- one JSON line an answer -- kill and replace on deadline, crash, memory
        Future of {key: Score}

Verifiers run model output through parsers and computer algebra: some inputs never return, exhaust memory or end the
process. Each answer therefore has a deadline that starts when its worker turns to it, not while it is queued, and a
worker that misses it is killed by the kernel and replaced. `timeout` and `error` are outcomes of their own: neither is
`wrong`. Workers see a short allow-list of environment variables, so no secrets.

The dispatcher never lets its own lateness count against an answer: the clock of an answer starts when the dispatcher
has read its predecessor's reply, and before it kills, it reads once more.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from megatron_dapo.rewards.verifier import tail_characters
from megatron_dapo.types import Score

logger = logging.getLogger(__name__)

ScoreItem = tuple[Hashable, str, str, bool]  # (key, response text, gold answer, is_truncated)

# math-verify with sympy needs about 100 MB of address space; importing torch in a user's function needs some 8 GB.
DEFAULT_MEMORY_LIMIT_MB = 1024
ENVIRONMENT_ALLOW_LIST = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH")
MAX_FAILED_STARTS = 3
MAX_REPLY_BYTES = 2**20  # a longer line is no reply of ours
MAX_QUEUED_PER_WORKER = 64  # answers sent ahead to one worker
QUEUE_SECONDS = 0.005  # how much work is sent ahead, in seconds of the worker's recent speed
STALLED_SECONDS = 0.1  # answers waiting behind one that takes longer are given to other workers


@dataclass(frozen=True)
class RewardMap:
    """The reward of a right and of any other response: +1 / -1 as published, or 1 / 0."""

    correct: float = 1.0
    incorrect: float = -1.0


@dataclass(frozen=True)
class PoolStatistics:
    """Counts since the pool was opened. `num_killed` counts deadlines, `num_crashed` exits nobody asked for."""

    outcomes: Mapping[str, int]
    num_killed: int
    num_crashed: int
    num_started: int


@dataclass
class _Job:
    """One call: its answers still to be sent, the replies so far, and the future its caller waits on."""

    pending: deque[_Task]
    convert: Callable[[Mapping[str, Any]], Any]
    results: dict[Hashable, Any]
    num_open: int
    future: Future[dict[Hashable, Any]] = field(default_factory=Future)


@dataclass(eq=False)
class _Task:
    task_id: int
    key: Hashable
    message: bytes
    job: _Job | None = None
    holder: _Worker | None = None  # the worker it was last sent to; None while it is pending
    is_done: bool = False


@dataclass(eq=False)
class _Worker:
    process: subprocess.Popen[bytes]
    queue: deque[_Task] = field(default_factory=deque)  # sent and unanswered; the first one is being worked on
    unsent: bytearray = field(default_factory=bytearray)
    unread: bytearray = field(default_factory=bytearray)
    is_ready: bool = False
    is_leaving: bool = False
    since: float = field(default_factory=time.monotonic)  # when it turned to its first queued answer, or was started
    seconds_per_answer: float = float("inf")

    @property
    def capacity(self) -> int:
        """How many more answers to send: a few milliseconds of work, so that a slow one delays few others."""
        if not self.is_ready or self.is_leaving:
            return 0
        ahead = int(QUEUE_SECONDS / self.seconds_per_answer) if self.seconds_per_answer else MAX_QUEUED_PER_WORKER
        return min(max(ahead, 1), MAX_QUEUED_PER_WORKER) - len(self.queue)


class VerifierPool:
    """Scores responses in `num_workers` processes, each answer within `timeout_s` seconds.

    Args:
        verifier: "dapo", "lenient" or "package.module:function" (see `rewards.verifier`).
        timeout_s: seconds one answer may take before its process is killed.
        memory_limit_mb: address space of one process; raise it for a user's function that imports torch.
        reward_correct, reward_incorrect: rewards of verifiers that do not set their own. A response that is
            truncated, times out or fails gets `reward_incorrect`, whatever the verifier.

    Raises ValueError if the verifier cannot be loaded. Close it, or use it as a context manager.
    """

    def __init__(
        self,
        verifier: str,
        num_workers: int = 2,
        timeout_s: float = 10.0,
        memory_limit_mb: int = DEFAULT_MEMORY_LIMIT_MB,
        reward_correct: float = 1.0,
        reward_incorrect: float = -1.0,
        startup_timeout_s: float = 120.0,
    ) -> None:
        if num_workers < 1 or timeout_s <= 0 or memory_limit_mb < 1:
            raise ValueError(
                "a verifier pool needs num_workers >= 1, timeout_s > 0 and memory_limit_mb >= 1; "
                f"got {num_workers}, {timeout_s}, {memory_limit_mb}"
            )
        self.verifier = verifier
        self.rewards = RewardMap(reward_correct, reward_incorrect)
        self._tail = tail_characters(verifier)
        self._task_ids = itertools.count()
        self._lock = threading.Lock()  # guards _inbox, _is_closed and _outcomes, the state callers share
        self._inbox: list[_Job] = []
        self._is_closed = False
        self._outcomes: Counter[str] = Counter()
        self._dispatcher = _Dispatcher(
            settings={"verifier": verifier, "memory_limit_mb": memory_limit_mb, "timeout_s": timeout_s},
            num_workers=num_workers,
            startup_timeout_s=startup_timeout_s,
            take_jobs=self._take_jobs,
            close_inbox=self._close_inbox,
        )
        try:
            self.version: str = self._dispatcher.started.result()
        except BaseException:
            self.close()
            raise

    # ---- scoring

    def score_many(self, items: Iterable[ScoreItem]) -> dict[Hashable, Score]:
        """Score every (key, response text, gold answer, is_truncated). Blocks; keys must be unique within a call."""
        return self.submit(items).result()

    async def score_many_async(self, items: Iterable[ScoreItem]) -> dict[Hashable, Score]:
        """`score_many` without blocking the event loop."""
        return await asyncio.wrap_future(self.submit(items))

    def submit(self, items: Iterable[ScoreItem]) -> Future[dict[Hashable, Score]]:
        """Start scoring and return at once. The future cannot be cancelled."""
        items = list(items)
        order = dict.fromkeys(key for key, *_ in items)
        if len(order) != len(items):
            raise ValueError(f"score_many: {len(items)} items have only {len(order)} different keys")
        truncated = {key: self._truncated() for key, _, _, is_truncated in items if is_truncated}
        tasks = [
            self._task(key, "score", response if self._tail is None else response[-self._tail :], answer)
            for key, response, answer, is_truncated in items
            if not is_truncated
        ]
        return self._enqueue(tasks, self._score_of_reply, {**order, **truncated}, self._count)

    def validate_answers(self, answers: Iterable[str]) -> dict[str, str]:
        """The gold answers no response could match, each with the reason."""
        tasks = [self._task(answer, "validate", "", answer) for answer in dict.fromkeys(answers)]
        problems = self._enqueue(tasks, _problem_of_reply, {}, lambda results: None).result()
        return {answer: problem for answer, problem in problems.items() if problem is not None}

    def statistics(self) -> PoolStatistics:
        with self._lock:
            outcomes = dict(self._outcomes)
        counts = self._dispatcher.counts
        return PoolStatistics(outcomes, counts["killed"], counts["crashed"], counts["started"])

    # ---- life

    def close(self) -> None:
        """Kill every worker. Calls still waiting get a RuntimeError."""
        self._dispatcher.stop()

    def __enter__(self) -> VerifierPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- between callers and the dispatcher

    def _task(self, key: Hashable, operation: str, response: str, answer: str) -> _Task:
        task_id = next(self._task_ids)
        message = {"id": task_id, "operation": operation, "response": response, "answer": answer}
        return _Task(task_id, key, json.dumps(message).encode() + b"\n")

    def _enqueue(
        self,
        tasks: Sequence[_Task],
        convert: Callable[[Mapping[str, Any]], Any],
        results: dict[Hashable, Any],
        on_done: Callable[[dict[Hashable, Any]], None],
    ) -> Future[dict[Hashable, Any]]:
        job = _Job(deque(tasks), convert, results, num_open=len(tasks))
        job.future.set_running_or_notify_cancel()
        job.future.add_done_callback(lambda done: None if done.exception() else on_done(done.result()))
        for task in tasks:
            task.job = job
        with self._lock:
            if self._is_closed:
                raise RuntimeError("this verifier pool is closed")
            if tasks:
                self._inbox.append(job)
        if tasks:
            self._dispatcher.wake()
        else:
            job.future.set_result(results)
        return job.future

    def _take_jobs(self) -> list[_Job]:
        with self._lock:
            jobs, self._inbox = self._inbox, []
        return jobs

    def _close_inbox(self) -> list[_Job]:
        """The dispatcher's last act: nothing may be queued that nobody will take."""
        with self._lock:
            self._is_closed = True
        return self._take_jobs()

    def _count(self, scores: Mapping[Hashable, Score]) -> None:
        with self._lock:
            self._outcomes.update(score.outcome for score in scores.values())

    def _truncated(self) -> Score:
        """A response cut off by its length is never right, whatever intermediate answer it may contain."""
        return Score(accuracy=0.0, reward=self.rewards.incorrect, outcome="truncated")

    def _score_of_reply(self, reply: Mapping[str, Any]) -> Score:
        is_correct = reply["outcome"] == "correct"
        default = self.rewards.correct if is_correct else self.rewards.incorrect
        reward = default if reply["reward"] is None else float(reply["reward"])
        return Score(float(is_correct), reward, reply["outcome"], reply["extracted"], reply["detail"])


def _problem_of_reply(reply: Mapping[str, Any]) -> str | None:
    if reply["outcome"] == "correct":
        return None
    detail = reply["detail"]
    return detail.get("problem") or detail.get("error") or f"verifier outcome {reply['outcome']}"


def _failure(outcome: str, message: str) -> dict[str, Any]:
    return {"outcome": outcome, "extracted": None, "reward": None, "detail": {"error": message}}


def worker_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a worker: a short allow-list, this process's import path, and one thread."""
    allowed = {name: environ[name] for name in ENVIRONMENT_ALLOW_LIST if name in environ}
    threads = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
    import_path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    # A fixed hash seed: sympy's order of terms, and with it what it manages to simplify, depends on it.
    return {**allowed, **threads, "PYTHONPATH": import_path, "PYTHONHASHSEED": "0"}


class _Dispatcher:
    """Owns the workers, in one thread of its own: nothing here is touched by callers but `wake` and `stop`."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        num_workers: int,
        startup_timeout_s: float,
        take_jobs: Callable[[], list[_Job]],
        close_inbox: Callable[[], list[_Job]],
    ) -> None:
        self.started: Future[str] = Future()  # the verifier's version, once the first worker is ready
        self.counts: Counter[str] = Counter()
        self._hello = json.dumps(settings).encode() + b"\n"
        self._timeout_s = settings["timeout_s"]
        self._startup_timeout_s = startup_timeout_s
        self._num_workers = num_workers
        self._take_jobs = take_jobs
        self._close_inbox = close_inbox
        self._jobs: deque[_Job] = deque()  # calls with answers still to be sent, in turn
        self._unfinished: dict[int, _Job] = {}  # every call somebody waits for, by id()
        self._workers: list[_Worker] = []
        self._dead: list[subprocess.Popen[bytes]] = []
        self._num_failed_starts = 0
        self._broken: BaseException | None = None
        self._stopping = False
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="verifier-pool", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        try:
            self._wake_write.send(b"w")
        except OSError:  # full of earlier wakes, or closed: in both cases there is nobody to wake
            pass

    def stop(self) -> None:
        if self._thread.is_alive():
            self._stopping = True
            self.wake()
            self._thread.join()

    # ---- the loop

    def _run(self) -> None:
        failure: BaseException = RuntimeError("this verifier pool is closed")
        try:
            while not self._stopping:
                self._step()
        except BaseException as error:  # a bug here must not leave callers waiting for ever
            logger.exception("the verifier pool failed")
            failure = error
        finally:
            self._shut_down(failure)

    def _step(self) -> None:
        self._replenish()
        self._accept_jobs()
        self._dispatch()
        for key, _ in self._selector.select(self._seconds_to_next_deadline()):
            if key.data is None:
                self._drain_wakes()
            elif key.data in self._workers:
                self._serve(key.data)
        self._enforce_deadlines()
        self._dead = [process for process in self._dead if process.poll() is None]

    def _drain_wakes(self) -> None:
        try:
            while self._wake_read.recv(4096):
                pass
        except BlockingIOError:
            pass

    def _shut_down(self, failure: BaseException) -> None:
        for worker in list(self._workers):
            self._remove(worker)
        for process in self._dead:
            process.wait()
        self._unfinished.update((id(job), job) for job in self._close_inbox())
        self._fail_everything(failure)
        if not self.started.done():
            self.started.set_exception(failure)
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()

    def _accept_jobs(self) -> None:
        for job in self._take_jobs():
            self._unfinished[id(job)] = job
            self._jobs.append(job)
        if self._broken is not None:
            self._fail_everything(self._broken)

    def _fail_everything(self, error: BaseException) -> None:
        self._jobs.clear()
        for job in self._unfinished.values():
            job.future.set_exception(error)
        self._unfinished.clear()

    # ---- processes

    def _replenish(self) -> None:
        while self._broken is None and len(self._workers) < self._num_workers:
            self._start_worker()

    def _start_worker(self) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", "megatron_dapo.rewards.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=worker_environment(os.environ),
            start_new_session=True,  # its own group, so that its children die with it
        )
        assert process.stdin is not None and process.stdout is not None
        os.set_blocking(process.stdin.fileno(), False)
        os.set_blocking(process.stdout.fileno(), False)
        worker = _Worker(process)
        worker.unsent += self._hello
        self._workers.append(worker)
        self._selector.register(process.stdout, selectors.EVENT_READ, worker)
        self.counts["started"] += 1
        self._write(worker)

    def _remove(self, worker: _Worker) -> None:
        """Kill a worker and its children; what it had not begun goes back to the front of its queue."""
        self._workers.remove(worker)
        process = worker.process
        assert process.stdin is not None and process.stdout is not None
        self._stop_writing(worker)
        self._selector.unregister(process.stdout)
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.stdin.close()
        process.stdout.close()
        self._dead.append(process)
        self._give_back(worker)

    def _give_back(self, worker: _Worker) -> None:
        """Make unfinished answers of a worker pending again, before those of its call that were never sent."""
        for task in reversed(worker.queue):
            if not task.is_done and task.holder is worker:
                task.holder = None
                assert task.job is not None
                if not task.job.pending:
                    self._jobs.appendleft(task.job)
                task.job.pending.appendleft(task)

    def _worker_failed_to_start(self, worker: _Worker, message: str) -> None:
        self._remove(worker)
        self._num_failed_starts += 1
        if not self.started.done():
            self._broken = ValueError(message)
            self.started.set_exception(self._broken)
        elif self._num_failed_starts >= MAX_FAILED_STARTS:
            self._broken = RuntimeError(
                f"{self._num_failed_starts} verifier processes in a row did not start: {message}"
            )
            logger.error("%s", self._broken)

    # ---- messages

    def _dispatch(self) -> None:
        """Send pending answers, one call after the other, to whoever has room."""
        hungry = [worker for worker in self._workers if worker.capacity > 0]
        while hungry and self._jobs:
            worker = min(hungry, key=lambda candidate: len(candidate.queue))
            task = self._next_task()
            if task is None:
                break
            self._send(worker, task)
            if worker.capacity <= 0:
                hungry.remove(worker)
        for worker in list(self._workers):
            if worker.unsent:
                self._write(worker)

    def _next_task(self) -> _Task | None:
        while self._jobs:
            job = self._jobs.popleft()
            task = job.pending.popleft()
            if job.pending:
                self._jobs.append(job)
            if not task.is_done:
                return task
        return None

    def _send(self, worker: _Worker, task: _Task) -> None:
        if not worker.queue:
            worker.since = time.monotonic()
        task.holder = worker
        worker.queue.append(task)
        worker.unsent += task.message

    def _write(self, worker: _Worker) -> None:
        assert worker.process.stdin is not None
        try:
            written = os.write(worker.process.stdin.fileno(), worker.unsent)
            del worker.unsent[:written]
        except BlockingIOError:
            pass
        except BrokenPipeError:  # it is gone; reading from it will say so
            worker.unsent.clear()
        if worker.unsent and not worker.is_leaving:
            self._start_writing(worker)
        else:
            self._stop_writing(worker)

    def _start_writing(self, worker: _Worker) -> None:
        assert worker.process.stdin is not None
        if worker.process.stdin.fileno() not in self._selector.get_map():
            self._selector.register(worker.process.stdin, selectors.EVENT_WRITE, worker)

    def _stop_writing(self, worker: _Worker) -> None:
        assert worker.process.stdin is not None
        if worker.process.stdin.fileno() in self._selector.get_map():
            self._selector.unregister(worker.process.stdin)

    def _serve(self, worker: _Worker) -> None:
        """Write what waits to be written, read what there is, and answer for a worker that has gone."""
        if worker.unsent:
            self._write(worker)
        is_gone = self._read(worker)
        lines = worker.unread.split(b"\n")
        worker.unread = lines.pop()
        for line in lines:
            if worker in self._workers:
                self._handle_line(worker, bytes(line))
        if worker in self._workers and (is_gone or len(worker.unread) > MAX_REPLY_BYTES):
            self._worker_is_gone(worker)

    def _read(self, worker: _Worker) -> bool:
        assert worker.process.stdout is not None
        try:
            while chunk := os.read(worker.process.stdout.fileno(), 65536):
                worker.unread += chunk
                if len(worker.unread) > MAX_REPLY_BYTES:
                    return False
            return True
        except BlockingIOError:
            return False

    def _handle_line(self, worker: _Worker, line: bytes) -> None:
        try:
            message = json.loads(line)
            if not worker.is_ready:
                self._handle_hello(worker, message)
                return
            reply = _checked_reply(message, worker.queue[0].task_id if worker.queue else None)
        except ValueError as error:  # a user's function got hold of the pipe: nothing this worker says counts any more
            self._worker_is_gone(worker, f"the verifier process spoke out of turn: {error}")
            return
        self._handle_reply(worker, reply)

    def _handle_hello(self, worker: _Worker, message: Mapping[str, Any]) -> None:
        if "ready" not in message:
            self._worker_failed_to_start(worker, f"the verifier did not start: {message.get('failed', message)}")
            return
        worker.is_ready = True
        worker.since = time.monotonic()
        self._num_failed_starts = 0
        if not self.started.done():
            self.started.set_result(str(message["ready"]))

    def _handle_reply(self, worker: _Worker, reply: Mapping[str, Any]) -> None:
        now = time.monotonic()
        seconds = now - worker.since
        # Falls at once after a fast answer, rises slowly: replies that arrive together look instantaneous.
        worker.seconds_per_answer = min(seconds, 0.8 * worker.seconds_per_answer + 0.2 * seconds)
        worker.since = now
        self._finish(worker.queue.popleft(), reply)
        if reply["leaving"]:
            worker.is_leaving = True
            self.counts["crashed"] += 1
            self._remove(worker)

    def _finish(self, task: _Task, reply: Mapping[str, Any]) -> None:
        if task.is_done:
            return
        task.is_done = True
        job = task.job
        assert job is not None
        job.results[task.key] = job.convert(reply)
        job.num_open -= 1
        if job.num_open == 0 and self._unfinished.pop(id(job), None) is not None:
            job.future.set_result(job.results)

    # ---- deadlines and deaths

    def _seconds_to_next_deadline(self) -> float | None:
        """None: sleep until something happens. Dead processes not yet reaped are looked at every 50 ms."""
        now = time.monotonic()
        waits = [self._deadline(worker) - now for worker in self._workers if worker.queue or not worker.is_ready]
        waits += [worker.since + STALLED_SECONDS - now for worker in self._stalling()]
        waits += [0.05] if self._dead else []
        return max(0.0, min(waits)) if waits else None

    def _deadline(self, worker: _Worker) -> float:
        return worker.since + (self._timeout_s if worker.is_ready else self._startup_timeout_s)

    def _stalling(self) -> list[_Worker]:
        """Workers on whose first answer others, not yet handed on, are waiting."""
        return [
            worker
            for worker in self._workers
            if len(worker.queue) > 1 and any(task.holder is worker for task in itertools.islice(worker.queue, 1, None))
        ]

    def _enforce_deadlines(self) -> None:
        now = time.monotonic()
        for worker in list(self._workers):
            if (worker.queue or not worker.is_ready) and now >= self._deadline(worker):
                self._last_chance(worker)
        for worker in self._stalling():
            if now >= worker.since + STALLED_SECONDS:
                first = worker.queue.popleft()
                self._give_back(worker)
                worker.queue.appendleft(first)

    def _last_chance(self, worker: _Worker) -> None:
        """This thread may have been late itself: what the worker has already said counts."""
        self._serve(worker)
        if worker not in self._workers or time.monotonic() < self._deadline(worker):
            return
        if not worker.is_ready:
            self._worker_failed_to_start(worker, f"the verifier did not start in {self._startup_timeout_s:g} s")
        elif worker.queue:
            self.counts["killed"] += 1
            task = worker.queue.popleft()
            self._remove(worker)
            self._finish(task, _failure("timeout", f"no verdict in {self._timeout_s:g} s"))

    def _worker_is_gone(self, worker: _Worker, reason: str | None = None) -> None:
        """A process ended by itself: the answer it was working on is to blame, the others are sent again."""
        if not worker.is_ready:
            self._worker_failed_to_start(worker, reason or "the verifier process ended before it was ready")
            return
        self.counts["crashed"] += 1
        task = worker.queue.popleft() if worker.queue else None
        self._remove(worker)
        if task is None:
            return
        exit_code = _exit_code(worker.process)
        # The worker's own alarm goes off only if this thread slept through the deadline.
        outcome = "timeout" if exit_code == -signal.SIGALRM else "error"
        self._finish(task, _failure(outcome, reason or f"the verifier process ended with exit status {exit_code}"))


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(0.2)
    except subprocess.TimeoutExpired:
        return None


def _checked_reply(message: Any, expected_id: int | None) -> Mapping[str, Any]:
    """A reply whose fields have the promised types and which answers the task at hand. ValueError otherwise."""
    if not isinstance(message, dict) or message.get("id") != expected_id or expected_id is None:
        raise ValueError(f"no reply to task {expected_id}")
    checks = (
        message.get("outcome") in ("correct", "wrong", "unparsable", "error"),
        isinstance(message.get("extracted"), (str, type(None))),
        isinstance(message.get("reward"), (int, float, type(None))),
        isinstance(message.get("detail"), dict),
        isinstance(message.get("leaving"), bool),
    )
    if not all(checks):
        raise ValueError("malformed reply")
    return message
