"""The thread that owns the verifier processes: it hands out answers, enforces deadlines, and replaces dead processes.

The dispatcher's own delays never count against an answer: an answer's clock starts when the dispatcher has read the
previous reply, and the dispatcher reads once more before it kills.
"""

from __future__ import annotations

import itertools
import json
import logging
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from megatron_dapo.rewards.pool.verifier_process import Job, ScoringTask, VerifierProcess, checked_reply, failure
from megatron_dapo.types import IS_LOST
from megatron_dapo.watch.evidence import oom_kills
from megatron_dapo.workers.owner import WorkerOwner
from megatron_dapo.workers.supervisor import TOO_MANY_PROCESSES

logger = logging.getLogger(__name__)

MAX_FAILED_STARTS = 3
MAX_KILLS = 3  # killed processes after which an answer has no score
_COMMAND = (sys.executable, "-m", "megatron_dapo.rewards.pool.worker")
STARTUP_SECONDS = 120.0  # A user's function may import torch.
MODEL_STARTUP_SECONDS = 1800.0  # The process reads a reward model first.
_BLOCKED_S = 2.0  # An asynchronous function counts as blocked this long after an answer's deadline.
STALLED_SECONDS = 0.1  # answers queued after one that takes longer move to other processes


class Dispatcher(WorkerOwner[VerifierProcess]):
    """Owns the workers in a separate thread. Other threads only call `submit` and `stop`."""

    def __init__(self, settings: Mapping[str, Any], environment: Mapping[str, str], num_workers: int) -> None:
        super().__init__("verifier")
        self.started: Future[Mapping[str, Any]] = Future()  # the first worker's first message, once it is ready
        self.counts: Counter[str] = Counter()
        self._oom_kills = oom_kills()  # kills before the pool starts its processes
        self._hello = json.dumps(settings).encode() + b"\n"
        self._environment = environment
        self._timeout_s, self._concurrency = settings["timeout_s"], settings["concurrency"]
        self._batch_size, self._startup_s = settings["batch_size"], settings["startup_s"]
        self._num_workers = num_workers
        self._inbox: list[Job] = []  # this and the next are shared with callers
        self._is_closed = False
        self._jobs: deque[Job] = deque()  # calls with answers still to be sent, in turn
        self._unfinished: dict[int, Job] = {}  # every call with a waiting caller, by id()
        self._num_failed_starts = 0
        self._broken: BaseException | None = None
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a call. Raises RuntimeError if the pool is closed."""
        with self._lock:
            if self._is_closed:
                raise RuntimeError("this verifier pool is closed")
            self._inbox.append(job)
        self.wake()

    # ---- the loop

    def _begin_step(self) -> None:
        self._replenish()
        self._accept_jobs()
        self._dispatch()

    def _close(self, failure: BaseException) -> None:
        with self._lock:  # closed together with the last look: no call waits for a thread that has ended
            self._is_closed = True
            self._unfinished.update((id(job), job) for job in self._inbox)
        self._fail_everything(failure)
        if not self.started.done():
            self.started.set_exception(failure)

    def _accept_jobs(self) -> None:
        with self._lock:
            arrived, self._inbox = self._inbox, []
        self._unfinished.update((id(job), job) for job in arrived)
        self._jobs.extend(arrived)
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
            self._add(VerifierProcess.start(_COMMAND, self._hello, self._environment))
            self.counts["started"] += 1

    def _remove(self, worker: VerifierProcess) -> None:
        """Kill a worker and its children; its unscored answers return to the front of their calls."""
        super()._remove(worker)
        self._give_back(worker)

    def _give_back(self, worker: VerifierProcess) -> None:
        """Make the unscored answers of a worker pending again, ahead of those of the same call that were never sent."""
        for task in reversed(worker.queue):
            if not task.is_done and task.holder is worker:
                self._make_pending(task)

    def _make_pending(self, task: ScoringTask) -> None:
        task.holder = None
        assert task.job is not None
        if not task.job.pending:
            self._jobs.appendleft(task.job)
        task.job.pending.appendleft(task)

    def _isolate(self, worker: VerifierProcess) -> bool:
        """End a worker whose whole batch failed and have its answers scored one by one, since one may be to blame.

        Return False if the worker has a single answer, which is then to blame.
        """
        if not worker.is_batched or len(worker.queue) < 2:
            return False
        for task in worker.queue:
            task.is_alone = True
        self._remove(worker)
        return True

    def _worker_failed_to_start(self, worker: VerifierProcess, message: str) -> None:
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
        """Send pending answers, one call after the other, to workers with room."""
        free = [worker for worker in self._workers if worker.capacity > 0]
        while free and self._jobs:
            worker = min(free, key=lambda candidate: len(candidate.queue))
            task = self._next_task()
            if task is None:
                break
            if task.is_alone and worker.queue:
                self._make_pending(task)  # It waits until a worker has nothing else.
                break
            worker.send(task)
            if worker.capacity <= 0:
                free.remove(worker)
        for worker in list(self._workers):
            if worker.unsent:
                self._write(worker)

    def _next_task(self) -> ScoringTask | None:
        while self._jobs:
            job = self._jobs.popleft()
            task = job.pending.popleft()
            if job.pending:
                self._jobs.append(job)
            if not task.is_done:
                return task
        return None

    def _handle_line(self, worker: VerifierProcess, line: bytes) -> None:
        try:
            message = json.loads(line)
            if not worker.is_ready:
                self._handle_hello(worker, message)
                return
            reply = checked_reply(message, worker.queue[0].task_id if worker.queue else None)
        except ValueError as error:  # a user's function wrote into the pipe: this worker's replies cannot be trusted
            self._worker_is_gone(worker, f"the verifier process sent an unexpected message: {error}")
            return
        self._finish(worker.answered(), reply)
        if reply["leaving"]:
            worker.is_leaving = True
            self.counts["crashed"] += 1
            self._remove(worker)

    def _handle_hello(self, worker: VerifierProcess, message: Mapping[str, Any]) -> None:
        if "ready" not in message:
            self._worker_failed_to_start(worker, f"the verifier did not start: {message.get('failed', message)}")
            return
        worker.is_ready = True
        worker.is_batched = bool(message.get("is_batched"))
        worker.concurrency = self._concurrency if message.get("is_async") else 0
        if worker.is_batched:
            worker.concurrency = max(worker.concurrency, self._batch_size)
        worker.since = time.monotonic()
        self._num_failed_starts = 0
        if not self.started.done():
            self.started.set_result(message)

    def _finish(self, task: ScoringTask, reply: Mapping[str, Any]) -> None:
        if task.is_done:  # another process was faster, see `_enforce_deadlines`
            return
        task.is_done = True
        job = task.job
        assert job is not None
        job.results[task.key] = job.convert(task.key, reply)
        job.num_open -= 1
        if job.num_open == 0 and self._unfinished.pop(id(job), None) is not None:
            job.future.set_result(job.results)

    # ---- deadlines and deaths

    def _seconds_to_next_deadline(self) -> float | None:
        """Return the time to sleep; None: until something happens."""
        now = time.monotonic()
        waits = [self._deadline(worker) - now for worker in self._workers if worker.queue or not worker.is_ready]
        waits += [worker.since + STALLED_SECONDS - now for worker in self._stalling()]
        return max(0.0, min(waits)) if waits else None

    def _deadline(self, worker: VerifierProcess) -> float:
        if not worker.is_ready:
            return worker.since + self._startup_s
        # An asynchronous function's answers time out by themselves unless it blocks.
        return worker.since + (self._timeout_s + _BLOCKED_S if worker.concurrency else self._timeout_s)

    def _stalling(self) -> list[VerifierProcess]:
        """Return the workers with answers queued after the current one that could move to other workers."""
        return [
            worker
            for worker in self._workers
            if not worker.concurrency
            and len(worker.queue) > 1
            and any(task.holder is worker for task in itertools.islice(worker.queue, 1, None))
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

    def _last_chance(self, worker: VerifierProcess) -> None:
        # This thread may have been late itself: a reply already in the pipe counts.
        self._serve(worker)
        if worker not in self._workers or time.monotonic() < self._deadline(worker):
            return
        if not worker.is_ready:
            self._worker_failed_to_start(worker, f"the verifier did not start in {self._startup_s:g} s")
        elif worker.queue:
            self.counts["killed"] += 1
            if self._isolate(worker):
                return
            task = worker.queue.popleft()
            self._remove(worker)
            self._finish(task, failure("timeout", f"no score in {self._timeout_s:g} s (reward.timeout_seconds)"))

    def _worker_is_gone(self, worker: VerifierProcess, reason: str | None = None) -> None:
        """Replace a process that ended by itself; its current answer is an error, and the others are sent again."""
        if not worker.is_ready:
            self._worker_failed_to_start(worker, reason or "the verifier process ended before it was ready")
            return
        self.counts["crashed"] += 1
        exit_code = worker.exit_code()  # Read it before `_remove` kills the worker.
        if exit_code == TOO_MANY_PROCESSES:
            reason = reason or "the user's function had more than reward.max_processes processes"
        is_killed = reason is None and exit_code == -signal.SIGKILL
        if is_killed and worker.queue and worker.queue[0].num_kills < MAX_KILLS - 1:
            # From outside, usually by the kernel's OOM killer, which may be passing.
            worker.queue[0].num_kills += 1
            self._remove(worker)
            return
        if self._isolate(worker):
            return
        task = worker.queue.popleft() if worker.queue else None
        self._remove(worker)
        if task is None:
            return
        # The worker's own alarm fires only if this thread slept through the deadline.
        outcome = "timeout" if exit_code == -signal.SIGALRM else "error"
        if is_killed:
            reason = f"the verifier process was killed by signal 9 (SIGKILL) {MAX_KILLS} times, not by this run"
            if num_oom_kills := oom_kills() - self._oom_kills:
                reason += f"; out of memory: the kernel has killed {num_oom_kills} processes of this machine since the pool began"
        reply = failure(outcome, reason or f"the verifier process ended with exit status {exit_code}")
        self._finish(task, {**reply, "detail": {**reply["detail"], IS_LOST: True}} if is_killed else reply)
