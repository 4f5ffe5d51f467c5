"""Ask a server for its parameters, because only the engine knows which ones it quantizes."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_dapo.bridge.protocol.description import DESCRIBE, DescriptionChannel, get_description
from megatron_dapo.bridge.protocol.messages import Command
from megatron_dapo.bridge.protocol.peer_group import LOOPBACK, PeerError, RendezvousStore
from megatron_dapo.bridge.transports.base import LOAD_FORMAT, ServerControl, SyncDeadline, encode_payload
from megatron_dapo.reshard.layout import TensorSpec


def served_parameters(
    control: ServerControl, tensor_parallel: int, *, host: str = LOOPBACK, timeout_s: float = 60.0
) -> list[Mapping[str, TensorSpec]]:
    """Return the current shape and element type of every parameter, for each rank of one server.

    `host` is this node's address as the server reaches it. Raise ValueError if a rank does not answer.
    """
    store = RendezvousStore(host, timeout_s)
    name, deadline = store.new_name(), SyncDeadline(timeout_s)
    channels = [DescriptionChannel(store.address, f"{name}/{rank}", timeout_s) for rank in range(tensor_parallel)]
    commands = [Command(c.key, DESCRIBE, name, channel=c.to_json()) for c in channels]
    # Newer servers accept messages to the weight loader only inside an update session.
    control.begin_weight_update()
    try:
        control.update_weights_from_tensor([encode_payload(command) for command in commands], LOAD_FORMAT)
    finally:
        control.end_weight_update()
    described: list[Mapping[str, TensorSpec]] = []
    for rank, channel in enumerate(channels):
        try:
            described.append(get_description(channel, deadline.left_s))
        except PeerError as error:
            raise ValueError(
                f"rank {rank} of a server did not describe its parameters within {timeout_s:g} s ({error}); start it with "
                "this version's weight loader and check that it reaches this node; its log says more"
            ) from error
    return described
