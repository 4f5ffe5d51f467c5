"""Layout of adapters, and weights merged with them shard by shard, against whole matrices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_dapo.checkpoints.adapters import MergedWeights, fresh_lora_a, initialize_adapters, load_adapters
from megatron_dapo.checkpoints.formats.peft import AddedAdapters, PeftAdapters
from megatron_dapo.checkpoints.layouts.lora import LoraLayout
from megatron_dapo.checkpoints.layouts.megatron import megatron_layout
from megatron_dapo.checkpoints.load import TensorReader, fill
from megatron_dapo.models.config_json import parse_architecture
from megatron_dapo.models.lora import LORA_A, LORA_B, WEIGHT
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.reshard.layout import Layout, SingleHolderLayout, TensorSpec, check_layout, shard_view, slice_view
from tests.unit.config import architectures
from tests.unit.plan.models import DEEPSEEK_V3, QWEN3_NEXT_80B

SMALL = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50}
EXPERTS = {"moe_intermediate_size": 12, "num_experts_per_tok": 2, "intermediate_size": 24}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 10,
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 5,
    "qk_rope_head_dim": 4,
    "v_head_dim": 3,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
DELTA = {
    "head_dim": 8,
    "num_experts": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 3,
    "shared_expert_intermediate_size": 6,
}
OF_MIXTURES = ("expert", "moe_", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers")
DENSE_DELTA = {name: value for name, value in {**QWEN3_NEXT_80B, **DELTA}.items() if not any(part in name for part in OF_MIXTURES)}
MODELS = {
    "dense": {**architectures.QWEN_7B, **SMALL, "intermediate_size": 24},
    "experts": {**architectures.EXPERTS, **SMALL, "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 12},
    "latent": {**DEEPSEEK_V3, **SMALL, **EXPERTS, **LATENT},
    "fused delta": {**QWEN3_NEXT_80B, **SMALL, **EXPERTS, **DELTA},
    "delta": {**DENSE_DELTA, **SMALL, "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"},
}
LAYOUTS = [
    ("dense", {"tensor": 4}),  # more tensor ranks than key-value heads
    ("dense", {"tensor": 2, "pipeline": 2, "virtual_pipeline": 2}),
    ("experts", {"tensor": 2, "expert": 2}),
    ("experts", {"tensor": 2, "expert": 2, "expert_tensor": 1, "pipeline": 2}),
    ("latent", {"tensor": 2, "expert": 2, "pipeline": 2}),
    ("fused delta", {"tensor": 2, "expert": 2}),
    ("delta", {"tensor": 2, "pipeline": 2}),
]
SCALE, RANK = 0.75, 3
SOME = {"latent": ("q_b_proj", "kv_a_proj_with_mqa", "up_proj"), "fused delta": ("in_proj_ba",), "delta": ("in_proj_z", "in_proj_a", "q_proj")}


def adapter_layout(model: str, fields: dict[str, int], targets: tuple[str, ...] = ()) -> LoraLayout:
    parallel = ParallelLayout(world_size=8, **fields)
    return LoraLayout(megatron_layout(parse_architecture(MODELS[model]), parallel, torch.float32), RANK, targets)


def drawn(specs: dict[str, TensorSpec], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(spec.shape, generator=generator) for name, spec in specs.items()}


def local_buffers(layout: Layout, rank: int, whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    buffers = {name: torch.zeros(shape) for name, shape in layout.local_shapes(rank).items()}
    for shard in layout.shards(rank):
        shard_view(buffers[shard.local], shard).copy_(slice_view(whole[shard.tensor], shard.bounds))
    return buffers


def merge(weights: dict[str, torch.Tensor], adapters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    merged = dict(weights)
    for name in adapters:
        if name.endswith(LORA_A):
            matrix = name.removesuffix(LORA_A)
            merged[matrix + WEIGHT] = weights[matrix + WEIGHT] + SCALE * adapters[matrix + LORA_B] @ adapters[name]
    return merged


@pytest.mark.parametrize("chosen", ["all", "some"])
@pytest.mark.parametrize(("model", "fields"), LAYOUTS)
def test_every_rank_merges_its_shards_as_the_whole_matrix(model: str, fields: dict[str, int], chosen: str) -> None:
    layout = adapter_layout(model, fields, SOME.get(model, ("q_proj", "up_proj")) if chosen == "some" else ())
    check_layout(layout)
    weights, adapters = drawn(layout.base.tensors, 1), drawn(layout.tensors, 2)
    merged = merge(weights, adapters)
    assert sum(not torch.equal(merged[name], weights[name]) for name in weights) == len(adapters) // 2
    for rank in range(layout.num_ranks):
        buffers = {**local_buffers(layout.base, rank, weights), **local_buffers(layout, rank, adapters)}
        served, want = MergedWeights(layout, rank, buffers, SCALE), local_buffers(layout.base, rank, merged)
        assert served.keys() == want.keys()
        for name, tensor in want.items():
            torch.testing.assert_close(served[name], tensor, rtol=1e-5, atol=1e-5)


def test_a_merged_weight_is_rounded_once() -> None:
    layout = adapter_layout("dense", {})
    whole = {**drawn(layout.base.tensors, 1), **drawn(layout.tensors, 2)}
    buffers = {**local_buffers(layout.base, 0, whole), **local_buffers(layout, 0, whole)}
    buffers = {name: buffer.bfloat16() for name, buffer in buffers.items()}
    name, matrix = "0.decoder.layers.1.self_attention.linear_proj.weight", "model.layers.1.self_attn.o_proj"
    w, b, a = (whole[matrix + kind].bfloat16().double() for kind in (WEIGHT, LORA_B, LORA_A))
    served = MergedWeights(layout, 0, buffers, SCALE)[name]
    assert served.dtype == torch.bfloat16 and torch.equal(served, (w + SCALE * b @ a).float().bfloat16())


@pytest.mark.parametrize(("model", "fields"), LAYOUTS)
def test_every_layout_starts_from_the_same_adapters(model: str, fields: dict[str, int]) -> None:
    layout = adapter_layout(model, fields)
    whole = {
        name: torch.zeros(spec.shape) if name.endswith(LORA_B) else fresh_lora_a(5, name, spec.shape)
        for name, spec in layout.tensors.items()
    }
    for rank in range(layout.num_ranks):
        buffers = {name: torch.full(shape, torch.nan) for name, shape in layout.local_shapes(rank).items()}
        initialize_adapters(5, layout, rank, buffers)
        for name, tensor in local_buffers(layout, rank, whole).items():
            assert torch.equal(buffers[name], tensor), name


@pytest.mark.parametrize(("model", "fields"), LAYOUTS)
def test_every_rank_reads_its_part_of_a_peft_directory(model: str, fields: dict[str, int], tmp_path: Path) -> None:
    """The adapters, and the model with them merged."""
    layout = adapter_layout(model, fields, SOME.get(model, ()))
    weights, adapters = drawn(layout.base.tensors, 1), drawn(layout.tensors, 2)
    save_file({f"base_model.model.{name}": tensor for name, tensor in adapters.items()}, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": SCALE * RANK**0.5, "use_rslora": True, "lora_dropout": 0.1}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    merged = merge(weights, adapters)
    with PeftAdapters(tmp_path) as stored:
        reader = AddedAdapters(TensorReader(weights), stored)
        for rank in range(layout.num_ranks):
            buffers = {name: torch.full(shape, torch.nan) for name, shape in layout.local_shapes(rank).items()}
            load_adapters(tmp_path, layout, rank, buffers)
            for name, tensor in local_buffers(layout, rank, adapters).items():
                assert torch.equal(buffers[name], tensor), name
            served = {name: torch.full(shape, torch.nan) for name, shape in layout.base.local_shapes(rank).items()}
            fill(SingleHolderLayout(layout.base.tensors, layout.num_ranks), reader, layout.base, rank, served)
            for name, tensor in local_buffers(layout.base, rank, merged).items():
                torch.testing.assert_close(served[name], tensor, rtol=1e-5, atol=1e-5)


def test_adapters_that_are_not_numbers_are_refused(tmp_path: Path) -> None:
    layout = adapter_layout("dense", {}, ("q_proj",))
    adapters = drawn(layout.tensors, 2)
    adapters["model.layers.1.self_attn.q_proj.lora_B.weight"][0, 1] = torch.nan
    save_file({f"base_model.model.{name}": tensor for name, tensor in adapters.items()}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": 1}))
    with pytest.raises(ValueError, match="some of its elements are not numbers"):
        load_adapters(tmp_path, layout, 0, {name: torch.empty(shape) for name, shape in layout.local_shapes(0).items()})


def test_a_fresh_lora_a_is_uniform_as_in_peft() -> None:
    values = fresh_lora_a(0, "x", (64, 400))
    assert values.abs().max() <= 1 / 20 and abs(float(values.std()) - 1 / 20 / 3**0.5) < 5e-4 and abs(float(values.mean())) < 1e-3


def test_a_target_that_the_model_does_not_have_is_named() -> None:
    with pytest.raises(ValueError, match="names gate; this model has q_proj, k_proj, v_proj, o_proj, gate_proj"):
        adapter_layout("dense", {}, ("q_proj", "gate"))
