"""Calls in threads: their deadlines, errors and GPU."""

from __future__ import annotations

import pickle
import pickletools
import threading

import pytest
import torch

from megatron_dapo.bridge.transports.base import Call, SyncDeadline, call_within, encode_payload


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


def test_a_call_uses_the_gpu_of_its_rank(gpu_3: None) -> None:
    outer = Call(lambda: Call(torch.cuda.current_device).result(SyncDeadline(5.0), "the inner call"))
    assert outer.result(SyncDeadline(5.0), "the outer call") == 3


def test_a_payload_names_nothing_but_a_class_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core 0.19 puts its function where a tensor's pickle names one of torch, which SGLang refuses."""

    class Order:
        def encode(self) -> str:
            return "an order"

    monkeypatch.setattr("torch.storage._load_from_bytes", lambda content: None)
    payload = encode_payload(Order(), Order())  # type: ignore[arg-type]
    text = [argument for opcode, argument, _ in pickletools.genops(payload) if isinstance(argument, str)]
    assert text == ["an order", "torch", "Tensor"]
    assert [(name, tensor.numel()) for name, tensor in pickle.loads(payload)] == [("an order", 0)] * 2
