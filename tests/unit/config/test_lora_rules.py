"""[model.lora]: what adapters are not trained with, and targets that a model lacks."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from megatron_dapo.config import validate
from megatron_dapo.config.model_schema import LoraTarget
from megatron_dapo.config.validator import missing_targets
from megatron_dapo.models.config_json import parse_architecture
from megatron_dapo.models.lora import ADAPTED, adapter_shapes, chosen_targets
from tests.unit.config import architectures
from tests.unit.config.small import make
from tests.unit.plan.models import DEEPSEEK_V3, QWEN3_NEXT_80B


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        ("precision.recipe=fp8_blockwise", 'set precision.recipe = ""'),
        ("rollout.engine=sglang sglang.quantization=fp8", 'set sglang.quantization = "none"'),
        ("rollout.engine=sglang sglang.weight_sync_full_interval=4", "set sglang.weight_sync_full_interval = 1"),
    ],
)
def test_each_combination_that_does_not_work_is_one_line(overrides: str, fix: str) -> None:
    def lines(rank: int) -> list[str]:
        return [str(one) for one in validate(make(f"{overrides} model.lora.rank={rank} training.micro_batch_tokens=2048"))]

    found = [line for line in lines(8) if fix in line]
    assert len(found) == 1 and "\n" not in found[0], lines(8)
    assert not [line for line in lines(0) if fix in line]


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


@pytest.mark.parametrize("model", [DEEPSEEK_V3, QWEN3_NEXT_80B], ids=["latent", "gated"])
def test_adapters_next_to_latent_and_gated_attention_are_only_synced_merged(model: dict[str, Any]) -> None:
    architecture, targets = parse_architecture(model), 'model.lora.targets=["o_proj"]'
    [violation] = missing_targets(make(f"{SERVED} model.lora.rank=8 {targets}"), architecture)
    assert f"{architecture.model_type}: adapters next to latent or gated attention are only synced merged" in str(violation)
    assert not list(missing_targets(make("model.lora.rank=8"), architecture))


def test_a_target_that_the_model_does_not_have_is_one_line() -> None:
    architecture = parse_architecture(architectures.QWEN_7B)
    [violation] = missing_targets(make('model.lora.rank=8 model.lora.targets=["kv_b_proj","q_proj"]'), architecture)
    assert "model.lora.targets names kv_b_proj; this model has q_proj, k_proj, v_proj, o_proj, gate_proj" in str(violation)
    assert not list(missing_targets(make(""), architecture))


def test_every_matrix_that_can_have_an_adapter_is_a_target() -> None:
    assert sorted(get_args(LoraTarget)) == sorted(ADAPTED)


def test_the_gate_of_a_shared_expert_has_no_adapter() -> None:
    """PEFT's gate_proj does not name shared_expert_gate either."""
    shared, experts = "model.layers.0.mlp.shared_expert.", "model.layers.0.mlp.experts.0."
    shapes = {f"{shared[:-1]}_gate.weight": (1, 4), f"{shared}gate_proj.weight": (8, 4), f"{experts}gate_proj.weight": (6, 4)}
    assert chosen_targets(shapes, ()) == ("gate_proj",)
    adapted = {name.partition(".lora_")[0] for name in adapter_shapes(shapes, 2, ())}
    assert adapted == {f"{shared}gate_proj", f"{experts}gate_proj"}
    with pytest.raises(ValueError, match="names shared_expert_gate; this model has gate_proj"):
        adapter_shapes(shapes, 2, ["shared_expert_gate"])
