"""[model.lora]: what adapters are not trained with, and targets that a model lacks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_dapo.config import validate
from megatron_dapo.config.validator import missing_targets
from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.models.config_json import parse_architecture
from tests.unit.config import architectures
from tests.unit.config.small import make


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        ("precision.recipe=fp8_blockwise", 'set precision.recipe = ""'),
        ("rollout.engine=sglang sglang.quantization=fp8", 'set sglang.quantization = "none"'),
        ("rollout.engine=sglang sglang.weight_sync_full_interval=4", "set sglang.weight_sync_full_interval = 1"),
        ("model.lora.targets=[]", 'set model.lora.targets = ["q_proj", "v_proj"]'),
    ],
)
def test_each_combination_that_does_not_work_is_one_line(overrides: str, fix: str) -> None:
    def lines(rank: int) -> list[str]:
        return [str(one) for one in validate(make(f"{overrides} model.lora.rank={rank} training.micro_batch_tokens=2048"))]

    found = [line for line in lines(8) if fix in line]
    assert len(found) == 1 and "\n" not in found[0], lines(8)
    assert overrides.startswith("model.lora") or not [line for line in lines(0) if fix in line]


def test_adapters_alone_are_valid() -> None:
    assert validate(make("model.lora.rank=8"), architecture=parse_architecture(architectures.QWEN_7B)) == []


def test_a_target_that_no_layer_has_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    architecture: Any = replace(parse_architecture(architectures.QWEN_7B))
    fused = {name.replace("gate_proj", "gate_up_proj"): shape for name, shape in architecture.shapes().items()}
    monkeypatch.setattr(ModelArchitecture, "shapes", lambda self: fused)
    [violation] = missing_targets(make("model.lora.rank=8"), architecture)
    assert "model.lora.targets names gate_proj; this model has down_proj, gate_up_proj, k_proj" in str(violation)
    assert not list(missing_targets(make(""), architecture))
