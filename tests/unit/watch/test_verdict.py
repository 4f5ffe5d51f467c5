"""The verdict is a function of what was seen: who is named, for what, and when nobody is."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from megatron_dapo.telemetry.metrics import PHASES
from megatron_dapo.watch.failure import Failure, in_order
from megatron_dapo.watch.verdict import (
    BOUNDED,
    COLLECTIVE,
    DEVICE_PHASES,
    WatchLimits,
    NodeView,
    RankView,
    EndStage,
    decision,
    exit_failure,
    hang,
    hang_of,
    missing_ranks,
    next_stage,
    node_failure,
    rank_failure,
    without_contact,
)

LIMITS = WatchLimits()


def rank(number: int, **values) -> RankView:
    """A rank that has waited for 14 s in a collective, on a CPU unless said otherwise."""
    given = {"phase": "train", "wait": COLLECTIVE, "doing": f"f{number}", "idle_s": 14.0, "stalled_s": 14.0}
    return RankView(number, f"node{number}", number, **{**given, **values})


def spinning(number: int, **values) -> RankView:
    """A rank on a GPU that has waited for NCCL for 200 s: it is busy, and its main thread's place is no evidence."""
    return rank(number, **{"is_on_gpu": True, "idle_s": 0.0, "wait": "", "stalled_s": 200.0, **values})


def alone(view: RankView, **values) -> NodeView:
    """The node of one rank."""
    given = {"idle_s": view.idle_s, "is_bounded": view.wait == BOUNDED, "views": (view,)}
    return NodeView(view.node_rank, view.node, (view.rank,), **{**given, **values})


@pytest.mark.parametrize(
    ("values", "unwritten_s", "cause"),
    [
        ({"stopped_s": 8.5}, 0.0, "stopped"),
        ({"stopped_s": 7.5}, 0.0, ""),
        ({"wait": ""}, 0.0, "hang"),
        ({"wait": "", "idle_s": 12.0}, 0.0, ""),
        ({"wait": "", "phase": "build"}, 0.0, ""),  # imports and weights come in bursts
        ({"wait": "", "phase": "build", "idle_s": 61.0}, 0.0, "hang"),
        ({"wait": COLLECTIVE, "idle_s": 900.0}, 0.0, ""),  # it waits for others
        ({"wait": BOUNDED, "idle_s": 900.0}, 0.0, ""),  # the deadline decides
        ({"wait": "", "is_sampled": False}, 0.0, ""),  # not one look at its main thread yet
        # Held in the kernel, or asleep in a file system in user space: slow unless a probe file is not written either.
        ({"wait": "", "held": ("thread 1: fsync",), "idle_s": 900.0}, 7.0, ""),
        ({"wait": "", "held": ("thread 1: fsync",)}, 9.0, "file system hung"),
        ({"wait": "", "file_operation": "append x", "idle_s": 900.0}, 0.0, ""),
        ({"wait": "", "file_operation": "append x", "idle_s": 900.0}, 9.0, "file system hung"),
        ({"wait": COLLECTIVE}, 9.0, ""),  # the probe hangs, but not this rank
        # On a GPU, sleep is no evidence of a hang while ranks wait for the device; elsewhere it is the same evidence.
        ({"wait": "", "is_on_gpu": True}, 0.0, ""),
        ({"wait": "", "is_on_gpu": True, "phase": "generate"}, 0.0, "hang"),
    ],
)
def test_one_rank(values: dict, unwritten_s: float, cause: str) -> None:
    failure = rank_failure(rank(3, **values), LIMITS, "/run", unwritten_s)
    assert (failure.cause if failure else "") == cause
    if failure is not None:
        assert (failure.rank, failure.node_rank, failure.phase) == (3, 3, values.get("phase", "train"))


@pytest.mark.parametrize(
    ("ranks", "culprit", "reason"),
    [
        ([rank(0, groups={"a": 7}), rank(1, wait=""), rank(2, groups={"a": 7})], 1, "while the others wait for it"),
        ([rank(0, groups={"a": 7, "b": 2}), rank(1, groups={"a": 7}), rank(2, groups={"a": 6, "b": 2})], 2, "6 of group a"),
        # Rank 3 is late in both of its groups, rank 1 in one, because it waits for rank 3 in the other.
        (
            [
                rank(0, groups={"a": 5}),
                rank(1, groups={"a": 4, "b": 9}),
                rank(2, groups={"c": 3}),
                rank(3, groups={"b": 8, "c": 2}),
            ],
            3,
            "8 of group b",
        ),
        ([rank(0, groups={"a": 5}), rank(1, idle_s=20.0, groups={"a": 5})], 1, "wait for each other"),
        ([rank(4, groups={"a": 5})], 4, "no other rank is left"),
        # On GPUs a main thread outside a collective may wait for its device.
        ([spinning(0, groups={"a": 7}), spinning(1, groups={"a": 6})], 1, "fewer collectives"),
    ],
)
def test_who_holds_up_the_others(ranks: list[RankView], culprit: int, reason: str) -> None:
    failure = hang_of(ranks)
    assert failure.rank == culprit and reason in failure.message


LATE = [spinning(0, groups={"tp": 9, "dp": 4}), spinning(1, groups={"tp": 9, "dp": 3}), spinning(2, groups={"dp": 4})]


@pytest.mark.parametrize(
    ("views", "culprit"),
    [
        (LATE, 1),
        ([replace(view, idle_s=150.0, wait=COLLECTIVE) for view in LATE], 1),  # Their CPU time makes no difference.
        ([replace(view, stalled_s=179.0) for view in LATE], None),
        ([LATE[0], replace(LATE[1], stalled_s=3.0), LATE[2]], None),  # it still makes micro-batches
        ([replace(view, phase="weight_sync") for view in LATE], None),
        ([LATE[0], replace(LATE[1], phase="generate"), LATE[2]], None),
        ([replace(view, groups={"dp": 4}) for view in LATE], None),  # equal numbers: a kernel that runs long
        # Equal numbers, but one rank sleeps in its own code while the others wait.
        ([replace(LATE[0], groups={}), replace(LATE[1], groups={}, idle_s=190.0), replace(LATE[2], groups={})], 1),
        (LATE[:2], None),  # the third has not reported
        ([replace(view, phase="connect") for view in LATE], 1),
    ],
)
def test_a_hang_on_gpus_is_seen_by_collectives(views: list[RankView], culprit: int | None) -> None:
    """Ranks that wait for NCCL spin. Healthy work moves a number or a micro-batch within the limit."""
    failure = hang([alone(view) for view in views], 3, LIMITS)
    assert (failure.rank if failure else None) == culprit


def test_a_hang_on_gpus_names_rank_group_and_phase() -> None:
    failure = hang([alone(view) for view in LATE], 3, WatchLimits(stalled_s=60.0))
    assert (failure.rank, failure.node, failure.phase, failure.cause) == (1, "node1", "train", "hang")
    assert "3 of group dp, the ranks that wait for it 4" in failure.message and "for 200 s" in failure.message


WAITING = [rank(0, groups={"a": 5}), rank(1, groups={"a": 4})]


@pytest.mark.parametrize(
    ("nodes", "since_gone_s", "culprit"),
    [
        ([alone(view) for view in WAITING], 99.0, 1),
        ([alone(WAITING[0]), alone(WAITING[1], is_bounded=True)], 99.0, None),
        ([alone(WAITING[0]), alone(replace(WAITING[1], idle_s=2.0), views=())], 99.0, None),  # one works
        ([alone(WAITING[0]), alone(WAITING[1], silent_s=6.0)], 99.0, None),  # its news are old
        ([alone(WAITING[0]), alone(WAITING[1], unanswered_s=14.0)], 99.0, None),  # its link may be the cause
        ([alone(replace(view, phase="build")) for view in WAITING], 99.0, None),
        ([alone(replace(view, phase="build", idle_s=61.0)) for view in WAITING], 99.0, 1),
        # The last rank that the others wait for has just ended in good order.
        ([alone(WAITING[0]), alone(WAITING[1], is_gone=True, views=())], 5.0, None),
        ([alone(WAITING[0]), alone(WAITING[1], is_gone=True, views=())], 99.0, 0),
        ([alone(WAITING[0])], 99.0, None),  # rank 1 has not reported
    ],
)
def test_silence_of_all(nodes: list[NodeView], since_gone_s: float, culprit: int | None) -> None:
    failure = hang(nodes, 2, LIMITS, since_gone_s)
    assert (failure.rank if failure else None) == culprit


def test_phases_on_the_device_are_phases_of_a_run() -> None:
    assert DEVICE_PHASES <= {*PHASES, "connect", "step"}
    assert not DEVICE_PHASES & {"generate", "evaluate", "weight_sync", "checkpoint", "record"}


@pytest.mark.parametrize(
    ("silent_s", "unanswered_s", "how"),
    [
        (9.0, 0.0, None),  # a busy link drops datagrams first
        (29.0, 0.0, "has had no answer"),  # only a fault of this node's link makes that a record
        (31.0, 0.0, "is silent"),
        (1.0, 9.0, None),
        (1.0, 28.0, "has had no answer"),
    ],
)
def test_contact_to_a_node(silent_s: float, unanswered_s: float, how: str | None) -> None:
    here, node = NodeView(0, "node0", phase="train"), NodeView(1, "node1", (2, 3), silent_s=silent_s, unanswered_s=unanswered_s)
    lost = [each for _, _, each in without_contact([here, node], LIMITS)]
    assert lost == ([how] if how else [])
    assert list(without_contact([replace(node, is_gone=True)], LIMITS)) == []
    failure = node_failure(here, node, silent_s, how or "", "")
    assert (failure is not None) == (how == "is silent")
    if failure is not None:
        assert (failure.cause, failure.node_rank, failure.rank) == ("node lost", 1, -1)
        assert "with ranks 2, 3" in failure.message and failure.phase == "train"
    fault = node_failure(here, node, 28.5, "has had no answer", "nor does 10.0.0.9 answer")
    assert fault is not None and (fault.cause, fault.node, fault.node_rank) == ("link lost", "node0", 0)


def test_ranks_that_never_report() -> None:
    nodes = [NodeView(0, "node0", (0, 1))]
    assert missing_ranks(nodes, 4, 599.0, LIMITS) is None and missing_ranks(nodes, 2, 601.0, LIMITS) is None
    failure = missing_ranks(nodes, 4, 601.0, LIMITS)
    assert failure is not None and (failure.rank, failure.cause) == (2, "not started") and "[2, 3]" in failure.message


KILLED = Failure(3, "signal", "killed", time=102.0)
RESET = Failure(0, "connection lost", "reset", is_consequence=True, time=100.0)
LOST = Failure(-1, "node lost", "lost", node_rank=1, time=101.0)


def test_who_broke_a_connection_may_be_a_node_without_contact() -> None:
    """It counts as lost only after 30 s; until then the broken connections that it caused are no verdict."""
    silent = NodeView(1, "node1", silent_s=20.0)
    assert decision([(10.0, RESET)], [silent], 4, 30.0, LIMITS) is None
    failures = decision([(10.0, RESET), (40.5, LOST)], [replace(silent, silent_s=34.0)], 4, 44.0, LIMITS)
    assert failures is not None and [each.cause for each in failures] == ["node lost", "connection lost"]


@pytest.mark.parametrize(
    ("records", "now", "culprit"),
    [
        ([], 1e9, None),
        ([(10.0, KILLED)], 11.0, None),  # the cause may be noticed after its consequence
        ([(10.0, KILLED)], 11.6, KILLED),
        ([(10.0, RESET)], 20.0, None),  # whoever broke the connection may still be named
        ([(10.0, RESET), (19.0, KILLED)], 20.0, KILLED),
        ([(10.0, RESET)], 22.1, RESET),
        ([(10.0, LOST)], 13.9, None),  # The node may still report a lost link.
        ([(10.0, LOST)], 14.1, LOST),
        ([(10.0, replace(KILLED, rank=each)) for each in range(4)], 10.0, replace(KILLED, rank=0)),  # all have reported
    ],
)
def test_when_it_is_decided_and_on_whom(records: list, now: float, culprit: Failure | None) -> None:
    failures = decision(records, [], 4, now, LIMITS, attempt=2)
    if culprit is None:
        assert failures is None
    else:
        assert failures is not None and failures[0].rank == culprit.rank and failures[0].cause == culprit.cause
        assert all(failure.attempt == 2 for failure in failures)
        assert all(failure.is_consequence for failure in failures[1:])


def test_numbers_of_collectives_tell_more_than_who_lost_patience_first() -> None:
    deadline = Failure(0, "deadline", "no progress", time=100.0)
    failures = decision([(10.0, deadline)], [alone(view) for view in WAITING], 2, 12.0, LIMITS)
    assert failures is not None and [(each.rank, each.cause) for each in failures] == [(1, "hang"), (0, "deadline")]


@pytest.mark.parametrize(
    ("status", "out_of_memory", "cause", "message"),
    [
        (3 << 8, "", "exit", "ended with exit code 3 before the run was over"),
        (signal.SIGKILL, "", "signal", "killed by signal 9 (SIGKILL)"),
        (signal.SIGKILL, "the kernel killed it", "out of memory", "out of memory: the kernel killed it"),
        (signal.SIGTERM, "", "signal", "killed by signal 15 (SIGTERM): scancel"),
        (None, "", "signal", "probably by signal 9"),  # an old kernel, and its parent has reaped it
        (None, "the kernel killed it", "out of memory", "out of memory"),
    ],
)
def test_how_a_rank_ended(status: int | None, out_of_memory: str, cause: str, message: str) -> None:
    failure = exit_failure(rank(2), status, out_of_memory, "its stack")
    assert (failure.rank, failure.cause, failure.detail) == (2, cause, "its stack") and message in failure.message


def test_a_rank_that_its_launcher_ends_is_a_consequence_of_one_that_failed_later_by_the_clock() -> None:
    """srun ends the tasks of healthy nodes, which report sooner than the one that cannot reach anybody."""
    killed = replace(exit_failure(rank(0), signal.SIGTERM, "", ""), time=1.0)
    error = Failure(1, "exception", "ValueError: bad", time=2.0)
    [first, second] = in_order([killed, error])
    assert (first.rank, second.rank) == (1, 0) and killed.is_consequence
    assert not exit_failure(rank(0), signal.SIGKILL, "", "").is_consequence


@pytest.mark.parametrize(
    ("has_stacks", "recorded_s", "times"),
    [
        # Everything hangs: the rank's stacks, the record, then the rank itself.
        (False, 99.0, {EndStage.RECORD: 1.0, EndStage.EXIT: 3.5, EndStage.KILL: 5.5, EndStage.NAME: 8.0}),
        # Ranks have reported already, and the record is on disk at once.
        (True, 0.1, {EndStage.RECORD: 0.0, EndStage.EXIT: 0.1, EndStage.KILL: 5.5, EndStage.NAME: 8.0}),
    ],
)
def test_the_stages_of_the_end(has_stacks: bool, recorded_s: float, times: dict[EndStage, float]) -> None:
    """A record may take `write_s`; ranks end only then, so that their launchers find it."""
    stage, began, since_s = EndStage.STACKS, {}, 0.0
    while since_s < 10.0:
        is_recorded = since_s - began.get(EndStage.RECORD, since_s) >= min(recorded_s, LIMITS.write_s)
        while (following := next_stage(stage, since_s, has_stacks, is_recorded, LIMITS)) != stage:
            stage = following
            began[stage] = since_s
            is_recorded = False
        since_s += 0.05
    assert began == pytest.approx(times, abs=0.11)
