"""Weight syncs by point-to-point: trainer ranks and engine ranks as threads over real gloo connections."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from one_stream import use_one_queue_a_sender
from sync_simulation import (
    PATIENT,
    Rendezvous,
    SimulatedEngine,
    ThreadCoordination,
    World,
    break_sender,
    run_ranks,
    small_architecture,
)

from megatron_dapo.bridge.protocol import p2p_stream, peer_group
from megatron_dapo.bridge.protocol.peer_group import PeerGroup
from megatron_dapo.bridge.transports import p2p
from megatron_dapo.bridge.transports.p2p import P2PSettings, P2PTransport
from megatron_dapo.bridge.weight_sync import EngineHandles, SyncTimeouts, WeightSync
from megatron_dapo.parallel.layout import ParallelLayout

TP2_PP2 = ParallelLayout(4, tensor=2, pipeline=2)


class PeerEngine(SimulatedEngine):
    """An engine whose ranks load concurrently, as the processes of a server do."""

    def update_weights_from_tensor(self, payloads, load_format=None) -> None:
        self._call("tensor")
        assert self.is_paused and self.session and len(payloads) == len(self.models)
        threads = [threading.Thread(target=self.load, args=pair, daemon=True) for pair in zip(self.models, payloads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if not self.is_alive:
            raise ConnectionError("connection lost before the answer")


def updates(
    world: World,
    engines: Sequence[PeerEngine],
    timeouts: SyncTimeouts = PATIENT,
    connect_s: float = 10.0,
    backend: str = "gloo",
    full_interval: int = 1,
) -> list[WeightSync]:
    """Return one WeightSync a trainer rank, all by point-to-point."""
    rendezvous = Rendezvous(world.size)
    result = []
    for rank in range(world.size):
        handles = EngineHandles(world.leaders, {e: c for e, c in enumerate(engines) if world.leaders[e] == rank})
        coordination = ThreadCoordination(rendezvous, rank)
        transport = P2PTransport(world.plan, handles, coordination, P2PSettings(connect_s=connect_s, backend=backend))
        sync = WeightSync(
            world.plan, handles, transport, coordination, timeouts, "session", full_interval=full_interval
        )
        result.append(sync)
    return result


def update_all(all_updates: Sequence[WeightSync], version: int, weights, timeout_s: float = 120.0) -> list:
    return run_ranks(len(all_updates), lambda r: all_updates[r].update(version, weights[r]), timeout_s)


def close_all(all_updates: Sequence[WeightSync]) -> None:
    for update in all_updates:
        update.transport.close()


@pytest.mark.parametrize(
    ("parallel", "tensor_parallel", "num_engines", "dtype", "direct_bytes"),
    [
        (TP2_PP2, 2, 1, torch.float32, 64),
        (TP2_PP2, 1, 2, torch.float32, 1 << 20),
        (ParallelLayout(4, tensor=2), 4, 1, torch.bfloat16, 64),
        (ParallelLayout(2, pipeline=2), 2, 2, torch.float32, 200),
    ],
)
def test_every_byte_arrives_in_every_version(
    parallel, tensor_parallel, num_engines, dtype, direct_bytes, monkeypatch
) -> None:
    """Large chunks sent directly, small ones packed, casts, several engines; the second version uses the same groups."""
    monkeypatch.setattr(p2p_stream, "DIRECT_BYTES", direct_bytes)
    world = World(
        small_architecture(tied=num_engines == 2),
        parallel,
        tensor_parallel=tensor_parallel,
        num_engines=num_engines,
        dtype=dtype,
        bucket_bytes=1500,
    )
    engines = [PeerEngine(world.layout, index) for index in range(num_engines)]
    syncs = updates(world, engines)
    groups = []
    for version in (1, 2):
        weights = world.weights(version)
        for report in update_all(syncs, version, weights):
            assert report.is_complete, report.describe()
        expected = world.expected(weights)
        assert all(world.holds(engine, index, expected) for index, engine in enumerate(engines))
        assert all(engine.version == version and not engine.is_paused for engine in engines)
        groups.append([group.name for update in syncs for group in update.transport._groups.values()])
        total = {e: sum(world.plan.num_bytes(rank) for rank in world.plan.ranks_of(e)) for e in range(num_engines)}
        # Alignment between chunks is the only surplus.
        assert all(0.6 * total[e] < report.engines[e].num_bytes <= total[e] for e in total)
    assert groups[0] == groups[1] and groups[0]
    close_all(syncs)


@pytest.mark.parametrize(("tensor_parallel", "num_engines"), [(2, 1), (1, 2)])
def test_a_backend_of_one_stream_carries_only_bytes(tensor_parallel, num_engines, monkeypatch) -> None:
    """NCCL runs operations one after the other: replies that it carried would block the bytes sent after them."""
    use_one_queue_a_sender(monkeypatch)
    monkeypatch.setattr(p2p_stream, "DIRECT_BYTES", 200)
    world = World(
        small_architecture(), TP2_PP2, tensor_parallel=tensor_parallel, num_engines=num_engines, bucket_bytes=1500
    )
    engines = [PeerEngine(world.layout, index) for index in range(num_engines)]
    syncs = updates(world, engines, backend="nccl")
    for version in (1, 2):
        weights = world.weights(version)
        for report in update_all(syncs, version, weights):
            assert report.is_complete, report.describe()
        expected = world.expected(weights)
        assert all(world.holds(engine, index, expected) for index, engine in enumerate(engines))
    close_all(syncs)


def test_senders_whose_threads_start_in_other_orders_do_not_wait_for_each_other(monkeypatch) -> None:
    """Both write into every bucket. Bucket 1 of the first engine to launch waits for the other sender's bucket 0 of it, and would
    hold back the other engine's bucket 0."""
    use_one_queue_a_sender(monkeypatch)
    world = World(
        small_architecture(), ParallelLayout(2, tensor=2), tensor_parallel=1, num_engines=2, bucket_bytes=1500
    )
    outgoing = P2PTransport._outgoing

    def late(self: P2PTransport, engine: int, *arguments):
        if engine == self.rank:
            time.sleep(0.3)
        return outgoing(self, engine, *arguments)

    monkeypatch.setattr(P2PTransport, "_outgoing", late)
    engines = [PeerEngine(world.layout, index) for index in range(2)]
    syncs = updates(world, engines, replace(PATIENT, transfer_s=15.0), backend="nccl")
    weights = world.weights(1)
    for report in update_all(syncs, 1, weights):
        assert report.is_complete, report.describe()
    assert all(world.holds(engine, index, world.expected(weights)) for index, engine in enumerate(engines))
    close_all(syncs)


def test_other_settings_of_nccl_in_the_engine_are_refused_by_name(monkeypatch) -> None:
    use_one_queue_a_sender(monkeypatch)

    def settings() -> dict[str, str]:
        is_trainer = threading.current_thread().name == "engine-call"
        return {"NCCL's version": "2.28.9", "NCCL_CUMEM_ENABLE": "" if is_trainer else "0"}

    monkeypatch.setattr(peer_group, "_nccl_settings", settings)
    world = World(small_architecture(), ParallelLayout(2, tensor=2), tensor_parallel=1)
    syncs = updates(world, [PeerEngine(world.layout)], backend="nccl")
    for report in update_all(syncs, 1, world.weights(1)):
        assert "NCCL_CUMEM_ENABLE is not set in the trainer (member 0) and 0 in member 2" in report.failures[0]
    close_all(syncs)


def test_a_lost_engine_rank_ends_a_sync_of_one_stream(monkeypatch) -> None:
    """Control connections tell senders of a lost engine rank; without them a sender would wait until the deadline."""
    use_one_queue_a_sender(monkeypatch)
    world = World(small_architecture(), ParallelLayout(2, tensor=2), tensor_parallel=2, bucket_bytes=2048)
    syncs = updates(world, [PeerEngine(world.layout)], backend="nccl")
    broken(monkeypatch, "receive", 2, 2, lambda group: group.close())
    start = time.monotonic()
    reports = update_all(syncs, 1, world.weights(1))
    assert time.monotonic() - start < 30 and not any(report.is_complete for report in reports)
    close_all(syncs)


def test_a_restarted_engine_gets_a_new_group() -> None:
    world = World(small_architecture(), TP2_PP2, tensor_parallel=2)
    engines = [PeerEngine(world.layout)]
    syncs = updates(world, engines)
    assert all(report.is_complete for report in update_all(syncs, 1, world.weights(1)))
    # A restarted process: the loader's state and its end of the group are gone, the trainer's objects are not.
    for model in engines[0].models:
        model.megatron_dapo_weight_sync.p2p._close()
        del model.megatron_dapo_weight_sync
    weights = world.weights(2)
    assert all(report.is_complete for report in update_all(syncs, 2, weights))
    assert world.holds(engines[0], 0, world.expected(weights))
    assert engines[0].calls.count("tensor") == 3  # the dead group was noticed, and the sync repeated
    close_all(syncs)


def broken(monkeypatch, operation: str, member: int, number: int, action: Callable[[PeerGroup], None]) -> None:
    """Run `action(group)` at a member's send or receive number `number`."""
    original, counts = getattr(PeerGroup, operation), {}

    def replaced(self: PeerGroup, tensor: torch.Tensor, peer: int, *tag: int):
        if self.rank == member:
            counts[member] = counts.get(member, -1) + 1
            if counts[member] == number:
                changed = action(self)
                tensor = tensor if changed is None else changed(tensor)
        return original(self, tensor, peer, *tag)

    monkeypatch.setattr(PeerGroup, operation, replaced)


def corrupt(group: PeerGroup):
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(-1).view(torch.uint8)[0] ^= 1
        return tensor

    return change


def fail(group: PeerGroup) -> None:
    raise RuntimeError("a made-up failure")


def test_a_fault_that_comes_back_when_the_sync_is_repeated(monkeypatch) -> None:
    """The sync is repeated once with a new group; after a second failure the engine is unserved on all ranks."""
    world = World(small_architecture(), TP2_PP2, tensor_parallel=1, bucket_bytes=2048)
    engines = [PeerEngine(world.layout)]
    syncs = updates(world, engines)
    assert all(report.is_complete for report in update_all(syncs, 1, world.weights(1)))
    with monkeypatch.context() as patch:
        break_sender(patch, 2)
        start = time.monotonic()
        reports = update_all(syncs, 2, world.weights(2))
        assert time.monotonic() - start < 30
    assert [report.is_complete for report in reports] == [False] * 4
    assert reports[0].failures[0] == "trainer rank 2: RuntimeError: a made-up failure"
    assert engines[0].calls.count("tensor") == 3
    weights = world.weights(3)
    assert all(report.is_complete for report in update_all(syncs, 3, weights))
    assert world.holds(engines[0], 0, world.expected(weights))
    close_all(syncs)


@pytest.mark.parametrize(
    ("operation", "member", "number", "action", "reason"),
    [
        ("send", 2, 1, fail, "trainer rank 2: RuntimeError: a made-up failure"),  # a sender
        ("receive", 5, 3, fail, "made-up failure"),  # an engine rank
        ("send", 1, 2, corrupt, "differ from the trainer's"),
        ("send", 3, 1, lambda group: group.close(), "member"),
        ("receive", 4, 2, lambda group: group.close(), "member"),
    ],
)
def test_a_fault_leaves_the_engine_unserved_and_the_next_sync_repairs_it(
    operation, member, number, action, reason, monkeypatch
) -> None:
    world = World(small_architecture(), TP2_PP2, tensor_parallel=2, bucket_bytes=2048)
    engines = [PeerEngine(world.layout)]
    syncs = updates(world, engines)
    with monkeypatch.context() as patch:
        broken(patch, operation, member, number, action)
        start = time.monotonic()
        reports = update_all(syncs, 1, world.weights(1))
        seconds = time.monotonic() - start
    assert [report.is_complete for report in reports] == [False] * 4
    assert engines[0].is_paused and engines[0].version is None
    text = " ".join(reports[0].failures.values())
    assert reason in text, text
    assert seconds < 30  # the transfer's deadline is 60 s
    weights = world.weights(2)
    assert all(report.is_complete for report in update_all(syncs, 2, weights))
    assert world.holds(engines[0], 0, world.expected(weights))
    close_all(syncs)


def test_a_lost_engine_rank_ends_the_sync_to_the_other_rank(monkeypatch) -> None:
    """The other rank waits for a slow sender; the leader must not wait with it."""
    world = World(small_architecture(), ParallelLayout(2, tensor=2), tensor_parallel=2, bucket_bytes=2048)
    syncs = updates(world, [PeerEngine(world.layout)])
    broken(monkeypatch, "receive", 2, 2, lambda group: group.close())
    broken(monkeypatch, "send", 1, 2, lambda group: time.sleep(1.5))
    start = time.monotonic()
    reports = update_all(syncs, 1, world.weights(1))
    assert time.monotonic() - start < 30  # not the deadline of a transfer
    assert not any(report.is_complete for report in reports) and "member 2" in reports[0].failures[0]
    close_all(syncs)


def test_a_slow_sender_fails_at_the_deadline_and_leaves_later_syncs_alone(monkeypatch) -> None:
    """All ranks fail shortly after the deadline. When the slow thread wakes up, it must not touch the group of the next
    sync."""
    world = World(small_architecture(), TP2_PP2, tensor_parallel=2, bucket_bytes=2048)
    engines = [PeerEngine(world.layout)]
    syncs = updates(world, engines, replace(PATIENT, transfer_s=2.0, grace_s=3.0))
    woken = threading.Event()

    def sleep(group: PeerGroup) -> None:
        time.sleep(12)
        woken.set()

    with monkeypatch.context() as patch:
        broken(patch, "send", 3, 2, sleep)
        start = time.monotonic()
        reports = update_all(syncs, 1, world.weights(1))
        assert time.monotonic() - start < 11.5
    assert not any(getattr(report, "is_complete", False) for report in reports), reports
    assert engines[0].is_paused
    for update in syncs:
        update.timeouts = PATIENT
    groups = []
    for version in (2, 3):
        assert all(report.is_complete for report in update_all(syncs, version, world.weights(version)))
        groups.append([update.transport._groups[0].name for update in syncs])
        assert woken.wait(60)
        time.sleep(0.5)  # time for the woken thread to do harm
    assert groups[0] == groups[1]
    close_all(syncs)


def test_a_dead_engine_does_not_affect_the_other() -> None:
    world = World(small_architecture(), TP2_PP2, tensor_parallel=1, num_engines=2)
    engines = [PeerEngine(world.layout, index) for index in range(2)]
    syncs = updates(world, engines)

    def dies(model, payload) -> None:
        engines[0].is_alive = False

    engines[0].load = dies
    start = time.monotonic()
    weights = world.weights(1)
    reports = update_all(syncs, 1, weights)
    # The leader tells the other ranks not to wait for the dead engine.
    assert time.monotonic() - start < 30
    assert "connection lost" in reports[2].failures[0]
    assert list(reports[0].failures) == [0]
    assert world.holds(engines[1], 1, world.expected(weights)) and engines[1].version == 1
    close_all(syncs)


def test_bytes_from_a_stranger_are_never_served() -> None:
    """A process that takes a sender's place in the group without the engine's key cannot change what is served."""
    world = World(small_architecture(), TP2_PP2, tensor_parallel=2)
    engines = [PeerEngine(world.layout)]
    syncs = updates(world, engines)
    weights = world.weights(1)
    real = p2p.send_buckets

    def send_buckets(group, buckets, *others):
        def strange():
            for bucket in buckets:
                yield replace(bucket, values={chunk: values + 1 for chunk, values in bucket.values.items()})

        return real(group, strange() if group.rank == 3 else buckets, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(p2p, "send_buckets", send_buckets)
        reports = update_all(syncs, 1, weights)
    assert all("differ from the trainer's" in report.failures[0] for report in reports)
    assert engines[0].is_paused
    close_all(syncs)
