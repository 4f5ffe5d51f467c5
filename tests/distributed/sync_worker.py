"""Program of each rank of test_weight_sync.py: real gloo groups, real shared memory, engines in the leaders' processes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sync_simulation import SimulatedEngine, World, small_architecture

from megatron_dapo.bridge.protocol.arena import PREFIX
from megatron_dapo.bridge.protocol.peer_group import RendezvousStore, meet
from megatron_dapo.bridge.transports.shared_memory import SharedMemoryTransport
from megatron_dapo.bridge.weight_sync import EngineHandles, EngineState, SyncTimeouts, WeightSync
from megatron_dapo.parallel.coordination import CoordinationError, coordinate, default_store
from megatron_dapo.parallel.layout import ParallelLayout

PATIENT = SyncTimeouts(30, 30, 30, 30, 40, 30, 20)


def _build(
    ranks_per_node: int,
    num_engines: int,
    timeouts: SyncTimeouts,
    directory: Path,
    engines_per_node: int = 1,
    **sizes: Any,
):
    rank, size = dist.get_rank(), dist.get_world_size()
    world = World(
        small_architecture(num_hidden_layers=4, **sizes),
        ParallelLayout(size, tensor=2, pipeline=2),
        tensor_parallel=2,
        num_engines=num_engines,
        dtype=torch.bfloat16,
        ranks_per_node=ranks_per_node,
        engines_per_node=engines_per_node,
    )
    engines = {e: SimulatedEngine(world.layout, e) for e in range(num_engines) if world.leaders[e] == rank}
    handles = EngineHandles(world.leaders, engines)
    everyone = coordinate(range(size), 60.0, group_size=ranks_per_node, fan_out=2)
    name = everyone.broadcast(RendezvousStore.new_name() if rank == 0 else None)
    peers = None
    if world.nodes.num_nodes > 1:
        peers = meet(default_store(), name, rank, size, timeout_s=30, host="127.0.0.1")
    transport = SharedMemoryTransport(
        world.plan,
        handles,
        rank,
        world.nodes,
        coordinate(world.nodes.ranks_of(world.nodes.node_of(rank)), 60.0),
        peers=peers,
        directory=directory,
        grace_s=timeouts.grace_s,
    )
    update = WeightSync(world.plan, handles, transport, everyone, timeouts)
    return world, engines, update


def nodes(arguments: dict[str, Any]) -> dict[str, Any]:
    """Sync two versions into the engines, on one node or on several; compare every byte with the executor's."""
    rank = dist.get_rank()
    world, engines, update = _build(
        arguments["ranks_per_node"],
        arguments["num_engines"],
        PATIENT,
        Path(arguments["directory"]),
        arguments["engines_per_node"],
    )
    for step in (1, 150, 1500):  # shorter and longer than one collective carries
        gathered = update.coordination.gather("é" * step * rank, "values of several lengths", 20.0)
        assert gathered == ["é" * step * other for other in range(dist.get_world_size())]
    last = arguments["num_engines"] - 1
    for version, chosen in ((1, range(last + 1)), (2, range(last + 1)), (2, [last])):  # last: after a restart of one
        weights = world.weights(version)
        report = update.update_engines(chosen, version, weights[rank])
        assert report.is_complete, report.failures
        if len(report.engines) > last:
            num_bytes = [one.num_bytes for one in report.engines.values()]
        expected = world.expected(weights)
        for index, engine in engines.items():
            assert world.holds(engine, index, expected) and engine.version == version and not engine.is_paused
    assert update.serving == tuple(range(arguments["num_engines"]))
    dist.barrier()
    left = [path.name for path in Path(arguments["directory"]).iterdir()]
    assert not left, left
    return {"bytes": num_bytes}


def killed(arguments: dict[str, Any]) -> dict[str, Any]:
    """Kill rank 3 in the middle of the second version: the others fail in time, and no engine resumes."""
    rank = dist.get_rank()
    hasty = SyncTimeouts(30, 10, 10, 10, 10, 10, 5)
    world, engines, update = _build(4, 1, hasty, Path(arguments["directory"]))
    assert update.update(1, world.weights(1)[rank]).is_complete
    weights = world.weights(2)
    if rank == 3:
        original = SharedMemoryTransport._round

        def die(self, state, index, *rest) -> None:
            if index == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            original(self, state, index, *rest)

        SharedMemoryTransport._round = die
    start = time.monotonic()
    try:
        update.update(2, weights[rank])
        raise AssertionError("the update ended well without rank 3")
    except CoordinationError as error:
        message = str(error)
    seconds = time.monotonic() - start
    assert seconds < 20, seconds
    assert update.states == {0: EngineState.UNSERVED} and update.serving == ()
    for engine in engines.values():
        assert engine.is_paused and engine.calls[-1] == "tensor"
    left = [path.name for path in Path(arguments["directory"]).iterdir() if path.name.startswith(PREFIX)]
    (Path(arguments["directory"]) / f"survivor{rank}").write_text(f"{seconds:.2f} {message} {left}")
    # Rank 3 is missing at the launcher's barrier.
    os._exit(0)
