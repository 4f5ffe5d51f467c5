"""Program of each rank of test_reshard.py: one function a scenario."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from replica_checks import drifted_replicas
from safetensors.torch import load_file

from megatron_dapo.bridge.protocol.receiver import Receiver
from megatron_dapo.bridge.transports.local import local_weight_sync
from megatron_dapo.checkpoints.export import export_to_huggingface
from megatron_dapo.checkpoints.layouts.megatron import MegatronLayout, megatron_layout
from megatron_dapo.checkpoints.load import load_from_huggingface
from megatron_dapo.models.config_json import read_architecture
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.reshard.execution import execute_distributed
from megatron_dapo.reshard.layout import Shard, TensorSpec
from megatron_dapo.reshard.planner import plan
from tests.reshard_oracles import ExplicitLayout, flat_range_shards

Tensors = dict[str, torch.Tensor]


def loaded(directory: Path, parallel: ParallelLayout, rank: int) -> tuple[MegatronLayout, Tensors]:
    layout = megatron_layout(read_architecture(directory), parallel, torch.float32)
    parameters = {name: torch.empty(shape) for name, shape in layout.local_shapes(rank).items()}
    load_from_huggingface(directory, layout, rank, parameters)
    return layout, parameters


def fails(error: type[Exception], action: Callable[[], object]) -> str:
    try:
        action()
    except error as raised:
        return str(raised)
    raise AssertionError(f"no {error.__name__}")


class Engine:
    """Stand-in for an embedded engine: its tensors, full of NaN, and the version it declares."""

    def __init__(self, layout, dtype: torch.dtype) -> None:
        self.tensors = {
            name: torch.full(spec.shape, float("nan"), dtype=dtype) for name, spec in layout.tensors.items()
        }
        self.version: int | None = None

    def parameters_by_name(self) -> dict[str, torch.Tensor]:
        return self.tensors

    def set_policy_version(self, version: int) -> None:
        self.version = version


def sync(rank: int, world: int, directory: Path, output: Path) -> None:
    """Bring the whole model to every rank, twice, in each layout and bucket size; a broken copy is not served."""
    stored = load_file(directory / "model.safetensors")
    for parallel in (
        ParallelLayout(world, tensor=2, pipeline=2),
        ParallelLayout(world, pipeline=2, virtual_pipeline=2),
        ParallelLayout(world, tensor=2),
    ):
        layout, parameters = loaded(directory, parallel, rank)
        for bucket_bytes, dtype in ((3_000, torch.float32), (1 << 20, torch.bfloat16)):
            engine = Engine(layout, dtype)
            update = local_weight_sync(layout, engine, dist.group.WORLD, bucket_bytes=bucket_bytes)
            for version, scale in enumerate((1.0, 2.0)):
                report = update.update(version, {name: tensor * scale for name, tensor in parameters.items()})
                assert report.is_complete and engine.version == version
                assert all(
                    torch.equal(engine.tensors[name], (tensor * scale).to(dtype)) for name, tensor in stored.items()
                )
                total = dtype.itemsize * layout.architecture.num_parameters
                assert [report.engines[other].num_bytes for other in range(world)] == [total] * world
            with spoiled(rank == 2):
                report = update.update(2, parameters)
            assert set(report.failures) == {2} and "model.norm.weight" in report.failures[2], report.failures
            assert engine.version == (1 if rank == 2 else 2)


@contextmanager
def spoiled(is_spoiled: bool) -> Iterator[None]:
    """Change one element of this rank's engine after its last write, before its checksums are read."""
    original = Receiver.checksums

    def checksums(self: Receiver) -> dict[str, int]:
        self.parameters["model.norm.weight"][3] += 1
        return original(self)

    Receiver.checksums = checksums if is_spoiled else original
    try:
        yield
    finally:
        Receiver.checksums = original


def replicas(rank: int, world: int, directory: Path, output: Path) -> None:
    """One changed bit in one of several copies is named on every rank: tied embedding, norm, data rank."""
    tied = "model.embed_tokens.weight"
    cases = [
        (ParallelLayout(world, tensor=2, pipeline=2), 3, "0.output_layer.weight", tied),
        (ParallelLayout(world, tensor=4), 1, "0.decoder.final_layernorm.weight", "model.norm.weight"),
        (
            ParallelLayout(world, tensor=2),
            2,
            "0.decoder.layers.1.mlp.linear_fc2.weight",
            "model.layers.1.mlp.down_proj.weight",
        ),
    ]
    for parallel, broken, local, name in cases:
        layout, parameters = loaded(directory, parallel, rank)
        assert drifted_replicas(layout, parameters, dist.group.WORLD) == []
        if rank == broken:
            parameters[local].view(torch.int32).view(-1)[0] ^= 1
        assert drifted_replicas(layout, parameters, dist.group.WORLD) == [name]


def megatron(rank: int, world: int, directory: Path, output: Path) -> None:
    """Reshard from layout to layout in a circle; every rank ends as if loaded directly."""
    parallels = [
        ParallelLayout(world, tensor=2, pipeline=2),
        ParallelLayout(world, tensor=4),
        ParallelLayout(world, pipeline=2),
        ParallelLayout(world, pipeline=2, virtual_pipeline=2),
        ParallelLayout(world, tensor=2, context=2),
    ]
    layout, parameters = loaded(directory, parallels[-1], rank)
    for parallel in parallels:
        destination, expected = loaded(directory, parallel, rank)
        filled = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        execute_distributed(plan(layout, destination), parameters, filled, dist.group.WORLD, bucket_bytes=5_000)
        assert all(torch.equal(filled[name], expected[name]) for name in expected), parallel.describe()
        layout, parameters = destination, filled


def export(rank: int, world: int, directory: Path, output: Path) -> None:
    """Export from every layout: the directory equals the source bit for bit; a failure of rank 0 reaches all ranks."""
    for number, parallel in enumerate(
        (
            ParallelLayout(world, tensor=2, pipeline=2),
            ParallelLayout(world, tensor=4),
            ParallelLayout(world, pipeline=2),
        )
    ):
        layout, parameters = loaded(directory, parallel, rank)
        target = output / f"out{number}"
        export_to_huggingface(
            target, directory, layout, parameters, dist.group.WORLD, batch_bytes=20_000, shard_bytes=50_000
        )
        if rank == 0:
            before = load_file(directory / "model.safetensors")
            after = {k: v for file in target.glob("*.safetensors") for k, v in load_file(file).items()}
            assert before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
        error, text = (ValueError, "exists already") if rank == 0 else (RuntimeError, "failed on rank 0")
        again = partial(export_to_huggingface, target, directory, layout, parameters, dist.group.WORLD)
        assert text in fails(error, again)


def mismatch(rank: int, world: int, directory: Path, output: Path) -> None:
    """A rank with another plan is an error on every rank, before anything moves."""
    parallel = ParallelLayout(world, tensor=4) if rank == 3 else ParallelLayout(world, tensor=2, pipeline=2)
    layout, parameters = loaded(directory, parallel, rank)
    engine = Engine(layout, torch.float32)
    update = local_weight_sync(layout, engine, dist.group.WORLD)
    assert "have different plans" in fails(ValueError, lambda: update.update(1, parameters))
    assert engine.version is None and all(bool(tensor.isnan().all()) for tensor in engine.tensors.values())


def ranges(rank: int, world: int, directory: Path, output: Path) -> None:
    """Flat ZeRO ranges that cut rows in the middle -> uneven rows, in several types, buckets smaller than a row."""
    shapes = {"w": (7, 5, 3), "b": (11,), "s": ()}
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
        specs = {name: TensorSpec(shape, dtype) for name, shape in shapes.items()}
        values = {name: torch.arange(spec.num_elements).view(spec.shape).to(dtype) for name, spec in specs.items()}
        cuts, rows = [0, 13, 13, 62, 105], [0, 1, 1, 4, 7]
        flat = [flat_range_shards("w", shapes["w"], *cut, "w", 2) for cut in zip(cuts, cuts[1:])]
        others = (Shard("b", (0,), (11,), "b", (0,)), Shard("s", (), (), "s", ()))
        source = ExplicitLayout(specs, tuple(flat[:-1]) + (flat[-1] + others,))
        destination = ExplicitLayout(
            specs,
            tuple((Shard("w", (a, 0, 0), (b - a, 5, 3), "w", (0, 0, 0)), *others) for a, b in zip(rows, rows[1:])),
        )
        held = {name: tensor.clone() for name, tensor in values.items() if name != "w" and rank == world - 1}
        if flat[rank]:
            held["w"] = torch.cat([torch.zeros(2, dtype=dtype), values["w"].view(-1)[cuts[rank] : cuts[rank + 1]]])
        filled = {
            "w": torch.zeros(rows[rank + 1] - rows[rank], 5, 3, dtype=dtype),
            "b": torch.zeros(11, dtype=dtype),
            "s": torch.zeros((), dtype=dtype),
        }
        execute_distributed(plan(source, destination), held, filled, dist.group.WORLD, bucket_bytes=20)
        assert torch.equal(filled["w"], values["w"][rows[rank] : rows[rank + 1]])
        assert torch.equal(filled["b"], values["b"]) and torch.equal(filled["s"], values["s"])


def subgroup(rank: int, world: int, directory: Path, output: Path) -> None:
    """Ranks of a group need not be ranks of the world: the last two processes hold a TP2 model of their own."""
    group = dist.new_group([2, 3])
    if rank < 2:
        return
    layout, parameters = loaded(directory, ParallelLayout(2, tensor=2), dist.get_rank(group))
    engine = Engine(layout, torch.float32)
    assert local_weight_sync(layout, engine, group).update(1, parameters).is_complete
    stored = load_file(directory / "model.safetensors")
    assert all(torch.equal(engine.tensors[name], tensor) for name, tensor in stored.items())
    export_to_huggingface(output / "subgroup", directory, layout, parameters, group)


SCENARIOS = {f.__name__: f for f in (sync, megatron, export, mismatch, ranges, replicas, subgroup)}


def run(arguments: dict) -> None:
    """arguments: {"scenarios": names, "directory": model, "output": empty directory}."""
    for name in arguments["scenarios"]:
        SCENARIOS[name](dist.get_rank(), dist.get_world_size(), Path(arguments["directory"]), Path(arguments["output"]))
        dist.barrier()
