"""Random numbers of libraries that draw from the module `random`, so that episodes of one process do not share them."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_LOCK = threading.RLock()  # episodes are threads of one process


class GlobalRandom:
    """An episode's state of the modules `random` and `numpy.random`, in place while it is used."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._states: dict[str, Any] | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Draw from this episode's numbers inside the context. Other episodes wait."""
        with _LOCK:
            before = _states()
            if self._states is None:
                random.seed(self._seed)
                if (numpy_random := _numpy_random()) is not None:
                    numpy_random.seed(self._seed % 2**32)
            else:
                _restore(self._states)
            try:
                yield
            finally:
                self._states = _states()
                _restore(before)


def _numpy_random() -> Any:
    """Return numpy.random if the library has imported it."""
    return sys.modules.get("numpy.random")


def _states() -> dict[str, Any]:
    numpy_random = _numpy_random()
    return {"random": random.getstate()} | ({} if numpy_random is None else {"numpy": numpy_random.get_state()})


def _restore(states: dict[str, Any]) -> None:
    random.setstate(states["random"])
    if "numpy" in states:
        _numpy_random().set_state(states["numpy"])
