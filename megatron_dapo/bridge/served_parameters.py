"""Asks a server which parameters its ranks hold: what is quantized is what the engine says is, not a list kept here."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_dapo.bridge.protocol.description import DESCRIBE, DescriptionChannel, read_description
from megatron_dapo.bridge.protocol.peer_group import LOOPBACK, PeerError, RendezvousStore
from megatron_dapo.bridge.protocol.receiver import Command
from megatron_dapo.bridge.transports.base import LOAD_FORMAT, EngineControl, SyncDeadline, encode_payload
from megatron_dapo.reshard.layout import TensorSpec


def served_parameters(
    control: EngineControl, tensor_parallel: int, *, host: str = LOOPBACK, timeout_s: float = 60.0
) -> list[Mapping[str, TensorSpec]]:
    """Shape and element type of every parameter of each rank of one server, as its model holds them now.

    `host` is this machine's address as the server reaches it. Raises ValueError where a rank does not answer.
    """
    place = RendezvousStore(host, timeout_s)
    name, deadline = place.new_name(), SyncDeadline(timeout_s)
    channels = [DescriptionChannel(place.address, f"{name}/{rank}", timeout_s) for rank in range(tensor_parallel)]
    commands = [Command(id=c.key, op=DESCRIBE, delivery=name, channel=c.to_json()) for c in channels]
    control.begin_weight_update()
    try:
        control.update_weights_from_tensor([encode_payload(command) for command in commands], LOAD_FORMAT)
    finally:
        control.end_weight_update()
    described: list[Mapping[str, TensorSpec]] = []
    for rank, channel in enumerate(channels):
        try:
            described.append(read_description(channel, deadline.left_s))
        except PeerError as error:
            raise ValueError(
                f"rank {rank} of a server did not tell its parameters within {timeout_s:g} s ({error}); was it started "
                "with this version's weight loader, and does it reach this machine? Its log says more"
            ) from error
    return described
