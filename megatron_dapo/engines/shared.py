"""One rollout engine for two threads: rollout, and an evaluation during training.

    collecting thread   -> rollout view    --+
                                             +-- one call at a time --> the engine
    evaluating thread   -> evaluation view --+

Each view is a `RolloutEngine` with its own requests. The poll of either thread advances the engine and leaves the other
view's completions for it. Rollout's requests go to the engine at once. Those of the evaluation wait and take the places that
rollout leaves, and at least an eighth of all, so that neither starves.

Both views sample from the weights that the engine serves. A weight update therefore waits until the evaluation has no
request left, so that an evaluation is of one policy version.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from megatron_dapo.engines.base import PrefixReuse, RolloutEngine, aborted, check_request_ids
from megatron_dapo.types import Completion, GenerationRequest

_RESERVED = 1 / 8  # share of the places that rollout cannot take


class SharedEngine:
    """Lets two threads use one engine, each by its view.

    Args:
        engine: used only through the views from now on, except inside `exclusive`.
        num_places: requests that keep the engine busy.
    """

    def __init__(self, engine: RolloutEngine, num_places: int) -> None:
        if num_places < 1:
            raise ValueError(f"shared engine: num_places = {num_places}, must be at least 1")
        self.engine = engine
        self._num_places = num_places
        self._condition = threading.Condition()  # guards the next two
        self._num_turns = self._turn = 0
        self._waiting: deque[GenerationRequest] = deque()  # the evaluation's, not in the engine
        self.rollout, self.evaluation = EngineView(self), EngineView(self)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep other threads from the engine. Threads take turns in the order in which they came: a lock would starve one
        that waits while another polls again and again."""
        with self._condition:
            turn = self._num_turns
            self._num_turns += 1
            self._condition.wait_for(lambda: self._turn == turn)
        try:
            yield
        finally:
            with self._condition:
                self._turn += 1
                self._condition.notify_all()

    # The views call these inside `exclusive`.

    def submit(self, view: EngineView, requests: Sequence[GenerationRequest]) -> None:
        """Give requests to the engine, or let those of the evaluation wait for places."""
        finished = [one.request_id for one in (*self.rollout.finished, *self.evaluation.finished)]
        check_request_ids(requests, {*self.rollout.open, *self.evaluation.open, *finished})
        if view is self.evaluation:
            self._waiting.extend(requests)
        else:
            self.engine.submit(requests)
        view.open.update((request.request_id, request) for request in requests)

    def poll(self) -> None:
        """Advance the engine and leave each completion with its view."""
        self._fill()
        for completion in self.engine.poll():
            self._leave(completion)

    def abort(self, stopped: EngineView) -> None:
        """Stop the requests of one view. The engine stops all: the other view's continue with the tokens they have."""
        if stopped is self.evaluation:
            for request in self._waiting:
                self._leave(aborted(request))
            self._waiting.clear()
        continued: list[GenerationRequest] = []
        for completion in self.engine.abort() if self.engine.num_unfinished else ():
            other = self._view_of(completion)
            if other is stopped or completion.finish_reason != "abort":
                self._leave(completion)
            else:
                request = other.open[completion.request_id]
                continued.append(replace(request, prefix=completion) if completion.num_tokens else request)
        if stopped is self.evaluation:
            self.engine.submit(continued)
        else:
            self._waiting.extendleft(reversed(continued))  # The next poll gives them to the engine.

    def _fill(self) -> None:
        """Submit waiting requests of the evaluation for which there are places."""
        num_evaluated = len(self.evaluation.open) - len(self._waiting)
        num_free = self._num_places - len(self.rollout.open) - num_evaluated
        num_reserved = max(1, int(self._num_places * _RESERVED)) - num_evaluated
        count = min(len(self._waiting), max(num_free, num_reserved))
        if count > 0:
            self.engine.submit([self._waiting.popleft() for _ in range(count)])

    def _view_of(self, completion: Completion) -> EngineView:
        return self.rollout if completion.request_id in self.rollout.open else self.evaluation

    def _leave(self, completion: Completion) -> None:
        view = self._view_of(completion)
        view.finished.append(completion)
        del view.open[completion.request_id]


class EngineView:
    """The `RolloutEngine` of one user of a `SharedEngine`, for one thread."""

    def __init__(self, shared: SharedEngine) -> None:
        self._shared = shared
        self.open: dict[str, GenerationRequest] = {}
        self.finished: list[Completion] = []  # not yet returned

    @property
    def num_unfinished(self) -> int:
        """See `RolloutEngine`."""
        return len(self.open) + len(self.finished)

    @property
    def policy_version(self) -> int:
        """See `RolloutEngine`."""
        return self._shared.engine.policy_version

    @property
    def prefix_reuse(self) -> PrefixReuse:
        """See `RolloutEngine`: totals of both views."""
        return self._shared.engine.prefix_reuse

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """See `RolloutEngine`."""
        with self._shared.exclusive():
            self._shared.submit(self, requests)

    def poll(self) -> list[Completion]:
        """See `RolloutEngine`. Advances the engine unless completions wait already."""
        with self._shared.exclusive():
            if not self.finished:
                self._shared.poll()
            return self._take()

    def abort(self) -> list[Completion]:
        """See `RolloutEngine`. Stops only the requests of this view."""
        with self._shared.exclusive():
            self._shared.abort(self)
            return self._take()

    def _take(self) -> list[Completion]:
        finished, self.finished = self.finished, []
        return finished
