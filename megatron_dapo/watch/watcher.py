"""The watcher of a node: a small process that sees its ranks end, stop or hang, and agrees with the other nodes on the culprit.

Its first rank starts it (`Heartbeat.connect`); it outlives any of them and ends after the last. It imports only the
standard library. It writes to the run directory in child processes, which may hang.

    ranks of the node      pidfd: exit and signal at once; /proc: stopped, blocked in the kernel, working or idle;
                           page: phase, kind of wait, sequence numbers of collectives
    other nodes            one UDP datagram a second to the leader, the watcher of node 0, and its answer; also over a
                           connection while answers are missing. If the leader is silent, the lowest node that answers
                           decides instead
    verdict                `watch.verdict` judges what was seen (pure); the leader prints the first line and tells every node:
                           stacks of all ranks, then their exit, then files

This module observes and acts: sockets, processes, files and the clock. It never blocks.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_dapo.watch.evidence import exit_status, parent, sectors_written, signal_name, tcp_queues
from megatron_dapo.watch.failure import Failure, first_line, reserve_space, write_failures
from megatron_dapo.watch.network import Datagrams, OwnLink
from megatron_dapo.watch.verdict import (
    BOUNDED,
    WatchLimits,
    NodeView,
    RankView,
    decision,
    hang,
    missing_ranks,
    node_failure,
    rank_failure,
    without_contact,
)
from megatron_dapo.watch.watched_rank import LOOK_CLOSER_S, MESSAGE_BYTES, WatchedRank

TICK_S = 0.5
BEAT_S = 1.0
_LOST_RECORD_S = 1.0  # for reading the record of a lost node
STACKS_S = 1.0  # for ranks to write their stacks
WRITE_S = 2.5  # for the record to reach the disk before ranks end and their launchers look for it
KILL_S = 5.5  # from the verdict to SIGKILL
END_S = 9.0  # from the verdict to the end of the watcher, whatever hangs
_QUEUES_S = 2.0  # between two reads of the machine's TCP connections, which may be many
_PATIENCE_S = 120.0  # for the first rank to connect
_DETAIL = 6_000


class Watcher:
    """The watcher of one node."""

    def __init__(self, place: Mapping[str, Any]) -> None:
        self._world_size, self._node_rank = int(place["world_size"]), int(place["node_rank"])
        self._name = socket.gethostname()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind("\0" + place["address"])
        self._listener.listen(256)
        self._network = Datagrams(self._node_rank, int(place["num_nodes"]), tuple(place["leader"]), place["run_id"])
        self._ranks: dict[int, WatchedRank] = {}
        self._pending: list[socket.socket] = []
        self._link = OwnLink()
        self._directory: Path | None = None
        self._device = 0  # of the run directory
        self._limits = WatchLimits()
        self._attempt = 1
        self._started = self._last_tick = time.monotonic()
        self._beat_at = self._queues_at = 0.0
        self._failures: list[tuple[float, Failure]] = []  # (time noticed here, failure)
        # Process that writes a probe file, start of the time without disk writes, sectors at that time
        self._probe: tuple[int, float, int | None] | None = None
        self._hangs: dict[int, Failure] = {}  # of ranks whose stacks are still to come
        # Of the leader
        self._heard: dict[int, float] = {}
        self._nodes: dict[int, NodeView] = {}  # by number, as of their last messages
        self._lost_records: dict[int, tuple[int, float]] = {}  # by lost node: process that reads its record, start
        self._lost_links: set[int] = set()  # nodes that have recorded the loss of their link
        self._gone: set[int] = set()  # nodes that exited cleanly
        self._gone_at = self._started  # time of the last of them
        # Of the others
        self._leader = 0
        self._answered_at = self._started + self._limits.start_s - self._limits.node_s  # the leader may start later
        self._next_leaders: dict[int, tuple[Any, ...]] = {}
        self._leader_is_done = False
        # The end
        self._verdict: list[Failure] | None = None
        self._verdict_at = 0.0
        self._is_writer = False
        self._stage = 0
        self._writer: tuple[int, float] | None = None

    @property
    def _is_leader(self) -> bool:
        return self._leader == self._node_rank

    def run(self) -> None:
        """Watch until all ranks have ended."""
        while not self._is_finished():
            waiting: list[Any] = [self._listener, *self._pending, *([self._network.socket] if self._network.socket else [])]
            living = [rank for rank in self._ranks.values() if not rank.is_over]
            waiting += [each for rank in living for each in (rank.pidfd, rank.connection) if each is not None]
            ready = select.select(waiting, [], [], TICK_S)[0]
            now = time.monotonic()
            lag = now - self._last_tick - 2 * TICK_S
            if lag > 2.0:  # the watcher itself was stopped or starved: the time does not count
                for rank in living:
                    rank.shift(lag)
                self._heard = {node: at + lag for node, at in self._heard.items()}
                self._answered_at += lag
            self._handle(ready, now)
            if now - self._last_tick >= TICK_S:
                self._last_tick = now
                self._tick(now)

    def _is_finished(self) -> bool:
        now = time.monotonic()
        is_over = all(rank.is_over for rank in self._ranks.values())
        if self._verdict is not None:
            # The writer still answers nodes that have not heard the verdict.
            stay = 3.0 if self._is_writer and self._network.num_nodes > 1 else 0.0
            is_written = self._stage >= 2 and self._writer is None
            return now - self._verdict_at > END_S or (is_over and is_written and now - self._verdict_at > stay)
        if not self._ranks:
            return now - self._started > _PATIENCE_S
        if not is_over or self._failures:
            return False
        others = set(range(self._network.num_nodes)) - self._gone - {self._node_rank}
        ended_at = max(rank.moved_at for rank in self._ranks.values())
        # Heartbeats continue for a moment, so that every node learns that this one exited cleanly.
        return now - ended_at > (15.0 if self._is_leader and others else 0.0 if not others else 3.0)

    # Ranks of this node

    def _handle(self, ready: Sequence[Any], now: float) -> None:
        if self._listener in ready:
            self._pending.append(self._listener.accept()[0])
        for connection in [each for each in self._pending if each in ready]:
            self._pending.remove(connection)
            self._admit(connection, now)
        for rank in list(self._ranks.values()):
            if rank.connection is not None and rank.connection in ready:
                self._read(rank, now)
            if rank.pidfd in ready and not rank.is_over:
                self._ended(rank, now)
        for message in self._network.receive(now):
            try:
                self._hear(message, now)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                _say(f"watcher of {self._name}: ignored a datagram that no watcher sends: {error!r}\n")

    def _admit(self, connection: socket.socket, now: float) -> None:
        user = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
        text, files, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 2)
        if user != os.getuid() or len(files) != 2:
            connection.close()
            return
        rank = WatchedRank(json.loads(text), connection, files[0], files[1], now)
        self._ranks[rank.rank] = rank
        self._name = rank.node

    def _read(self, rank: WatchedRank, now: float) -> None:
        assert rank.connection is not None
        try:
            text = rank.connection.recv(MESSAGE_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            text = b""
        if not text:
            rank.connection.close()
            rank.connection = None
            rank.is_over = rank.is_complete  # otherwise its pidfd shows how it ended
            return
        message = json.loads(text)
        if message["kind"] == "run":
            self._directory = directory = Path(message["directory"])
            self._device = message["device"]
            self._attempt = message["attempt"] or self._attempt
            self._limits = WatchLimits(**message["limits"])
            os.umask(message["umask"])
            if message["attempt"]:
                _in_child(lambda: reserve_space(directory))
        elif message["kind"] == "failure":
            rank.is_reported = True
            self._note(Failure(**{**message["failure"], "node_rank": self._node_rank}), now)
        elif message["kind"] == "dump":
            rank.flight_record = message["text"]
        elif message["kind"] == "bye":
            rank.is_complete, rank.moved_at = bool(message["is_complete"]), now

    def _ended(self, rank: WatchedRank, now: float) -> None:
        while rank.connection is not None and select.select([rank.connection], [], [], 0)[0]:
            self._read(rank, now)  # its last messages before it ended
        rank.is_over, rank.moved_at = True, now
        if rank.is_complete or rank.is_reported or self._verdict is not None:
            return
        status = exit_status(rank.pidfd, rank.pid)
        stack = rank.new_stacks() or rank.last_stacks
        if status is None or os.WIFSIGNALED(status):
            number = os.WTERMSIG(status) if status is not None else signal.SIGKILL
            out_of_memory = rank.out_of_memory.kill() if number == signal.SIGKILL else ""
            how = (
                f"killed by {signal_name(number)}"
                if status is not None
                else "exited without reporting an error, probably by signal 9 (SIGKILL)"
            )
            if number == signal.SIGTERM:
                how += ": scancel, a time limit, a second Ctrl-C, or a launcher that has ended"
            message = f"out of memory: {out_of_memory}" if out_of_memory else how
            cause = "out of memory" if out_of_memory else "signal"
        else:
            message, cause = f"ended with exit code {os.WEXITSTATUS(status)} before the run was over", "exit"
        self._note(rank.view(now, self._node_rank).failure(cause, message, stack), now)

    def _note(self, failure: Failure, now: float) -> None:
        """Keep a record for the verdict, once for each rank and cause."""
        failure = replace(failure, time=time.time(), detail=failure.detail[-_DETAIL:])
        known = {(each.rank, each.cause, each.node_rank) for _, each in self._failures}
        if (failure.rank, failure.cause, failure.node_rank) not in known:
            self._failures.append((now, failure))
            self._beat_at = 0.0  # sent at the next tick

    def _tick(self, now: float) -> None:
        living = [rank for rank in self._ranks.values() if not rank.is_over]
        queues = None
        if now - self._queues_at >= _QUEUES_S and any(now - rank.moved_at > LOOK_CLOSER_S for rank in living):
            self._queues_at, queues = now, tcp_queues()
        for rank in living:
            rank.look(now, queues)
        if self._verdict is None:
            self._judge_ranks(now)
        self._look_at_link(now)
        if now - self._beat_at >= BEAT_S:
            self._beat_at = now
            self._beat(now)
        if self._verdict is None and self._is_leader:
            self._lead(now)
        if self._verdict is not None:
            self._finish(now)

    def _judge_ranks(self, now: float) -> None:
        for rank in self._ranks.values():
            stacks, failure = rank.new_stacks(), self._hangs.pop(rank.rank, None)
            if failure is not None:
                self._note(replace(failure, detail=stacks), now)
            elif stacks:
                _say(f"rank {rank.rank} ({self._name}), process {rank.pid}, its stacks:\n{stacks}")
            if rank.is_over or rank.is_reported or rank.is_complete:
                continue
            view = rank.view(now, self._node_rank)
            if view.held or view.file_operation:
                self._probe_files(now)
            failure = rank_failure(view, self._limits, str(self._directory), self._unwritten_s(now))
            if failure is not None and failure.cause == "hang":
                rank.signal(signal.SIGUSR1)  # its stacks arrive by the next tick
                self._hangs[rank.rank] = failure
            elif failure is not None:
                self._note(failure, now)

    def _probe_files(self, now: float) -> None:
        """Have a child write a small file next to the run's, to see whether the file system answers."""
        if self._probe is not None or self._directory is None:
            return
        directory, name = self._directory, f".watcher_{self._node_rank}"
        self._probe = (_in_child(lambda: _touch(directory / name)), now, self._sectors())

    def _unwritten_s(self, now: float) -> float:
        """Return the seconds for which the probe file stayed unwritten while its disk wrote nothing; 0 without one."""
        if self._probe is None:
            return 0.0
        process, since, written = self._probe
        if _exit_code_of(process) is not None:
            self._probe = None
            return 0.0
        # A disk that writes is slow, not dead.
        if (written_now := self._sectors()) != written:
            self._probe = process, now, written_now
            return 0.0
        return now - since

    def _sectors(self) -> int | None:
        return sectors_written(self._device) if self._device else None

    # Other nodes

    def _here(self, now: float) -> NodeView:
        """Return the state of this node's ranks."""
        living = [rank for rank in self._ranks.values() if not (rank.is_over or rank.is_complete)]
        views = [rank.view(now, self._node_rank) for rank in living]
        # The end of a rank counts as progress: ranks that waited for it have had no time to continue.
        idle_s = min((now - rank.moved_at for rank in self._ranks.values()), default=1e9)
        stalled_s = min((view.stalled_s for view in views), default=0.0)
        is_still = idle_s > self._limits.silent_s / 2 or stalled_s > self._limits.stalled_s / 2
        return NodeView(
            self._node_rank,
            self._name,
            tuple(sorted(self._ranks)),
            is_gone=bool(self._ranks) and all(rank.is_complete for rank in self._ranks.values()),
            unanswered_s=0.0 if self._is_leader else max(0.0, now - self._answered_at),
            idle_s=idle_s,
            is_bounded=any(view.wait == BOUNDED for view in views),
            views=tuple(views) if is_still or self._failures else (),
        )

    def _beat(self, now: float) -> None:
        here = self._here(now)
        self._nodes[self._node_rank], self._heard[self._node_rank] = here, now
        if self._is_leader:
            for node in self._network.addresses if here.is_gone else ():
                self._network.send(node, {"kind": "answer", "is_done": True})
            return
        beat = {
            "kind": "beat",
            "view": asdict(replace(here, views=())),
            "failures": [
                {
                    **asdict(failure),
                    "age": now - at,
                    "detail": failure.detail[-_DETAIL // 2 :],
                    "message": failure.message[:500],
                }
                for at, failure in self._failures[:4]
            ],
            "details": [asdict(replace(view, held=(), file_operation="")) for view in here.views],
        }
        self._network.send(self._leader, beat)
        if self._leader_is_done or here.is_gone or self._verdict is not None:
            return
        if now - self._answered_at > self._limits.node_s / 3:
            self._network.call(self._leader, beat, now)
        if now - self._answered_at > self._limits.node_s:
            self._lose_leader(now)

    def _look_at_link(self, now: float) -> None:
        others = [node for node in self._network.addresses if node != self._node_rank]
        if others:
            nodes = [node for node in self._seen(now) if node.node_rank != self._node_rank and not node.is_gone]
            silent_s = max((node.silent_s + node.unanswered_s for node in nodes), default=0.0)
            self._link.look(now, self._network.host(others[0]), silent_s)

    def _seen(self, now: float) -> list[NodeView]:
        """Return the nodes that this one hears, as of now: all of them if it leads, otherwise the leader."""
        if self._is_leader:
            return [replace(self._nodes[node], silent_s=now - at) for node, at in self._heard.items()]
        name = f"node {self._leader}" if self._leader else "the node of rank 0"
        leader = self._nodes.get(self._leader) or NodeView(self._leader, name)
        return [replace(leader, silent_s=now - self._answered_at)]

    def _lose_leader(self, now: float) -> None:
        """Turn to the next node that may answer, finally to this one."""
        lost = self._leader
        [leader] = self._seen(now)
        failure = self._node_failure(leader, leader.silent_s, "is silent", now)
        assert failure is not None
        self._note(failure, now)
        following = sorted(node for node in self._next_leaders if node > lost)
        is_alone = failure.node_rank == self._node_rank
        is_next = not following or following[0] >= self._node_rank
        self._leader = self._node_rank if is_alone or is_next else following[0]
        self._network.addresses.update(self._next_leaders)
        if not self._is_leader:
            self._answered_at = now - self._limits.node_s / 2  # it answers at once or not at all

    def _node_failure(self, node: NodeView, silent_s: float, how: str, now: float) -> Failure | None:
        fault = self._link.fault(now - silent_s, self._network.host(node.node_rank))
        return node_failure(NodeView(self._node_rank, self._name), node, silent_s, how, fault, self._phase())

    def _phase(self) -> str:
        pages = [rank.page.get("phase", "") for rank in self._ranks.values()]
        return str(pages[0]) if pages else ""

    def _hear(self, message: Mapping[str, Any], now: float) -> None:
        node = int(message["from"])
        if message["kind"] == "beat":
            views = tuple(RankView(**detail) for detail in message["details"])
            view = NodeView(**{**message["view"], "node_rank": node, "views": views})
            self._heard[node], self._nodes[node] = now, replace(view, ranks=tuple(view.ranks))
            if view.is_gone and node not in self._gone:
                self._gone.add(node)
                self._gone_at = now
            for entry in message["failures"]:
                age = float(entry.pop("age"))
                failure = replace(Failure(**entry), time=time.time() - age)
                known = {(each.rank, each.cause, each.node_rank) for _, each in self._failures}
                if (failure.rank, failure.cause, failure.node_rank) not in known:
                    self._failures.append((now - age, failure))
            # The two nodes that would lead next: enough for two simultaneous losses.
            following = {
                str(each): self._network.addresses[each] for each in sorted(self._network.addresses) if each > 0
            }
            answer = {"kind": "answer", "attempt": self._attempt, "next": dict(list(following.items())[:2])}
            self._network.send(node, {**answer, "name": self._name, **self._verdict_message()})
        elif message["kind"] == "answer" and node == self._leader:
            self._answered_at = now
            self._leader_is_done = bool(message.get("is_done")) or self._leader_is_done
            self._attempt = int(message.get("attempt", self._attempt))
            self._next_leaders = {
                int(each): tuple(address) for each, address in message.get("next", {}).items()
            } or self._next_leaders
            if "name" in message:
                self._nodes.setdefault(node, NodeView(node, message["name"]))
        if message.get("verdict") and self._verdict is None:
            self._decide([Failure(**entry) for entry in message["verdict"]], now, is_writer=False)

    def _verdict_message(self) -> dict[str, Any]:
        if self._verdict is None:
            return {}
        return {"verdict": [asdict(replace(failure, detail="")) for failure in self._verdict[:8]]}

    # The leader

    def _lead(self, now: float) -> None:
        nodes = self._seen(now)
        if not self._leader_is_done and self._node_rank not in self._gone:
            for node, silent_s, how in without_contact(nodes, self._limits):
                if (failure := self._node_failure(node, silent_s, how, now)) is not None:
                    self._note(failure, now)
        if not self._failures:
            failure = hang(nodes, self._world_size, self._limits, now - self._gone_at) or missing_ranks(
                nodes, self._world_size, now - self._started, self._limits
            )
            if failure is not None:
                self._note(failure, now)
        failures = decision(self._failures, nodes, self._world_size, now, self._limits, self._attempt)
        if failures is not None and self._lost_nodes_are_read(failures, now):
            self._decide([self._with_reported_cause(failure) for failure in failures], now, is_writer=True)

    def _lost_nodes_are_read(self, failures: Sequence[Failure], now: float) -> bool:
        """Check whether lost nodes have left a cause in the run directory; True once that is known or takes long."""
        for node in {failure.node_rank for failure in failures if failure.cause == "node lost"} - self._lost_records.keys():
            if (directory := self._directory) is not None:
                self._lost_records[node] = _in_child(partial(_require_link_lost, directory, node)), now
        for node, (process, since) in self._lost_records.items():
            if process and (code := _exit_code_of(process)) is not None:
                self._lost_records[node] = 0, since
                if code == 0:
                    self._lost_links.add(node)
        return all(not process or now - since > _LOST_RECORD_S for process, since in self._lost_records.values())

    def _with_reported_cause(self, failure: Failure) -> Failure:
        """Return the record of a lost node with the cause that the node itself left in the run directory, if any."""
        if failure.cause != "node lost" or failure.node_rank not in self._lost_links:
            return failure
        return replace(failure, cause="link lost", message=f"link lost: that node reports it; {failure.message}")

    # The end

    def _decide(self, failures: list[Failure], now: float, is_writer: bool) -> None:
        self._verdict, self._verdict_at, self._is_writer = failures, now, is_writer
        # Under srun all nodes share one log; started by hand, each node has one.
        if is_writer or "SLURM_JOB_ID" not in os.environ:
            _say(first_line(failures[0]) + "\n")
        for node in list(self._network.addresses) if is_writer else ():
            self._network.send(node, {"kind": "answer", "name": self._name, **self._verdict_message()})
        for rank in self._ranks.values():
            rank.new_stacks()
            rank.signal(signal.SIGUSR1)
            rank.signal(signal.SIGCONT)
            rank.send({"kind": "dump"})

    def _finish(self, now: float) -> None:
        """Carry out the verdict in stages, by the time since it was made."""
        assert self._verdict is not None
        since, first = now - self._verdict_at, self._verdict[0]
        living = [rank for rank in self._ranks.values() if not rank.is_over]
        # Ranks that wait for the verdict have already reported where they failed.
        silent = [rank for rank in living if not rank.is_reported]
        if self._stage == 0 and (since > STACKS_S or not silent):
            self._stage, stacks = 1, self._stacks()
            if self._directory is not None:
                self._writer = (_in_child(lambda: self._write(stacks)), now)
        if self._writer is not None and (code := _exit_code_of(self._writer[0])) is not None:
            self._writer = None
            if code:
                why = os.strerror(code) if code > 0 else f"signal {-code} ended the process that writes it"
                _say(f"{self._directory}: the record could not be written: {why}\n")
        if self._stage == 1 and (self._writer is None or now - self._writer[1] > WRITE_S):
            self._stage = 2
            for rank in self._ranks.values():
                for line in rank.held_file_process():
                    _say(f"rank {rank.rank} ({self._name}) ends without what the kernel holds: {line}\n")
            for rank in living:
                rank.send({"kind": "verdict", "exit_code": first.exit_code, "culprit": first.rank})
        if self._stage == 2 and since > KILL_S:
            self._stage = 3
            for rank in living:
                rank.signal(signal.SIGKILL)
        if self._stage == 3 and since > END_S - 1.0:
            self._stage = 4
            for rank in living:
                held = "; ".join(rank.held()) or "reason unknown"
                _say(
                    f"rank {rank.rank} ({self._name}), process {rank.pid}, does not end: the kernel holds it: {held}\n"
                )
                # torchrun waits for its workers forever; Slurm gives up on such a process (UnkillableStepTimeout).
                agent = parent(rank.pid)
                if "TORCHELASTIC_RUN_ID" in os.environ and agent is not None and agent > 1:
                    os.kill(agent, signal.SIGKILL)
            if self._writer is not None:
                _say(
                    f"{self._directory}: the record could not be written: the file system holds process {self._writer[0]}\n"
                )
            for process in [each[0] for each in (self._writer, self._probe) if each is not None]:
                os.kill(process, signal.SIGKILL)  # works unless the kernel blocks it

    def _stacks(self) -> str:
        """Return the stacks of this node's ranks; equal stacks are written once."""
        texts: dict[str, list[int]] = {}
        for rank in self._ranks.values():
            page = rank.page
            state = f"phase {page.get('phase')}, {page.get('wait') or 'no'} wait, in {page.get('doing')}, collectives {page.get('groups', {})}"
            text = rank.new_stacks() or "no stack: the process has ended or the kernel holds it\n"
            text += "\n".join(rank.held())
            record = f"\nflight recorder, newest entries:\n{rank.flight_record}\n" if rank.flight_record else ""
            texts.setdefault(f"{state}\n{text}{record}", []).append(rank.rank)
        return "\n".join(f"==== ranks {ranks} ({self._name}): {text}" for text, ranks in texts.items())

    def _write(self, stacks: str) -> None:
        assert self._directory is not None and self._verdict is not None
        if self._is_writer:
            write_failures(self._directory, self._verdict, f"node_{self._node_rank}")
        directory = self._directory / "stacks"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"node_{self._node_rank}.txt").write_text(stacks, encoding="utf-8")


def _require_link_lost(directory: Path, node: int) -> None:
    """Raise OSError unless a node's watcher has written that its link is lost."""
    for name in ("failure.json", f"failure_node_{node}.json"):
        document = json.loads((directory / name).read_text(encoding="utf-8"))
        if document["writer"] == f"node_{node}" and document["entries"][0]["cause"] == "link lost":
            return
    raise FileNotFoundError


def _touch(path: Path) -> None:
    path.write_text("the watcher looks whether this file system answers\n", encoding="utf-8")
    path.unlink()


def _in_child(action: Callable[[], object], keep: int = 0) -> int:
    """Run an action on files in a child, which may hang; return its process id. Its exit code is the errno of a failure.

    keep: descriptors below this stay open. A child blocked in the kernel must not keep ports, connections or the log
    open.
    """
    # Fork without exec, as the interpreter itself may be on the hanging file system. There are no threads.
    process = os.fork()
    if process:
        return process
    code = 0
    try:
        os.closerange(keep, 4096)
        action()
    except OSError as error:
        code = error.errno or 1
    except BaseException:
        code = 1
    finally:
        os._exit(code)


def _exit_code_of(process: int) -> int | None:
    """Return the exit code of a child, None while it runs."""
    found, status = os.waitpid(process, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def _say(text: str) -> None:
    # Standard error may be a file on the hanging file system.
    _in_child(lambda: os.write(2, text.encode()), keep=3)


def main() -> None:
    """Run the watcher that the command line describes."""
    # A launcher that ends its job sends these to every process, but the watcher still has to report why.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    gc.freeze()
    Watcher(json.loads(sys.argv[1])).run()


if __name__ == "__main__":
    main()
