"""Judges a run from its watchers' observations. Pure functions: no clock, no socket, no process.

    exit_failure    one rank that has ended: by a signal, for lack of memory, or with an exit code
    rank_failure    one rank, by the watcher of its node: stopped, held by a file system, silent outside any wait
    hang            all ranks, by the leader: silent in collectives, or on GPUs without a new collective
    node_failure    one node: lost, or this node's own link
    decision        when the records are complete enough, and which of them is the culprit
    next_stage      what comes next once there is a verdict, until all ranks have ended

What shows a hang depends on how a rank waits. On a CPU (gloo) it sleeps: silence, i.e. neither CPU time, data nor a
collective, shows within seconds, and the stack of its main thread shows whether it waits for others. On a GPU a rank that waits
for NCCL spins and looks busy, so in phases that run there only counters tell: if no rank of the run has entered a
collective, begun a micro-batch or changed its phase for `stalled_s`, and the members of a group have entered different
numbers of collectives, the one that entered fewest holds up the others.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

from megatron_dapo.watch.evidence import signal_name
from megatron_dapo.watch.failure import Failure, in_order

COLLECTIVE, BOUNDED = "collective", "bounded"  # kinds of waits, see `heartbeat.WAITS`
# Phases whose waits are collectives on the device. In all others (generation, weight sync, evaluation, files, start) ranks
# wait on sockets and sleep, on GPUs too.
CONNECT, STEP = "connect", "step"
DEVICE_PHASES = frozenset({CONNECT, STEP, "values", "logprobs", "advantages", "train", "train_critic", "offload"})
_STARTING = ("start", "build")
_FRESH_S = 4.0  # A node's last message may be outdated after this.


@dataclass(frozen=True)
class WatchLimits:
    """All times of a watcher in seconds: the deadlines after which something is wrong, then the periods of its work."""

    stopped_s: float = 8.0  # process state T
    silent_s: float = 13.0  # no CPU time, data or collective
    start_silent_s: float = 60.0  # the same in `start` and `build`: imports and weights come in bursts from a slow file system
    stalled_s: float = 180.0  # GPUs: no new collective, micro-batch or phase on any rank
    files_s: float = 8.0  # writing a probe file
    node_s: float = 30.0  # no contact to a node's watcher
    start_s: float = 600.0  # first report of every rank
    settle_s: float = 1.5  # first record to decision: the cause may be noticed after its consequence
    cause_s: float = 12.0  # the same while all records are consequences
    doubt_s: float = 2.5  # added for a lost node, which may record in the run directory that its link is lost
    tick_s: float = 0.5  # period of the looks at the ranks
    beat_s: float = 1.0  # period of the messages to the leader
    queues_s: float = 2.0  # period of the reads of the machine's TCP connections, which may be many
    connect_s: float = 120.0  # connection of the first rank
    lost_record_s: float = 1.0  # reading the record of a lost node
    stacks_s: float = 1.0  # stacks of all ranks
    write_s: float = 2.5  # The record must be on disk before ranks end and their launchers look for it.
    kill_s: float = 5.5  # verdict to SIGKILL
    end_s: float = 9.0  # verdict to the end of the watcher, whatever hangs

    @property
    def unheard_s(self) -> float:
        """Seconds without an answer after which the leader knows that a node's link loses one direction."""
        return self.node_s - 2.0  # just before that node turns to the next leader


@dataclass(frozen=True)
class RankView:
    """State of one rank, as the watcher of its node sees it."""

    rank: int
    node: str = ""
    node_rank: int = 0
    phase: str = "start"
    wait: str = ""  # COLLECTIVE, BOUNDED, or "" outside any wait
    doing: str = ""  # innermost function of its main thread
    idle_s: float = 0.0  # no CPU time, data or new collective
    stalled_s: float = 0.0  # no change of phase, progress or number of collectives
    is_on_gpu: bool = False
    groups: Mapping[str, int] = field(default_factory=dict)  # collectives entered, by process group
    stopped_s: float = 0.0  # process state T
    held: tuple[str, ...] = ()  # kernel calls that its threads are blocked in
    file_operation: str = ""  # operation of its file process
    is_sampled: bool = True  # its main thread has been sampled

    @property
    def counts_idleness(self) -> bool:
        """True if sleeping indicates a hang; in device phases a wait for the GPU can look like anything."""
        return not (self.is_on_gpu and self.phase in DEVICE_PHASES)

    def failure(self, cause: str, message: str, detail: str = "") -> Failure:
        return Failure(self.rank, cause, message, self.node, self.phase, detail, node_rank=self.node_rank)


@dataclass(frozen=True)
class NodeView:
    """State of one node, as the leader knows it."""

    node_rank: int
    name: str = ""
    ranks: tuple[int, ...] = ()
    phase: str = ""  # its first rank's
    is_gone: bool = False  # its ranks exited cleanly
    silent_s: float = 0.0  # no datagram or connection from its watcher
    unanswered_s: float = 0.0  # Its watcher got no answer, as far as known.
    idle_s: float = 0.0  # no progress of any of its ranks
    is_bounded: bool = False  # one of its ranks is in a wait with a deadline
    views: tuple[RankView, ...] = ()  # living ranks; empty while they make progress

    @property
    def is_in_contact(self) -> bool:
        """True if its watcher and the leader hear each other, so that its last message still holds."""
        return self.is_gone or max(self.silent_s, self.unanswered_s) < _FRESH_S


def exit_failure(view: RankView, status: int | None, out_of_memory: str, stack: str) -> Failure:
    """Return the record of a rank that ended before the run was over.

    status: wait status, None if unknown. out_of_memory: what the kernel says of an OOM kill, "" if there was none.
    """
    if status is not None and not os.WIFSIGNALED(status):
        message = f"ended with exit code {os.WEXITSTATUS(status)} before the run was over"
        return view.failure("exit", message, stack)
    if out_of_memory:
        return view.failure("out of memory", f"out of memory: {out_of_memory}", stack)
    if status is None:
        return view.failure("signal", "exited without reporting an error, probably by signal 9 (SIGKILL)", stack)
    message = f"killed by {signal_name(os.WTERMSIG(status))}"
    if os.WTERMSIG(status) != signal.SIGTERM:
        return view.failure("signal", message, stack)
    message += ": scancel, a time limit, a second Ctrl-C, or a launcher that ends it after another rank"
    # Launchers send it: what made them do so is the cause, if anything reports it.
    return replace(view.failure("signal", message, stack), is_consequence=True)


def rank_failure(view: RankView, limits: WatchLimits, directory: str = "", unwritten_s: float = 0.0) -> Failure | None:
    """Return what is wrong with one rank.

    directory: of the run; unwritten_s: how long a probe file there has stayed unwritten while its disk wrote nothing.
    """
    if view.stopped_s:
        message = f"stopped (state T) for {view.stopped_s:.0f} s"
        return view.failure("stopped", message) if view.stopped_s > limits.stopped_s else None
    held_by = [*view.held] or [view.file_operation] * bool(view.file_operation)
    if held_by and unwritten_s > limits.files_s:
        message = f"file system hung: {directory} does not answer for {unwritten_s:.0f} s; it holds {held_by[0]}"
        return view.failure("file system hung", message, "\n".join(held_by))
    limit = limits.start_silent_s if view.phase in _STARTING else limits.silent_s
    # A file system in user space lets its callers sleep interruptibly, so a slow write looks like any sleep.
    is_waiting = bool(view.wait or held_by) or not view.is_sampled
    if view.idle_s > limit and not is_waiting and view.counts_idleness:
        return view.failure("hang", f"silent for {view.idle_s:.0f} s in {view.doing}")
    return None


def hang(nodes: Sequence[NodeView], world_size: int, limits: WatchLimits, since_gone_s: float = 1e9) -> Failure | None:
    """Return the culprit if all ranks of the run wait for each other.

    since_gone_s: since a node exited cleanly; ranks that waited for it need time to exit as well.
    """
    views = [view for node in nodes for view in node.views]
    living = [node for node in nodes if not node.is_gone]
    if not views or sum(len(node.ranks) for node in nodes) < world_size or since_gone_s < limits.silent_s:
        return None
    if not all(node.is_in_contact for node in nodes):
        return None
    if all(view.is_on_gpu and view.phase in DEVICE_PHASES for view in views):
        is_complete = len(views) == sum(len(node.ranks) for node in living)
        is_stalled = is_complete and min(view.stalled_s for view in views) > limits.stalled_s
        return _stalled(views, limits) if is_stalled else None
    limit = limits.start_silent_s if any(view.phase in _STARTING for view in views) else limits.silent_s
    is_silent = all(node.idle_s > limits.silent_s and not node.is_bounded for node in living)
    if not is_silent or min(view.idle_s for view in views) <= limit or not all(view.counts_idleness for view in views):
        return None
    return hang_of(views)


def _stalled(views: Sequence[RankView], limits: WatchLimits) -> Failure | None:
    if latest := _latest(views):
        view, group = latest
        most = max(each.groups[group] for each in views if group in each.groups)
        message = (
            f"no rank has entered a collective for {min(each.stalled_s for each in views):.0f} s: this one has entered "
            f"{view.groups[group]} of group {group}, the ranks that wait for it {most}; in {view.doing}"
        )
        return view.failure("hang", message)
    # Equal numbers may mean a long-running kernel, but a rank that sleeps outside any wait runs none.
    asleep = [view for view in views if not view.wait and view.idle_s > limits.silent_s]
    return _silent_outside(asleep) if asleep and len(asleep) < len(views) else None


def _latest(views: Sequence[RankView]) -> tuple[RankView, str] | None:
    """Return the rank that most others wait for, judged by the collectives entered, and a group in which they wait."""
    waiting: Counter[int] = Counter()  # number of ranks that wait for each rank, over all groups
    group_of: dict[int, str] = {}
    for group in sorted({name for view in views for name in view.groups}):
        entered = {view.rank: view.groups[group] for view in views if group in view.groups}
        fewest = min(entered.values())
        # In a cycle of waits every rank is late in some group.
        if num_waiting := sum(count > fewest for count in entered.values()):
            for rank in (rank for rank, count in entered.items() if count == fewest):
                waiting[rank] += num_waiting
                group_of.setdefault(rank, group)
    if not waiting:
        return None
    latest = min(waiting, key=lambda rank: (-waiting[rank], rank))
    return next(view for view in views if view.rank == latest), group_of[latest]


def hang_of(views: Sequence[RankView]) -> Failure:
    """Return which of the ranks without progress holds up the others, and the evidence."""
    if outside := [view for view in views if not view.wait and view.counts_idleness]:
        return _silent_outside(outside)
    if latest := _latest(views):
        view, group = latest
        entered = f"it entered fewer collectives ({view.groups[group]} of group {group}) than the ranks that wait for it"
        return view.failure("hang", f"silent for {view.idle_s:.0f} s in {view.doing}: {entered}")
    view = max(views, key=lambda each: (each.idle_s, -each.rank))
    where = f"{view.idle_s:.0f} s in {view.doing}"
    if len(views) == 1:
        return view.failure("hang", f"silent for {where}: no other rank is left")
    message = f"all {len(views)} ranks wait for each other in collectives, this one longest: {where}"
    return view.failure("hang", message)


def _silent_outside(views: Sequence[RankView]) -> Failure:
    view = max(views, key=lambda each: (each.idle_s, -each.rank))
    return view.failure("hang", f"silent for {view.idle_s:.0f} s in {view.doing}, while the others wait for it")


def without_contact(nodes: Sequence[NodeView], limits: WatchLimits) -> Iterator[tuple[NodeView, float, str]]:
    """Yield the nodes that are lost or do not hear the leader, for how long, and which of the two."""
    for node in nodes:
        # A node that has no answer turns to the next leader after `node_s`, and is heard until then.
        if not node.is_gone and node.silent_s > limits.node_s:
            yield node, node.silent_s, "is silent"
        elif not node.is_gone and node.silent_s + node.unanswered_s > limits.unheard_s:
            yield node, node.silent_s + node.unanswered_s, "has had no answer"


def node_failure(here: NodeView, node: NodeView, silent_s: float, how: str, fault: str) -> Failure | None:
    """Return the record of a node without contact, or of this node if its own link has a fault.

    fault: fault of this node's link, "" if none is known. None if the node is heard: only a fault here explains that.
    """
    if fault:
        message = f"link lost: {node.name} {how} for {silent_s:.0f} s, {fault}"
        return Failure(-1, "link lost", message, here.name, here.phase, node_rank=here.node_rank)
    if how != "is silent":
        return None
    ranks = f" with rank{'s' * (len(node.ranks) > 1)} {', '.join(map(str, node.ranks))}" if node.ranks else ""
    message = f"node lost{ranks}: no sign of life for {silent_s:.0f} s: its link is down or it has no power"
    return Failure(-1, "node lost", message, node.name, here.phase, node_rank=node.node_rank)


def path_failure(here: NodeView, lost: Failure) -> Failure:
    """Return the record of a node that counts as lost, and has left word that it does not hear this one."""
    pair = sorted([(here.node_rank, here.name), (lost.node_rank, lost.node)])
    names = " and ".join(name for _, name in pair)
    message = f"path lost: {names} are alive and do not hear each other: the network between them loses packets, in one direction or both"
    return replace(lost, cause="path lost", message=message, node=names, node_rank=pair[0][0])


def missing_ranks(nodes: Sequence[NodeView], world_size: int, age_s: float, limits: WatchLimits) -> Failure | None:
    """Return the record of ranks that have never reported, `age_s` after the start."""
    missing = sorted(set(range(world_size)) - {rank for node in nodes for rank in node.ranks})
    if not missing or age_s <= limits.start_s:
        return None
    message = f"ranks {missing[:8]} of {world_size} never reported within {limits.start_s:g} s"
    return Failure(missing[0], "not started", message, "its node", "start")


def decision(
    records: Sequence[tuple[float, Failure]],
    nodes: Sequence[NodeView],
    world_size: int,
    now: float,
    limits: WatchLimits,
    attempt: int = 1,
) -> list[Failure] | None:
    """Return the failures with the culprit first, None while more may be noticed.

    records: the failures noticed, and when, on the clock of `now`.
    """
    if not records:
        return None
    failures = [failure for _, failure in records]
    has_cause = any(not failure.is_consequence for failure in failures)
    patience_s = limits.settle_s if has_cause else limits.cause_s
    if not has_cause and not all(node.is_in_contact for node in nodes):
        patience_s = limits.node_s + limits.settle_s  # A node out of contact may be the cause.
    if has_cause and len({failure.rank for failure in failures}) == world_size:
        patience_s = 0.0  # every rank has reported
    elif any(failure.cause == "node lost" for failure in failures):
        patience_s += limits.doubt_s
    if now - min(at for at, _ in records) < patience_s:
        return None
    views = [view for node in nodes for view in node.views]
    if views and all(failure.is_consequence or failure.cause == "deadline" for failure in failures):
        # Their numbers of collectives say more than which of them timed out first.
        failures.append(replace(hang_of(views), time=min(failure.time for failure in failures) - 1e-3))
    return in_order([replace(failure, attempt=attempt) for failure in failures])


class EndStage(IntEnum):
    """Steps of the end of a run, in order. Each begins when the one before it is over."""

    STACKS = 0  # ranks write their stacks
    RECORD = 1  # the record is written
    EXIT = 2  # ranks exit by themselves
    KILL = 3  # those left are killed
    NAME = 4  # those that the kernel holds are named


def next_stage(stage: EndStage, since_s: float, has_stacks: bool, is_recorded: bool, limits: WatchLimits) -> EndStage:
    """Return the stage after `stage` if that is over, `since_s` after the verdict; otherwise `stage`."""
    is_over = {
        EndStage.STACKS: has_stacks or since_s > limits.stacks_s,
        EndStage.RECORD: is_recorded,
        EndStage.EXIT: since_s > limits.kill_s,
        EndStage.KILL: since_s > limits.end_s - 1.0,
        EndStage.NAME: False,
    }
    return EndStage(stage + is_over[stage])
