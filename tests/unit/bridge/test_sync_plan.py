"""Buckets: each element of an engine rank comes once, from one trainer rank; buckets keep to the byte limit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.bridge.protocol.messages import CHUNK_ALIGNMENT
from megatron_dapo.bridge.protocol.receiver import Receiver
from megatron_dapo.bridge.sync_plan import ExpectedChecksums, SyncPlan, local_slice, plan_sync, write_chunks
from megatron_dapo.checkpoints.layouts.megatron import megatron_layout
from megatron_dapo.checkpoints.layouts.sglang import sglang_layout
from megatron_dapo.models.config_json import parse_architecture
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.reshard.checksum import signed
from megatron_dapo.reshard.layout import Shard, ShiftedLayout, TensorSpec
from megatron_dapo.reshard.planner import plan
from megatron_dapo.reshard.slices import Slice
from tests.examples import examples
from tests.reshard_oracles import ExplicitLayout, execute_in_memory

CONFIG = {
    "model_type": "qwen2",
    "vocab_size": 131,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
}
PARALLELS = [
    {"tensor": 2, "pipeline": 2},
    {"tensor": 4},
    {"pipeline": 4},
    {"pipeline": 2, "virtual_pipeline": 2},
    {"tensor": 2, "context": 2},
    {},
]


def _plan(parallel=None, *, tied=False, tensor_parallel=2, num_engines=1, dtype=torch.float32, bucket_bytes=2048):
    architecture = parse_architecture({**CONFIG, "tie_word_embeddings": tied})
    source = megatron_layout(architecture, ParallelLayout(4, **(parallel or {})), torch.float32)
    engines = sglang_layout(architecture, tensor_parallel, dtype, num_engines)
    return source, SyncPlan(plan(source, engines, ranks_per_node=4), engines, bucket_bytes)


def _shards(source) -> list[dict[str, torch.Tensor]]:
    """Shards in which every element has its own number; replicas agree because they are cut from one model."""
    numbers, model = 0, {}
    for name, spec in source.tensors.items():
        model[name] = torch.arange(numbers, numbers + spec.num_elements, dtype=torch.float32).view(spec.shape)
        numbers += spec.num_elements
    whole = ExplicitLayout(source.tensors, (tuple(_whole(name, spec.shape) for name, spec in source.tensors.items()),))
    buffers = [{n: torch.zeros(shape) for n, shape in source.local_shapes(r).items()} for r in range(source.num_ranks)]
    execute_in_memory(plan(whole, source), [model], buffers)
    return buffers


def _whole(name: str, shape) -> Shard:
    zeros = (0,) * len(shape)
    return Shard(name, zeros, tuple(shape), name, zeros)


@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
def test_every_element_arrives_once_and_is_verified(data):
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    source, sync_plan = _plan(
        data.draw(st.sampled_from(PARALLELS)),
        tied=data.draw(st.booleans()),
        tensor_parallel=data.draw(st.sampled_from([1, 2, 4])),
        num_engines=data.draw(st.integers(1, 2)),
        dtype=dtype,
        bucket_bytes=data.draw(st.sampled_from([64, 100, 1000, 4096, 1 << 20])),
    )
    sources = _shards(source)
    engines = sync_plan.engines
    expected = [
        {n: torch.zeros(s.shape, dtype=dtype) for n, s in engines.local_specs(r).items()}
        for r in range(engines.num_ranks)
    ]
    execute_in_memory(sync_plan.reshard, sources, expected)
    counted = [ExpectedChecksums(sync_plan) for _ in sources]
    for rank in range(engines.num_ranks):
        specs = engines.local_specs(rank)
        receiver = Receiver({n: torch.full(s.shape, float("nan"), dtype=dtype) for n, s in specs.items()})
        receiver.begin(sync_plan.manifest(rank, "d", "s", 1))
        for bucket in sync_plan.buckets(rank):
            assert bucket.num_bytes <= sync_plan.bucket_bytes
            slot = torch.full((bucket.num_bytes,), 255, dtype=torch.uint8)
            written = sum(write_chunks(sync_plan, bucket, r, sources[r], slot, sums) for r, sums in enumerate(counted))
            assert written == sum(chunk.bounds.volume * dtype.itemsize for chunk in bucket.chunks)
            receiver.accept("d", bucket, slot)
        checksums = receiver.finish("d")
        assert all(torch.equal(receiver.parameters[name], value) for name, value in expected[rank].items())
        vectors = torch.stack([sums.vector([rank]) for sums in counted]).sum(0)
        assert counted[0].named([rank], vectors)[rank] == checksums


@pytest.mark.parametrize("bucket_bytes", [700, 2048, 5000])
def test_a_parameter_stays_in_one_bucket_where_it_fits(bucket_bytes):
    _source, sync_plan = _plan({"tensor": 2, "pipeline": 2}, bucket_bytes=bucket_bytes)
    for rank in range(2):
        buckets_of: dict[str, set[int]] = {}
        sizes: dict[str, int] = {}
        for bucket in sync_plan.buckets(rank):
            for write in sync_plan.writes(bucket):
                buckets_of.setdefault(write.chunk.name, set()).add(bucket.index)
                size = write.chunk.bounds.volume * 4
                sizes[write.chunk.name] = sizes.get(write.chunk.name, 0) + -(-size // CHUNK_ALIGNMENT) * CHUNK_ALIGNMENT
        split = {name for name, buckets in buckets_of.items() if len(buckets) > 1}
        assert split == {name for name, size in sizes.items() if size > bucket_bytes}
        # Buckets are well filled: no two neighbors would fit into one.
        fills = [bucket.num_bytes for bucket in sync_plan.buckets(rank)]
        assert len(fills) <= 2 * -(-sum(fills) // bucket_bytes) + 1


def test_segments_name_the_writer_of_each_byte():
    source, sync_plan = _plan({"tensor": 2, "pipeline": 2}, bucket_bytes=1 << 20)
    sources = _shards(source)
    bucket = sync_plan.buckets(0)[0]
    whole = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
    for rank in range(4):
        write_chunks(sync_plan, bucket, rank, sources[rank], whole)
    joined, end = torch.zeros_like(whole), 0
    for rank, (start, stop) in bucket.segments.items():
        assert start == end
        write_chunks(sync_plan, bucket, rank, sources[rank], joined[start:stop], origin=start)
        end = stop
    assert end == bucket.num_bytes and torch.equal(joined, whole) and len(bucket.segments) > 1


@pytest.mark.parametrize(
    ("parallel", "bucket_bytes"),
    [({"tensor": 2, "pipeline": 2}, 8192), ({"pipeline": 4}, 8192), ({"pipeline": 2}, 700)],
)
def test_pipeline_stages_write_concurrently(parallel, bucket_bytes):
    """After any number of buckets every source has written its share, up to one bucket."""
    _, sync_plan = _plan(parallel, bucket_bytes=bucket_bytes)
    for rank in range(2):
        buckets = sync_plan.buckets(rank)
        total = dict.fromkeys(sync_plan.sources(rank), 0)
        for bucket in buckets:
            for source, (start, stop) in bucket.segments.items():
                total[source] += stop - start
        assert len(total) > 1 and len(buckets) > 2
        so_far, seen = dict.fromkeys(total, 0), 0
        for bucket in buckets:
            seen += bucket.num_bytes
            for source, (start, stop) in bucket.segments.items():
                so_far[source] += stop - start
            share = seen / sum(total.values())
            assert all(abs(so_far[source] - share * total[source]) <= bucket_bytes for source in total)


def test_work_is_spread_over_replicas():
    """Four whole replicas and an engine next to none of them."""
    source, near = _plan({}, tensor_parallel=1)
    shifted = plan(source, ShiftedLayout(near.engines, 4), ranks_per_node=4)
    sync_plan = SyncPlan(shifted, near.engines, 2048, rank_offset=4)
    written = dict.fromkeys(range(4), 0)
    for bucket in sync_plan.buckets(0):
        for write in sync_plan.writes(bucket):
            written[write.source] += write.chunk.bounds.volume
    total = sum(spec.num_elements for spec in source.tensors.values())
    assert sum(written.values()) == total
    assert max(written.values()) <= 0.35 * total
    # An engine next to rank 0 gets everything from there: nothing crosses to another rank's memory.
    assert {write.source for bucket in near.buckets(0) for write in near.writes(bucket)} == {0}


def test_engines_of_one_node_get_each_byte_through_it_once():
    """Two nodes of four ranks, one pipeline stage on each, two engines on each."""
    architecture = parse_architecture({**CONFIG, "tie_word_embeddings": False})
    source = megatron_layout(architecture, ParallelLayout(8, tensor=2, pipeline=2), torch.float32)
    engines = sglang_layout(architecture, 2, torch.float32, 4)
    apart, shared = (plan_sync(source, engines, 2048, ranks_per_node=4, engines_per_node=n) for n in (1, 2))
    crossing = {apart: 0, shared: 0}  # bytes that come to a node
    for sync_plan, firsts in ((apart, range(8)), (shared, (0, 1, 4, 5))):
        for rank in firsts:
            for bucket in sync_plan.buckets(rank):
                far = (stop - start for s, (start, stop) in bucket.segments.items() if s // 4 != rank // 4)
                crossing[sync_plan] += sum(far)
    assert crossing[apart] == pytest.approx(2 * crossing[shared], rel=0.02)
    for rank in range(8):
        assert shared.manifest(rank, "d", "s", 1).parameters == apart.manifest(rank, "d", "s", 1).parameters
        assert rank in shared.alike(rank) and {r // 4 for r in shared.alike(rank)} == {rank // 4}
        for other in shared.alike(rank):
            assert [vars(b) | {"engine_rank": 0} for b in shared.buckets(rank)] == [
                vars(b) | {"engine_rank": 0} for b in shared.buckets(other)
            ]
        # A sender knows all that get its bytes, and ranks that hold the same share the work.
        assert all(rank in shared.destinations(source) for source in shared.sources(rank))
        assert shared.sources(rank) == shared.sources(shared.alike(rank)[0])
    # Ranks of a node that hold the same share what goes to all of its engines.
    written = dict.fromkeys(range(8), 0)
    for rank in (0, 1, 4, 5):
        for bucket in shared.buckets(rank):
            for source, (start, stop) in bucket.segments.items():
                written[source] += (stop - start) * (source // 4 == rank // 4)
    for source, replica in ((0, 2), (1, 3), (4, 6), (5, 7)):
        assert 0.7 < written[source] / written[replica] < 1.4, written
    assert apart.digest != shared.digest


def test_digest_depends_on_everything_that_affects_the_bytes():
    digests = {
        _plan({"tensor": 2}, bucket_bytes=2048)[1].digest,
        _plan({"tensor": 2}, bucket_bytes=4096)[1].digest,
        _plan({"tensor": 4}, bucket_bytes=2048)[1].digest,
        _plan({"tensor": 2}, tensor_parallel=4)[1].digest,
        _plan({"tensor": 2}, dtype=torch.bfloat16)[1].digest,
    }
    assert len(digests) == 5 and all(len(digest) == 32 for digest in digests)
    assert _plan({"tensor": 2})[1].digest == _plan({"tensor": 2})[1].digest


def test_engines_beside_the_trainer_have_ranks_of_their_own():
    source, near = _plan({"tensor": 2, "pipeline": 2})
    far = SyncPlan(plan(source, ShiftedLayout(near.engines, 4)), near.engines, 2048, rank_offset=4)
    for rank in range(2):
        assert near.manifest(rank, "d", "s", 1) == far.manifest(rank, "d", "s", 1)
        assert far.num_bytes(rank) == near.num_bytes(rank)


@pytest.mark.parametrize("bucket_bytes", [0, 63])
def test_buckets_too_small_for_a_chunk_are_refused(bucket_bytes):
    with pytest.raises(ValueError, match=f"bucket of {bucket_bytes} bytes: must be at least 64"):
        _plan(bucket_bytes=bucket_bytes)


def test_slices_of_stacked_parameters():
    """The matrix of one expert in a stack, given by its position in memory."""
    down = Shard("down", (0, 8), (6, 4), "w2", (2 * 24,))  # columns 8-11 of a [6, 16] matrix -> w2[2] of [3, 6, 4]
    assert local_slice(down, Slice((1, 9), (2, 3)), (3, 6, 4)) == Slice((2, 1, 1), (1, 2, 3))
    up = Shard("up", (0, 0), (3, 4), "w13", (1 * 24 + 12,))  # rows 3-5 of expert 1
    assert local_slice(up, Slice((1, 0), (2, 4)), (3, 6, 4)) == Slice((1, 4, 0), (1, 2, 4))
    same = Shard("x", (4, 0), (2, 4), "y", (1, 0))
    assert local_slice(same, Slice((5, 1), (1, 2)), (8, 4)) == Slice((2, 1), (1, 2))
    for shard, shape in ((Shard("x", (0, 0), (3, 5), "y", (0,)), (3, 6)), (Shard("x", (0,), (9,), "y", (20,)), (4, 7))):
        with pytest.raises(ValueError, match="no slice of a buffer"):
            local_slice(shard, Slice(shard.global_offset, shard.shape), shape)


def test_checksums_without_buckets_are_the_same():
    source, sync_plan = _plan({"tensor": 2, "pipeline": 2}, dtype=torch.bfloat16)
    sources, specs = _shards(source), sync_plan.engines.local_specs(0)
    through_buckets, direct = ExpectedChecksums(sync_plan), ExpectedChecksums(sync_plan)
    for rank, buffers in enumerate(sources):
        for bucket in sync_plan.buckets(0):
            slot = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
            write_chunks(sync_plan, bucket, rank, buffers, slot, through_buckets)
            for write in sync_plan.writes(bucket, rank):
                assert write.read(buffers, specs[write.chunk.name].dtype).dtype is torch.bfloat16
        direct.add_plan(0, rank, buffers)
    assert torch.equal(through_buckets.vector([0]), direct.vector([0]))
    assert all(signed(value) == value for value in direct.vector([0]).tolist())


def test_a_tensor_without_elements():
    """A layout with a zero-element tensor plans nothing for it."""
    specs = {"w": TensorSpec((4, 4), torch.float32), "none": TensorSpec((0, 4), torch.float32)}

    class Engines(ExplicitLayout):
        tensor_parallel = 1

        def local_specs(self, rank):
            return specs

    shards = (_whole("w", (4, 4)), _whole("none", (0, 4)))
    layout = Engines(specs, (shards,))
    sync_plan = SyncPlan(plan(layout, layout), layout, 64)
    manifest = sync_plan.manifest(0, "d", "s", 1)
    assert {name: p.num_filled for name, p in manifest.parameters.items()} == {"w": 16, "none": 0}
    assert [bucket.num_bytes for bucket in sync_plan.buckets(0)] == [64]
