"""Wall time of a step by named phases that, with `unaccounted`, sum to the step time exactly."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager


class PhaseTimer:
    """Adds up wall time by phase. The time of a nested phase is not counted in the outer one.

    `clock` returns seconds; tests pass their own.
    """

    def __init__(self, names: Sequence[str], clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._names = tuple(names)
        self._open: list[str] = []
        self._reset()

    def _reset(self) -> None:
        self._seconds = dict.fromkeys((*self._names, "unaccounted"), 0.0)
        self._start = self._mark = self._clock()

    @property
    def current(self) -> str:
        """The innermost open phase, or "unaccounted"."""
        return self._open[-1] if self._open else "unaccounted"

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Attribute the time spent inside to `name`. Raises ValueError for an unknown phase."""
        if name not in self._names:
            raise ValueError(f"no phase {name!r}; there are {', '.join(self._names)}")
        # Time so far belongs to the outer phase, so that nested phases are never counted twice.
        self._turn()
        self._open.append(name)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time spent inside."""
        self._turn()
        yield
        now = self._clock()
        self._start += now - self._mark
        self._mark = now

    def finish_step(self) -> dict[str, float]:
        """Return the seconds by phase, "unaccounted" and "step" since the last call, and start the next step.

        No phase may be open.
        """
        assert not self._open, f"phases {self._open} are still open at the end of the step"
        self._turn()
        times = {**self._seconds, "step": self._mark - self._start}
        self._reset()
        return times

    def _turn(self) -> None:
        now = self._clock()
        self._seconds[self.current] += now - self._mark
        self._mark = now
