"""DeepSeek-V3's published config.json, and what is refused in it; every layer's tensors against transformers'."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config

from megatron_dapo.models.blocks import GroupedRouting, LatentAttention, Yarn
from megatron_dapo.models.config_json import parse_architecture
from megatron_dapo.models.placement import EngineCut
from megatron_dapo.proof.oracle import stored_tensors

YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
# DeepSeek-V3's and R1's, without quantization_config: FP8 checkpoints are dequantized before.
PUBLISHED: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": YARN,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def test_the_published_config() -> None:
    architecture = parse_architecture(PUBLISHED)
    assert architecture.latent == LatentAttention(1536, 512, 128, 64, 128, Yarn(40, 4096, 32, 1, 1, 1))
    assert (architecture.head_dim, architecture.rope_theta, architecture.rope_scaling) == (192, 10_000, None)
    experts = architecture.experts
    assert experts is not None and experts.layers == frozenset(range(3, 61))
    assert experts.routing == GroupedRouting(8, 4, 2.5) and experts.shared_intermediate_size == 2048
    attention, _ = architecture.parts(3)
    assert attention.cached_per_token(EngineCut(8)) == 576  # section 2.1.1 of the paper: d_c + d_h^R


@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": None}, {"first_k_dense_replace": 4}, {"n_shared_experts": 3}])
def test_tensors_are_those_of_transformers(changes: dict[str, Any]) -> None:
    sizes = {"num_hidden_layers": 4, "n_routed_experts": 16, "vocab_size": 128}
    config = {name: value for name, value in {**PUBLISHED, **sizes, **changes}.items() if name != "auto_map"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(DeepseekV3Config(**config))
    want = {name: tuple(tensor.shape) for name, tensor in stored_tensors(model.state_dict()).items()}
    assert parse_architecture(config).shapes() == want
    # transformers writes the rotary part's size as head_dim.
    assert parse_architecture(model.config.to_dict()).shapes() == want


def test_layers_that_predict_further_tokens_are_carried() -> None:
    architecture = parse_architecture(PUBLISHED)
    assert architecture.is_carried("model.layers.61.eh_proj.weight")
    assert not architecture.is_carried("model.layers.60.self_attn.o_proj.weight")
    assert not architecture.is_carried("model.norm.weight")
    assert [name for name in architecture.layer_shapes(3) if architecture.is_float32(name)] == [
        "model.layers.3.mlp.gate.e_score_correction_bias"
    ]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps = 1e-05 is not supported, only 1e-06"),
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported, only 'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method = 'greedy' is not supported, only 'noaux_tc'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2 is not supported, only 1"),
        ({"rope_interleave": False}, "rope_interleave = False is not supported, only True"),
        ({"attention_bias": True}, "attention_bias = True is not supported"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings = True is not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config = .* is not supported"),
        ({"index_topk": 2048}, "unknown field index_topk = 2048 may change the model"),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8; latent attention has 128"),
        ({"kv_lora_rank": None}, "kv_lora_rank is missing"),
        ({"q_lora_rank": 0}, "q_lora_rank = 0 must be a positive integer"),
        ({"head_dim": 128}, r"head_dim is 128, but qk_nope_head_dim and qk_rope_head_dim are 128 and 64"),
        ({"n_group": 7}, "n_group 7, of which topk_group 4 are kept, cannot give 8 of 256"),
        ({"n_group": 256}, "n_group 256, .* two experts or more"),
        ({"topk_group": 9}, "topk_group 9 are kept"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace = -1 must be a number of layers"),
        ({"rope_scaling": {**YARN, "mscale": None}}, "one of mscale and mscale_all_dim"),
        (
            {"rope_scaling": {**YARN, "attention_factor": 1.2}},
            "rope type 'yarn' with .*attention_factor.* is not supported",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type 'linear' .* is not supported"),
        (
            {"rope_scaling": {**YARN, "factor": 20}},
            "is 163840, but factor 20 x original_max_position_embeddings 4096 reach 81920",
        ),
    ],
)
def test_what_would_change_the_math_is_refused(changes: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        parse_architecture({**PUBLISHED, **changes})
