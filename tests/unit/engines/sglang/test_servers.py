"""Servers over several nodes: which rank starts which part, where parts meet, and what is started again together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_dapo.engines.sglang import servers as module
from megatron_dapo.engines.sglang.servers import Part, ServersFailed, StartedServers
from megatron_dapo.parallel.nodes import NodeTopology

RANKS_PER_NODE = 2


class Ranks:
    """Exchanges between threads, one a rank."""

    def __init__(self, size: int) -> None:
        self.barrier, self.values = threading.Barrier(size, timeout=60), [None] * size

    def of(self, rank: int) -> Any:
        def gather(value: Any) -> list[Any]:
            self.values[rank] = value
            self.barrier.wait()
            found = list(self.values)
            self.barrier.wait()
            return found

        return SimpleNamespace(
            gather=gather,
            merge=lambda value, combine, what: combine(gather(value)),
            broadcast=lambda value: gather(value)[0],
        )


@dataclass
class Process:
    """A part that lives until it is killed; a first part chooses where the others meet it."""

    part: Part
    node: int
    number: int
    is_kept: bool = False
    alive: bool = True
    waits: list[str] = field(default_factory=list)

    @property
    def answers(self) -> bool:
        return self.part.node_rank == 0

    @property
    def url(self) -> str:
        return f"http://{self.node}.{self.part.index}"

    @property
    def meeting(self) -> str:
        return self.part.meeting or f"node {self.node}, start {self.number}"

    def is_alive(self) -> bool:
        return self.alive

    def exit_reason(self) -> str:
        return f"node {self.node} was killed"

    def wait_until_healthy(self) -> Any:
        assert self.answers
        return SimpleNamespace(api_version=None, max_total_tokens=500 + self.part.index)

    def wait_until_joined(self) -> None:
        assert not self.answers

    def kill(self) -> None:
        self.alive = False

    def start_anew(self) -> None:
        self.number, self.is_kept = self.number + 100, False


class World:
    """`num_nodes` nodes of two ranks, with servers over `nodes_per_server` of them; `kept`: (node, index) of parts kept."""

    def __init__(self, num_nodes: int, per_node: int, nodes_per_server: int, kept: set[tuple[int, int]] | None = None) -> None:
        self.nodes, self.started = NodeTopology(num_nodes * RANKS_PER_NODE, RANKS_PER_NODE), list[Process]()
        self.kept, self.lock = kept or set(), threading.Lock()
        self.ranks = Ranks(self.nodes.num_ranks)
        self.all = self.each(
            lambda rank: StartedServers(
                lambda part: self.start(rank, part), self.nodes, rank, per_node, 3, self.ranks.of(rank), nodes_per_server
            )
        )

    def start(self, rank: int, part: Part) -> Process:
        with self.lock:
            node = self.nodes.node_of(rank)
            # A kept part is found only if it meets the same first part, whose first start is number 0 here.
            first = node - part.node_rank
            is_kept = (node, part.index) in self.kept and part.meeting in ("", f"node {first}, start 0")
            number = 0 if is_kept else len(self.started) + 1
            self.started.append(Process(part, node, number, is_kept))
            return self.started[-1]

    def each(self, call: Callable[[int], Any]) -> list[Any]:
        with ThreadPoolExecutor(self.nodes.num_ranks) as pool:
            return list(pool.map(call, range(self.nodes.num_ranks)))

    def running(self) -> dict[tuple[int, int], Process]:
        return {(one.node, one.part.index): one for one in self.started if one.alive}


@pytest.mark.parametrize(("num_nodes", "per_node", "spread"), [(1, 2, 1), (3, 1, 1), (2, 1, 2), (4, 2, 2), (4, 1, 4), (6, 3, 3)])
def test_every_part_is_on_its_node_and_meets_the_first(num_nodes: int, per_node: int, spread: int) -> None:
    world = World(num_nodes, per_node, spread)
    count = num_nodes // spread * per_node
    assert {server.leaders == world.all[0].leaders for server in world.all} == {True}
    assert world.all[0].leaders == [index // per_node * spread * RANKS_PER_NODE for index in range(count)]
    parts = world.running()
    assert len(world.started) == len(parts) == num_nodes * per_node
    for index in range(count):
        first = index // per_node * spread
        for node_rank in range(spread):
            part = parts[first + node_rank, index].part
            assert (part.slot, part.node_rank) == (index % per_node, node_rank)
            assert part.meeting == ("" if node_rank == 0 else parts[first, index].meeting)
    for ready in world.each(lambda rank: world.all[rank].ready()):
        assert [(one.index, one.url) for one in ready] == [(i, f"http://{i // per_node * spread}.{i}") for i in range(count)]


def test_a_lost_part_is_noticed_by_all_and_all_parts_start_again() -> None:
    world = World(4, 1, 2)
    world.each(lambda rank: world.all[rank].ready())
    world.running()[3, 1].alive = False  # the second server's part on its second node
    for dead in world.each(lambda rank: world.all[rank].dead({})):
        assert dead == {1: "node 3 was killed"}
    before = world.running()
    world.each(lambda rank: world.all[rank].replace({1: "node 3 was killed"}))
    after = world.running()
    assert [after[node, 0] is before[node, 0] for node in (0, 1)] == [True, True]
    assert after[2, 1] is not before[2, 1] and after[3, 1].part.meeting == after[2, 1].meeting
    assert [after[node, 1].part.num_restarts for node in (2, 3)] == [1, 1]
    assert [after[node, 1].part.cache_tokens for node in (2, 3)] == [501, 501]
    with pytest.raises(ServersFailed, match="server 1 is lost"):
        for _ in range(4):
            world.each(lambda rank: world.all[rank].replace({1: "again"}))


@pytest.mark.parametrize("kept", [{(0, 0), (1, 0)}, {(0, 0)}, {(1, 0)}, set()])
def test_a_server_is_kept_if_all_its_parts_are(kept: set[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SupervisedServer", Process)
    world = World(2, 1, 2, kept)
    first, second = world.all[0].own(0), world.all[RANKS_PER_NODE].own(0)
    assert isinstance(first, Process) and isinstance(second, Process)
    assert first.is_kept == second.is_kept == (len(kept) == 2)
    assert second.part.meeting == first.meeting
