"""What an engine rank's parameters are, told to the trainer on request: name, shape and element type of each.

The request comes as a `Command` of op "describe" whose `channel` says where to leave the answer and under which key;
the key is made for one request and known to nobody else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron_dapo.bridge.protocol.peer_group import Address, RendezvousClient
from megatron_dapo.reshard.layout import TensorSpec

DESCRIBE = "describe"


@dataclass(frozen=True)
class DescriptionChannel:
    """Where a description goes."""

    address: Address  # of the trainer's meeting place
    key: str
    seconds: float  # an engine rank may take to reach it

    def to_json(self) -> dict[str, Any]:
        return {"host": self.address.host, "port": self.address.port, "key": self.key, "seconds": self.seconds}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> DescriptionChannel:
        address = Address(str(value["host"]), int(value["port"]))
        return DescriptionChannel(address, str(value["key"]), float(value["seconds"]))


def leave_description(channel: DescriptionChannel, parameters: Mapping[str, torch.Tensor]) -> None:
    """The engine rank's side. PeerError where the trainer cannot be reached."""
    specs = {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in parameters.items()}
    text = json.dumps(specs_to_json(specs), separators=(",", ":"))
    RendezvousClient(channel.address, channel.seconds).put(channel.key, text)


def read_description(channel: DescriptionChannel, timeout_s: float) -> dict[str, TensorSpec]:
    """The trainer's side: waits for it. PeerError after `timeout_s`, ValueError where it is no description."""
    text = RendezvousClient(channel.address, channel.seconds).get(channel.key, timeout_s)
    try:
        return specs_from_json(json.loads(text))
    except (TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"an engine's description of its parameters cannot be read: {error}") from error


def specs_to_json(specs: Mapping[str, TensorSpec]) -> dict[str, Any]:
    """{name: [shape, type]}."""
    return {name: [list(spec.shape), str(spec.dtype).removeprefix("torch.")] for name, spec in specs.items()}


def specs_from_json(value: Mapping[str, Any]) -> dict[str, TensorSpec]:
    return {str(name): TensorSpec(tuple(map(int, shape)), _dtype(dtype)) for name, (shape, dtype) in value.items()}


def _dtype(name: str) -> torch.dtype:
    dtype = vars(torch).get(name)
    if isinstance(dtype, torch.dtype):
        return dtype
    raise ValueError(f"an engine's description of its parameters has an element type {name!r}, which torch lacks")
