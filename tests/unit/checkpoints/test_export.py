"""Export in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from megatron_dapo.checkpoints.export import export_to_huggingface
from megatron_dapo.checkpoints.layouts.megatron import megatron_layout
from megatron_dapo.checkpoints.load import load_from_huggingface
from megatron_dapo.models.config_json import read_architecture
from megatron_dapo.parallel.layout import ParallelLayout


@pytest.fixture
def loaded(make_model_directory):
    directory = make_model_directory("qwen2", tied=True)
    layout = megatron_layout(read_architecture(directory), ParallelLayout(1), torch.float32)
    parameters = {name: torch.empty(shape) for name, shape in layout.local_shapes(0).items()}
    load_from_huggingface(directory, layout, 0, parameters)
    return directory, layout, parameters


def test_export_of_one_process(loaded, tmp_path):
    directory, layout, parameters = loaded
    report = export_to_huggingface(tmp_path / "out", directory, layout, parameters, None, batch_bytes=10_000)
    before, after = load_file(directory / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
    assert (report.num_tensors, report.num_bytes) == (50, 4 * layout.architecture.num_parameters)


def test_export_in_another_type(loaded, tmp_path):
    directory, layout, parameters = loaded
    export_to_huggingface(tmp_path / "out", directory, layout, parameters, None, dtype=torch.bfloat16)
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(after[n], t.bfloat16()) for n, t in load_file(directory / "model.safetensors").items())
    assert read_architecture(tmp_path / "out").dtype == "bfloat16"


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_an_fp32_tensor_of_a_bf16_model_keeps_its_type_and_bits(dtype: torch.dtype | None, tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 64}
    latent = {"q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    config = DeepseekV3Config(**sizes, **latent, **experts, num_attention_heads=4, num_key_value_heads=4)
    model = DeepseekV3ForCausalLM(config).bfloat16()
    gate = model.model.layers[1].mlp.gate
    gate.e_score_correction_bias = torch.rand(4)  # not numbers of bf16
    model.save_pretrained(tmp_path / "in")
    layout = megatron_layout(read_architecture(tmp_path / "in"), ParallelLayout(1), torch.bfloat16)
    parameters = {name: torch.empty(spec.shape, dtype=spec.dtype) for name, spec in layout.local_specs(0).items()}
    load_from_huggingface(tmp_path / "in", layout, 0, parameters)
    export_to_huggingface(tmp_path / "out", tmp_path / "in", layout, parameters, None, dtype=dtype)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("in", "out"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    wide = [name for name, tensor in after.items() if tensor.dtype != torch.bfloat16]
    assert wide == ["model.layers.1.mlp.gate.e_score_correction_bias"] and after[wide[0]].dtype == torch.float32
