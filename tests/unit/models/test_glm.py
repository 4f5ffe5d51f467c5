"""Published config.json of Kimi-K2, GLM-4.5 and GLM-4.7-Flash, and what is refused in them; tensors against transformers'."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Glm4MoeConfig, Glm4MoeLiteConfig

from megatron_dapo.models.blocks import GroupedRouting, LatentAttention, Yarn
from megatron_dapo.models.config_json import parse_architecture
from megatron_dapo.proof.oracle import stored_tensors
from tests.unit.models.test_deepseek import PUBLISHED as DEEPSEEK
from tests.unit.models.test_deepseek import YARN

KIMI: dict[str, Any] = {
    **DEEPSEEK,
    "model_type": "kimi_k2",
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": {**YARN, "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}
_COMMON: dict[str, Any] = {
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "n_group": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_cache": True,
}
GLM: dict[str, Any] = {  # GLM-4.5's and 4.6's, but for their context
    **_COMMON,
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "first_k_dense_replace": 3,
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "max_position_embeddings": 131072,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 92,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.5,
    "routed_scaling_factor": 2.5,
    "use_qk_norm": True,
    "vocab_size": 151552,
}
FLASH: dict[str, Any] = {
    **_COMMON,
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "model_type": "glm4_moe_lite",
    "moe_intermediate_size": 1536,
    "n_routed_experts": 64,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "partial_rotary_factor": 1.0,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "routed_scaling_factor": 1.8,
    "topk_method": "noaux_tc",
    "v_head_dim": 256,
    "vocab_size": 154880,
}


def test_kimi_k2_is_a_deepseek_v3_of_one_group() -> None:
    kimi = parse_architecture(KIMI)
    assert kimi.experts is not None and kimi.experts.routing == GroupedRouting(1, 1, 2.827)
    assert kimi.latent == LatentAttention(1536, 512, 128, 64, 128, Yarn(32, 4096, 1, 1, 1, 1))
    assert replace(kimi, model_type="deepseek_v3") == parse_architecture({**KIMI, "model_type": "deepseek_v3"})
    assert kimi.class_name == "DeepseekV3ForCausalLM" and round(kimi.num_parameters / 1e9) == 1026


def test_the_published_configs_of_glm() -> None:
    glm, flash = parse_architecture(GLM), parse_architecture(FLASH)
    assert (glm.qkv_bias, glm.qk_norm, glm.rotary_dim, glm.head_dim) == (True, True, 64, 128)
    assert flash.latent == LatentAttention(768, 512, 192, 64, 256, None) and flash.head_dim == 256
    for one, first in ((glm, 3), (flash, 1)):
        assert one.experts is not None and one.experts.layers == frozenset(range(first, one.num_layers))
        assert one.experts.routing == GroupedRouting(1, 1, 2.5 if one is glm else 1.8)
        assert one.is_carried(f"model.layers.{one.num_layers}.eh_proj.weight")
        bias = f"model.layers.{first}.mlp.gate.e_score_correction_bias"
        assert [name for name in one.layer_shapes(first) if one.is_float32(name)] == [bias]
    assert (round(glm.num_parameters / 1e9), round(flash.num_parameters / 1e9)) == (353, 30)


@pytest.mark.parametrize(
    ("config_class", "published", "changes"),
    [
        (Glm4MoeConfig, GLM, {}),
        (Glm4MoeConfig, GLM, {"use_qk_norm": False, "attention_bias": False}),
        (Glm4MoeLiteConfig, FLASH, {}),
        (Glm4MoeLiteConfig, FLASH, {"q_lora_rank": None}),
    ],
)
def test_tensors_are_those_of_transformers(config_class: Any, published: dict[str, Any], changes: dict[str, Any]) -> None:
    sizes = {"num_hidden_layers": 4, "n_routed_experts": 16, "vocab_size": 128}
    config = {**published, **sizes, **changes}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_class(**config))
    want = {name: tuple(tensor.shape) for name, tensor in stored_tensors(model.state_dict()).items()}
    assert parse_architecture(config).shapes() == want
    # The config that transformers writes gives the same.
    assert parse_architecture(model.config.to_dict()) == parse_architecture(config)


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({**GLM, "use_qk_norm": None}, "use_qk_norm is missing"),
        ({**GLM, "attention_bias": None}, "attention_bias = None is not supported"),
        ({**GLM, "use_qk_norm": 1}, "use_qk_norm = 1 must be true or false"),
        ({**GLM, "partial_rotary_factor": 0.51}, "rotates 65 dims"),
        ({**GLM, "scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported"),
        ({**FLASH, "partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported, only 1.0"),
        ({**FLASH, "mlp_layer_types": ["sparse"] * 47}, "mlp_layer_types and first_k_dense_replace 1 disagree"),
        ({**FLASH, "first_k_dense_replace": None}, "first_k_dense_replace is missing"),
        ({**FLASH, "attention_bias": True}, "attention_bias = True is not supported"),
        ({**FLASH, "index_topk": 2048}, "unknown field index_topk = 2048"),
        ({**FLASH, "model_type": "glm_moe_dsa"}, "'glm_moe_dsa' is not supported: its attention reads only the tokens that an indexer"),
    ],
)
def test_what_would_change_the_math_is_refused(config: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error) as caught:
        parse_architecture(config)
    assert "\n" not in str(caught.value)
