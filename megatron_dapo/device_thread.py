"""Threads that may use their rank's GPU. Modules that import torch start no others (tests/unit/test_layers.py).

The current device is per thread, and a new thread starts with GPU 0. After a single CUDA call in it, the rank keeps a
context of about 500 MiB on GPU 0 until it ends; eight ranks of a node take 4 GiB there.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def device_thread(target: Callable[..., object], *args: Any, name: str) -> threading.Thread:
    """Return a daemon thread, not started yet, that runs `target(*args)` on the caller's current device."""
    device = _current_device()

    def run() -> None:
        _use_device(device)
        target(*args)

    return threading.Thread(target=run, name=name, daemon=True)


def device_thread_pool(num_threads: int, name: str) -> ThreadPoolExecutor:
    """Return a pool whose threads run on the caller's current device."""
    return ThreadPoolExecutor(num_threads, name, initializer=_use_device, initargs=(_current_device(),))


def _current_device() -> int | None:
    torch = sys.modules.get("torch")  # this also runs in processes that never import torch
    return torch.cuda.current_device() if torch is not None and torch.cuda.is_initialized() else None


def _use_device(device: int | None) -> None:
    if device is not None:
        sys.modules["torch"].cuda.set_device(device)
