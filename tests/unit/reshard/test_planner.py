"""The plan against brute force: tensors filled with their own flat index, moved, and compared element by element."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest
import torch

from megatron_dapo.reshard.layout import (
    ReplicatedLayout,
    Shard,
    SingleHolderLayout,
    TensorSpec,
    check_layout,
    shard_view,
)
from megatron_dapo.reshard.planner import plan
from megatron_dapo.reshard.slices import Slice, whole
from tests.reshard_oracles import ExplicitLayout, execute_in_memory, flat_range_shards

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "golden.json").read_text())["systems"]


def _specs(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.int64) -> dict[str, TensorSpec]:
    return {name: TensorSpec(shape, dtype) for name, shape in shapes.items()}


def _rows_layout(shape: tuple[int, ...], cuts: list[int]) -> ExplicitLayout:
    """Rank i holds rows [cuts[i], cuts[i + 1]) of tensor "w"."""
    shards = tuple(
        (Shard("w", (a, *[0] * (len(shape) - 1)), (b - a, *shape[1:]), "w", (0,) * len(shape)),)
        for a, b in zip(cuts, cuts[1:])
    )
    return ExplicitLayout(_specs({"w": shape}), shards)


def _cut(generator: random.Random, bounds: Slice, depth: int) -> list[Slice]:
    """A random partition of a slice by repeated halving along random dimensions."""
    dims = [d for d, n in enumerate(bounds.shape) if n > 1]
    if not depth or not dims:
        return [bounds]
    dim = generator.choice(dims)
    size = generator.randrange(1, bounds.shape[dim])
    first, second = list(bounds.shape), list(bounds.shape)
    first[dim], second[dim] = size, bounds.shape[dim] - size
    offset = list(bounds.offset)
    offset[dim] += size
    return _cut(generator, Slice(bounds.offset, tuple(first)), depth - 1) + _cut(
        generator, Slice(tuple(offset), tuple(second)), depth - 1
    )


def _random_layout(generator: random.Random, shapes: dict[str, tuple[int, ...]], num_ranks: int) -> ExplicitLayout:
    """Each tensor as slices, as flat ranges (ZeRO) or whole, on random ranks, with random replicas."""
    shards: list[list[Shard]] = [[] for _ in range(num_ranks)]
    for name, shape in shapes.items():
        if generator.random() < 0.4:
            size = torch.Size(shape).numel()
            cuts = sorted({0, size, *(generator.randrange(size + 1) for _ in range(num_ranks - 1))})
            for number, (start, stop) in enumerate(zip(cuts, cuts[1:])):
                rank = generator.randrange(num_ranks)
                shards[rank] += flat_range_shards(name, shape, start, stop, f"{name}.flat{number}", 3)
        else:
            for number, bounds in enumerate(_cut(generator, whole(shape), generator.randrange(4))):
                for rank in generator.sample(range(num_ranks), generator.randrange(1, num_ranks + 1)):
                    margin = tuple(generator.randrange(2) for _ in shape)
                    shards[rank].append(Shard(name, bounds.offset, bounds.shape, f"{name}.{number}", margin))
    return ExplicitLayout(_specs(shapes), tuple(tuple(p) for p in shards))


def _buffers(layout, rank: int, fill: int) -> dict[str, torch.Tensor]:
    """Buffers just large enough for the rank's shards."""
    shapes: dict[str, list[int]] = {}
    for shard in layout.shards(rank):
        flat = len(shard.local_offset) == 1
        ends = (
            [shard.local_offset[0] + shard.bounds.volume]
            if flat
            else [o + n for o, n in zip(shard.local_offset, shard.shape)]
        )
        known = shapes.setdefault(shard.local, ends)
        shapes[shard.local] = [max(a, b) for a, b in zip(known, ends)]
    return {name: torch.full(shape, fill, dtype=torch.int64) for name, shape in shapes.items()}


def _global(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape)


def _part(shape: tuple[int, ...], bounds: Slice) -> torch.Tensor:
    return _global(shape)[tuple(slice(o, o + n) for o, n in zip(bounds.offset, bounds.shape))]


@pytest.mark.parametrize("seed", range(60))
def test_random_layouts_against_brute_force(seed):
    generator = random.Random(seed)
    shapes = {"a": (5, 7), "b": (11,), "c": (3, 4, 2), "d": (1, 6), "s": ()}
    num_source, num_destination = generator.randrange(1, 5), generator.randrange(1, 5)
    source = _random_layout(generator, shapes, num_source)
    destination = _random_layout(generator, shapes, num_destination)
    check_layout(source)
    held = [_buffers(source, rank, fill=-1) for rank in range(num_source)]
    for rank in range(num_source):
        for shard in source.shards(rank):
            shard_view(held[rank][shard.local], shard).copy_(_part(shapes[shard.tensor], shard.bounds))
    filled = [_buffers(destination, rank, fill=-2) for rank in range(num_destination)]
    reshard = plan(source, destination, ranks_per_node=2)
    execute_in_memory(reshard, held, filled)
    for rank in range(num_destination):
        for shard in destination.shards(rank):
            assert torch.equal(shard_view(filled[rank][shard.local], shard), _part(shapes[shard.tensor], shard.bounds))
    _check_exactly_once(reshard, destination)
    _check_both_ends_agree(reshard)


def _check_exactly_once(reshard, destination) -> None:
    for rank in range(destination.num_ranks):
        moved: dict[Shard, int] = {}
        for transfer in reshard.receives(rank):
            moved[transfer.destination_shard] = moved.get(transfer.destination_shard, 0) + transfer.bounds.volume
        assert moved == {shard: shard.bounds.volume for shard in destination.shards(rank)}


def _check_both_ends_agree(reshard) -> None:
    """sends(r) lists, per pair and in order, exactly what receives(r') lists."""
    ranks = range(reshard.num_ranks)
    for source in ranks:
        for destination in ranks:
            sent = [t for t in reshard.sends(source) if t.destination == destination]
            assert sent == [t for t in reshard.receives(destination) if t.source == source]


def test_own_rank_first():
    specs = _specs({"w": (8, 2)})
    reshard = plan(ReplicatedLayout(specs, 4), _rows_layout((8, 2), [0, 2, 4, 6, 8]))
    assert all(t.source == t.destination for rank in range(4) for t in reshard.receives(rank))
    assert reshard.traffic(1) == (0, 0, 2 * 2 * 8)


def test_same_node_before_other_nodes():
    source = ExplicitLayout(
        _specs({"w": (4,)}), ((), (Shard("w", (0,), (4,), "w", (0,)),), (), (Shard("w", (0,), (4,), "w", (0,)),))
    )
    reshard = plan(source, ReplicatedLayout(source.tensors, 4), ranks_per_node=2)
    assert [reshard.receives(rank)[0].source for rank in range(4)] == [1, 1, 3, 3]


def test_replicas_share_the_load():
    """Sixteen ranks without a tensor draw it from the eight that have it: none serves more than its share plus one."""
    specs = _specs({f"w{i}": (4,) for i in range(64)})
    shards = ReplicatedLayout(specs, 1).shards(0)
    source = ExplicitLayout(specs, tuple([shards] * 8 + [()] * 16))
    reshard = plan(source, ReplicatedLayout(specs, 24), ranks_per_node=8)
    served = [sum(t.destination != rank for t in reshard.sends(rank)) for rank in range(8)]
    assert sum(served) == 16 * 64 and max(served) <= 16 * 64 / 8 * 1.3


def test_golden_tp2_to_tp3():
    reshard = plan(_rows_layout((6, 4), [0, 3, 6]), _rows_layout((6, 4), [0, 2, 4, 6]))
    for rank, parts in enumerate(GOLDEN["reshard_TP2_to_TP3_shape(6,4)"].values()):
        mine = [
            {"from_file": t.source, "global_off": list(t.bounds.offset), "len": list(t.bounds.shape)}
            for t in reshard.receives(rank)
        ]
        assert mine == parts


def test_hole_is_named():
    source = ExplicitLayout(
        _specs({"w": (6, 4)}), ((Shard("w", (0, 0), (2, 4), "w", (0, 0)),), (Shard("w", (3, 0), (3, 4), "w", (0, 0)),))
    )
    with pytest.raises(ValueError, match=r"4 of 24 elements of 'w' \(6, 4\).*\[2:3, 0:4\]"):
        plan(source, ReplicatedLayout(source.tensors, 1))


def test_missing_tensor_and_wrong_shape_are_named():
    source = SingleHolderLayout(_specs({"w": (2,)}))
    with pytest.raises(ValueError, match="'v'"):
        plan(source, ReplicatedLayout(_specs({"w": (2,), "v": (2,)}), 1))
    with pytest.raises(ValueError, match=r"'w' is \(2,\) in the source, \(3,\)"):
        plan(source, ReplicatedLayout(_specs({"w": (3,)}), 1))


def test_shard_outside_its_tensor_is_named():
    layout = ExplicitLayout(_specs({"w": (2,)}), ((Shard("w", (1,), (2,), "w", (0,)),),))
    with pytest.raises(ValueError, match=r"\[1:3\] of rank 0 is not inside 'w'"):
        check_layout(layout)


def test_digest_is_canonical():
    two = plan(_rows_layout((6, 4), [0, 3, 6]), _rows_layout((6, 4), [0, 2, 4, 6]))
    same = plan(_rows_layout((6, 4), [0, 3, 6]), _rows_layout((6, 4), [0, 2, 4, 6]))
    other = plan(_rows_layout((6, 4), [0, 3, 6]), _rows_layout((6, 4), [0, 1, 4, 6]))
    assert two.digest == same.digest and len(two.digest) == 32
    assert two.digest != other.digest
    assert two.digest != plan(two.source, two.destination, ranks_per_node=4).digest
    shared = ReplicatedLayout(_specs({"w": (6, 4)}), 2)
    written_out = ExplicitLayout(shared.tensors, tuple(tuple(Shard(*p) for p in shared.shards(r)) for r in range(2)))
    assert plan(shared, shared).digest == plan(written_out, shared).digest


def test_one_rank_of_a_large_world_is_cheap():
    """1,024 ranks, 640 tensors cut eight ways with replicas: one rank's plan without all pairs."""
    specs = _specs({f"w{i}": (64, 8) for i in range(640)})

    def shards(stage: int, tensor: int) -> tuple[Shard, ...]:
        return tuple(
            Shard(f"w{i}", (tensor * 8, 0), (8, 8), f"w{i}", (0, 0)) for i in range(stage * 80, stage * 80 + 80)
        )

    source = ExplicitLayout(specs, tuple(shards(rank // 128, rank % 8) for rank in range(1024)))
    destination = ExplicitLayout(specs, tuple(shards(rank % 8, rank // 128) for rank in range(1024)))
    start = time.process_time()
    reshard = plan(source, destination)
    assert len(reshard.receives(731)) == 80 and len(reshard.digest) == 32
    reshard.sends(731)
    assert time.process_time() - start < 5
