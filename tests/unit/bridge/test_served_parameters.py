"""Descriptions of a server's parameters: the real weight loader answers, only HTTP is missing."""

from __future__ import annotations

import pickle
import time

import pytest
import torch

from megatron_dapo.bridge.protocol import weight_loader
from megatron_dapo.bridge.protocol.description import specs_from_json, specs_to_json
from megatron_dapo.bridge.served_parameters import served_parameters
from megatron_dapo.reshard.layout import TensorSpec

E4M3 = torch.float8_e4m3fn


class Layer(torch.nn.Module):
    """One quantized layer of a rank; ranks have different numbers of rows."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(128 * (rank + 1), 256).to(E4M3), requires_grad=False)
        self.weight_scale_inv = torch.nn.Parameter(torch.ones(rank + 1, 2), requires_grad=False)
        self.k_scale = torch.nn.Parameter(torch.tensor(1.0), requires_grad=False)


class Server:
    """A server of two ranks; the loaders of `deaf` ranks get no message."""

    def __init__(self, deaf: tuple[int, ...] = ()) -> None:
        self.models, self.deaf, self.calls = [Layer(0), Layer(1)], deaf, []

    def begin_weight_update(self) -> None:
        self.calls.append("begin")

    def end_weight_update(self) -> None:
        self.calls.append("end")

    def update_weights_from_tensor(self, payloads, load_format=None) -> None:
        self.calls.append(load_format)
        for rank, (model, payload) in enumerate(zip(self.models, payloads, strict=True)):
            if rank not in self.deaf:
                weight_loader.load(model, pickle.loads(payload))


def test_every_rank_describes_its_own_parameters() -> None:
    server = Server()
    described = served_parameters(server, 2)
    for rank, specs in enumerate(described):
        assert specs == {
            "weight": TensorSpec((128 * (rank + 1), 256), E4M3),
            "weight_scale_inv": TensorSpec((rank + 1, 2), torch.float32),
            "k_scale": TensorSpec((), torch.float32),
        }
    # Newer servers accept messages only within a session; nothing is written.
    assert server.calls == ["begin", "megatron_dapo.bridge.protocol.weight_loader.load", "end"]
    assert all(bool((model.weight_scale_inv == 1).all()) for model in server.models)


def test_a_silent_rank_is_named_in_time() -> None:
    start = time.monotonic()
    with pytest.raises(ValueError, match="rank 1 of a server did not describe its parameters within 1 s"):
        served_parameters(Server(deaf=(1,)), 2, timeout_s=1.0)
    assert time.monotonic() - start < 10


def test_descriptions_survive_json_and_unknown_types_are_refused() -> None:
    specs = {"a": TensorSpec((2, 3), E4M3), "b": TensorSpec((), torch.bfloat16)}
    assert specs_from_json(specs_to_json(specs)) == specs
    with pytest.raises(ValueError, match="'no_such_type'"):
        specs_from_json({"a": [[1], "no_such_type"]})
