"""The lines about precision: formats of layers and multiples of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_dapo.cli.description import precision_lines
from megatron_dapo.models.config_json import parse_architecture
from megatron_dapo.parallel.layout import ParallelLayout
from tests.unit.config.architectures import DENSE, EXPERTS
from tests.unit.plan.models import run_of

SEQUENCE = {"tensor": 2, "sequence_parallel": True}


def lines_of(document: Mapping[str, Any], layout: ParallelLayout, dtype: str, **precision: Any) -> list[str]:
    config = run_of(model={"dtype": dtype}, precision=precision)
    return list(precision_lines(config, parse_architecture(document), layout))


def test_layers_padding_and_main_params_of_experts_in_fp8() -> None:
    layout = ParallelLayout(8, **SEQUENCE, expert=4, expert_tensor=1, token_multiple=128)
    sections = {"recipe": "fp8_blockwise", "num_layers_at_start_in_bf16": 1}
    precision, padding = lines_of(EXPERTS, layout, "bfloat16", **sections)
    assert "fp8_blockwise: projections of attention and experts in layers 2 to 4 of 4, e4m3 x e4m3" in precision
    assert "layer 1, embedding, norms, router, attention in bfloat16" in precision
    assert "to a multiple of 256 tokens (128 on a rank); each expert's tokens for its own products" in padding


def test_a_float32_model_is_named_by_its_type() -> None:
    assert lines_of(DENSE, ParallelLayout(2), "float32") == ["precision: fp32 in all layers, in the type of the operands"]
