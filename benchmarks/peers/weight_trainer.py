"""One trainer rank of `weight_sync.py`: the actor, and the three ways its weights are moved, taking turns.

RANK=r WORLD_SIZE=n MASTER_ADDR=... MASTER_PORT=... python weight_trainer.py SPECIFICATION.json
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from mbridge_export import MbridgeExport
from weight_sink import DEADLINE_S, SinkClient, SinkControl, read_all

from megatron_dapo.bridge import sync_plan as sync_plan_module
from megatron_dapo.bridge.protocol.arena import Arena, ArenaSpec, create_arena, remove_arena
from megatron_dapo.bridge.protocol.checksums import CountedSlice, slice_sums
from megatron_dapo.bridge.protocol.peer_group import Address, RendezvousStore, join
from megatron_dapo.bridge.sync_plan import ExpectedChecksums, SyncPlan
from megatron_dapo.bridge.transports.base import ServerControl, SyncDeadline, SyncRequest, transfer
from megatron_dapo.bridge.transports.p2p import P2PTransport
from megatron_dapo.bridge.transports.shared_memory import SharedMemoryTransport, default_directory
from megatron_dapo.bridge.weight_sync import EngineHandles, WeightSync
from megatron_dapo.checkpoints.layouts.sglang import sglang_layout
from megatron_dapo.checkpoints.load import initialize_randomly
from megatron_dapo.engines.sglang.client import SglangClient
from megatron_dapo.engines.sglang.keys import read_key
from megatron_dapo.engines.sglang.versions import api_version_of
from megatron_dapo.megatron.actor import ActorSettings, MegatronActor
from megatron_dapo.megatron.model_config import ModelSettings
from megatron_dapo.models.config_json import read_architecture
from megatron_dapo.parallel.collectives import broadcast_json
from megatron_dapo.parallel.coordination import Coordination
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.parallel.nodes import NodeTopology
from megatron_dapo.reshard.checksum import tensor_checksum
from megatron_dapo.reshard.execution import execute_distributed
from megatron_dapo.reshard.layout import ReplicatedLayout, ShiftedLayout, TensorSpec
from megatron_dapo.reshard.planner import plan
from megatron_dapo.reshard.slices import whole

SEED = 0
SIDES = ("ours", "unverified", "read", "bytes", "floor")
# About as many elements of bf16 weights change from one version to the next at a learning rate of 1e-6.
CHANGED_SHARE = 0.02
RATE_SHAPE, RATE_RUNS = (18432, 896), 7  # 64 MiB in fp32
Specification = dict[str, Any]


class Trainer:
    """This rank's weights and how they leave it."""

    def __init__(self, specification: Specification) -> None:
        self.specification = specification
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.dtype = getattr(torch, specification["dtype"])
        self.directory = Path(specification["directory"])
        self.architecture = read_architecture(specification["model"])
        layout = ParallelLayout(self.size, tensor=specification["tensor"], pipeline=specification["pipeline"])
        settings = ActorSettings(model=ModelSettings(dtype=specification["dtype"]))
        self.actor = MegatronActor(
            self.architecture,
            layout,
            settings,
            lambda parameters, tensors: initialize_randomly(SEED, tensors, dist.get_rank(), parameters),
        )
        self.mbridge = MbridgeExport(Path(specification["model"]), self.actor, self.dtype)
        self.sinks = self._sinks()
        self.engine = sglang_layout(self.architecture, specification["engine_tensor"], self.dtype, device="cpu")
        self.updates = {name: TRANSPORTS[name](self) for name in specification["transports"]}
        self.version = 0

    def _sinks(self) -> list[SinkClient]:
        ranks = range(self.specification["engine_tensor"]) if self.rank == 0 else ()
        return [SinkClient(self.directory / f"sink{rank}.sock") for rank in ranks]

    def control(self) -> dict[int, ServerControl]:
        if self.rank:
            return {}
        server = self.specification["server"]
        if server is None:
            return {0: SinkControl(self.sinks)}
        return {
            0: SglangClient(
                server["url"], read_key(Path(server["key_file"])), api_version=api_version_of(server["version"])
            )
        }

    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self.actor.named_local_parameters().items()}

    # What is timed

    def export(self) -> None:
        """mbridge's: every rank gets every tensor."""
        for _ in self.mbridge.tensors():
            pass

    def sync(self, name: str) -> dict[str, float]:
        """Ours, once, verified. Seconds of the whole update and of its steps on this rank."""
        return self.update(self.updates[name])

    def change(self) -> None:
        """Change the lowest bit of some elements."""
        for parameter in self.parameters().values():
            values = parameter.view(-1).view(torch.int16 if parameter.dtype.itemsize == 2 else torch.int32)
            values[torch.rand(values.shape) < CHANGED_SHARE] ^= 1

    def deltas(self, name: str, num_runs: int) -> list[dict[str, float]]:
        """Updates that send only changes, after a full one and one to warm up; then every byte is compared."""
        full = self.updates[name]
        update = WeightSync(full.plan, full.handles, full.transport, full.coordination, full_interval=num_runs + 3)
        rows = [self.update(update)]
        for _ in range(num_runs + 1):
            self.change()
            dist.barrier()
            rows.append(self.update(update))
        assert [row["is_delta"] for row in rows] == [0, *[1] * (num_runs + 1)], "an update was not sent as planned"
        return [rows[0], *rows[2:]]

    def update(self, update: WeightSync) -> dict[str, float]:
        self.version += 1
        report = update.update(self.version, self.parameters())
        if not report.is_complete:
            raise RuntimeError(report.describe())
        phases = getattr(update.transport, "seconds", {})
        steps = {**report.engines[0].seconds, **{f"phase_{name}": seconds for name, seconds in phases.items()}}
        sizes = {"bytes": report.engines[0].num_bytes, "is_delta": int(report.is_delta)}
        return {**steps, **sizes, "update": report.seconds}

    def sync_unverified(self, name: str) -> float:
        """The same update without a checksum at either end. 0 with a server, which cannot leave them out."""
        if self.specification["server"] is not None:
            return 0.0
        self.count_in_engine(False)
        with without_trainer_checksums():
            seconds = self.sync(name)["update"]
        self.count_in_engine(True)
        return seconds

    def read(self) -> None:
        """Only read the weights once at each end, the trainer's ranks first, as they are sent first."""
        read_all(self.parameters().values())
        dist.barrier()
        for sink in self.sinks:
            sink.start({"op": "read"})
        for sink in self.sinks:
            sink.wait()

    def count_in_engine(self, is_on: bool) -> None:
        for sink in self.sinks:
            sink.start({"op": "count", "on": is_on})
            sink.wait()

    def bytes_alone(self, name: str) -> float:
        """Ours without verification: seconds until every byte is in the engine's parameters.

        The trainer's checksums are left out and the engine's are subtracted: by its own report it does nothing else at
        the end.
        """
        self.version += 1
        update = self.updates[name]
        control = update.handles.controls.get(0)
        order = SyncRequest(f"bytes-{self.version}", "bytes", self.version, (0,))
        if control is not None:
            control.begin_weight_update()
        with without_trainer_checksums():
            dist.barrier()
            start = time.perf_counter()
            outcome = transfer(update.transport, order, self.parameters(), SyncDeadline(DEADLINE_S))
            seconds = time.perf_counter() - start
        if outcome.failures:
            raise RuntimeError(f"{name}: {outcome.failures}")
        if control is not None:
            control.end_weight_update()
        return seconds - max((report.seconds for report in outcome.replies.get(0, ())), default=0.0)


@contextlib.contextmanager
def without_trainer_checksums() -> Iterator[None]:
    with ExitStack() as stack:
        for name in ("add", "add_plan"):
            stack.enter_context(patch.object(ExpectedChecksums, name, lambda *unused: None))
        stack.enter_context(patch.object(sync_plan_module, "copy_and_count", _only_copy))
        yield


def _only_copy(target: torch.Tensor, source: CountedSlice) -> int:
    target.copy_(source.values)
    return 0


def _p2p_update(trainer: Trainer) -> WeightSync:
    reshard = plan(trainer.actor.tensors, ShiftedLayout(trainer.engine, trainer.size), ranks_per_node=trainer.size)
    sync_plan = SyncPlan(reshard, trainer.engine, trainer.specification["bucket_bytes"], rank_offset=trainer.size)
    handles, everyone = EngineHandles([0], trainer.control()), Coordination(dist.group.WORLD)
    return WeightSync(sync_plan, handles, P2PTransport(sync_plan, handles, everyone), everyone)


def _shared_memory_update(trainer: Trainer) -> WeightSync:
    reshard = plan(trainer.actor.tensors, trainer.engine, ranks_per_node=trainer.size)
    sync_plan = SyncPlan(reshard, trainer.engine, trainer.specification["bucket_bytes"])
    handles, everyone = EngineHandles([0], trainer.control()), Coordination(dist.group.WORLD)
    nodes = NodeTopology(trainer.size, trainer.size)
    transport = SharedMemoryTransport(sync_plan, handles, trainer.rank, nodes, everyone)
    return WeightSync(sync_plan, handles, transport, everyone)


TRANSPORTS: dict[str, Callable[[Trainer], WeightSync]] = {"p2p": _p2p_update, "shared_memory": _shared_memory_update}


class SharedMemoryFloor:
    """The same bytes through shared memory: every rank copies its part in, then the engine's ranks copy all out."""

    def __init__(self, trainer: Trainer, sync_plan: SyncPlan) -> None:
        self._trainer = trainer
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []

        made = [
            create_arena(default_directory(), f"floor{rank}", sync_plan.num_bytes(rank), 1)
            for rank in range(len(trainer.sinks))
        ]
        specs = [ArenaSpec.from_json(value) for value in broadcast_json([spec.to_json() for spec in made])]
        for rank, spec in enumerate(specs):
            sizes = [_bytes_between(sync_plan, source, rank) for source in range(trainer.size)]
            start, size = sum(sizes[: trainer.rank]), sizes[trainer.rank]
            slot = Arena(spec).slots[0]
            self._parts.append((slot[start : start + size], torch.ones(size, dtype=torch.uint8)))
        for spec, sink in zip(specs, trainer.sinks):
            sink.start({"op": "map", "path": spec.path, "num_bytes": spec.num_bytes})
            sink.wait()
        dist.barrier()
        for spec in made:
            remove_arena(spec)  # all have mapped it: the name may go

    def copy(self) -> None:
        for slot, own in self._parts:
            slot.copy_(own)
        dist.barrier()
        for sink in self._trainer.sinks:
            sink.start({"op": "shared_floor"})
        for sink in self._trainer.sinks:
            sink.wait()


class P2PFloor:
    """The same bytes, between the same pairs of ranks, in messages of a bucket, from and into plain buffers."""

    def __init__(self, trainer: Trainer, sync_plan: SyncPlan) -> None:
        engine_ranks = range(sync_plan.engines.num_ranks)
        self._trainer = trainer
        self._bucket_bytes = sync_plan.bucket_bytes
        own = {rank: _bytes_between(sync_plan, trainer.rank, rank) for rank in engine_ranks}
        self._buffers = {rank: torch.ones(size, dtype=torch.uint8) for rank, size in own.items() if size}
        facts: list[Any] = []
        if trainer.rank == 0:
            self._place = RendezvousStore()
            facts = [self._place.address.host, self._place.address.port, self._place.new_name()]
            # Told first and waited for last: a group is joined when all its members are there.
            for rank, sink in enumerate(trainer.sinks):
                sizes = {source: _bytes_between(sync_plan, source, rank) for source in range(trainer.size)}
                sink.start(
                    {
                        "op": "join",
                        "address": facts[:2],
                        "name": facts[2],
                        "member": trainer.size + rank,
                        "size": trainer.size + len(engine_ranks),
                        "num_bytes": {source: size for source, size in sizes.items() if size},
                    }
                )
        host, port, name = broadcast_json(facts)
        size = trainer.size + len(engine_ranks)
        self._group = join(Address(host, port), name, trainer.rank, size, timeout_s=DEADLINE_S)
        for sink in trainer.sinks:
            sink.wait()

    def copy(self) -> None:
        for sink in self._trainer.sinks:
            sink.start({"op": "floor", "bucket_bytes": self._bucket_bytes})
        deadline = time.monotonic() + DEADLINE_S
        pending = [
            self._group.send(part, self._trainer.size + rank)
            for rank, buffer in self._buffers.items()
            for part in buffer.split(self._bucket_bytes)
        ]
        for message in pending:
            message.wait(deadline)
        for sink in self._trainer.sinks:
            sink.wait()


FLOORS: dict[str, Callable[[Trainer, SyncPlan], Any]] = {"p2p": P2PFloor, "shared_memory": SharedMemoryFloor}


def _bytes_between(sync_plan: SyncPlan, source: int, engine_rank: int) -> int:
    segments = (bucket.segments.get(source, (0, 0)) for bucket in sync_plan.buckets(engine_rank))
    return sum(stop - start for start, stop in segments)


# ---- measuring


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds from the moment all ranks are here until rank 0 is done, and what the action returned."""
    dist.barrier()
    start = time.perf_counter()
    value = action()
    return time.perf_counter() - start, value


def until_all(action: Callable[[], Any]) -> Callable[[], Any]:
    """The action, done when every rank is."""

    def run() -> Any:
        value = action()
        dist.barrier()
        return value

    return run


def measure(trainer: Trainer, num_runs: int) -> dict[str, Any]:
    """Every way once to warm up, then `num_runs` times in turns."""
    floors = {name: FLOORS[name](trainer, update.plan) for name, update in trainer.updates.items()}
    rows: dict[str, Any] = {"mbridge": [], **{side: {name: [] for name in floors} for side in SIDES}}
    # All ways take turns in the same processes, so that load on the machine hits them alike.
    for run in range(num_runs + 1):
        rows["mbridge"].append(timed(until_all(trainer.export))[0])
        for name, floor in floors.items():
            rows["ours"][name].append(timed(lambda name=name: trainer.sync(name))[1])
            rows["unverified"][name].append(timed(lambda name=name: trainer.sync_unverified(name))[1])
            rows["read"][name].append(timed(trainer.read)[0])
            rows["bytes"][name].append(trainer.bytes_alone(name))
            rows["floor"][name].append(timed(floor.copy)[0])
        if trainer.rank == 0:
            print(f"run {run} of {num_runs}", file=sys.stderr)
    warm: dict[str, Any] = {"mbridge": rows["mbridge"][1:]}
    warm["sizes"] = sizes(trainer)
    warm["deltas"] = {name: trainer.deltas(name, num_runs) for name in floors}
    return {**warm, **{side: {n: v[1:] for n, v in rows[side].items()} for side in SIDES}}


def checksum_rates() -> dict[str, float]:
    """GB/s of the checksum of a tensor in memory, compiled and by NumPy, and of only reading it."""
    values = torch.rand(RATE_SHAPE)
    part = CountedSlice(values, whole(RATE_SHAPE), RATE_SHAPE)
    ways: dict[str, Callable[[], Any]] = {
        "checksum": lambda: slice_sums([part]).tolist(),
        "numpy": lambda: tensor_checksum(values),
        "read": lambda: int(values.view(torch.int64).sum()),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(RATE_RUNS + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - start)
    return {name: values.nbytes / 1e9 / statistics.median(times[1:]) for name, times in seconds.items()}


def check_mbridge(trainer: Trainer) -> None:
    """mbridge exports exactly the actor's weights, all of them, in their type."""
    shapes = trainer.architecture.shapes()
    specs = {name: TensorSpec(shape, trainer.dtype) for name, shape in shapes.items()}
    model = {name: torch.empty(shape, dtype=trainer.dtype) for name, shape in shapes.items()}
    whole = plan(trainer.actor.tensors, ReplicatedLayout(specs, trainer.size))
    execute_distributed(whole, trainer.parameters(), model, dist.group.WORLD)
    seen = set()
    for name, tensor in trainer.mbridge.tensors():
        seen.add(name)
        assert tensor.dtype == trainer.dtype and torch.equal(tensor, model[name]), f"mbridge differs in {name}"
    assert seen == set(shapes), "mbridge exports other tensors"


def sizes(trainer: Trainer) -> dict[str, Any]:
    engine_ranks = range(trainer.engine.num_ranks)
    shards = [sum(spec.num_bytes for spec in trainer.engine.local_specs(rank).values()) for rank in engine_ranks]
    received = {
        name: getattr(update.transport, "received", None)
        or {rank: update.plan.num_bytes(rank) for rank in engine_ranks}
        for name, update in trainer.updates.items()
    }
    model = trainer.architecture.num_parameters * trainer.dtype.itemsize
    return {"model_bytes": model, "shard_bytes": shards, "received_bytes": received}


def main() -> None:
    torch.set_num_threads(1)
    specification = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    dist.init_process_group("gloo")
    trainer = Trainer(specification)
    check_mbridge(trainer)
    dist.barrier()
    rows = measure(trainer, specification["runs"])
    if trainer.rank == 0:
        rates = checksum_rates()
        sent = rows.pop("sizes")
        result = {"rows": rows, "checksum_gb_per_s": rates, "mbridge": f"mbridge=={version('mbridge')}", **sent}
        (Path(specification["directory"]) / "result.json").write_text(json.dumps(result), encoding="utf-8")
    dist.barrier()


if __name__ == "__main__":
    main()
