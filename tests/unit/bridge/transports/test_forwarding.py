"""Memory of messages between nodes: used again, never while a message may still be under way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from megatron_dapo.bridge.protocol.messages import Bucket
from megatron_dapo.bridge.transports import forwarding
from megatron_dapo.bridge.transports.base import EngineHandles, SyncDeadline, SyncRequest
from megatron_dapo.bridge.transports.forwarding import EngineNodes, Forwarding
from megatron_dapo.parallel.nodes import NodeTopology

NUM_ROUNDS = 20
REQUEST = SyncRequest("sync", "session", 1, (0, 1))


class Peers:
    """A group whose messages arrive when they are waited for. No two under way may share memory."""

    def __init__(self) -> None:
        self.in_flight: set[Any] = set()
        self.blocks: set[int] = set()

    def _start(self, data: torch.Tensor, peer: int) -> Any:
        start = data.data_ptr()
        message = _Message(range(start, start + data.numel()), self)
        assert not any(m.bytes.start < message.bytes.stop and message.bytes.start < m.bytes.stop for m in self.in_flight)
        self.in_flight.add(message)
        self.blocks.add(start)
        return message

    send = receive = _start


class _Message:
    def __init__(self, bytes_: range, peers: Peers) -> None:
        self.bytes, self._peers = bytes_, peers

    def wait(self, deadline: float) -> None:
        self._peers.in_flight.remove(self)


class Plan(SimpleNamespace):
    """Two engines of one rank, on two nodes of one trainer rank each. Both ranks write into every bucket."""

    engines = SimpleNamespace(tensor_parallel=1)
    num_engines = 2

    def ranks_of(self, engine: int) -> range:
        return range(engine, engine + 1)

    alike = ranks_of

    def destinations(self, source: int) -> tuple[int, ...]:
        return (0, 1)

    def buckets(self, engine_rank: int) -> list[Bucket]:
        sizes = [1000 - 7 * index for index in range(NUM_ROUNDS)]
        return [Bucket(i, size, (), {0: (0, size // 2), 1: (size // 2, size)}, engine_rank) for i, size in enumerate(sizes)]


def sync(forward: Forwarding, rounds: int = NUM_ROUNDS) -> None:
    forward.begin(REQUEST)
    assert forward.num_rounds == NUM_ROUNDS
    for index in range(rounds):
        incoming = forward.receive()
        forward.send(index, {}, None, SyncDeadline(10))
        for _, pending in incoming.values():
            pending.wait(0.0)
    if rounds == NUM_ROUNDS:
        forward.wait(SyncDeadline(10))


def test_rounds_and_syncs_share_memory_and_messages_under_way_do_not(monkeypatch) -> None:
    monkeypatch.setattr(forwarding, "write_chunks", lambda *arguments, **more: 0)
    peers, nodes = Peers(), EngineNodes(Plan(), EngineHandles([0, 1], {}), NodeTopology(2, 1), 0)
    forward = Forwarding(nodes, peers)
    sync(forward)
    first = set(peers.blocks)
    assert len(first) < 10  # 40 messages in all
    sync(forward)
    assert peers.blocks == first and not peers.in_flight
    sync(forward, rounds=5)  # it fails with messages under way
    assert peers.in_flight
    sync(forward)  # `Peers` would see a message into memory that those may still write
