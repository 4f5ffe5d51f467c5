"""What each rank of test_reshard.py does: one function a scenario."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from replica_checks import drifted_replicas
from safetensors.torch import load_file

from megatron_dapo.bridge.replica_sync import ReplicaSync, replica_sync
from megatron_dapo.checkpoints.architecture import ModelArchitecture
from megatron_dapo.checkpoints.export import export_to_huggingface
from megatron_dapo.checkpoints.load import load_from_huggingface
from megatron_dapo.checkpoints.megatron_layout import MegatronLayout, megatron_layout
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.reshard.layout import ExplicitLayout, Shard, TensorSpec, flat_range_shards
from megatron_dapo.reshard.regions import owned_slices

Tensors = dict[str, torch.Tensor]


def loaded(folder: Path, parallel: ParallelLayout, rank: int) -> tuple[MegatronLayout, Tensors]:
    layout = megatron_layout(ModelArchitecture.from_directory(folder), parallel, torch.float32)
    parameters = {name: torch.empty(shape) for name, shape in layout.local_shapes(rank).items()}
    load_from_huggingface(folder, layout, rank, parameters)
    return layout, parameters


def fails(error: type[Exception], action: Callable[[], object]) -> str:
    try:
        action()
    except error as raised:
        return str(raised)
    raise AssertionError(f"no {error.__name__}")


def sync(rank: int, world: int, folder: Path, output: Path) -> None:
    """Every rank gets the whole model, twice, whatever the layout and the bucket; a broken copy is found everywhere."""
    stored = load_file(folder / "model.safetensors")
    for parallel in (
        ParallelLayout(world, tensor=2, pipeline=2),
        ParallelLayout(world, pipeline=2, virtual_pipeline=2),
        ParallelLayout(world, tensor=2),
    ):
        layout, parameters = loaded(folder, parallel, rank)
        for bucket_bytes, dtype in ((3_000, torch.float32), (1 << 20, torch.bfloat16)):
            update = replica_sync(layout, dtype, dist.group.WORLD, bucket_bytes=bucket_bytes)
            engine = {name: torch.full(spec.shape, float("nan"), dtype=dtype) for name, spec in layout.tensors.items()}
            for scale in (1.0, 2.0):
                report = update.execute({name: tensor * scale for name, tensor in parameters.items()}, engine)
                assert all(torch.equal(engine[name], (tensor * scale).to(dtype)) for name, tensor in stored.items())
            local = sum(t.bounds.volume for t in update.plan.receives(rank) if t.source == rank)
            assert report.bytes_received == dtype.itemsize * (layout.architecture.num_parameters - local)
            assert report.bytes_local == 4 * local
            doubled = {name: tensor * 2 for name, tensor in parameters.items()}
            update.verify(doubled, engine)
            if rank == 2:
                engine["model.norm.weight"][3] += 1
            message = fails(RuntimeError, partial(update.verify, doubled, engine))
            assert ("model.norm.weight" in message) == (rank == 2), message


def replicas(rank: int, world: int, folder: Path, output: Path) -> None:
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
        layout, parameters = loaded(folder, parallel, rank)
        assert drifted_replicas(layout, parameters, dist.group.WORLD) == []
        if rank == broken:
            parameters[local].view(torch.int32).view(-1)[0] ^= 1
        assert drifted_replicas(layout, parameters, dist.group.WORLD) == [name]


def megatron(rank: int, world: int, folder: Path, output: Path) -> None:
    """From layout to layout in a circle, every rank as if loaded directly, checksums equal although tensors are cut."""
    parallels = [
        ParallelLayout(world, tensor=2, pipeline=2),
        ParallelLayout(world, tensor=4),
        ParallelLayout(world, pipeline=2),
        ParallelLayout(world, pipeline=2, virtual_pipeline=2),
        ParallelLayout(world, tensor=2, context=2),
    ]
    layout, parameters = loaded(folder, parallels[-1], rank)
    for parallel in parallels:
        destination, expected = loaded(folder, parallel, rank)
        filled = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        update = ReplicaSync(layout, destination, dist.group.WORLD, bucket_bytes=5_000)
        update.execute(parameters, filled)
        assert all(torch.equal(filled[name], expected[name]) for name in expected), parallel.describe()
        update.verify(parameters, filled)
        layout, parameters = destination, filled
    name = next(n for n in parameters if n.endswith("linear_proj.weight"))
    owner = next(r for r in range(world) if any(shard.local == name for _, shard in owned_slices(destination)[r]))
    if rank == owner:
        parameters[name][0, 0] += 1
    same = ReplicaSync(destination, destination, dist.group.WORLD)
    fails(RuntimeError, lambda: same.verify(expected, parameters))


def export(rank: int, world: int, folder: Path, output: Path) -> None:
    """The folder is the source bit for bit from every layout; a failure of rank 0 reaches all ranks."""
    for number, parallel in enumerate(
        (
            ParallelLayout(world, tensor=2, pipeline=2),
            ParallelLayout(world, tensor=4),
            ParallelLayout(world, pipeline=2),
        )
    ):
        layout, parameters = loaded(folder, parallel, rank)
        target = output / f"out{number}"
        export_to_huggingface(
            target, folder, layout, parameters, dist.group.WORLD, batch_bytes=20_000, shard_bytes=50_000
        )
        if rank == 0:
            before = load_file(folder / "model.safetensors")
            after = {k: v for file in target.glob("*.safetensors") for k, v in load_file(file).items()}
            assert before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
        error, text = (ValueError, "exists already") if rank == 0 else (RuntimeError, "failed on rank 0")
        again = partial(export_to_huggingface, target, folder, layout, parameters, dist.group.WORLD)
        assert text in fails(error, again)


def mismatch(rank: int, world: int, folder: Path, output: Path) -> None:
    """A rank with another plan is an error on every rank that sees it, before anything moves."""
    parallel = ParallelLayout(world, tensor=4) if rank == 3 else ParallelLayout(world, tensor=2, pipeline=2)
    layout, parameters = loaded(folder, parallel, rank)
    update = replica_sync(layout, torch.float32, dist.group.WORLD)
    engine = {name: torch.zeros(spec.shape) for name, spec in layout.tensors.items()}
    assert "have another plan" in fails(ValueError, lambda: update.execute(parameters, engine))
    assert not any(tensor.any() for tensor in engine.values())


def ranges(rank: int, world: int, folder: Path, output: Path) -> None:
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
        update = ReplicaSync(source, destination, dist.group.WORLD, bucket_bytes=20)
        update.execute(held, filled)
        update.verify(held, filled)
        assert torch.equal(filled["w"], values["w"][rows[rank] : rows[rank + 1]])
        assert torch.equal(filled["b"], values["b"]) and torch.equal(filled["s"], values["s"])


def subgroup(rank: int, world: int, folder: Path, output: Path) -> None:
    """Ranks of a group need not be ranks of the world: the last two processes hold a TP2 model of their own."""
    group = dist.new_group([2, 3])
    if rank < 2:
        return
    layout, parameters = loaded(folder, ParallelLayout(2, tensor=2), dist.get_rank(group))
    engine = {name: torch.zeros(spec.shape) for name, spec in layout.tensors.items()}
    update = replica_sync(layout, torch.float32, group)
    update.execute(parameters, engine)
    update.verify(parameters, engine)
    stored = load_file(folder / "model.safetensors")
    assert all(torch.equal(engine[name], tensor) for name, tensor in stored.items())
    export_to_huggingface(output / "subgroup", folder, layout, parameters, group)


SCENARIOS = {f.__name__: f for f in (sync, megatron, export, mismatch, ranges, replicas, subgroup)}


def run(arguments: dict) -> None:
    """arguments: {"scenarios": names, "folder": model, "output": empty folder}."""
    for name in arguments["scenarios"]:
        SCENARIOS[name](dist.get_rank(), dist.get_world_size(), Path(arguments["folder"]), Path(arguments["output"]))
        dist.barrier()
