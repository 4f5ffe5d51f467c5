"""One killable verifier process: its pipes, the answers it was sent and has not scored, and its speed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from megatron_dapo.rewards.result import VERIFIER_OUTCOMES
from megatron_dapo.workers.process import WorkerProcess

MAX_QUEUED = 64  # answers sent ahead to one process
QUEUE_SECONDS = 0.005  # work sent ahead to a process, in seconds of its recent speed


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
class VerifierProcess(WorkerProcess):
    """A verifier process. `since` is when it turned to its first queued answer."""

    queue: deque[ScoringTask] = field(default_factory=deque)  # sent and unanswered; the first one is being worked on
    concurrency: int = 0  # answers that it works on at a time; 0: one after the other
    is_batched: bool = False  # it works on several answers in one call, which fail together
    is_leaving: bool = False
    seconds_per_answer: float = float("inf")

    @property
    def capacity(self) -> int:
        """Number of answers to send ahead: a few milliseconds of work, so that a slow answer delays few others."""
        if not self.is_ready or self.is_leaving or (self.queue and self.queue[0].is_alone):
            return 0
        if self.concurrency:
            return self.concurrency - len(self.queue)
        ahead = int(QUEUE_SECONDS / self.seconds_per_answer) if self.seconds_per_answer else MAX_QUEUED
        return min(max(ahead, 1), MAX_QUEUED) - len(self.queue)

    def send(self, task: ScoringTask) -> None:
        """Queue an answer for writing."""
        if not self.queue:
            self.since = time.monotonic()
        task.holder = self
        self.queue.append(task)
        self.unsent += task.message

    def answered(self) -> ScoringTask:
        """Remove and return the first answer of the queue, which has been scored, and update the speed."""
        now = time.monotonic()
        seconds = now - self.since
        # Fall at once after a fast answer but rise slowly, because replies that arrive together look instantaneous.
        self.seconds_per_answer = min(seconds, 0.8 * self.seconds_per_answer + 0.2 * seconds)
        self.since = now
        return self.queue.popleft()


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
