"""Preparation of micro-batches: only what the layers in use read is computed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from actor_checks import make_micro_batch

from megatron_dapo.megatron import attention, schedule
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
        context_parallel_size=1, window_size=None, window_attn_skip_freq=None, attention_implementation="auto"
    )
    layer = attention.PackedAttention(config, 1)
    query = torch.randn(batch.num_tokens, 2, 8)
    for _ in range(3):
        layer(query, query, query, packed_seq_params=item.packed)
    assert len(plans) == 1
