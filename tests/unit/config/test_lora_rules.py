"""[model.lora]: what adapters are not trained with, and targets that a model lacks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_dapo.config import validate
from megatron_dapo.config.validator import missing_targets
from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.models.config_json import parse_architecture
from megatron_dapo.models.lora import adapter_shapes
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


SERVED = "rollout.engine=sglang sglang.placement=disaggregated model.lora.sync=adapters"


def test_adapters_are_valid() -> None:
    for overrides in ("", SERVED):
        assert validate(make(f"model.lora.rank=8 {overrides}"), architecture=parse_architecture(architectures.QWEN_7B)) == []


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        (f"{SERVED} model.lora.rank=0", "or model.lora.rank = 16"),
        ("model.lora.rank=8 model.lora.sync=adapters", 'or rollout.engine = "sglang" without sglang.urls'),
        (f"{SERVED} model.lora.rank=8 sglang.placement=colocated", 'or sglang.placement = "disaggregated"'),
        (f"{SERVED} model.lora.rank=8 rollout.max_staleness=1 sglang.update_pause=retract", 'set sglang.update_pause = "abort"'),
    ],
)
def test_servers_hold_adapters_only_where_they_can(overrides: str, fix: str) -> None:
    found = [str(one) for one in validate(make(overrides)) if fix in str(one)]
    assert len(found) == 1 and "\n" not in found[0], validate(make(overrides))


def test_adapters_of_experts_are_only_synced_merged() -> None:
    architecture = parse_architecture(architectures.EXPERTS)
    [violation] = missing_targets(make(f"{SERVED} model.lora.rank=8"), architecture)
    assert "adapters of experts (down_proj, gate_proj, up_proj) are only synced merged" in str(violation)
    assert not list(missing_targets(make(f'{SERVED} model.lora.rank=8 model.lora.targets=["q_proj"]'), architecture))


def test_a_target_that_no_layer_has_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    architecture: Any = replace(parse_architecture(architectures.QWEN_7B))
    fused = {name.replace("gate_proj", "gate_up_proj"): shape for name, shape in architecture.shapes().items()}
    monkeypatch.setattr(ModelArchitecture, "shapes", lambda self: fused)
    [violation] = missing_targets(make("model.lora.rank=8"), architecture)
    assert "model.lora.targets names gate_proj; this model has down_proj, gate_up_proj, k_proj" in str(violation)
    assert not list(missing_targets(make(""), architecture))


def test_a_shared_expert_takes_no_adapter() -> None:
    shapes = {"model.layers.0.mlp.shared_expert.up_proj.weight": (8, 4), "model.layers.0.mlp.experts.0.up_proj.weight": (8, 4)}
    with pytest.raises(ValueError, match="names up_proj: model.layers.0.mlp.shared_expert.up_proj.weight is of a shared expert"):
        adapter_shapes(shapes, 2, ["up_proj"])
