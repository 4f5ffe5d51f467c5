"""Lines of a start: formats of layers and multiples of tokens, and numbers of prompts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_dapo.cli.description import data_lines, precision_lines
from megatron_dapo.config.data_schema import DataConfig
from megatron_dapo.config.rollout_schema import RolloutConfig
from megatron_dapo.data.sources import PromptCounts
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


@pytest.mark.parametrize(("num_prompts", "warned"), [(60, True), (512, False), (0, False)])
def test_a_step_that_needs_more_prompts_than_there_are_is_warned_about(num_prompts: int, warned: bool) -> None:
    """0: they were not counted."""
    data = DataConfig(train_paths=(Path("a.jsonl"),), eval_paths=(Path("b.jsonl"),))
    config = SimpleNamespace(data=data, rollout=RolloutConfig(prompts_per_step=512))
    plan = SimpleNamespace(prompts=PromptCounts(num_prompts, 6), loaded=SimpleNamespace(config=config))
    warnings = [line for line in data_lines(plan) if line.startswith("warning: ")]
    assert bool(warnings) == warned
    if warned:
        assert warnings == [
            "warning: a step needs 512 prompts (rollout.prompts_per_step) and there are 60: each is sampled 8.5 times a step; "
            "lower it to 15 or less"
        ]


def test_a_float32_model_is_named_by_its_type() -> None:
    assert lines_of(DENSE, ParallelLayout(2), "float32") == ["precision: fp32 in all layers, in the type of the operands"]
