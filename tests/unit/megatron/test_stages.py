"""Layers that a pipeline stage holds, against megatron-core's own arithmetic; and how stages hand over."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_dapo.megatron.model_config import _communication_fields, _layout_fields
from megatron_dapo.parallel.layout import ParallelLayout


@pytest.mark.parametrize("virtual", [1, 2])
@pytest.mark.parametrize(
    ("stages", "first", "last", "num_layers"),
    [(2, 0, 0, 8), (2, 2, 0, 8), (4, 10, 4, 94), (4, 0, 22, 94), (3, 2, 2, 12), (2, 6, 2, 8)],
)
def test_layers_are_those_of_megatron_core(stages: int, first: int, last: int, num_layers: int, virtual: int) -> None:
    layout = ParallelLayout(
        stages, pipeline=stages, virtual_pipeline=virtual, first_stage_layers=first, last_stage_layers=last
    )
    config = TransformerConfig(
        num_layers=num_layers,
        hidden_size=16,
        num_attention_heads=2,
        pipeline_dtype=torch.float32,
        **_layout_fields(layout),
    )
    for rank in range(stages):
        for chunk in range(virtual):
            stage = chunk if virtual > 1 else None
            start = get_transformer_layer_offset(config, stage, rank)
            count = get_num_layers_to_build(config, stage, rank)
            assert layout.layers_of(rank, chunk, num_layers) == range(start, start + count), (rank, chunk)


def test_stages_on_gpus_do_not_wait_for_the_device_after_a_hand_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    fields = _communication_fields(ParallelLayout(2, pipeline=2))
    assert fields["batch_p2p_comm"] and not fields["batch_p2p_sync"]
    assert TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2).batch_p2p_sync, "megatron-core's own"
