"""Tail batching for runs that are strictly on policy (rollout.tail_rounds), after RollPacker (arXiv 2509.21009).

    fresh prompts --> short round: oversample times the batch; the groups that end first are trained
                           |
                           +--> prompts of the others are put off --> long round: a batch of them, all of them trained

So most steps do not wait for their longest response, and those that do wait for many at once. What was sampled for a group
that is put off is thrown away: in the long round another policy samples it anew. Groups of short rounds are shorter than
sampled ones, and so are those of all rounds together, because only groups that came out long are drawn again.

A long round begins once as many prompts as a batch has are put off, or when the data ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any


class TailRounds:
    """Prompts that are put off, and the kind of the current round."""

    def __init__(self, is_on: bool) -> None:
        self.is_on = is_on
        self.is_long = False  # the current round
        self._is_under_way = False
        self._put_off: deque[str] = deque()

    @property
    def takes_first_ended(self) -> bool:
        """True if the batch is full with the groups that end first."""
        return self.is_on and not self.is_long

    def begin(self, num_groups: int) -> None:
        """Begin a round, or continue one that an error or a restart interrupted, which keeps its kind."""
        if not self._is_under_way:
            self.is_long = self.is_on and len(self._put_off) >= num_groups
        self._is_under_way = True

    def end(self) -> None:
        """Note that the batch is full."""
        self._is_under_way = False

    def next(self, draw: Callable[[], tuple[str, int] | None], size: int) -> tuple[str, int] | None:
        """Return the next prompt and the size of its group: one that was put off, or in a short round what `draw` returns.

        At the end of the data the round becomes a long one.
        """
        drawn = None if self.is_long and self._put_off else draw()
        if drawn is None and self._put_off:
            self.is_long = True
            return self._put_off.popleft(), size
        return drawn

    def put_off(self, prompt_id: str) -> None:
        """Keep a prompt for a long round."""
        self._put_off.append(prompt_id)

    def statistics(self) -> dict[str, float]:
        """Return the numbers of this collection, by their names in the metrics."""
        return {"put_off": len(self._put_off), "is_long_round": float(self.is_long)}

    def state_dict(self) -> dict[str, Any]:
        """Return the JSON-serializable state."""
        return {"put_off": list(self._put_off), "is_long": self.is_long, "is_under_way": self._is_under_way}

    def load_state_dict(self, state: Mapping[str, Any], requeue: Callable[[str], None]) -> None:
        """Invert `state_dict`. In a run without these rounds, `requeue` takes the prompts that were put off."""
        self._put_off = deque(state.get("put_off", ()))
        self.is_long, self._is_under_way = state.get("is_long", False), state.get("is_under_way", False)
        if not self.is_on:
            for prompt_id in self._put_off:
                requeue(prompt_id)
            self._put_off.clear()
            self.is_long = False
