"""A server that shares its device with the trainer: it gives its memory back while the trainer works.

    generate | rest: cache and weights released | trainer's step | begin update: weights back (their content is not)
             | delivery, verified | resume: cache back, then generation

Weights come back first and the cache only after the delivery, so that both are never there beside the buckets of a
delivery and the trainer's own peak. Needs a server started with its memory saver (CUDA alone; written, not run on one).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from megatron_dapo.engines.sglang.client import SglangClient

WEIGHTS, CACHE = "weights", "kv_cache"
_POLL_S = 0.05


class RestingClient(SglangClient):
    """`SglangClient` of such a server. What is released comes back by the next weight update."""

    _released: frozenset[str] = frozenset()  # SGLang ends where something is to come back that was not released

    def rest(self) -> None:
        """Release cache and weights, what of them is there. The server must have no request."""
        tags = tuple(tag for tag in (CACHE, WEIGHTS) if tag not in self._released)
        if tags:
            self.flush_cache()
            self.release_memory(tags)
            self._released |= set(tags)

    def begin_weight_update(self) -> None:
        """Bring the memory of the weights back, then open the session."""
        self._bring_back(WEIGHTS)
        super().begin_weight_update()

    def resume(self) -> None:
        """Bring the cache back, then generate again."""
        self._bring_back(CACHE)
        super().resume()

    def _bring_back(self, tag: str) -> None:
        if tag in self._released:
            self.resume_memory((tag,))
            self._released -= {tag}


def wait_for_memory(free_bytes: Callable[[], int], before: int, expected: int, timeout_s: float) -> int:
    """Until `expected` more bytes are free than `before`; returns how many are. A release is over only when the device
    says so.

    MemoryError with both numbers where they are not within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while (freed := free_bytes() - before) < expected:
        if time.monotonic() >= deadline:
            raise MemoryError(
                f"the servers on this device released {freed} bytes within {timeout_s:g} s, their weights alone are "
                f"{expected}: they run without the memory saver, or another process took the memory"
            )
        time.sleep(_POLL_S)
    return freed
