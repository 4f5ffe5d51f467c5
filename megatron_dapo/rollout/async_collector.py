"""Generation during training: a thread of rank 0 collects the next rollout batches while the current one is trained.

    main thread   next_batch (t) | train batch t          | before_update, weights, after_update (t + 1) | next_batch
    thread                       | collects batch t + 1 by weights t | paused      | continues by weights t + 1 ...

Each batch trains one policy version, in order, so the version a batch will train is known when its collection begins.
A collection may begin when the served version is at most `max_ahead`, the staleness bound, behind that version. So at
most that many batches are ahead, and the collector keeps every token within the bound. With max_ahead = 0 there is no
thread: `next_batch` itself collects a batch, exactly as the collector does without this class.

With training.stream, `next_batch` returns a batch in parts, each as soon as it is collected. With `overlaps`, the thread
then collects the rest of a batch while its first parts are trained, and no further batch if max_ahead = 0. The parts
handed out of an unfinished step count as untrained in `state_dict`: a resumed run trains the whole step again.

The state says where the thread is. The main thread requests a pause, and the thread answers between two polls:

                  may collect a batch             pause requested           between two polls
    WAITING ------------------------> COLLECTING ----------------> PAUSING -----------------> PAUSED or UPDATING
       ^                                 |  ^                                                     |
       |  batch is full                  |  +---- continues a collection that was under way ------+
       +---------------------------------+                                                        |
       +---- (or EXHAUSTED, if no collection was under way) --------------------------------------+
    COLLECTING -> EXHAUSTED: the batch said that there is nothing more; `next_batch` looks again
    COLLECTING, once the run is asked to stop: the engine is emptied, and the thread waits for PAUSING or CLOSING
    any -> CLOSING -> CLOSED: `close`;  COLLECTING or PAUSING -> FAILED -> RAISED: an error of the thread, then reported

At a weight update the engine is emptied: unfinished responses are held with their tokens and continue with the new
weights. With keeps_requests they stay in the engine, which says the version of each token. The thread calls the
collector, its engine and its verifier, never torch.distributed: the other ranks wait in the main thread's broadcast of
the batch, under the deadline of their process group.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from megatron_dapo.rollout.batch import RolloutBatch
from megatron_dapo.rollout.collector import Collector, ends_step

logger = logging.getLogger(__name__)

_RECOVERY_INTERVAL_S = 1.0


class State(enum.Enum):
    """State of the collecting thread; see the diagram above."""

    WAITING = enum.auto()  # no collection runs; one begins when the staleness bound allows it
    COLLECTING = enum.auto()  # the thread is inside the collector
    PAUSING = enum.auto()  # the main thread waits for the thread to reach a safe point
    PAUSED = enum.auto()  # the engine belongs to the main thread
    UPDATING = enum.auto()  # the same, between before_update and after_update
    EXHAUSTED = enum.auto()  # rounds or prompts have run out
    CLOSING = enum.auto()  # the thread ends at its next safe point
    CLOSED = enum.auto()
    FAILED = enum.auto()  # an error ended the thread, and no call has raised it yet
    RAISED = enum.auto()  # an error ended the thread, and a call has raised it


_STANDING_STILL = (State.PAUSED, State.UPDATING)
_ENDED = (State.CLOSED, State.FAILED, State.RAISED)


class _Closed(Exception):
    """Ends a collection from within, at a safe point."""


class AsyncCollector:
    """Collects rollout batches ahead and returns them in order. Call all methods from the main thread.

    Args:
        collector: must be used only through this object from now on, and so must its engine while a collection may be
            running (see `paused`). With max_ahead > 0, rollout.partial_rollout should be on; otherwise every weight
            update throws the unfinished responses away.
        max_ahead: the staleness bound of the collector's buffer.
        overlaps: collect in the thread even if max_ahead = 0.
        timeout_s: the longest any call waits for a pause, for the thread to end, or for a batch without progress.
        recover_engines: called in the main thread about once a second while it waits for a batch. The thread is
            paused meanwhile, so the call may change the engine without another thread seeing it half done. Returns
            True if a response has finished since the last call.
        check_stop: called between polls; raises once the run is asked to stop, and nothing more is generated.
        keep_stopped: if True, the state of a stopped collection includes what was generated. If False, it is the state
            before the collection, from which an engine that repeats its responses makes the same batch.
        keeps_requests: the engine takes new weights while it has requests (sglang.update_pause).

    If the thread fails, the next call of `next_batch`, `before_update` or `paused` raises its error unchanged, and so
    does every later one. The collector has lost nothing, and `state_dict` still returns its state.
    """

    def __init__(
        self,
        collector: Collector,
        max_ahead: int,
        timeout_s: float,
        recover_engines: Callable[[], bool | None] | None = None,
        check_stop: Callable[[], None] = lambda: None,
        keep_stopped: bool = True,
        overlaps: bool = False,
        keeps_requests: bool = False,
    ) -> None:
        if max_ahead < 0:
            raise ValueError(f"asynchronous collector: max_ahead = {max_ahead}, must be at least 0")
        self._collector = collector
        self._max_ahead = max_ahead
        self._overlaps = overlaps or max_ahead > 0
        self._timeout_s = timeout_s
        self._recover_engines = recover_engines
        self._check_stop = check_stop
        self._keep_stopped = keep_stopped
        self._keeps_requests = keeps_requests
        self._begin: dict[str, Any] | None = None  # state before a stopped collection that is not kept
        self._thread: threading.Thread | None = None
        self._condition = threading.Condition()  # guards everything below
        self._state = State.WAITING
        self._resumed_state = State.WAITING  # the state to return to after a pause
        self._ready: deque[RolloutBatch] = deque()
        self._sizes = 0, 0  # groups of a batch and of a part
        self._version = -1  # policy version published last
        self._next_version = -1  # version that the next collected batch will train
        self._error: BaseException | None = None
        self._handed_out: RolloutBatch | None = None
        self._step_parts: tuple[RolloutBatch, ...] = ()  # handed out of a batch that is not complete

    @property
    def generation_step(self) -> int:
        """The collector's generation step when the last returned batch was full."""
        return self._handed_out.generation_step if self._handed_out else self._collector.generation_step

    def next_batch(self, num_groups: int, part_size: int = 0) -> RolloutBatch:
        """Return the batch for the policy version published last, waiting for it if necessary; or its next part, of
        `part_size` groups. Once a part was handed out, a stop of the run waits for the end of the step.

        Raises the error of the collection or of check_stop, TimeoutError, or ValueError if batches collected ahead
        have another size.
        """
        batch = self._take(num_groups, part_size) if self._overlaps else self._collect_here(num_groups, part_size)
        with self._condition:
            self._step_parts = () if batch.is_last else (*self._step_parts, batch)
            self._condition.notify_all()
        self._handed_out = batch
        return batch

    def _collect_here(self, num_groups: int, part_size: int) -> RolloutBatch:
        begin = None if self._keep_stopped or self._step_parts else self._collector.state_dict()

        def look() -> None:
            try:
                self._require_running()
            except BaseException:
                if begin is None:
                    self._collector.hold()
                self._begin = begin
                raise

        return self._collect((num_groups, part_size), None, look)

    def _require_running(self) -> None:
        """Raise if the run is asked to stop, unless a step was trained in part: it is finished first."""
        if not self._step_parts:
            self._check_stop()

    def _take(self, num_groups: int, part_size: int) -> RolloutBatch:
        with self._condition:
            self._raise_error()
            self._start(num_groups, part_size)
            if not self._ready and self._state is State.EXHAUSTED:
                self._set(State.WAITING)  # prompts may have been requeued since
        self._wait_for_batch()
        with self._condition:
            batch = self._ready.popleft()
        assert not batch.groups or batch.training_version == self._version, (
            f"a batch for policy version {batch.training_version} is requested at version {self._version}: "
            "each batch is trained and published before the next is requested"
        )
        return batch

    def _wait_for_batch(self) -> None:
        """Wait until a batch is ready; the deadline counts from the last finished response.

        Meanwhile this thread recovers the engines, which may need the main thread.
        """
        deadline = time.monotonic() + self._timeout_s
        while True:
            with self._condition:
                if self._condition.wait_for(lambda: bool(self._ready) or self._state in _ENDED, _RECOVERY_INTERVAL_S):
                    self._raise_error()
                    return
                if time.monotonic() > deadline:
                    raise TimeoutError(self._describe("a rollout batch"))
            try:
                self._require_running()
            except BaseException:
                with self._pause():
                    self._collector.hold()
                raise
            if self.recover_engines():
                deadline = time.monotonic() + self._timeout_s

    def recover_engines(self) -> bool:
        """Look after the engines while the main thread waits; return True if a response has finished since the last call."""
        if self._recover_engines is None:
            return False
        with self._pause():
            return bool(self._recover_engines())

    def before_update(self) -> None:
        """Empty the engine, unless it keeps its requests, and do not touch it until `after_update`: its weights change."""
        assert self._state is not State.UPDATING, "before_update was called twice; after_update comes between"
        self._stand_still(State.UPDATING)
        if not self._keeps_requests:
            self._collector.hold()

    def after_update(self, version: int) -> None:
        """Resume collecting with an engine that serves policy `version`: the same as before or the next one."""
        assert self._state is State.UPDATING, "after_update without before_update"
        if self._overlaps and self._version >= 0 and version - self._version not in (0, 1):
            raise ValueError(
                f"policy version went from {self._version} to {version}: batches were collected ahead for one version "
                "after the other; publish each"
            )
        with self._condition:
            if self._version < 0:
                self._next_version = version
            self._version = version
        self._resume()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep the engine empty for another use, such as an evaluation; unfinished responses continue later."""
        with self._pause():
            self._collector.hold()
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return a consistent snapshot of the collector's state, even while a collection runs or after one failed.

        Batches not yet returned, and the parts of a step under way, are saved as if given back. Responses in flight are
        saved with the tokens up to their last stop; call `close` first to save all tokens. For a stopped collection see `keep_stopped`.
        """
        if self._begin is not None:
            return self._begin
        with self._pause(raise_error=False):
            return self._collector.state_dict(untrained=[*self._step_parts, *self._ready])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the collector's state. Call before the first batch."""
        assert self._thread is None, "a collection runs already; load the state before requesting a batch"
        self._collector.load_state_dict(state)

    def close(self) -> None:
        """End the thread at its next safe point and hold the unfinished responses. May be called repeatedly.

        Raises TimeoutError if the thread does not end. Logs an error of the thread that no call has raised.
        """
        with self._condition:
            if self._state not in _ENDED:
                self._set(State.CLOSED if self._thread is None else State.CLOSING)
        if self._thread is None:
            return
        self._thread.join(self._timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(self._describe("the collecting thread to end"))
        if self._state is State.FAILED:
            self._state = State.RAISED
            logger.error("collecting ahead failed, and no call has raised its error", exc_info=self._error)
        elif self._state is State.CLOSED:
            try:
                self._collector.hold()
            except Exception:  # the run is over: the unfinished responses are lost, their prompts are not
                logger.exception("the engine did not return its unfinished responses")

    # Pauses, requested by the main thread

    @contextmanager
    def _pause(self, raise_error: bool = True) -> Iterator[None]:
        """Keep the thread at a safe point; pauses nest."""
        is_outermost = self._stand_still(State.PAUSED, raise_error)
        try:
            yield
        finally:
            if is_outermost:
                self._resume()

    def _stand_still(self, state: State, raise_error: bool = True) -> bool:
        """Wait until the thread is paused in `state`; return False if it already was, or has ended."""
        with self._condition:
            if raise_error:
                self._raise_error()
            if self._state in _STANDING_STILL:
                return False
            if self._state is State.COLLECTING:
                self._set(State.PAUSING)
            elif self._state in (State.WAITING, State.EXHAUSTED):
                self._resumed_state = self._state
                self._set(State.PAUSED)
            if not self._condition.wait_for(lambda: self._state in (State.PAUSED, *_ENDED), self._timeout_s):
                message = self._describe("the collection to pause")
                if self._state is State.PAUSING:
                    self._set(State.COLLECTING)  # the request is withdrawn
                raise TimeoutError(message)
            if raise_error:
                self._raise_error()
            if self._state is not State.PAUSED:
                return False
            self._set(state)
            return True

    def _resume(self) -> None:
        with self._condition:
            if self._state in _STANDING_STILL:
                self._set(self._resumed_state)

    def _set(self, state: State) -> None:
        """Change the state; the caller holds the condition."""
        self._state = state
        self._condition.notify_all()

    def _raise_error(self) -> None:
        if self._error is not None:
            self._state = State.RAISED
            raise self._error

    def _describe(self, what: str) -> str:
        return (
            f"waited {self._timeout_s:.0f} s for {what} ({self._state.name}); published policy version {self._version}, "
            f"{len(self._ready)} batches ready, collecting for version {self._next_version}: "
            f"{self._collector.accounting()}"
        )

    # The thread

    def _start(self, num_groups: int, part_size: int) -> None:
        if self._thread is None:
            assert self._version >= 0, "no policy was published yet: before_update and after_update come first"
            self._sizes = num_groups, part_size
            self._thread = threading.Thread(target=self._run, name="collect-ahead", daemon=True)
            self._thread.start()
        if (num_groups, part_size) != self._sizes:
            raise ValueError(
                f"a batch of {num_groups} groups was requested, batches of {self._sizes[0]} are collected ahead"
            )

    def _run(self) -> None:
        try:
            while (training_version := self._next_to_collect()) is not None:
                for part in self._parts_of_batch(training_version):
                    self._enqueue(part)
        except _Closed:
            pass
        except BaseException as error:
            with self._condition:
                self._error = error
                self._set(State.FAILED)
            return
        with self._condition:
            self._set(State.CLOSED)

    def _parts_of_batch(self, training_version: int) -> Iterator[RolloutBatch]:
        is_last = False
        while not is_last:
            part = self._collect(self._sizes, training_version, self._between_polls)
            is_last = part.is_last
            yield part

    def _next_to_collect(self) -> int | None:
        """Wait until a batch may be collected; return the version it will train, or None at the end."""
        with self._condition:
            # No timeout: only the main thread ends this wait, and it never waits for this thread meanwhile.
            self._condition.wait_for(
                lambda: (
                    self._state is State.CLOSING
                    or (
                        self._state is State.WAITING
                        and self._next_version - self._version <= self._max_ahead
                        and not self._must_stop()
                    )
                )
            )
            if self._state is State.CLOSING:
                return None
            self._set(State.COLLECTING)
            return self._next_version

    def _enqueue(self, batch: RolloutBatch) -> None:
        with self._condition:
            self._ready.append(batch)
            if not batch.is_last:
                self._condition.notify_all()
                return
            self._next_version += ends_step(batch)  # an empty batch trains nothing
            following = State.EXHAUSTED if batch.should_stop else State.WAITING
            if self._state is State.COLLECTING:
                self._set(following)
            elif self._state is State.PAUSING:
                self._resumed_state = following
                self._set(State.PAUSED)

    def _between_polls(self) -> None:
        """Pause here as long as the main thread requires; every response is accounted for."""
        is_stopped = False
        while True:
            with self._condition:
                # Loop because the main thread may resume and pause again before this thread runs.
                while self._state is State.PAUSING:
                    self._resumed_state = State.COLLECTING
                    self._set(State.PAUSED)
                    self._condition.wait_for(lambda: self._state not in _STANDING_STILL)
                if self._state is State.CLOSING:
                    raise _Closed
                if is_stopped:
                    self._condition.wait_for(lambda: self._state is not State.COLLECTING or bool(self._step_parts))
                    is_stopped = not self._step_parts
                    continue
            if not self._must_stop():
                return
            # Hold for the rest of the run: responses in flight come back with their tokens.
            self._collector.hold()
            is_stopped = True

    def _is_followed(self) -> bool:
        """Return True if the batch after the one that is being collected may be collected at once."""
        with self._condition:
            return self._overlaps and self._next_version + 1 - self._version <= self._max_ahead

    def _must_stop(self) -> bool:
        try:
            self._require_running()
        except Exception:
            return True
        return False

    def _collect(
        self, sizes: tuple[int, int], training_version: int | None, between_polls: Callable[[], None]
    ) -> RolloutBatch:
        start = time.perf_counter()
        num_groups, part_size = sizes
        batch = self._collector.collect(num_groups, training_version, between_polls, part_size, self._is_followed)
        seconds = time.perf_counter() - start
        return replace(batch, generation_step=self._collector.generation_step, seconds=seconds)
