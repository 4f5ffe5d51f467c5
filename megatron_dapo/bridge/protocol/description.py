"""Name, shape and element type of an engine rank's parameters, which it describes to the trainer on request.

The request is a `Command` of op "describe" whose `channel` names the trainer's rendezvous store and a key made for this
one request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron_dapo.bridge.protocol.messages import dtype_name
from megatron_dapo.bridge.protocol.peer_group import Address, RendezvousClient
from megatron_dapo.reshard.layout import TensorSpec

DESCRIBE = "describe"


@dataclass(frozen=True)
class DescriptionChannel:
    """Destination of a description."""

    address: Address  # the trainer's rendezvous store
    key: str
    seconds: float  # an engine rank may take to reach it

    def to_json(self) -> dict[str, Any]:
        return {"host": self.address.host, "port": self.address.port, "key": self.key, "seconds": self.seconds}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> DescriptionChannel:
        address = Address(str(value["host"]), int(value["port"]))
        return DescriptionChannel(address, str(value["key"]), float(value["seconds"]))


def put_description(channel: DescriptionChannel, parameters: Mapping[str, torch.Tensor]) -> None:
    """Send the description, from an engine rank. Raise PeerError if the trainer cannot be reached."""
    specs = {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in parameters.items()}
    text = json.dumps(specs_to_json(specs), separators=(",", ":"))
    RendezvousClient(channel.address, channel.seconds).put(channel.key, text)


def get_description(channel: DescriptionChannel, timeout_s: float) -> dict[str, TensorSpec]:
    """Wait for a description, in the trainer. Raise PeerError after `timeout_s`, ValueError if it cannot be read."""
    text = RendezvousClient(channel.address, channel.seconds).get(channel.key, timeout_s)
    try:
        return specs_from_json(json.loads(text))
    except (TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"an engine's description of its parameters cannot be read: {error}") from error


def specs_to_json(specs: Mapping[str, TensorSpec]) -> dict[str, Any]:
    """Return {name: [shape, type]}."""
    return {name: [list(spec.shape), dtype_name(spec.dtype)] for name, spec in specs.items()}


def specs_from_json(value: Mapping[str, Any]) -> dict[str, TensorSpec]:
    """Inverse of `specs_to_json`."""
    return {str(name): TensorSpec(tuple(map(int, shape)), _dtype(dtype)) for name, (shape, dtype) in value.items()}


def _dtype(name: str) -> torch.dtype:
    # Any type of torch, not only those a weight sync carries: the caller's error names the parameter of an odd type.
    dtype = vars(torch).get(name)
    if isinstance(dtype, torch.dtype):
        return dtype
    raise ValueError(f"an engine's description of its parameters has an element type {name!r}, which torch lacks")
