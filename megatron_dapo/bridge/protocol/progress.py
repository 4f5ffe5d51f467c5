"""Progress of a weight sync through shared memory: counters that writers and the reader of the slots poll.

Bucket k lies in slot k % 2. A writer may fill it when bucket k - 2 is loaded; the reader loads it when all writers have
counted it. No message is needed. Either side may stop the sync, which ends all waiting at once.

The counters only order the work of processes that behave; checksums prove that the bytes are right.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

NUM_SLOTS = 2
MAX_WRITERS = 1000  # one int64 each, after the other counters
LEFT = "it has left the weight sync"  # a writer ends its waiting; the engine's messenger knows the reason
ABANDONED = "the trainer has abandoned the weight sync"
_NUMBER, _STOPPED, _LOADED, _BEGUN, _WRITTEN = 0, 1, 2, 3, 4
NUM_WORDS = 1024
KEY_WORD = NUM_WORDS - 1  # written once, when the memory is created
# Looking costs time that writers and readers of one machine need: a wait is prolonged by at most a chunk of itself.
_SHORTEST_POLL_S, _LONGEST_POLL_S, _POLL_SHARE = 0.00005, 0.002, 0.125


class ArenaProgress:
    """Counters in int64 words [NUM_WORDS] of shared memory."""

    def __init__(self, words: torch.Tensor) -> None:
        self._words = words

    @property
    def key(self) -> int:
        """Key of the memory, zero if it has none."""
        return int(self._words[KEY_WORD])

    def start(self, number: int) -> None:
        """Reset all counters for weight sync `number`. No process may still work on an earlier one."""
        self._words[:KEY_WORD].zero_()
        self._words[_NUMBER] = number

    def stop(self) -> None:
        """Abandon the weight sync for all processes."""
        self._words[_STOPPED] = 1

    def stop_sync(self, number: int) -> None:
        """Stop weight sync `number`, but not a later one."""
        if int(self._words[_NUMBER]) == number:
            self.stop()

    @property
    def is_stopped(self) -> bool:
        return bool(self._words[_STOPPED])

    def begin(self, number: int) -> None:
        """Let the reader begin weight sync `number`. Raise ValueError if that is over or has begun already."""
        self._check(number)
        if self._words[_BEGUN]:
            raise ValueError("the weight sync has begun already; its message arrived twice")
        # A message that arrives twice would find bytes of other buckets in the slots.
        self._words[_BEGUN] = 1

    def _check(self, number: int) -> None:
        if int(self._words[_NUMBER]) != number or self.is_stopped:
            raise ValueError(ABANDONED)

    def count_written(self, writer: int, count: int) -> None:
        """Publish that this writer has written its share of the first `count` buckets."""
        # A separate word for every writer: an increment of a shared one is not atomic between processes.
        self._words[_WRITTEN + writer] = count

    def count_loaded(self, count: int) -> None:
        """Publish that the first `count` buckets are in the parameters."""
        self._words[_LOADED] = count

    @property
    def num_loaded(self) -> int:
        return int(self._words[_LOADED])

    def wait_for_slot(self, index: int, seconds: float) -> bool:
        """Return True once the slot of bucket `index` is free, False after `seconds`. Raise ValueError if the sync was stopped."""

        def is_free() -> bool:
            if self.is_stopped:
                raise ValueError(LEFT)
            return self.num_loaded > index - NUM_SLOTS

        return _poll(is_free, seconds)

    def wait_for_bucket(self, index: int, number: int, num_writers: int, seconds: float) -> None:
        """Wait until bucket `index` of sync `number` is whole. Raise ValueError if the sync stops, TimeoutError if it is late."""
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
