"""The watcher of a node: a small process that sees its ranks end, stop or hang, and agrees with the other nodes on the culprit.

Its first rank starts it (`Heartbeat.connect`); it outlives any of them and ends after the last. It imports only the
standard library. It writes to the run directory in child processes, which may hang.

    ranks of the node      pidfd: exit and signal at once; /proc: stopped, blocked in the kernel, working or idle;
                           page: phase, kind of wait, sequence numbers of collectives
    other nodes            `watch.agreement`: one UDP datagram a second to the leader, and its answer; also over a
                           connection while answers are missing
    verdict                `watch.verdict` judges what was seen (pure); the leader prints the first line and tells every node:
                           stacks of all ranks, then their exit, then files

This module observes and acts: sockets, processes, files and the clock. It never blocks.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_dapo.files.durable import identity_of
from megatron_dapo.files.linux import ignore_launcher_signals, require_same_user
from megatron_dapo.watch.agreement import Agreement
from megatron_dapo.watch.evidence import exit_status, parent, sectors_written, tcp_queues
from megatron_dapo.watch.failure import CONTACT, Failure, failure_of, first_line, reserve_space, write_failures
from megatron_dapo.watch.network import Datagrams, OwnLink
from megatron_dapo.watch.verdict import (
    BOUNDED,
    NodeView,
    EndStage,
    WatchLimits,
    exit_failure,
    next_stage,
    rank_failure,
)
from megatron_dapo.watch.watched_rank import LOOK_CLOSER_S, MESSAGE_BYTES, WatchedRank


_IS_ALIVE = errno.EISCONN  # exit code of a child that has read a lost node's word


class Watcher:
    def __init__(self, place: Mapping[str, Any]) -> None:
        node, num_nodes, self._started = int(place["node_rank"]), int(place["num_nodes"]), time.monotonic()
        self._run = Agreement(node, num_nodes, int(place["world_size"]), socket.gethostname(), self._started)
        self._run.attempt = int(place["attempt"])
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind("\0" + place["address"])
        self._listener.listen(256)
        self._run_id, self._link = str(place["run_id"]), OwnLink()
        self._network = self._connected(node, num_nodes, tuple(place["leader"]))
        self._pending: list[socket.socket] = []
        self._ranks: dict[int, WatchedRank] = {}
        self._hangs: dict[int, Failure] = {}  # rank -> its hang, until its stacks arrive
        self._directory: Path | None = None
        self._identity = (0, 0)  # device and inode number of the run directory, 0 if unknown
        self._probe: Child | None = None  # writes a file in the run directory
        self._sectors: int | None = None  # written when the probe began, or at the last progress of that disk
        self._lost_records: dict[int, Child] = {}  # lost node -> process that reads its record
        self._contact_notes: dict[int, Child] = {}  # silent node -> process that notes that this one is alive
        self._last_tick = self._started
        self._beat_at = self._queues_at = 0.0
        self._stage: EndStage | None = None
        self._writer: Child | None = None  # writes the record

    def _connected(self, node: int, num_nodes: int, leader: tuple[str, int]) -> Datagrams:
        """Connect to the other watchers; if that is impossible, this node ends its ranks and says why."""
        try:
            return Datagrams(node, num_nodes, leader, self._run_id)
        except RuntimeError as error:
            failure = failure_of(-1, error, "start", self._run.name)
            self._run.stand_alone(replace(failure, node_rank=node), time.monotonic())
            return Datagrams(node, 1, leader, self._run_id)

    def run(self) -> None:
        while not self._is_finished():
            waiting: list[Any] = [self._listener, *self._pending, *([self._network.socket] if self._network.socket else [])]
            living = self._living()
            waiting += [each for rank in living for each in (rank.pidfd, rank.connection) if each is not None]
            tick_s = self._run.limits.tick_s
            ready = select.select(waiting, [], [], tick_s)[0]
            now = time.monotonic()
            lag = now - self._last_tick - 2 * tick_s
            if lag > 2.0:  # the watcher itself was stopped or starved: the time does not count
                for rank in living:
                    rank.shift(lag)
                self._run.shift(lag)
            self._handle(ready, now)
            if now - self._last_tick >= tick_s:
                self._last_tick = now
                self._tick(now)

    def _living(self) -> list[WatchedRank]:
        return [rank for rank in self._ranks.values() if not rank.is_over]

    def _is_finished(self) -> bool:
        now, run, is_over = time.monotonic(), self._run, not self._living()
        if self._stage is not None:
            # The writer still answers nodes that have not heard the verdict.
            stay = 3.0 if run.is_writer and run.num_nodes > 1 else 0.0
            is_written = self._stage >= EndStage.EXIT and self._writer is None
            since = now - run.verdict_at
            return since > run.limits.end_s or (is_over and is_written and since > stay)
        if not self._ranks:
            return now - self._started > run.limits.connect_s
        if not is_over or run.records:
            return False
        ended_at = max(rank.moved_at for rank in self._ranks.values())
        # Heartbeats continue for a moment, so that every node learns that this one exited cleanly.
        return now - ended_at > (0.0 if not run.others else 15.0 if run.is_leader else 3.0)

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
                answer = self._run.hear(message, self._network.addresses, now)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                _say(f"watcher of {self._run.name}: ignored a datagram that no watcher sends: {error!r}\n")
                continue
            if answer is not None:
                self._network.send(message["from"], answer)
        self._begin_end()

    def _admit(self, connection: socket.socket, now: float) -> None:
        try:
            require_same_user(connection)
            text, (page, stacks), _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 2)
        except (OSError, ValueError):  # another user's, or no rank's
            connection.close()
            return
        rank = WatchedRank(json.loads(text), connection, page, stacks, now)
        self._ranks[rank.rank] = rank
        self._run.name = rank.node

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
            self._identity = tuple(message["identity"])
            self._run.attempt = message["attempt"]
            self._run.limits = WatchLimits(**message["limits"])
            os.umask(message["umask"])
            if rank.rank == 0:
                _fork(lambda: reserve_space(directory))
        elif message["kind"] == "failure":
            rank.is_reported = True
            self._note(Failure(**{**message["failure"], "node_rank": self._run.node_rank}), now)
        elif message["kind"] == "dump":
            rank.flight_record = message["text"]
        elif message["kind"] == "bye":
            rank.is_complete, rank.moved_at = bool(message["is_complete"]), now

    def _ended(self, rank: WatchedRank, now: float) -> None:
        while rank.connection is not None and select.select([rank.connection], [], [], 0)[0]:
            self._read(rank, now)  # its last messages before it ended
        rank.is_over, rank.moved_at = True, now
        if not (rank.is_complete or rank.is_reported or self._run.verdict):
            status = exit_status(rank.pidfd, rank.pid)
            is_killed = status is None or os.WTERMSIG(status) == signal.SIGKILL
            out_of_memory = rank.out_of_memory.kill() if is_killed else ""
            view, stack = rank.view(now, self._run.node_rank), rank.new_stacks() or rank.last_stacks
            self._note(exit_failure(view, status, out_of_memory, stack), now)

    def _note(self, failure: Failure, now: float) -> None:
        if self._run.note(failure, now):
            self._beat_at = 0.0  # sent at the next tick

    def _tick(self, now: float) -> None:
        run, queues = self._run, None
        living = self._living()
        if now - self._queues_at >= run.limits.queues_s and any(now - rank.moved_at > LOOK_CLOSER_S for rank in living):
            self._queues_at, queues = now, tcp_queues()
        for rank in living:
            rank.look(now, queues)
        if run.verdict is None:
            self._judge_ranks(now)
        self._look_at_link(now)
        self._note_missing_contact(now)
        if now - self._beat_at >= run.limits.beat_s:
            self._beat_at = now
            self._beat(now)
        if run.verdict is None and run.is_leader:
            run.lead(self._find_fault, now)
            failures = run.decide(now, time.time())
            if failures is not None and self._lost_nodes_are_read(failures, now):
                run.accept(list(map(self._with_reported_cause, failures)), now, is_writer=True)
                self._begin_end()
        if self._stage is not None:
            self._finish(now)

    def _judge_ranks(self, now: float) -> None:
        for rank in self._ranks.values():
            stacks, failure = rank.new_stacks(), self._hangs.pop(rank.rank, None)
            if failure is not None:
                self._note(replace(failure, detail=stacks), now)
            elif stacks:
                _say(f"rank {rank.rank} ({self._run.name}), process {rank.pid}, its stacks:\n{stacks}")
            if rank.is_over or rank.is_reported or rank.is_complete:
                continue
            view = rank.view(now, self._run.node_rank)
            unwritten_s = self._probe_files(bool(view.held or view.file_operation), now)
            failure = rank_failure(view, self._run.limits, str(self._directory), unwritten_s)
            if failure is not None and failure.cause == "hang":
                rank.signal(signal.SIGUSR1)  # its stacks arrive by the next tick
                self._hangs[rank.rank] = failure
            elif failure is not None:
                self._note(failure, now)

    def _probe_files(self, is_needed: bool, now: float) -> float:
        """Return the seconds for which a probe file next to the run's stayed unwritten while its disk wrote nothing.

        0 without a probe; `is_needed`: start one, in a child, if there is none.
        """
        if self._probe is None and (self._directory is None or not is_needed):
            return 0.0
        device, _ = self._identity
        sectors = sectors_written(device) if device else None
        if self._probe is None and self._directory is not None:
            path = self._directory / f".watcher_{self._run.node_rank}"
            self._probe, self._sectors = Child(lambda: self._touch(path), now), sectors
        if self._probe is None or self._probe.exit_code() is not None:
            self._probe = None
            return 0.0
        if sectors != self._sectors:  # a disk that writes is slow, not dead
            self._probe.since, self._sectors = now, sectors
        return now - self._probe.since

    # Other nodes

    def _here(self, now: float) -> NodeView:
        limits, ranks = self._run.limits, self._ranks.values()
        views = [rank.view(now, self._run.node_rank) for rank in self._living() if not rank.is_complete]
        # The end of a rank counts as progress: ranks that waited for it have had no time to continue.
        idle_s = min((now - rank.moved_at for rank in ranks), default=1e9)
        stalled_s = min((view.stalled_s for view in views), default=0.0)
        is_still = idle_s > limits.silent_s / 2 or stalled_s > limits.stalled_s / 2
        return NodeView(
            self._run.node_rank,
            self._run.name,
            tuple(sorted(self._ranks)),
            phase=next((str(rank.page.get("phase", "")) for rank in ranks), ""),
            is_gone=bool(ranks) and all(rank.is_complete for rank in ranks),
            unanswered_s=self._run.unanswered_s(now),
            idle_s=idle_s,
            is_bounded=any(view.wait == BOUNDED for view in views),
            views=tuple(views) if is_still or self._run.records else (),
        )

    def _beat(self, now: float) -> None:
        here, run = self._here(now), self._run
        beat = run.beat(here, now)
        if run.is_leader:
            for node in self._network.addresses if here.is_gone else ():
                self._network.send(node, {"kind": "answer", "is_done": True})
            return
        self._network.send(run.leader, beat)
        unanswered_s = 0.0 if run.has_ended or here.is_gone else run.unanswered_s(now)
        if unanswered_s > run.limits.node_s / 3:
            self._network.call(run.leader, beat, now)
        if unanswered_s > run.limits.node_s:
            self._network.addresses.update(run.lose_leader(self._find_fault, now))

    def _look_at_link(self, now: float) -> None:
        others = [node for node in self._network.addresses if node != self._run.node_rank]
        if others:
            nodes = [node for node in self._run.seen(now) if node.node_rank in self._run.others]
            silent_s = max((node.silent_s + node.unanswered_s for node in nodes), default=0.0)
            self._link.look(now, self._network.host(others[0]), silent_s)

    def _note_missing_contact(self, now: float) -> None:
        """Leave word in the run directory for nodes without contact: they cannot tell this one from a dead one.

        Not if its own link is at fault, which its record will say.
        """
        directory, unheard, notes = self._directory, set(self._run.unheard(now)), self._contact_notes
        if directory is None:
            return
        heard_at = now - self._run.limits.unheard_s
        for node in [each for each in unheard - notes.keys() if not self._find_fault(each, heard_at)]:
            notes[node] = Child(partial(self._write_contact, directory / f"{CONTACT}{self._run.node_rank}_{node}"), now)
        for node in [node for node, child in notes.items() if child.exit_code() is not None]:
            if node not in unheard and self._run.is_heard(node, now):  # it holds no longer
                _fork((directory / f"{CONTACT}{self._run.node_rank}_{node}").unlink)
                del notes[node]

    def _write_contact(self, path: Path) -> None:
        self._require_same(path.parent)
        path.write_text(self._run_id, encoding="utf-8")

    def _find_fault(self, node: int, heard_at: float) -> str:
        return self._link.fault(heard_at, self._network.host(node))

    def _lost_nodes_are_read(self, failures: Sequence[Failure], now: float) -> bool:
        """Check whether lost nodes have left a cause in the run directory; True once that is known or takes long."""
        for node in {failure.node_rank for failure in failures if failure.cause == "node lost"} - self._lost_records.keys():
            if (directory := self._directory) is not None:
                read = partial(_read_word, directory, node, self._run.node_rank, self._run_id)
                self._lost_records[node] = Child(read, now)
        limit_s = self._run.limits.lost_record_s
        return all(child.exit_code() is not None or now - child.since > limit_s for child in self._lost_records.values())

    def _with_reported_cause(self, failure: Failure) -> Failure:
        """Return the record of a lost node with the cause that the node itself left in the run directory, if any."""
        child = self._lost_records.get(failure.node_rank)
        code = child.exit_code() if child is not None and failure.cause == "node lost" else None
        if code == _IS_ALIVE:
            return self._run.path_failure(failure)
        if code != 0:
            return failure
        return replace(failure, cause="link lost", message=f"link lost: that node reports it; {failure.message}")

    # The end

    def _begin_end(self) -> None:
        """Begin to carry out the verdict, once there is one."""
        if self._run.verdict is None or self._stage is not None:
            return
        self._stage = EndStage.STACKS
        # Under srun all nodes share one log; started by hand, each node has one.
        if self._run.is_writer or "SLURM_JOB_ID" not in os.environ:
            _say(first_line(self._run.verdict[0]) + "\n")
        for node in list(self._network.addresses) if self._run.is_writer else ():
            self._network.send(node, self._run.answer())
        for rank in self._ranks.values():
            rank.new_stacks()
            rank.signal(signal.SIGUSR1)
            rank.signal(signal.SIGCONT)
            rank.send({"kind": "dump"})

    def _finish(self, now: float) -> None:
        """Carry out the verdict, as far as it is time."""
        assert self._stage is not None
        while True:
            if self._writer is not None and (code := self._writer.exit_code()) is not None:
                self._writer = None
                if code:
                    why = os.strerror(code) if code > 0 else f"signal {-code} ended the process that writes it"
                    _say(f"{self._directory}: the record could not be written: {why}\n")
            # Ranks that wait for the verdict have already reported where they failed.
            has_stacks = all(rank.is_reported for rank in self._living())
            is_recorded = self._writer is None or now - self._writer.since > self._run.limits.write_s
            stage = next_stage(self._stage, now - self._run.verdict_at, has_stacks, is_recorded, self._run.limits)
            if stage == self._stage:
                return
            self._stage = stage
            self._enter(stage, now)

    def _enter(self, stage: EndStage, now: float) -> None:
        assert self._run.verdict is not None
        first = self._run.verdict[0]
        if stage == EndStage.RECORD and self._directory is not None:
            self._writer = Child(partial(self._write, self._directory, self._stacks()), now)
        if stage == EndStage.EXIT:
            for rank in self._ranks.values():
                for line in rank.held_file_process():
                    _say(f"rank {rank.rank} ({self._run.name}) ends without what the kernel holds: {line}\n")
        for rank in self._living():
            if stage == EndStage.EXIT:
                rank.send({"kind": "verdict", "exit_code": first.exit_code, "culprit": first.rank})
            elif stage == EndStage.KILL:
                rank.signal(signal.SIGKILL)
            elif stage == EndStage.NAME:
                held = "; ".join(rank.held()) or "reason unknown"
                who = f"rank {rank.rank} ({self._run.name}), process {rank.pid}"
                _say(f"{who}, does not end: the kernel holds it: {held}\n")
                # torchrun waits for its workers forever; Slurm gives up on such a process (UnkillableStepTimeout).
                agent = parent(rank.pid)
                if "TORCHELASTIC_RUN_ID" in os.environ and agent is not None and agent > 1:
                    os.kill(agent, signal.SIGKILL)
        if stage == EndStage.NAME and self._writer is not None:
            holds = f"the file system holds process {self._writer.pid}"
            _say(f"{self._directory}: the record could not be written: {holds}\n")
        for child in (self._writer, self._probe) if stage == EndStage.NAME else ():
            if child is not None:
                os.kill(child.pid, signal.SIGKILL)  # works unless the kernel blocks it

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
        return "\n".join(f"==== ranks {ranks} ({self._run.name}): {text}" for text, ranks in texts.items())

    def _touch(self, path: Path) -> None:
        self._require_same(path.parent)
        path.write_text("the watcher looks whether this file system answers\n", encoding="utf-8")
        path.unlink()

    def _require_same(self, directory: Path) -> None:
        """Raise OSError (ESTALE) if the run directory is another one than at the start."""
        if any(self._identity) and identity_of(directory.stat()) != self._identity:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(directory))

    def _write(self, directory: Path, stacks: str) -> None:
        self._require_same(directory)
        name = f"node_{self._run.node_rank}"
        if self._run.is_writer and self._run.verdict is not None:
            write_failures(directory, self._run.verdict, name)
        (directory / "stacks").mkdir(parents=True, exist_ok=True)
        (directory / "stacks" / f"{name}.txt").write_text(stacks, encoding="utf-8")


def _read_word(directory: Path, node: int, here: int, run_id: str) -> None:
    """Return if a lost node's watcher has written that its link is lost.

    Raises OSError: with _IS_ALIVE if it has written that it does not hear this node, with another number if it has written nothing.
    """
    for name in ("failure.json", f"failure_node_{node}.json"):
        with suppress(FileNotFoundError):
            document = json.loads((directory / name).read_text(encoding="utf-8"))
            if document["writer"] == f"node_{node}" and document["entries"][0]["cause"] == "link lost":
                return
    if (directory / f"{CONTACT}{node}_{here}").read_text(encoding="utf-8") == run_id:
        raise OSError(_IS_ALIVE, os.strerror(_IS_ALIVE))
    raise FileNotFoundError


class Child:
    """A child process that does an action on files, which may hang. Its exit code is the errno of a failure."""

    def __init__(self, action: Callable[[], object], now: float) -> None:
        self.pid, self.since = _fork(action), now
        self._code: int | None = None

    def exit_code(self) -> int | None:
        if self._code is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if found else None
        return self._code


def _fork(action: Callable[[], object], keep: int = 0) -> int:
    """Run an action in a child and return its process id. Its exit code is the errno of a failure.

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


def _say(text: str) -> None:
    # Standard error may be a file on the hanging file system.
    _fork(lambda: os.write(2, text.encode()), keep=3)


def main() -> None:
    ignore_launcher_signals()  # it still has to report why the job ends
    gc.freeze()
    Watcher(json.loads(sys.argv[1])).run()


if __name__ == "__main__":
    main()
