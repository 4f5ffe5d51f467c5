"""Configs of Qwen3-Next and Qwen3.5: sizes against transformers' models, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Qwen3_5Config, Qwen3NextConfig

from megatron_dapo.checkpoints.layouts.megatron import megatron_layout
from megatron_dapo.checkpoints.layouts.sglang import sglang_layout
from megatron_dapo.models.architecture import ModelArchitecture, tensor_name
from megatron_dapo.models.config_json import parse_architecture
from megatron_dapo.parallel.layout import ParallelLayout

# As published for Qwen3-Next-80B-A3B.
QWEN3_NEXT: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
TEXT: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3584,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 6,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 8,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "tie_word_embeddings": True,
    "use_cache": True,
    "vocab_size": 248320,
}
QWEN3_5: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "image_token_id": 248056,
    "model_type": "qwen3_5",
    "text_config": TEXT,
    "tie_word_embeddings": True,
    "video_token_id": 248057,
    "vision_config": {
        "depth": 12,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_heads": 12,
        "num_position_embeddings": 2304,
        "out_hidden_size": 1024,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
    "vision_end_token_id": 248054,
    "vision_start_token_id": 248053,
}


def test_a_qwen3_next_has_the_parameters_of_transformers_model() -> None:
    ours = parse_architecture(QWEN3_NEXT)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(Qwen3NextConfig(**QWEN3_NEXT))
    assert ours.num_parameters == sum(parameter.numel() for parameter in theirs.parameters())
    assert ours.delta is not None and 3 not in ours.delta.layers and len(ours.delta.layers) == 36
    assert ours.rotary_dim == 64 and ours.experts is not None and ours.experts.gated_shared_size == 512


@pytest.fixture(scope="module")
def vision_model() -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(Qwen3_5Config(**QWEN3_5))


def test_a_qwen3_5_has_the_parameters_of_transformers_model_and_carries_its_tower(vision_model: Any) -> None:
    ours = parse_architecture(QWEN3_5)
    shapes = {tensor_name(name): tuple(parameter.shape) for name, parameter in vision_model.named_parameters()}
    carried = {name for name in shapes if ours.is_carried(name)}
    assert {name: shape for name, shape in shapes.items() if name not in carried} == ours.shapes()
    tower = sum(torch.Size(shapes[name]).numel() for name in carried)
    assert carried and ours.vision_parameters == tower
    assert ours.is_carried("mtp.layers.0.self_attn.q_proj.weight")


def test_the_language_model_of_a_qwen3_5_is_the_text_model() -> None:
    fields = vars(parse_architecture(TEXT))
    language_model = {**vars(parse_architecture(QWEN3_5)), "model_type": "qwen3_5_text", "vision_parameters": 0}
    assert language_model == fields and isinstance(parse_architecture(TEXT), ModelArchitecture)


def test_only_the_decay_is_fp32_in_an_engine_and_a_trainer_of_another_type() -> None:
    architecture = parse_architecture(TEXT)
    for layout in (sglang_layout(architecture, 2, torch.bfloat16), megatron_layout(architecture, ParallelLayout(2), torch.bfloat16)):
        wide = {name for name, spec in layout.tensors.items() if spec.dtype == torch.float32}
        assert wide == {f"model.layers.{layer}.linear_attn.A_log" for layer in range(24) if layer % 4 != 3}
        held = [spec.dtype for name, spec in layout.local_specs(1).items() if name.endswith("A_log")]
        assert held == [torch.float32] * 18


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"full_attention_interval": 6}, "layer_types and full_attention_interval 6 disagree"),
        ({"layer_types": ["linear_attention"] * 24, "full_attention_interval": None}, "layer_types has no 'full_attention' in 24 layers"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types has 3 entries for num_hidden_layers 24"),
        ({"layer_types": ["sliding_attention"] * 24}, "layer_types holds"),
        ({"linear_num_value_heads": 24}, "linear_num_value_heads 24 is no multiple of linear_num_key_heads 16"),
        ({"linear_conv_kernel_dim": None}, "linear_conv_kernel_dim is missing"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, in rope_parameters 0.25; keep one"),
        ({"attn_output_gate": False}, "attn_output_gate = False is not supported, only True"),
        ({"linear_gate": True}, "unknown field linear_gate = True"),
        (
            {"rope_parameters": {"rope_theta": 1e7, "rope_type": "default", "partial_rotary_factor": 67 / 256}},
            "rotates 67 dims",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e7, "rope_type": "default", "partial_rotary_factor": 1.5}},
            "rotates 384 dims",
        ),
    ],
)
def test_variants_that_no_layer_computes_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_architecture({**TEXT, **changed})
