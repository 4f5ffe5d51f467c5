"""Watchers that talk over a network which loses what a case says: what each of them concludes, in simulated time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_dapo.watch.agreement import Agreement
from megatron_dapo.watch.failure import Failure
from megatron_dapo.watch.verdict import NodeView, WatchLimits

TICK_S = 0.5
LIMITS = replace(WatchLimits(), node_s=9.0)


class Network:
    """Nodes with one rank each. From `at_s` on messages in `lost` (from, to) vanish and nodes in `off` do nothing."""

    def __init__(self, num_nodes: int, lost: set[tuple[int, int]], off: set[int], at_s: float = 20.0, until_s: float = 1e9) -> None:
        self.watchers = [Agreement(node, num_nodes, num_nodes, f"node{node}", 0.0) for node in range(num_nodes)]
        for watcher in self.watchers:
            watcher.limits = LIMITS
        self.lost, self.off, self.at_s, self.until_s = lost, off, at_s, until_s
        self.words: set[tuple[int, int]] = set()  # (who, does not hear whom), in the run directory
        self.now = 0.0
        self.addresses = {node: (f"10.0.0.{node}", 1) for node in range(num_nodes)}

    def send(self, sender: int, receiver: int, message: dict) -> None:
        is_faulty = self.at_s <= self.now < self.until_s
        if is_faulty and ((sender, receiver) in self.lost or receiver in self.off):
            return
        answer = self.watchers[receiver].hear({**message, "from": sender}, self.addresses, self.now)
        if answer is not None:
            self.send(receiver, sender, answer)

    def run(self, end_s: float) -> list[Failure]:
        """Return the first entry of each node's own verdict."""
        verdicts: dict[int, Failure] = {}
        while self.now < end_s:
            self.now += TICK_S
            for node, watcher in enumerate(self.watchers):
                if watcher.verdict is not None or (node in self.off and self.now >= self.at_s):
                    continue
                self.words |= {(node, other) for other in watcher.unheard(self.now)}
                self.tick(node, watcher)
                if watcher.is_leader:
                    watcher.lead(lambda lost, at: "", self.now)
                    failures = watcher.decide(self.now, self.now)
                    if failures is not None:
                        verdicts[node] = self.with_words(watcher, failures[0])
                        watcher.accept(failures, self.now, is_writer=True)
        return [verdicts[node] for node in sorted(verdicts)]

    def tick(self, node: int, watcher: Agreement) -> None:
        here = NodeView(node, f"node{node}", (node,), phase="train", unanswered_s=watcher.unanswered_s(self.now))
        beat = watcher.beat(here, self.now)
        if not watcher.is_leader:
            self.send(node, watcher.leader, beat)
            if watcher.unanswered_s(self.now) > LIMITS.node_s:
                watcher.lose_leader(lambda lost, at: "", self.now)

    def with_words(self, watcher: Agreement, failure: Failure) -> Failure:
        has_word = failure.cause == "node lost" and (failure.node_rank, watcher.node_rank) in self.words
        return watcher.path_failure(failure) if has_word else failure


@pytest.mark.parametrize(
    ("num_nodes", "lost", "off", "cause", "node"),
    [
        (2, {(1, 0)}, set(), "path lost", "node0 and node1"),
        (2, {(0, 1)}, set(), "path lost", "node0 and node1"),
        (2, {(0, 1), (1, 0)}, set(), "path lost", "node0 and node1"),
        (4, {(2, 0)}, set(), "path lost", "node0 and node2"),
        (2, set(), {1}, "node lost", "node1"),
        (2, set(), {0}, "node lost", "node0"),
        (4, set(), {2}, "node lost", "node2"),
    ],
)
def test_a_pair_without_contact_is_told_from_a_dead_node(
    num_nodes: int, lost: set[tuple[int, int]], off: set[int], cause: str, node: str
) -> None:
    network = Network(num_nodes, lost, off)
    found = network.run(60.0)
    assert found and {(each.cause, each.node, each.rank) for each in found} == {(cause, node, -1)}, found
    if cause == "path lost":
        assert all("are alive and do not hear each other" in each.message for each in found)


def test_contact_that_returns_in_time_is_no_failure() -> None:
    network = Network(2, {(1, 0), (0, 1)}, set(), until_s=26.0)
    assert network.run(60.0) == [] and all(not watcher.unheard(network.now) for watcher in network.watchers)


def test_a_node_that_finds_no_other_decides_at_once() -> None:
    watcher = Agreement(1, 2, 2, "node1", 0.0)
    watcher.stand_alone(Failure(-1, "no address", "the node of rank 0, 'node0', has no address on node1", "node1", "start"), 1.0)
    assert watcher.is_leader and watcher.decide(1.5, 1.5) is None
    watcher.beat(NodeView(1, "node1", (1,)), 3.0)
    watcher.lead(lambda lost, at: "", 3.0)
    [first] = watcher.decide(3.0, 3.0)
    assert (first.cause, first.node) == ("no address", "node1")
