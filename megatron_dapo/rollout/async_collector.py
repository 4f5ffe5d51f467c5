"""Generation beside training: a thread of rank 0 collects the next rollout batches while the current one is trained.

    main thread   next_batch (t) | train batch t          | before_update, weights, after_update (t + 1) | next_batch
    thread                       | collects batch t + 1 by weights t | stands still | goes on by weights t + 1 ...

Batches train one policy version each, in order, so the version a batch will train is known when its collection begins.
It may begin while the version served is at most `max_ahead`, the staleness bound, behind that; so at most that many
batches are ahead, and the collector keeps every token within the bound. With max_ahead = 0 there is no thread: a batch
is collected when it is asked for, exactly as by the collector alone.

At a weight update the thread stands still between two polls and the engine is emptied: unfinished responses are held
with their tokens and go on by the new weights. The thread calls the collector, its engine and its verifier, never
torch.distributed: the other ranks wait in the main thread's broadcast of the batch, under the deadline of their process
group.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megatron_dapo.rollout.batch import RolloutBatch
from megatron_dapo.rollout.batch_collector import BatchCollector

logger = logging.getLogger(__name__)

_LOOK_AFTER_S = 1.0


class _Closed(Exception):
    """Ends a collection from within, at a safe point."""


@dataclass(frozen=True)
class _Collected:
    """A batch and what was so when it was full."""

    batch: RolloutBatch
    generation_step: int
    seconds: float


class AsyncCollector:
    """Batches in order, collected ahead. All methods are for the main thread.

    Args:
        collector: from now on used through this object alone, and so is its engine while a collection may be running
            (see `paused`). With max_ahead > 0 it should have partial = "continue": otherwise every weight update
            throws the unfinished responses away.
        max_ahead: the staleness bound of the collector's buffer.
        timeout_s: the longest any call waits for the thread to stand still or to end, and for a batch without progress.
        while_waiting: called in the main thread about once a second while it waits for a batch, the thread standing
            still between two polls: it may do to the engine what no other thread may see half done. True: a response has finished since.

    An error of the thread is raised, as it was, by the next call of `next_batch`, `before_update` or `paused` and by
    every later one. The collector has lost nothing then, and `state_dict` still gives its state.
    """

    def __init__(
        self,
        collector: BatchCollector,
        max_ahead: int,
        timeout_s: float,
        while_waiting: Callable[[], bool | None] | None = None,
    ) -> None:
        if max_ahead < 0:
            raise ValueError(f"overlapped rollout: max_ahead = {max_ahead}, must be at least 0")
        self._collector = collector
        self._max_ahead = max_ahead
        self._timeout_s = timeout_s
        self._while_waiting = while_waiting
        self._thread: threading.Thread | None = None
        self._condition = threading.Condition()  # guards all that follows
        self._ready: deque[_Collected] = deque()
        self._num_groups = 0  # of a batch
        self._version = -1  # of the policy published last
        self._next_version = -1  # that the next batch to be collected will train
        self._num_pauses = 0  # callers that need the thread to stand still
        self._is_updating = False
        self._is_running = False  # the thread is inside the collector, not at a safe point
        self._is_exhausted = False  # the batch collected last said that there is nothing more
        self._is_closing = False
        self._error: BaseException | None = None
        self._was_raised = False
        self._handed_out: _Collected | None = None

    @property
    def generation_step(self) -> int:
        """The collector's, when the batch handed out last was full."""
        return self._handed_out.generation_step if self._handed_out else self._collector.generation_step

    @property
    def generation_seconds(self) -> float:
        """How long collecting the batch handed out last took, pauses included, whoever waited for it."""
        return self._handed_out.seconds if self._handed_out else 0.0

    def next_batch(self, num_groups: int) -> RolloutBatch:
        """The batch for the policy version published last; waits for it where it is not ready.

        Raises what the collection raised; TimeoutError; ValueError where batches of another size were collected ahead.
        """
        collected = self._take(num_groups) if self._max_ahead else self._collect(num_groups, None, _no_pause)
        self._handed_out = collected
        return collected.batch

    def _take(self, num_groups: int) -> _Collected:
        with self._condition:
            self._raise_error()
            self._start(num_groups)
            if not self._ready:
                self._is_exhausted = False  # asked again: look again
            self._condition.notify_all()
        self._wait_for_batch()
        with self._condition:
            collected = self._ready.popleft()
            self._condition.notify_all()
        batch = collected.batch
        assert not batch.groups or batch.training_version == self._version, (
            f"a batch for policy version {batch.training_version} is asked for at version {self._version}: "
            "each batch is trained and published before the next is asked for"
        )
        return collected

    def _wait_for_batch(self) -> None:
        """Wait until a batch is ready. The owner looks after its engines meanwhile, which may need the main thread, and
        says whether a response has finished: the deadline counts from the last one.
        """
        deadline = time.monotonic() + self._timeout_s
        while True:
            with self._condition:
                if self._condition.wait_for(lambda: bool(self._ready) or self._error is not None, _LOOK_AFTER_S):
                    self._raise_error()
                    return
                if time.monotonic() > deadline:
                    raise TimeoutError(self._describe("a rollout batch"))
            if self._while_waiting is not None:
                self._stand_still()
                try:
                    if self._while_waiting():
                        deadline = time.monotonic() + self._timeout_s
                finally:
                    self._go_on()

    def before_update(self) -> None:
        """From here to `after_update` the engine is empty and nobody uses it: its weights can be replaced."""
        assert not self._is_updating, "before_update was called twice; after_update comes between"
        self._stand_still()
        self._is_updating = True
        self._collector.hold()

    def after_update(self, version: int) -> None:
        """The engine serves policy `version`: one more than before, or the same again. Collecting goes on."""
        assert self._is_updating, "after_update without before_update"
        if self._version >= 0 and version - self._version not in (0, 1):
            raise ValueError(
                f"policy version went from {self._version} to {version}: batches were collected ahead for one version "
                "after the other; publish each"
            )
        with self._condition:
            if self._version < 0:
                self._next_version = version
            self._version = version
        self._is_updating = False
        self._go_on()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, the engine is empty and free for other use (an evaluation); unfinished responses go on afterwards."""
        self._stand_still()
        try:
            self._collector.hold()
            yield
        finally:
            self._go_on()

    def state_dict(self) -> dict[str, Any]:
        """The collector's state, one consistent cut, also while a collection runs or after one failed: batches not yet
        handed out are as if given back. Of what the engine is working on, it holds the tokens of the last stop; call
        `close` before to have them all.
        """
        self._stand_still(raise_error=False)
        try:
            return self._collector.state_dict(untrained=[collected.batch for collected in self._ready])
        finally:
            self._go_on()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Before the first batch."""
        assert self._thread is None, "a collection runs already; load the state before asking for a batch"
        self._collector.load_state_dict(state)

    def close(self) -> None:
        """End the thread at its next safe point and hold what is unfinished; may be called again.

        Raises TimeoutError where the thread does not end. An error of it that no call has raised is logged.
        """
        with self._condition:
            self._is_closing = True
            self._condition.notify_all()
        if self._thread is None:
            return
        self._thread.join(self._timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(self._describe("the collecting thread to end"))
        if self._error is None:
            self._hold_at_the_end()
        elif not self._was_raised:
            self._was_raised = True
            logger.error("collecting ahead had failed, nobody asked for its batch", exc_info=self._error)

    def _hold_at_the_end(self) -> None:
        try:
            self._collector.hold()
        except Exception:  # the run is over: what the engine had begun is lost, its prompts are not
            logger.exception("the engine did not return its unfinished responses")

    # Waiting, in the main thread

    def _stand_still(self, raise_error: bool = True) -> None:
        """Return once the thread is at a safe point; it stays there until `_go_on`."""
        with self._condition:
            if raise_error:
                self._raise_error()
            self._num_pauses += 1
            try:
                self._wait("the collection to stand still", lambda: not self._is_running, raise_error)
            except BaseException:
                self._num_pauses -= 1
                raise

    def _go_on(self) -> None:
        with self._condition:
            self._num_pauses -= 1
            self._condition.notify_all()

    def _wait(self, what: str, is_there: Callable[[], bool], raise_error: bool = True) -> None:
        """Until `is_there`, or the thread's error; TimeoutError after the deadline."""
        in_time = self._condition.wait_for(lambda: is_there() or self._error is not None, self._timeout_s)
        if raise_error:
            self._raise_error()
        if not in_time:
            raise TimeoutError(self._describe(what))

    def _raise_error(self) -> None:
        if self._error is not None:
            self._was_raised = True
            raise self._error

    def _describe(self, what: str) -> str:
        return (
            f"waited {self._timeout_s:.0f} s for {what}; published policy version {self._version}, {len(self._ready)} "
            f"batches ready, collecting for version {self._next_version}: {self._collector.accounting()}"
        )

    # The thread

    def _start(self, num_groups: int) -> None:
        if self._thread is None:
            assert self._version >= 0, "no policy was published yet: before_update and after_update come first"
            self._num_groups = num_groups
            self._thread = threading.Thread(target=self._run, name="collect-ahead", daemon=True)
            self._thread.start()
        if num_groups != self._num_groups:
            raise ValueError(
                f"a batch of {num_groups} groups was asked for, batches of {self._num_groups} are collected ahead"
            )

    def _run(self) -> None:
        try:
            while (training_version := self._next_to_collect()) is not None:
                self._deliver(self._collect(self._num_groups, training_version, self._safe_point))
        except _Closed:
            pass
        except BaseException as error:
            with self._condition:
                self._error = error
        finally:
            with self._condition:
                self._is_running = False
                self._condition.notify_all()

    def _next_to_collect(self) -> int | None:
        """Wait until a batch may be collected; the version it trains, or None at the end."""
        with self._condition:
            # The main thread ends this wait, by going on or by `close`; nobody waits for this thread here.
            self._condition.wait_for(lambda: self._is_closing or self._may_collect())
            if self._is_closing:
                return None
            self._is_running = True
            return self._next_version

    def _may_collect(self) -> bool:
        is_within_bound = self._next_version - self._version <= self._max_ahead
        return is_within_bound and not self._num_pauses and not self._is_exhausted

    def _deliver(self, collected: _Collected) -> None:
        with self._condition:
            self._ready.append(collected)
            self._next_version += bool(collected.batch.groups)  # an empty batch trains nothing
            self._is_exhausted = collected.batch.should_stop
            self._is_running = False
            self._condition.notify_all()

    def _safe_point(self) -> None:
        """Between two polls: stand still as long as somebody wants it."""
        with self._condition:
            if self._num_pauses:
                self._is_running = False
                self._condition.notify_all()
                self._condition.wait_for(lambda: self._is_closing or not self._num_pauses)  # see _next_to_collect
            if self._is_closing:
                raise _Closed
            self._is_running = True

    def _collect(self, num_groups: int, training_version: int | None, between_polls: Callable[[], None]) -> _Collected:
        start = time.perf_counter()
        batch = self._collector.collect(num_groups, training_version, between_polls)
        return _Collected(batch, self._collector.generation_step, time.perf_counter() - start)


def _no_pause() -> None:
    """Without a thread nobody interrupts."""
