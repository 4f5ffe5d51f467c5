"""The table of all ranks against the transfers of each rank, and its sums against numbers by hand."""

from __future__ import annotations

import random

import pytest
import torch

from megatron_dapo.reshard import traffic
from megatron_dapo.reshard.layout import ReplicatedLayout, Shard, ShiftedLayout, TensorSpec
from megatron_dapo.reshard.planner import plan
from megatron_dapo.reshard.traffic import traffic_table
from tests.reshard_oracles import ExplicitLayout

SHAPES = {"a": (6, 4), "b": (5,), "c": (12, 2), "d": (3, 8)}


def _random_rows(generator: random.Random, num_ranks: int) -> ExplicitLayout:
    """Each tensor cut into row blocks, each block on some ranks."""
    shards: list[list[Shard]] = [[] for _ in range(num_ranks)]
    for name, shape in SHAPES.items():
        cuts = sorted({0, shape[0], *(generator.randrange(shape[0]) for _ in range(2))})
        for start, stop in zip(cuts, cuts[1:]):
            size, tail = (stop - start, *shape[1:]), (0,) * (len(shape) - 1)
            for rank in generator.sample(range(num_ranks), generator.randrange(1, num_ranks + 1)):
                shards[rank].append(Shard(name, (start, *tail), size, f"{name}{start}", (0,) * len(shape)))
    # Equal ranks share one tuple, as in real layouts.
    known: dict[tuple[Shard, ...], tuple[Shard, ...]] = {}
    shared = tuple(known.setdefault(tuple(p), tuple(p)) for p in shards)
    return ExplicitLayout({name: TensorSpec(shape, torch.float32) for name, shape in SHAPES.items()}, shared)


@pytest.mark.parametrize("limit", [traffic._EXACT, 0])
@pytest.mark.parametrize("seed", range(12))
def test_table_is_the_sum_of_the_transfers(seed, limit, monkeypatch):
    """The sums hold also if the numbers would not fit an int64 (limit 0)."""
    monkeypatch.setattr(traffic, "_EXACT", limit)
    generator = random.Random(seed)
    source = _random_rows(generator, generator.randrange(1, 9))
    destination = ShiftedLayout(_random_rows(generator, generator.randrange(1, 9)), generator.choice([0, 3]))
    reshard = plan(source, destination, ranks_per_node=generator.choice([1, 2, 4]))
    table = traffic_table(reshard)
    pairs: dict[tuple[int, int], list[int]] = {}
    for rank in range(destination.num_ranks):
        for t in reshard.receives(rank):
            if t.source != rank:
                pairs.setdefault((rank, t.source), []).append(reshard.num_bytes(t))
    mine = zip(table.destination.tolist(), table.source.tolist(), table.num_bytes.tolist(), table.num_overlaps.tolist())
    assert {(d, s): (b, n) for d, s, b, n in mine} == {pair: (sum(v), len(v)) for pair, v in pairs.items()}
    for rank in range(reshard.num_ranks):
        assert reshard.traffic(rank) == (table.sent[rank], table.received[rank], table.local[rank])


def test_bytes_and_messages_by_hand():
    """Rank 0 of 2 x 2 ranks has 40 bytes that all others want: one of its node, two of the other."""
    specs = {"w": TensorSpec((10,), torch.float32)}
    whole = ReplicatedLayout(specs, 1).shards(0)
    source = ExplicitLayout(specs, (whole, (), (), ()))
    table = traffic_table(plan(source, ReplicatedLayout(specs, 4), ranks_per_node=2))
    assert table.sent.tolist() == [120, 0, 0, 0] and table.received.tolist() == [0, 40, 40, 40]
    assert table.local.tolist() == [40, 0, 0, 0] and int(table.num_bytes[table.crosses].sum()) == 80
    assert (table.num_messages(40), table.num_messages(39), table.num_messages(16)) == (3, 6, 9)


def test_nothing_to_move():
    specs = {"w": TensorSpec((10,), torch.bfloat16)}
    table = traffic_table(plan(ReplicatedLayout(specs, 3), ReplicatedLayout(specs, 3)))
    assert table.num_messages(1) == 0
    assert table.local.tolist() == [20] * 3


def test_narrower_type_crosses():
    wide, narrow = {"w": TensorSpec((10,), torch.float32)}, {"w": TensorSpec((10,), torch.bfloat16)}
    for source, destination in ((wide, narrow), (narrow, wide)):
        reshard = plan(ReplicatedLayout(source, 1), ReplicatedLayout(destination, 2))
        assert reshard.traffic(0) == (20, 0, 20) and traffic_table(reshard).sent.tolist() == [20, 0]
