"""How the watchers of a run agree on its verdict: what one of them knows, and what it sends. No socket, process or clock.

Each node sends a beat to the leader every second. The leader, node 0's watcher, answers with the nodes that would lead
next, and with its verdict once there is one. A node without an answer turns to the next leader, finally to itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from megatron_dapo.watch.failure import Failure
from megatron_dapo.watch.verdict import (
    NodeView,
    RankView,
    WatchLimits,
    decision,
    hang,
    missing_ranks,
    node_failure,
    path_failure,
    without_contact,
)

DETAIL_CHARS = 6_000  # The limit for records; messages get half.
Address = tuple[Any, ...]
# Fault of this node's link, "" if none is known; given a node, and when it was last heard.
FindFault = Callable[[int, float], str]


class Agreement:
    """What the watcher of node `node_rank` knows of the run. Times are on its monotonic clock."""

    def __init__(self, node_rank: int, num_nodes: int, world_size: int, name: str, now: float) -> None:
        self.node_rank, self.num_nodes, self.world_size, self.name = node_rank, num_nodes, world_size, name
        self.limits = WatchLimits()
        self.attempt = 1
        self.records: list[tuple[float, Failure]] = []  # (time noticed here, failure)
        self.leader = 0
        self.leader_is_done = False
        self.others = set(range(num_nodes)) - {node_rank}  # nodes that have not exited cleanly
        self.verdict: list[Failure] | None = None
        self.verdict_at = 0.0
        self.is_writer = False  # this watcher made the verdict
        self._started = self._gone_at = now  # _gone_at: when the last node exited cleanly
        self._nodes = {0: NodeView(0, "the node of rank 0")}  # node rank -> its last message
        # The leader may start later than the others.
        self._heard = {0: now + self.limits.start_s - self.limits.node_s} if node_rank else {}
        self._next_leaders: dict[int, Address] = {}

    @property
    def is_leader(self) -> bool:
        return self.leader == self.node_rank

    @property
    def has_ended(self) -> bool:
        """True if no answer of the leader is to be expected: there is a verdict, or it has exited cleanly."""
        return self.leader_is_done or self.verdict is not None

    def unanswered_s(self, now: float) -> float:
        return 0.0 if self.is_leader else max(0.0, now - self._heard[self.leader])

    def shift(self, seconds: float) -> None:
        """Discount time in which this watcher did not run."""
        self._heard = {node: at + seconds for node, at in self._heard.items()}

    def note(self, failure: Failure, at: float) -> bool:
        """Keep a record for the verdict, once for each rank and cause. Return True if it is new."""
        known = {(each.rank, each.cause, each.node_rank) for _, each in self.records}
        is_new = (failure.rank, failure.cause, failure.node_rank) not in known
        if is_new:
            self.records.append((at, replace(failure, detail=failure.detail[-DETAIL_CHARS:])))
        return is_new

    def seen(self, now: float) -> list[NodeView]:
        """Return the nodes that this one hears: all of them if it leads, otherwise the leader."""
        nodes = self._heard if self.is_leader else [self.leader]
        return [replace(self._nodes[node], silent_s=now - self._heard[node]) for node in nodes]

    def unheard(self, now: float) -> list[int]:
        """Return the nodes without contact to this one, each of which may hear others and be heard by them."""
        if self.is_leader:
            return [node.node_rank for node, _, _ in without_contact(self.seen(now), self.limits)]
        return [self.leader] if self.unanswered_s(now) > self.limits.unheard_s else []

    def is_heard(self, node: int, now: float) -> bool:
        return now - self._heard.get(node, -float("inf")) < self.limits.beat_s * 2

    def path_failure(self, lost: Failure) -> Failure:
        """Return the record of a lost node that has left word of itself."""
        return path_failure(self._nodes[self.node_rank], lost)

    def beat(self, here: NodeView, now: float) -> dict[str, Any]:
        """Note the state of this node's ranks, and return the message that tells the leader."""
        self._nodes[self.node_rank], self._heard[self.node_rank] = here, now
        failures = [
            {
                **asdict(failure),
                "age": now - at,
                "detail": failure.detail[-DETAIL_CHARS // 2 :],
                "message": failure.message[:500],
            }
            for at, failure in self.records[:4]
        ]
        details = [asdict(replace(view, held=(), file_operation="")) for view in here.views]
        return {"kind": "beat", "view": asdict(replace(here, views=())), "failures": failures, "details": details}

    def hear(self, message: Mapping[str, Any], addresses: Mapping[int, Address], now: float) -> dict[str, Any] | None:
        """Note a message of another watcher, and return the answer to it, if any. `addresses`: of the watchers, by node.

        Raises KeyError, TypeError, ValueError or AttributeError for a message that no watcher sends.
        """
        node, answer = int(message["from"]), None
        if message["kind"] == "beat":
            views = tuple(RankView(**detail) for detail in message["details"])
            view = NodeView(**{**message["view"], "node_rank": node, "views": views})
            self._heard[node], self._nodes[node] = now, replace(view, ranks=tuple(view.ranks))
            if view.is_gone and node in self.others:
                self.others.remove(node)
                self._gone_at = now
            for entry in message["failures"]:
                age = float(entry.pop("age"))
                self.note(Failure(**entry), now - age)
            # The two nodes that would lead next: enough for two simultaneous losses.
            following = [each for each in sorted(addresses) if each > 0][:2]
            next_leaders = {str(each): addresses[each] for each in following}
            answer = self.answer() | {"attempt": self.attempt, "next": next_leaders}
        elif message["kind"] == "answer" and node == self.leader:
            self._heard[node] = now
            self.leader_is_done = bool(message.get("is_done")) or self.leader_is_done
            self.attempt = int(message.get("attempt", self.attempt))
            next_addresses = message.get("next", {}).items()
            self._next_leaders = {int(each): tuple(address) for each, address in next_addresses} or self._next_leaders
            self._nodes[node] = NodeView(node, message.get("name", self._nodes[node].name))
        if message.get("verdict") and self.verdict is None:
            self.accept([Failure(**entry) for entry in message["verdict"]], now, is_writer=False)
        return answer

    def answer(self) -> dict[str, Any]:
        """Return the message to another node, with the verdict if there is one."""
        message: dict[str, Any] = {"kind": "answer", "name": self.name}
        if self.verdict is not None:
            message["verdict"] = [asdict(replace(failure, detail="")) for failure in self.verdict[:8]]
        return message

    def accept(self, verdict: list[Failure], now: float, is_writer: bool) -> None:
        self.verdict, self.verdict_at, self.is_writer = verdict, now, is_writer

    def stand_alone(self, failure: Failure, now: float) -> None:
        """Record why this node can reach no other, and decide without them."""
        self.leader, self._heard = self.node_rank, {}
        self.note(failure, now)

    def lose_leader(self, find_fault: FindFault, now: float) -> Mapping[int, Address]:
        """Record that the leader is silent, and turn to the next node that may answer; return addresses to use."""
        [lost] = self.seen(now)
        failure = self._node_failure(lost, lost.silent_s, "is silent", find_fault, now)
        assert failure is not None
        self.note(failure, now)
        is_alone = failure.node_rank == self.node_rank  # its own link is lost
        following = sorted(node for node in self._next_leaders if node > lost.node_rank)
        del self._heard[lost.node_rank]
        self.leader = following[0] if following and following[0] < self.node_rank and not is_alone else self.node_rank
        if not self.is_leader:
            self._nodes.setdefault(self.leader, NodeView(self.leader, f"node {self.leader}"))
            self._heard[self.leader] = now - self.limits.node_s / 2  # it answers at once or not at all
        return self._next_leaders

    def lead(self, find_fault: FindFault, now: float) -> None:
        """Record what the leader notices: nodes without contact, a hang of all ranks, ranks that never reported."""
        nodes = self.seen(now)
        for node, silent_s, how in () if self.leader_is_done else without_contact(nodes, self.limits):
            if (failure := self._node_failure(node, silent_s, how, find_fault, now)) is not None:
                self.note(failure, now)
        if not self.records:
            failure = hang(nodes, self.world_size, self.limits, now - self._gone_at) or missing_ranks(
                nodes, self.world_size, now - self._started, self.limits
            )
            if failure is not None:
                self.note(failure, now)

    def decide(self, now: float, wall: float) -> list[Failure] | None:
        """Return the failures with the culprit first, None while more may be noticed. `wall`: now, in seconds since 1970."""
        records = [(at, replace(failure, time=wall - (now - at))) for at, failure in self.records]
        return decision(records, self.seen(now), self.world_size, now, self.limits, self.attempt)

    def _node_failure(
        self, node: NodeView, silent_s: float, how: str, find_fault: FindFault, now: float
    ) -> Failure | None:
        fault = find_fault(node.node_rank, now - silent_s)
        return node_failure(self._nodes[self.node_rank], node, silent_s, how, fault)
