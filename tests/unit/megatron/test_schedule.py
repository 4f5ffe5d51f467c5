"""Preparation of micro-batches: only what the layers in use read is computed, and each moves to the device when its turn comes."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from actor_checks import make_micro_batch

from megatron_dapo.megatron import attention, schedule
from megatron_dapo.parallel import packing
from megatron_dapo.parallel.layout import ParallelLayout


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments of every call of `plan_attention`."""
    calls: list[Any] = []
    plan_attention = attention.plan_attention

    def count(*arguments: Any) -> attention.AttentionPlan:
        calls.append(arguments)
        return plan_attention(*arguments)

    for module in (attention, schedule):
        monkeypatch.setattr(module, "plan_attention", count, raising=False)
    return calls


@pytest.mark.parametrize("context_size", [1, 2])
def test_no_attention_is_planned_for_layers_that_read_cu_seqlens_alone(context_size: int, plans: list[Any]) -> None:
    layout = ParallelLayout(context_size, context=context_size)
    batch = make_micro_batch([torch.arange(1, 9), torch.arange(1, 5)], layout, total_targets=10, seed=1)
    prepared = schedule.prepare([batch, batch], layout, rank=0)
    for item in prepared:  # a stand-in for Transformer Engine's attention: megatron-core hands it these fields
        assert torch.equal(item.packed.cu_seqlens_q, batch.cu_seqlens) and item.packed.qkv_format == "thd"
    assert not plans


def test_our_own_layers_plan_a_micro_batch_once(plans: list[Any]) -> None:
    layout = ParallelLayout(1)
    batch = make_micro_batch([torch.arange(1, 9), torch.arange(1, 5)], layout, total_targets=10, seed=1)
    [item] = schedule.prepare([batch], layout, rank=0)
    config = SimpleNamespace(
        context_parallel_size=1,
        window_size=None,
        window_attn_skip_freq=None,
        attention_implementation="auto",
        softmax_type="vanilla",
    )
    layer = attention.PackedAttention(config, 1)
    query = torch.randn(batch.num_tokens, 2, 8)
    for _ in range(3):
        layer(query, query, query, packed_seq_params=item.packed)
    assert len(plans) == 1


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_a_micro_batch_moves_to_the_device_once_when_the_first_chunk_computes_it(
    num_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = ParallelLayout(1)
    batch = make_micro_batch([torch.arange(1, 9), torch.arange(1, 5)], layout, total_targets=10, seed=1)
    prepared = schedule.prepare([batch] * 3, layout, rank=0)
    moved: list[int] = []

    def to_device(item: schedule.PreparedMicroBatch, device: Any) -> schedule.PreparedMicroBatch:
        assert device == "the device"
        moved.append(item.index)
        return packing.to_device(item, "meta")

    def run(forward_step_func: Any, data_iterator: Any, model: Any, num_microbatches: int, **_: Any) -> list[int]:
        counts = []
        for index in range(num_microbatches):
            for chunk, iterator in zip(model, data_iterator if num_chunks > 1 else [data_iterator], strict=True):
                output, finish = forward_step_func(iterator, chunk)
                counts.append(len(moved))
                assert finish(output)[2] == index
        return counts

    def chunk(input_ids: torch.Tensor, packed_seq_params: Any, **_: Any) -> torch.Tensor:
        assert {input_ids.device.type, packed_seq_params.cu_seqlens_q.device.type} == {"meta"}
        return input_ids

    def loss(micro_batch: Any, output: torch.Tensor, index: int) -> tuple[torch.Tensor, int]:
        assert micro_batch.advantages.device.type == "meta"
        return output, index

    monkeypatch.setattr(schedule, "to_device", to_device)
    monkeypatch.setattr(schedule.torch.cuda, "current_device", lambda: "the device")
    monkeypatch.setattr(schedule, "get_forward_backward_func", lambda: run)
    monkeypatch.setattr(schedule, "unwrap", lambda chunk: SimpleNamespace(config=SimpleNamespace()))
    counts = schedule._run([chunk] * num_chunks, prepared, lambda chunk, hidden, micro_batch: hidden, loss)
    assert counts == [1 + index for index in range(3) for _ in range(num_chunks)] and moved == [0, 1, 2]


@pytest.mark.parametrize("lengths", [[16, 8], [8, 600, 24], [8, 8, 8, 1500]])
@pytest.mark.parametrize("context_size", [2, 4])
@pytest.mark.parametrize("padded_to", [0, 4096])
def test_ranks_hold_what_transformer_engine_takes_for_granted(
    lengths: list[int], context_size: int, padded_to: int
) -> None:
    """Without padded bounds its ring takes bounds // C for those of a rank, and // 2C for those of a half."""
    layout = ParallelLayout(context_size, context=context_size)
    batch = make_micro_batch([torch.arange(1, length + 1) for length in lengths], layout, total_targets=10, seed=1)
    for rank in range(context_size):
        [item] = schedule.prepare([batch], layout, rank, fixed_tokens=padded_to)
        packed, bounds = item.packed, item.packed.cu_seqlens_q.tolist()
        # Given, they would mean padding between sequences, which Transformer Engine skips: some rows would have no attention.
        assert packed.cu_seqlens_q_padded is None and packed.cu_seqlens_kv_padded is None
        assert not getattr(packed, "pad_between_seqs", None) and packed.max_seqlen_q % (2 * context_size) == 0
        assert padded_to in (0, bounds[-1])
        local = iter(packed.position_ids.tolist())
        for start, end in pairwise(bounds):
            half = end // (2 * context_size) - start // (2 * context_size)
            assert end // context_size - start // context_size == 2 * half
            for chunk in (rank, 2 * context_size - 1 - rank):
                assert [next(local) for _ in range(half)] == list(range(chunk * half, (chunk + 1) * half))
        assert next(local, None) is None, "the rank holds no other token"
