"""Watchers of several nodes, in one process and on a clock that the test turns: lost messages, lost nodes, lost links."""

from __future__ import annotations

import json
import os
import random
import socket
import sys
import time
from collections.abc import Iterator

import pytest

from megatron_dapo.watch import network, watcher
from megatron_dapo.watch.network import OwnLink
from megatron_dapo.watch.verdict import RankView
from megatron_dapo.watch.watcher import Watcher

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the watcher needs abstract sockets")


class Nodes:
    """Watchers without ranks; `pass_time` lets them tick."""

    def __init__(self, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lines: list[str] = []
        monkeypatch.setattr(watcher, "_say", self.lines.append)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        place = {"world_size": count, "num_nodes": count, "leader": ["127.0.0.1", self.port], "run_id": "x", "attempt": 1}
        self.watchers = [
            Watcher({**place, "node_rank": node, "address": f"test-{os.getpid()}-{self.port}-{node}"})
            for node in range(count)
        ]
        self.now = time.monotonic()
        self.is_blocked = False  # no datagram arrives
        self.lost: set[int] = set()  # nodes without power
        for each in self.watchers:
            monkeypatch.setattr(each._network, "socket", Unreliable(each._network.socket, self))

    def pass_time(self, seconds: float) -> None:
        """Let all watchers that have power tick twice a second."""
        end = self.now + seconds
        while self.now < end:
            self.now += 0.5
            for node, each in enumerate(self.watchers):
                if node not in self.lost:
                    each._handle([], self.now)
                    each._tick(self.now)

    def verdicts(self) -> list[list[tuple[str, int]] | None]:
        """Return cause and node of each watcher's records."""
        found = [each._run.verdict for each in self.watchers]
        return [None if records is None else [(each.cause, each.node_rank) for each in records] for records in found]

    def close(self) -> None:
        for each in self.watchers:
            for opened in (each._listener, each._network._listener, each._network.socket):
                opened.close()


class Unreliable:
    """A UDP socket whose datagrams are lost while its nodes say so."""

    def __init__(self, of: socket.socket, nodes: Nodes) -> None:
        self._of, self._nodes = of, nodes

    def sendto(self, text: bytes, address: tuple) -> None:
        if not self._nodes.is_blocked:
            self._of.sendto(text, address)

    def __getattr__(self, name: str) -> object:
        return getattr(self._of, name)


@pytest.fixture
def nodes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    made = Nodes(request.param, monkeypatch)
    made.pass_time(3.0)
    yield made
    made.close()


@pytest.mark.parametrize("nodes", [2], indirect=True)
def test_a_gap_of_datagrams_is_no_verdict(nodes: Nodes) -> None:
    """A saturated link drops datagrams first; connections of the watchers still arrive, and carry what there is to say."""
    leader, other = nodes.watchers
    nodes.is_blocked = True
    nodes.pass_time(9.0)
    assert nodes.verdicts() == [None, None] and nodes.now - leader._run._heard[1] > 8.0
    nodes.pass_time(120.0)
    assert nodes.verdicts() == [None, None] and nodes.now - leader._run._heard[1] < 30.0
    other._note(RankView(1, "node1", 1).failure("exit", "ended with exit code 3"), nodes.now)
    nodes.pass_time(15.0)
    assert nodes.verdicts() == [[("exit", 1)], [("exit", 1)]]


@pytest.mark.parametrize("nodes", [2], indirect=True)
def test_a_node_without_power_is_lost_after_the_limit(nodes: Nodes) -> None:
    nodes.lost = {1}
    nodes.pass_time(29.0)
    assert nodes.verdicts() == [None, None]
    nodes.pass_time(7.0)
    assert nodes.verdicts() == [[("node lost", 1)], None]
    assert nodes.lines[0].startswith("first failure: attempt 1, ") and "no sign of life for 3" in nodes.lines[0]


@pytest.mark.parametrize("nodes", [4], indirect=True)
def test_the_next_node_decides_if_that_of_the_leader_is_lost(nodes: Nodes) -> None:
    nodes.lost = {0}
    nodes.pass_time(36.0)
    assert nodes.verdicts() == [None] + [[("node lost", 0)]] * 3
    assert [each._run.is_writer for each in nodes.watchers] == [False, True, False, False]


@pytest.mark.parametrize("nodes", [2], indirect=True)
def test_datagrams_of_strangers_are_ignored(nodes: Nodes) -> None:
    """Random bytes, JSON of any form, and even the run's identifier with nonsense."""
    generator = random.Random(0)
    forms = [b"[]", b"{}", b'{"run": 1}', b"\xff" * 60_000]
    for kind in ("beat", "answer", "x", 7, None):
        for extra in ({}, {"verdict": 5}, {"failures": [1], "view": {"x": 0}, "details": []}, {"port": "x"}):
            forms.append(json.dumps({"run": "x", "from": 1, "port": 1, "kind": kind, **extra}).encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for form in [*forms, *(generator.randbytes(200) for _ in range(20))]:
            sender.sendto(form, ("127.0.0.1", nodes.port))
    port = nodes.watchers[0]._network._listener.getsockname()[1]
    with socket.create_connection(("127.0.0.1", port)) as sender:
        sender.sendall(b"GET / HTTP/1.0\r\n\r\n")
        nodes.pass_time(10.0)
    assert nodes.verdicts() == [None, None]
    assert nodes.lines and all("ignored a datagram" in line for line in nodes.lines)
    assert nodes.watchers[0]._network._connections == []


@pytest.mark.parametrize(
    ("down", "answered_at", "fault"),
    [
        (set(), {}, ""),  # nobody was asked
        (set(), {"10.0.0.9": 99.0}, ""),  # a third machine still answers
        (set(), {"10.0.0.9": 50.0, "10.0.0.8": 51.0}, "nor does 10.0.0.8 or 10.0.0.9 answer, which did before"),
        (set(), {"10.0.0.2": 50.0}, ""),  # An answer of the silent node proves nothing.
        ({"eth0"}, {"10.0.0.9": 99.0}, "interface eth0 has no carrier"),
    ],
)
def test_whose_link_is_lost(
    down: set[str], answered_at: dict[str, float], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node 10.0.0.2 was heard last at 60 s, and it is 100 s."""
    monkeypatch.setattr(network, "interfaces_up", lambda: {"eth0", "eth1"})
    link = OwnLink()
    link._answered_at = answered_at
    monkeypatch.setattr(network, "interfaces_up", lambda: {"eth0", "eth1"} - down)
    assert link.fault(60.0, "10.0.0.2") == fault
