"""A phase of the loop: timed, shown, and ended with stacks and a reason if it takes too long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from megatron_dapo.telemetry.phases import PhaseTimer

OFFLOAD = "offload"
View = Callable[[str, float, float], None]  # (phase, done, total)


class Phases:
    """Phases of one rank. `view` is set on the rank that shows progress, `moves` where models leave the device while they
    rest: it is called with the name of every phase before that begins, in a phase of its own."""

    def __init__(self, timer: PhaseTimer, watch: Callable[[str], AbstractContextManager[None]]) -> None:
        self.timer = timer
        self.view: View | None = None
        self.moves: Callable[[str], None] | None = None
        self._watch = watch

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Everything inside belongs to phase `name`."""
        if self.moves is not None:
            with self.timer.phase(OFFLOAD), self._watch(OFFLOAD):
                self.moves(name)
        self.show(name)
        with self.timer.phase(name), self._watch(name):
            yield

    def show(self, text: str, done: float = 0.0, total: float = 0.0) -> None:
        """Say how far the current phase is, on the rank that shows it."""
        if self.view is not None:
            self.view(text, done, total)
