"""One rank of `checkpoints.py`: the state of a Megatron actor, saved and loaded by each side, taking turns.

RANK=r WORLD_SIZE=n MASTER_ADDR=... MASTER_PORT=... python checkpoint_rank.py SPECIFICATION.json
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from megatron_dapo.checkpoints.load import initialize_randomly
from megatron_dapo.checkpoints.save import IN_FLIGHT, BackgroundSaves
from megatron_dapo.checkpoints.store import CheckpointStore, CheckpointWriter, newest_valid
from megatron_dapo.files.process import FileProcess
from megatron_dapo.megatron.actor import ActorSettings, MegatronActor, TokenOutputs
from megatron_dapo.megatron.model_config import ModelSettings
from megatron_dapo.models.config_json import read_architecture
from megatron_dapo.parallel.coordination import coordinate
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.parallel.packing import pack
from megatron_dapo.types import MicroBatch, TrainSample

try:
    import bytecheckpoint
except ImportError:
    bytecheckpoint = None

NAME = "policy"
MATRIX = 384  # The work of a step multiplies matrices of this size.
Specification = dict[str, Any]


class Ours:
    """This project's checkpoints."""

    def __init__(self, actor: MegatronActor, directory: Path) -> None:
        self.files = FileProcess()
        coordination = coordinate(range(dist.get_world_size()), 600.0)
        self._store = CheckpointStore(directory / "ours", 1, coordination, self.files)
        self._saves, self._state, self._step = BackgroundSaves(self._store), actor.saved_state, 0
        self.num_bytes = sum(tensor.nbytes for tensor in self._state.tensors().values())

    def start(self) -> None:
        self._step += 1

        def write(writer: CheckpointWriter) -> None:
            writer.save_tensors(f"{NAME}_{self._state.rank:05d}.safetensors", self._state.tensors())
            if index := self._state.index(NAME):
                writer.save_json(f"{NAME}.json", index)

        self._saves.start(self._step, write)

    def before_update(self) -> None:
        """Wait until parameters may change."""
        self._saves.wait_for_copy()

    def is_writing(self) -> bool:
        return self._saves.status == IN_FLIGHT

    def finish(self) -> None:
        self._saves.finish()

    def load(self) -> None:
        found = newest_valid(self._store, lambda found: self._state.load(found.directory, NAME, found.checksums))
        assert found is not None, "there is a checkpoint"

    @property
    def path(self) -> Path:
        return self._store.path(self._store.steps()[0])

    def writers(self) -> list[psutil.Process]:
        return [psutil.Process(self.files.pid)]


class MegatronDist:
    """megatron-core's torch_dist, fully reshardable, its save parallel over the data-parallel ranks."""

    def __init__(self, actor: MegatronActor, directory: Path) -> None:
        self.path, self._actor = directory / "torch_dist", actor
        self._queue = AsyncCallsQueue(persistent=False)
        self._group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        base = get_default_save_sharded_strategy("torch_dist", 1)
        self._save = FullyParallelSaveStrategyWrapper(base, self._group, do_cache_distribution=True)
        for optimizer in getattr(actor.optimizer, "chained_optimizers", [actor.optimizer]):
            _load_without_step(optimizer)

    def _state(self, is_loading: bool) -> dict[str, Any]:
        metadata = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "chained_optim_avoid_prefix": True,
            "dp_cp_group": self._group,
        }
        [chunk] = self._actor.chunks
        module = chunk.module if hasattr(chunk, "module") else chunk
        model = module.sharded_state_dict(metadata=metadata)
        optimizer = self._actor.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
        return {"model": model, "optimizer": optimizer}

    def start(self) -> None:
        request = dist_checkpointing.save(self._state(False), _emptied(self.path), self._save, async_sharded_save=True)
        self._queue.schedule_async_request(request)

    def before_update(self) -> None:
        """Nothing: the tensors are copied when `start` returns."""

    def is_writing(self) -> bool:
        self._queue.maybe_finalize_async_calls(blocking=False)
        return self._queue.get_num_unfinalized_calls() > 0

    def finish(self) -> None:
        self._queue.maybe_finalize_async_calls(blocking=True)

    def load(self) -> None:
        # Each rank reads what it needs: the load that is parallel over data-parallel ranks wants CUDA.
        strategy = get_default_load_sharded_strategy(str(self.path))
        loaded = dist_checkpointing.load(self._state(True), str(self.path), strategy)
        [chunk] = self._actor.chunks
        (chunk.module if hasattr(chunk, "module") else chunk).load_state_dict(loaded["model"])
        self._actor.optimizer.load_state_dict(loaded["optimizer"])
        # It leaves "step" in the groups of torch's Adam, where only fused optimizers have it: the next save would read it there.
        for optimizer in getattr(self._actor.optimizer, "chained_optimizers", [self._actor.optimizer]):
            for group in optimizer.optimizer.param_groups:
                group.pop("step", None)

    def writers(self) -> list[psutil.Process]:
        return psutil.Process().children()


def _load_without_step(optimizer: Any) -> None:
    """Make a fully reshardable load keep torch Adam's step, which was set before.

    megatron-core 0.16 skips "step" among what is stored and asks for it among what is loaded: a KeyError without
    Transformer Engine's Adam.
    """
    load = optimizer._set_main_param_and_optimizer_states

    def load_with_step(parameter: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        group, place = optimizer.model_param_group_index_map[parameter]
        state = optimizer.optimizer.state[optimizer.optimizer.param_groups[group]["params"][place]]
        load(parameter, {"step": state["step"], **tensors})

    optimizer._set_main_param_and_optimizer_states = load_with_step


class TorchDcp:
    """torch.distributed.checkpoint.async_save of as many bytes, sharded as FSDP2 does, staged in memory it keeps."""

    def __init__(self, actor: MegatronActor, directory: Path, axis: int) -> None:
        self.path = directory / "dcp"
        size = dist.get_world_size()
        mesh = init_device_mesh("cpu", (size,))
        kinds = ("parameter", "exp_avg", "exp_avg_sq")
        self._state: dict[str, torch.Tensor] = {}
        for name, spec in actor.tensors.tensors.items():
            shape = list(spec.shape)
            dim = axis if len(shape) > 1 else 0
            shape[dim] //= size
            for kind in kinds:
                local = torch.full(shape, 0.5, dtype=spec.dtype)
                self._state[f"{kind}/{name}"] = DTensor.from_local(local, mesh, [Shard(dim)])
        # A stager keeps its memory from save to save.
        self._stager = DefaultStager(StagingOptions(False, False, False, False))
        # A separate group, as the writing thread uses collectives while the run does.
        self._group = dist.new_group(backend="gloo")
        self._future: Any = None

    def start(self) -> None:
        path = _emptied(self.path)
        self._future = dcp.async_save(
            self._state, checkpoint_id=path, async_stager=self._stager, process_group=self._group
        )

    def before_update(self) -> None:
        """Nothing: the tensors are copied when `start` returns."""

    def is_writing(self) -> bool:
        return not self._future.done()

    def finish(self) -> None:
        self._future.result()

    def load(self) -> None:
        dcp.load(self._state, checkpoint_id=self.path)

    def writers(self) -> list[psutil.Process]:
        return []


class ByteCheckpoint:
    """bytecheckpoint 0.0.2 of as many bytes under FSDP2; it has no planner for Megatron in what is published."""

    def __init__(self, actor: MegatronActor, directory: Path, axis: int) -> None:
        self.path, self._step = directory / "bytecheckpoint", 0
        self._is_in_place = threading.Event()
        module = torch.nn.ParameterDict()
        for name, spec in actor.tensors.tensors.items():
            module[name.replace(".", "_")] = torch.nn.Parameter(torch.full(spec.shape, 0.5, dtype=spec.dtype))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        place = {1: Shard(0), 2: Shard(axis)}
        module = fully_shard(module, mesh=mesh, shard_placement_fn=lambda parameter: place[parameter.dim()])
        self._state = {"model": module, "optimizer": torch.optim.AdamW(module.parameters())}

    def start(self) -> None:
        self._step += 1
        self._is_in_place.clear()
        bytecheckpoint.save(_emptied(self.path), self._state, "fsdp2", True, self._step, callback=self._is_in_place.set)

    def before_update(self) -> None:
        """Nothing: the tensors are copied when `start` returns."""

    def is_writing(self) -> bool:
        return dist.get_rank() == 0 and not self._is_in_place.is_set()

    def finish(self) -> None:
        if dist.get_rank() == 0 and not self._is_in_place.wait(300):
            raise RuntimeError("bytecheckpoint: not saved after 300 s")

    def load(self) -> None:
        [step] = self.path.glob("global_step_*")
        bytecheckpoint.load(str(step), self._state, "fsdp2", fast_loading=True)

    def writers(self) -> list[psutil.Process]:
        return []


def sides_of(ours: Ours, actor: MegatronActor, directory: Path, axis: int) -> dict[str, Any]:
    """Return all sides; `axis`: along which FSDP2 shards matrices."""
    sides = {"ours": ours, "torch_dist": MegatronDist(actor, directory), "dcp": TorchDcp(actor, directory, axis)}
    return sides | ({"bytecheckpoint": ByteCheckpoint(actor, directory, axis)} if bytecheckpoint else {})


def train_once(actor: MegatronActor, layout: ParallelLayout) -> None:
    """Make one optimizer step: before it there are no moments."""
    tokens = torch.arange(1, 33)
    numbers = torch.ones(len(tokens) - 1)
    sample = TrainSample("0", 0, tokens, 1, numbers, numbers, torch.zeros(len(tokens) - 1))

    def loss_fn(part: MicroBatch, outputs: TokenOutputs, index: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = -(outputs.logprobs * part.loss_weights).sum()
        return loss, {"loss": loss.detach()}

    actor.train_step([pack([sample], [1.0 / len(numbers)], layout)], loss_fn, 1.0, 1e-5)


def _emptied(path: Path) -> str:
    """Return an empty directory; it is emptied outside of what is timed."""
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
    dist.barrier()
    return str(path)


def forget_cached(path: Path) -> None:
    """Push the files of a checkpoint out of the page cache, so that all sides read from the disk, and what another side left
    unwritten to the disk, so that it is not written while they do."""
    if dist.get_rank() == 0:
        os.sync()
        for file in path.rglob("*"):
            if file.is_file():
                descriptor = os.open(file, os.O_RDONLY)
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)
    dist.barrier()


def timed(action: Callable[[], object]) -> float:
    """Return the seconds until all ranks have done something."""
    dist.barrier()
    start = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - start


def slowest(seconds: float) -> float:
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)


def total(number: float) -> float:
    value = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(value)
    return float(value)


def work(num_products: int) -> None:
    """Compute as a step does, and meet the other ranks at its end."""
    matrix = torch.full((MATRIX, MATRIX), 1.0 / MATRIX)
    for _ in range(num_products):
        matrix = matrix @ matrix
    dist.all_reduce(matrix[:1])


def save_once(side: Any, num_products: int) -> dict[str, float]:
    """Save during a run: a rollout, then steps until the checkpoint is in place. Returns the figures of all ranks."""
    dist.barrier()
    begin = time.perf_counter()
    side.start()
    blocked = time.perf_counter() - begin
    before = sum(sum(process.cpu_times()[:2]) for process in side.writers())
    work(num_products)
    waited = time.perf_counter()
    side.before_update()
    blocked += time.perf_counter() - waited
    steps, used = [], 0.0
    while slowest(float(side.is_writing())):
        start = time.perf_counter()
        work(num_products)
        steps.append(time.perf_counter() - start)
        used = sum(sum(process.cpu_times()[:2]) for process in side.writers()) - before
    seconds = time.perf_counter() - begin
    side.finish()
    share = total(used) / (seconds * len(os.sched_getaffinity(0)))
    return {
        "blocked_seconds": slowest(blocked),
        "step_seconds": slowest(statistics.median(steps)) if steps else 0.0,
        "writer_share": share,
    }


def save_alone(side: Any) -> dict[str, float]:
    """Save up to the commit while nothing else runs."""

    def save() -> None:
        side.start()
        side.before_update()
        side.finish()

    return {"save_seconds": timed(save)}


def medians(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def read_bytes() -> int:
    return psutil.Process().io_counters().read_chars


def measure_saves(specification: Specification, actor: MegatronActor) -> dict[str, Any]:
    """Return the figures of saving and of loading into the same layout."""
    directory, products = Path(specification["directory"]), specification["products"]
    ours = Ours(actor, directory)
    sides = sides_of(ours, actor, directory, 0)
    tensors = list(actor.saved_state.tensors().values())
    copies = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]

    def copy() -> None:
        for target, source in zip(copies, tensors, strict=True):
            target.copy_(source)

    copy()
    floor = statistics.median(timed(copy) for _ in range(specification["runs"]))
    steps = statistics.median(timed(lambda: work(products)) for _ in range(5))
    report: dict[str, Any] = {"copy_seconds": floor, "step_seconds_alone": steps, "unique_bytes": total(ours.num_bytes)}
    for side in sides.values():  # memory that is kept, plans that are cached
        save_alone(side)
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for _ in range(specification["runs"]):
        for name, side in sides.items():
            forget_cached(side.path)
            loaded = timed(side.load)
            rows[name].append({**save_alone(side), **save_once(side, products), "load_seconds": loaded})
    report["sides"] = {name: medians(found) for name, found in rows.items()}
    files = [file.stat().st_size for file in ours.path.glob("*.safetensors")]
    report["written_bytes"] = sum(file.stat().st_size for file in ours.path.iterdir())
    report["balance"] = max(files) / (sum(files) / dist.get_world_size())
    before = read_bytes()
    ours.load()
    report["read_bytes"] = total(read_bytes() - before)
    ours.files.close()
    return report


def measure_reshard(specification: Specification, actor: MegatronActor) -> dict[str, Any]:
    """Return the seconds of loading what another layout saved."""
    directory = Path(specification["directory"])
    ours = Ours(actor, directory)
    sides = sides_of(ours, actor, directory, 1)
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(specification["runs"]):
        for name, side in sides.items():
            forget_cached(side.path)
            found[name].append(timed(side.load))
    ours.files.close()
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def main() -> None:
    specification = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    layout = ParallelLayout(dist.get_world_size(), tensor=specification["tensor"], pipeline=specification["pipeline"])
    actor = MegatronActor(
        read_architecture(specification["model"]),
        layout,
        ActorSettings(model=ModelSettings(dtype="float32")),
        lambda parameters, tensors: initialize_randomly(0, tensors, dist.get_rank(), parameters),
    )
    train_once(actor, layout)
    measure = measure_saves if specification["phase"] == "save" else measure_reshard
    report = measure(specification, actor)
    if dist.get_rank() == 0:
        Path(specification["report"]).write_text(json.dumps(report), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
    for process in psutil.Process().children():  # bytecheckpoint's server
        process.kill()
    sys.stdout.flush()
    os._exit(0)  # its threads do not end


if __name__ == "__main__":
    main()
