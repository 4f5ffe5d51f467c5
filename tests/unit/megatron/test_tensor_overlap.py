"""Buffers of overlapped tensor-parallel communication: the call of Transformer Engine, once a process, and one length for all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_dapo.megatron import schedule, tensor_overlap
from megatron_dapo.megatron.tensor_overlap import initialize_overlap, overlapped_tokens
from megatron_dapo.parallel.layout import ParallelLayout
from tests.distributed.actor_checks import make_micro_batch

LAYOUT = ParallelLayout(8, tensor=4, context=2, sequence_parallel=True)
CONFIG: Any = SimpleNamespace(hidden_size=96, params_dtype=torch.bfloat16, tp_comm_bootstrap_backend="nccl")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Arguments of each call of a stand-in for Transformer Engine's function."""
    found: list[dict[str, Any]] = []
    base = SimpleNamespace(
        UserBufferQuantizationMode=SimpleNamespace(NONE="none"), initialize_ub=lambda **given: found.append(given)
    )
    monkeypatch.setattr(tensor_overlap, "_shapes", set())
    monkeypatch.setattr(tensor_overlap, "uses_transformer_engine", lambda: True)
    monkeypatch.setattr(tensor_overlap.importlib, "import_module", lambda name: base)
    return found


def test_buffers_are_allocated_once_for_the_tokens_of_a_context_rank(calls: list[dict[str, Any]]) -> None:
    for _ in range(2):  # policy and critic
        initialize_overlap(CONFIG, LAYOUT, 1024)
    [given] = calls
    assert given["shape"] == [512, 96] and given["tp_size"] == 4 and given["quantization_modes"] == ["none"]
    with pytest.raises(ValueError, match=r"= \(512, 96, 4\), and another model needs \(1024, 96, 4\); give both"):
        initialize_overlap(CONFIG, LAYOUT, 2048)
    assert len(calls) == 1


def test_without_transformer_engine_it_is_refused() -> None:
    with pytest.raises(ValueError, match="tp_comm_overlap needs Transformer Engine"):
        initialize_overlap(CONFIG, LAYOUT, 1024)


@pytest.mark.parametrize(("limit", "tokens"), [(512, 512), (513, 1024), (24576, 24576)])
def test_the_length_is_cut_evenly_by_ranks_and_pieces(limit: int, tokens: int) -> None:
    assert overlapped_tokens(limit, LAYOUT) == tokens and not tokens % (64 * 4 * 2)


def test_every_micro_batch_has_the_length_and_a_longer_one_is_refused() -> None:
    layout = ParallelLayout(2, tensor=2, sequence_parallel=True)
    batches = [
        make_micro_batch([torch.arange(1, size + 1) for size in sizes], layout, total_targets=10, seed=1)
        for sizes in ((30, 9), (4,))
    ]
    prepared = schedule.prepare(batches, layout, rank=0, fixed_tokens=64)
    for item, batch in zip(prepared, batches, strict=True):
        assert item.token_ids.numel() == item.packed.position_ids.numel() == int(item.packed.cu_seqlens_q[-1]) == 64
        assert item.micro_batch.num_tokens == batch.num_tokens < 64
        # Padding has the micro-batch's own tokens, for routers that would send equal ones to the same experts.
        assert torch.equal(item.token_ids, batch.token_ids.repeat(16)[:64])
    with pytest.raises(
        ValueError, match="a micro-batch has 40 tokens, and the buffers of megatron.tp_comm_overlap are for 32"
    ):
        schedule.prepare(batches, layout, rank=0, fixed_tokens=32)
