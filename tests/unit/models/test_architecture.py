"""config.json -> architecture: transformers is the oracle; every field that changes the math is used or refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import (
    Gemma3Config,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from megatron_dapo.models.blocks import LocalAttention, RopeScaling
from megatron_dapo.models.config_json import parse_architecture, read_architecture
from tests.unit.config.architectures import GEMMA3_1B, GEMMA3_4B, GEMMA3_270M

MODELS = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
# As transformers 4 wrote it for Qwen2.5-7B.
QWEN25 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
LLAMA3_SCALING = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


# As published for Qwen3-30B-A3B and Qwen3-235B-A22B.
QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_235B = {
    **QWEN3_30B,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 64,
    "num_hidden_layers": 94,
}


def _with(**fields) -> dict:
    return {**QWEN25, **fields}


def test_qwen25_of_transformers_4():
    architecture = parse_architecture(QWEN25)
    assert (architecture.head_dim, architecture.query_groups_ratio, architecture.rope_theta) == (128, 7, 1e6)
    assert architecture.qkv_bias and not architecture.qk_norm and architecture.rope_scaling is None
    assert architecture.dtype == "bfloat16"
    assert architecture.num_parameters == 7_615_616_512


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", MODELS)
def test_names_and_shapes_are_those_of_transformers(family, tied, tmp_path):
    config_class, model_class = MODELS[family]
    config = config_class(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=tied,
    )
    model = model_class(config)
    model.save_pretrained(tmp_path)
    architecture = read_architecture(tmp_path)
    assert architecture.shapes() == {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert architecture.aliases() == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})
    assert architecture.num_parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    "dense", [{}, {"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}, {"mlp_only_layers": [0, 1, 2]}]
)
def test_names_and_shapes_of_experts_are_those_that_transformers_stores(dense, tmp_path):
    config = Qwen3MoeConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=12,
        num_experts=6,
        num_experts_per_tok=2,
        norm_topk_prob=False,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        **dense,
    )
    model = Qwen3MoeForCausalLM(config)
    model.save_pretrained(tmp_path)
    architecture = read_architecture(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as stored:
        shapes = {name: tuple(stored.get_slice(name).get_shape()) for name in stored.keys()}  # noqa: SIM118 - no mapping
    assert architecture.shapes() == shapes
    assert architecture.num_parameters == sum(p.numel() for p in model.parameters())
    with_experts = [layer for layer in range(3) if hasattr(model.model.layers[layer].mlp, "experts")]
    assert [layer for layer in range(3) if architecture.has_experts(layer)] == with_experts
    assert architecture.head_dim == 4 and architecture.qk_norm and not architecture.qkv_bias
    if with_experts:
        experts = architecture.experts
        assert (experts.num_experts, experts.num_experts_per_token, experts.normalize) == (6, 2, False)


def test_the_published_config_of_smollm2_is_read():
    fields = {
        "_name_or_path": "HuggingFaceTB/SmolLM2-135M", "architectures": ["LlamaForCausalLM"], "attention_bias": False,
        "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576,
        "initializer_range": 0.041666666666666664, "intermediate_size": 1536, "is_llama_config": True,
        "max_position_embeddings": 8192, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 9,
        "num_hidden_layers": 30, "num_key_value_heads": 3, "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "use_cache": True,
        "vocab_size": 49152,
    }  # fmt: skip
    assert parse_architecture(fields).num_parameters == 134_515_008
    with pytest.raises(ValueError, match="rope_interleaved = True is not supported"):
        parse_architecture({**fields, "rope_interleaved": True})


def test_published_mixtures_of_experts():
    small, large = parse_architecture(QWEN3_30B), parse_architecture(QWEN3_235B)
    assert small.num_parameters == 30_532_122_624 and large.num_parameters == 235_093_634_560
    assert small.experts.normalize and small.experts.layers == frozenset(range(48)) and not small.has_dense_layers


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts": None}, "num_experts is missing"),
        ({"num_local_experts": 64}, r"num_experts and num_local_experts are \[64, 128\]"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok 129 is more than num_experts 128"),
        ({"norm_topk_prob": None}, "norm_topk_prob is missing"),
        ({"norm_topk_prob": 1}, "norm_topk_prob = 1 must be true or false"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step = 0"),
        ({"mlp_only_layers": [48]}, r"mlp_only_layers = \[48\].*0 to 47"),
        ({"shared_expert_intermediate_size": 512}, "shared_expert_intermediate_size = 512"),
        ({"n_group": 4}, "unknown field n_group"),
    ],
)
def test_problems_of_a_mixture_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        parse_architecture({**QWEN3_30B, **fields})


def test_a_dense_family_has_no_experts():
    with pytest.raises(ValueError, match="unknown field num_experts = 8"):
        parse_architecture(_with(num_experts=8))


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3_SCALING},
        {"rope_theta": None, "rope_scaling": None, "rope_parameters": {**LLAMA3_SCALING, "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_parameters": {**LLAMA3_SCALING, "rope_theta": 5e5}},
    ],
)
def test_rope_of_transformers_4_and_5(fields):
    architecture = parse_architecture(_with(**fields))
    assert architecture.rope_theta == 5e5
    assert architecture.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)


def test_linear_rope_with_the_old_key():
    architecture = parse_architecture(_with(rope_scaling={"type": "linear", "factor": 2.0}))
    assert architecture.rope_scaling == RopeScaling("linear", 2.0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"model_type": "mixtral"},
            "'mixtral' is not supported; supported are deepseek_v3, gemma3, gemma3_text, glm4_moe, ",
        ),
        ({"architectures": ["Qwen2ForSequenceClassification"]}, "Qwen2ForSequenceClassification"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'.*'silu'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"use_sliding_window": True}, "sliding_window = 131072"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            "'yarn' is not supported; supported are default, linear, llama3",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 4.0, "attention_factor": 2.0}}, "attention_factor"),
        ({"rope_scaling": {"type": "linear"}}, r"takes \['factor'\]"),
        ({"rope_theta": None}, "rope_theta is missing"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1.0}}, r"rope_theta is \[1.0, 1000000.0\]"),
        ({"rms_norm_eps": None}, "rms_norm_eps is missing"),
        ({"tie_word_embeddings": None}, "tie_word_embeddings is missing"),
        ({"hidden_act": None}, "hidden_act"),
        ({"logit_scale": 0.5}, "unknown field logit_scale = 0.5"),
        ({"num_key_value_heads": 3}, "28 is no multiple of num_key_value_heads 3"),
        ({"hidden_size": 3585}, "3585 is no multiple of num_attention_heads 28"),
        ({"vocab_size": "many"}, "vocab_size = 'many'"),
        ({"torch_dtype": "int8"}, "int8"),
        ({"model_type": "qwen3", "architectures": None}, "head_dim is missing"),
    ],
)
def test_unsupported_features_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        parse_architecture(_with(**fields))


@pytest.mark.parametrize(
    ("config", "num_parameters"), [(GEMMA3_270M, 268_098_176), (GEMMA3_1B, 999_885_952), (GEMMA3_4B, 3_880_263_168)]
)
def test_published_gemma_3(config, num_parameters):
    """The sizes that the 4B model's config leaves out are transformers' defaults; transformers 5 writes them out."""
    architecture = parse_architecture(config)
    assert architecture.num_parameters == num_parameters
    config_class = Gemma3Config if config is GEMMA3_4B else Gemma3TextConfig
    for use_diff in (True, False):
        written = json.loads(config_class(**config).to_json_string(use_diff=use_diff))
        assert parse_architecture(written) == architecture
    theirs = config_class(**config).get_text_config()
    local = {layer for layer, kind in enumerate(theirs.layer_types) if kind == "sliding_attention"}
    assert architecture.local == LocalAttention(frozenset(local), theirs.sliding_window, 10_000.0)
    assert architecture.attention_scale == 256**-0.5 and architecture.activation == "gelu_tanh"
    linear = RopeScaling("linear", 8.0) if config is GEMMA3_4B else None
    assert (architecture.rope_theta, architecture.rope_scaling) == (1_000_000.0, linear)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0 is not supported, only None"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ({"hidden_activation": "gelu"}, "hidden_activation = 'gelu' is not supported, only 'gelu_pytorch_tanh'"),
        ({"hidden_act": "silu"}, "hidden_act = 'silu' is not supported, only 'gelu_pytorch_tanh'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries.*num_hidden_layers 26"),
        ({"layer_types": ["chunked_attention"] * 26}, "layer_types has 26 entries of .'chunked_attention'"),
        ({"sliding_window": None}, "sliding_window is missing"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar = 0 must be a finite number above 0"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "rope_parameters has .'rope_theta'"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope_parameters scale sliding_attention layers",
        ),
        ({"architectures": ["Gemma3TextModel"]}, "Gemma3TextModel.*only .'Gemma3ForCausalLM'"),
        (
            {"model_type": "gemma2", "architectures": None},
            "'gemma2' is not supported; supported are deepseek_v3, gemma3, gemma3_text",
        ),
        ({"model_type": "gemma3n", "architectures": None}, "'gemma3n' is not supported"),
        ({"altup_num_inputs": 4}, "unknown field altup_num_inputs = 4"),
    ],
)
def test_unsupported_variants_of_gemma_3_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        parse_architecture({**GEMMA3_1B, **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text_config": None}, "a gemma3 needs an object text_config"),
        ({"text_config": {"model_type": "gemma3n_text"}}, "text_config of model_type gemma3_text"),
        ({"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}}, "keep one"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"audio_config": {"hidden_size": 4}}, "unknown field audio_config"),
    ],
)
def test_broken_configs_beside_a_vision_tower_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        parse_architecture({**GEMMA3_4B, **fields})


def test_a_window_of_a_family_without_the_switch_is_refused():
    config = {k: v for k, v in QWEN25.items() if k != "use_sliding_window"}
    with pytest.raises(ValueError, match="sliding_window = 131072"):
        parse_architecture(config)


def test_an_unset_unknown_field_is_neutral():
    assert parse_architecture(_with(trained_by=None, packed=False)).vocab_size == 152064


def test_directory_without_config(tmp_path: Path):
    with pytest.raises(ValueError, match="no config.json"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN25))
    assert read_architecture(tmp_path).model_type == "qwen2"


@pytest.mark.parametrize("content", ["[]", "5", "null", '"qwen2"', "[" * 100_000])
def test_a_config_that_is_no_object_is_refused(content, tmp_path):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config.json: (holds a \w+, not an object|not JSON)"):
        read_architecture(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan must be a finite number above 0"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps = '1e-6' must be a finite number"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps = -1e-06 must be"),
        ({"rope_theta": float("inf")}, "rope_theta = inf must be"),
        ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "factor = nan must be"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000 is more than 10000"),
        ({"vocab_size": 10**12}, "vocab_size = 1000000000000 is more than 2147483647"),
    ],
)
def test_numbers_no_model_can_have_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        parse_architecture(_with(**fields))


def test_too_many_experts_are_refused():
    with pytest.raises(ValueError, match="num_experts = 1000000000 is more than 10000"):
        parse_architecture({**QWEN3_30B, "num_experts": 10**9})


@pytest.mark.parametrize("config", [QWEN25, QWEN3_30B], ids=["dense", "experts"])
@pytest.mark.parametrize("value", [[], [[1]], {}, {"a": [1]}, "x", 1.5, 10**400, -1, True], ids=repr)
def test_a_value_of_any_type_gives_an_architecture_or_one_line(config, value):
    for field in (*config, "rope_parameters", "layer_types", "num_local_experts", "mlp_only_layers", "dtype"):
        try:
            parse_architecture({**config, field: value})
        except ValueError as error:
            assert str(error).startswith("config.json: ") and "\n" not in str(error), field


def test_attention_takes_as_many_operations_as_the_weights_at_its_parity():
    """Counted by torch over one forward pass of transformers' model with its plain attention."""
    from torch.utils.flop_counter import FlopCounterMode

    fields = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 2, "head_dim": 4}
    config = Qwen2Config(
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False, use_cache=False, **fields
    )
    model = Qwen2ForCausalLM._from_config(config, attn_implementation="eager")
    parity = parse_architecture({**config.to_dict(), "architectures": ["Qwen2ForCausalLM"]}).attention_parity
    found = {}
    for length in (parity, 2 * parity):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.zeros(1, length, dtype=torch.int64))
        operations = counter.get_flop_counts()["Global"]
        of_attention = operations[torch.ops.aten.bmm] / 2  # a causal kernel computes half of the scores
        found[length] = of_attention / (operations[torch.ops.aten.mm] + operations[torch.ops.aten.addmm])
    # Norms and biases are no products, but are counted with the weights; rotary angles are a product.
    assert found[parity] == pytest.approx(1.0, rel=0.03), found
    assert found[2 * parity] == pytest.approx(2 * found[parity], rel=0.01)
