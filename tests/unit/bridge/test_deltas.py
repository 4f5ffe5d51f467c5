"""What one trainer rank compares and sends: quantized weights, casts, and tensors that have two places in an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch

from megatron_dapo.bridge.deltas import Deltas
from megatron_dapo.bridge.protocol.deltas import areas, bits
from megatron_dapo.bridge.protocol.receiver import Receiver
from megatron_dapo.bridge.sync_plan import ExpectedChecksums, SyncPlan, slot_bytes, write_chunks
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.reshard.planner import plan
from tests.unit.bridge.test_fp8_weights import (
    Fp8EngineLayout,
    Fp8SourceLayout,
    architecture,
    expected_parameters,
    megatron_layout,
    sglang_layout,
    sources_of,
    trainer_buffers,
    weights_of,
    with_kv_scales,
)
from tests.unit.bridge.test_sync_plan import _plan, _shards


def receivers_of(sync_plan: SyncPlan, sources: Sequence[Mapping[str, torch.Tensor]], version: int) -> list[Receiver]:
    """Engine ranks after a full update."""
    receivers = []
    for rank in range(sync_plan.engines.num_ranks):
        specs = sync_plan.engines.local_specs(rank)
        receiver = Receiver({name: torch.ones(spec.shape).to(spec.dtype) for name, spec in specs.items()})
        receiver.begin(sync_plan.manifest(rank, f"full {version}", "s", version))
        for bucket in sync_plan.buckets(rank):
            data = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
            for source, buffers in enumerate(sources):
                write_chunks(sync_plan, bucket, source, buffers, data)
            receiver.accept(f"full {version}", bucket, data)
        receiver.finish(f"full {version}")
        receivers.append(receiver)
    return receivers


def check_delta(sync_plan: SyncPlan, old: Sequence, new: Sequence) -> int:
    """Send a delta after a full update and compare with a full update; return its bytes over those of that."""
    receivers, expected = receivers_of(sync_plan, old, 1), receivers_of(sync_plan, new, 2)
    sent, sums = [], ExpectedChecksums(sync_plan)
    for rank, (before, after) in enumerate(zip(old, new)):
        deltas = Deltas(sync_plan, rank, 9)
        assert not deltas.is_due([1])
        deltas.advance(1, None, before)
        assert deltas.is_due([1, 1]) and not deltas.is_due([1, 0]) and not deltas.is_due([1, None])
        sent.append(deltas.compare(after))
        assert sent[-1].fits()
    num_bytes = 0
    for rank, receiver in enumerate(receivers):
        receiver.begin(sent[0].plan.manifest(rank, "delta", "s", 2, 1, base=1))
        for bucket in sent[0].plan.buckets(rank):
            slot = torch.full((slot_bytes(sync_plan, rank),), 255, dtype=torch.uint8)
            for source in bucket.segments:
                segment, area = sent[source].segment(bucket), areas(bucket, slot.numel())[source]
                slot[area][: segment.numel()] = segment
                sent[source].count(bucket, (rank,), sums)
            num_bytes += receiver.accept("delta", bucket, slot)
        checksums = receiver.finish("delta")
        assert checksums == sums.named([rank], sums.vector([rank]))[rank]
        for name, parameter in receiver.parameters.items():
            assert torch.equal(bits(parameter), bits(expected[rank].parameters[name])), (rank, name)
    return num_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_what_was_cast_or_has_two_places(dtype, tied):
    source, sync_plan = _plan({"tensor": 2, "pipeline": 2}, tied=tied, num_engines=2, dtype=dtype, bucket_bytes=4096)
    old = _shards(source)
    new = [{name: values.clone() for name, values in buffers.items()} for buffers in old]
    for buffers in new:
        for values in buffers.values():
            values.view(-1)[::40] += 300
    full = sum(sync_plan.num_bytes(rank) for rank in range(sync_plan.engines.num_ranks))
    assert 0 < check_delta(sync_plan, old, new) < 0.4 * full


def test_quantized_weights():
    """A block of FP8 values changes only if its scale does, or values cross to the next number."""
    model, parallel = architecture(), ParallelLayout(2, 2)
    trainer_layout = megatron_layout(model, parallel, torch.float32)
    plain = sglang_layout(model, 1, torch.bfloat16)
    engine = Fp8EngineLayout(plain, with_kv_scales(expected_parameters(plain)))
    layout = Fp8SourceLayout(trainer_layout, engine)
    weights = weights_of(model)
    changed = {name: values.clone() for name, values in weights.items()}
    for values in changed.values():
        values.view(-1)[::400] *= 0.9
    # The scale of one block, and with it all of its values.
    changed["model.layers.0.self_attn.o_proj.weight"][:128, :128] *= 1.7
    old, new = (
        sources_of(layout, [trainer_buffers(trainer_layout, each, rank) for rank in range(trainer_layout.num_ranks)])
        for each in (weights, changed)
    )
    assert check_delta(SyncPlan(plan(layout, engine), engine, 200_000), old, new) > 0
