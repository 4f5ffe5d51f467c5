"""Memory of a run that trains adapters: their number on a rank is that of the layout; weights have no optimizer."""

from __future__ import annotations

import pytest
import torch

from megatron_dapo.checkpoints.layouts.lora import LoraLayout
from megatron_dapo.checkpoints.layouts.megatron import megatron_layout
from megatron_dapo.models.config_json import parse_architecture
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.plan.memory import model_memory, policy_parameters, rank_adapters
from tests.unit.config import architectures
from tests.unit.config.small import make
from tests.unit.plan.models import DEEPSEEK_V3, QWEN3_NEXT_80B

FEW = {"num_hidden_layers": 4, "first_k_dense_replace": 1, "n_routed_experts": 16}
MODELS = {
    "dense": parse_architecture(architectures.QWEN_7B),
    "experts": parse_architecture(architectures.EXPERTS),
    "latent": parse_architecture({**DEEPSEEK_V3, **FEW}),
    "latent queries": parse_architecture({**DEEPSEEK_V3, **FEW, "q_lora_rank": None}),
    "delta": parse_architecture({**QWEN3_NEXT_80B, "num_hidden_layers": 4, "num_experts": 16}),
}


SOME = 'model.lora.targets=["q_proj","v_proj","down_proj"]'


@pytest.mark.parametrize(
    ("model", "fields", "targets"),
    [
        ("dense", {"tensor": 4}, ""),
        ("dense", {"tensor": 2, "pipeline": 2}, SOME),
        ("experts", {"tensor": 2, "expert": 4}, SOME),
        ("experts", {"tensor": 2, "expert": 8, "expert_tensor": 1}, ""),
        ("latent", {"tensor": 2, "expert": 4}, ""),
        ("latent queries", {"tensor": 4, "pipeline": 2}, 'model.lora.targets=["q_proj","kv_a_proj_with_mqa"]'),
        ("delta", {"tensor": 2, "expert": 2}, ""),
        ("delta", {"pipeline": 2}, 'model.lora.targets=["in_proj_ba","up_proj"]'),
    ],
)
def test_the_elements_of_a_rank_are_those_of_the_layout(model: str, fields: dict[str, int], targets: str) -> None:
    architecture, names = MODELS[model], {"tensor": "tp", "pipeline": "pp", "expert": "ep", "expert_tensor": "etp"}
    sizes = " ".join(f"parallel.{names[axis]}_size={size}" for axis, size in fields.items())
    config = make(f"model.lora.rank=8 {sizes} {targets}")
    layout = LoraLayout(megatron_layout(architecture, ParallelLayout(8, **fields), torch.bfloat16), 8, config.model.lora.targets)
    planned = rank_adapters(config, architecture)
    held = {name: spec.num_elements for name, spec in layout.local_specs(0).items()}
    assert planned.experts == sum(number for name, number in held.items() if ".experts." in name)
    assert planned.total == sum(held.values())
    assert policy_parameters(config, architecture) == sum(spec.num_elements for spec in layout.tensors.values())


def test_only_adapters_have_gradients_and_an_optimizer() -> None:
    full, lora = (
        model_memory(make(f"model.lora.rank={rank} model.dtype=bfloat16"), MODELS["dense"], 1) for rank in (0, 16)
    )
    count = policy_parameters(make("model.lora.rank=16"), MODELS["dense"])
    assert count == 16 * 28 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944))
    assert (lora.gradients, lora.main_params, lora.moments) == (4 * count, 4 * count, 8 * count)
    assert lora.weights - full.weights == 2 * count
    assert (lora.activations, lora.head) == (full.activations, full.head) and lora.saved < 0.01 * full.saved

