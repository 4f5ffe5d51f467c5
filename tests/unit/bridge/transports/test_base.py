"""Calls in threads: their deadlines, errors and GPU."""

from __future__ import annotations

import threading

import pytest
import torch

from megatron_dapo.bridge.transports.base import Call, SyncDeadline, call_within


def test_a_call_ends_at_its_deadline() -> None:
    let_go = threading.Event()
    with pytest.raises(TimeoutError, match=r"the answer took longer than 0.1 s"):
        call_within(let_go.wait, 0.1, "the answer")
    let_go.set()


def test_an_error_reaches_the_caller() -> None:
    def fail() -> None:
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        call_within(fail, 5.0, "the answer")


def test_a_call_uses_the_gpu_of_its_rank(monkeypatch) -> None:
    """The current device is a property of the thread; a new thread starts with GPU 0."""
    current = threading.local()
    current.device = 3
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(current, "device", 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(current, "device", device))
    outer = Call(lambda: Call(torch.cuda.current_device).result(SyncDeadline(5.0), "the inner call"))
    assert outer.result(SyncDeadline(5.0), "the outer call") == 3
