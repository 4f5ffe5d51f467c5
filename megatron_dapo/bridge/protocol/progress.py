"""How far a delivery through shared memory has come: counters in it that writers and the reader of the slots poll.

Bucket k lies in slot k % 2. A writer may fill it when bucket k - 2 is loaded; the reader loads it when all writers have
counted it. Nobody sends a message for that. Either side may stop the delivery, which ends all waiting at once: a writer
that leaves it, and a reader that cannot go on.

The counters order nothing but the work of processes that behave: that the bytes are the right ones is proved by their
checksums. Needs torch and the standard library alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

NUM_SLOTS = 2
MAX_WRITERS = 1000
LEFT = "it has left the delivery"  # why a writer ends its waiting; the reason is known elsewhere
GIVEN_UP = "the trainer has given the delivery up"
_NUMBER, _STOPPED, _LOADED, _BEGUN, _WRITTEN = 0, 1, 2, 3, 4
NUM_WORDS = 1024
# Looking costs time that writers and readers of one machine need: a wait is prolonged by at most a chunk of itself.
_SHORTEST_POLL_S, _LONGEST_POLL_S, _POLL_SHARE = 0.00005, 0.002, 0.125


class Progress:
    """Over int64 words [NUM_WORDS] of shared memory."""

    def __init__(self, words: torch.Tensor) -> None:
        self._words = words

    def start(self, number: int) -> None:
        """All counters at zero for the delivery `number`. Nobody may be working on an earlier one."""
        self._words.zero_()
        self._words[_NUMBER] = number

    def stop(self) -> None:
        """The delivery is given up: nobody goes on with it."""
        self._words[_STOPPED] = 1

    def stop_delivery(self, number: int) -> None:
        """`stop`, where the delivery that is under way is `number` and not a later one."""
        if int(self._words[_NUMBER]) == number:
            self.stop()

    @property
    def is_stopped(self) -> bool:
        return bool(self._words[_STOPPED])

    def begin(self, number: int) -> None:
        """The reader begins with the delivery `number`. ValueError where that is over or was begun before: a message that
        arrives twice finds bytes of other buckets in the slots."""
        self._check(number)
        if self._words[_BEGUN]:
            raise ValueError("the delivery has been begun already; its message arrived twice")
        self._words[_BEGUN] = 1

    def _check(self, number: int) -> None:
        if int(self._words[_NUMBER]) != number or self.is_stopped:
            raise ValueError(GIVEN_UP)

    def count_written(self, writer: int, count: int) -> None:
        """The first `count` buckets have all that this writer contributes."""
        self._words[_WRITTEN + writer] = count

    def count_loaded(self, count: int) -> None:
        """The first `count` buckets are where they belong."""
        self._words[_LOADED] = count

    @property
    def num_loaded(self) -> int:
        return int(self._words[_LOADED])

    def wait_for_slot(self, index: int, seconds: float) -> bool:
        """Whether the slot of bucket `index` may be written, within `seconds`. ValueError where the delivery was stopped."""

        def is_free() -> bool:
            if self.is_stopped:
                raise ValueError(LEFT)
            return self.num_loaded > index - NUM_SLOTS

        return _poll(is_free, seconds)

    def wait_for_bucket(self, index: int, number: int, num_writers: int, seconds: float) -> None:
        """Until bucket `index` of the delivery `number` is whole. ValueError where it never will be, TimeoutError."""
        written = self._words[_WRITTEN : _WRITTEN + num_writers]

        def is_whole() -> bool:
            self._check(number)
            return int(written.min()) > index

        if not _poll(is_whole, seconds):
            raise TimeoutError(f"the trainer's writing of bucket {index} took longer than {seconds:.1f} s")


def _poll(condition: Callable[[], bool], seconds: float) -> bool:
    start = time.monotonic()
    while not condition():
        waited = time.monotonic() - start
        if waited > seconds:
            return False
        time.sleep(min(max(_POLL_SHARE * waited, _SHORTEST_POLL_S), _LONGEST_POLL_S))
    return True
