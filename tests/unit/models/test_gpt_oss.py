"""gpt-oss's published config.json, and what is refused in it; its experts, stored in MXFP4 or not, against transformers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatron_dapo.checkpoints.export import export_stored_model
from megatron_dapo.checkpoints.formats.huggingface import HFCheckpoint
from megatron_dapo.checkpoints.formats.stacked_experts import dequantized
from megatron_dapo.checkpoints.layouts.sglang import sglang_layout
from megatron_dapo.config import config_from_dict
from megatron_dapo.config.layout_rules import missing_targets, uncut_biases
from megatron_dapo.megatron.rotary import attention_scale, inverse_frequencies
from megatron_dapo.models.blocks import LocalAttention, MixtureOfExperts, Yarn
from megatron_dapo.models.config_json import parse_architecture, read_architecture
from megatron_dapo.proof.oracle import stored_tensors
from megatron_dapo.reshard.slices import Slice
from megatron_dapo.trainer.start_engines import served_architecture

YARN = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "rope_type": "yarn",
    "truncate": False,
}
PUBLISHED: dict[str, Any] = {  # openai/gpt-oss-20b's
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": YARN,
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
    "vocab_size": 201088,
}
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "layer_types": PUBLISHED["layer_types"][:2],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "experts_per_token": 2,
    "vocab_size": 128,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
EXPERTS = "model.layers.1.mlp.experts."


def test_the_published_config() -> None:
    architecture = parse_architecture(PUBLISHED)
    assert architecture.rope_scaling == Yarn(32, 4096, 32, 1, truncate=False)
    assert architecture.local == LocalAttention(frozenset(range(0, 24, 2)), 128, None)
    everywhere = frozenset(range(24))
    assert architecture.experts == MixtureOfExperts(32, 4, 2880, True, everywhere, softmax_of_chosen=True)
    assert architecture.num_parameters == 20_914_757_184  # "21B"


def test_tensors_are_those_of_transformers() -> None:
    config = {name: value for name, value in {**PUBLISHED, **SIZES}.items() if name != "quantization_config"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(GptOssConfig(**config))
    want = {name: tuple(tensor.shape) for name, tensor in stored_tensors(model.state_dict()).items()}
    assert parse_architecture(config).shapes() == parse_architecture(model.config.to_dict()).shapes() == want


def test_rotary_angles_are_those_of_transformers() -> None:
    architecture, config = parse_architecture(PUBLISHED), GptOssConfig(**{**PUBLISHED, "quantization_config": None})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(GptOssConfig(**{**config.to_dict(), **SIZES, "head_dim": 64}))
    theirs = type(model.model.rotary_emb)(config)
    ours = inverse_frequencies(64, architecture.rope_theta, architecture.rope_scaling)
    torch.testing.assert_close(ours, theirs.inv_freq, rtol=1e-6, atol=0)
    # Queries and keys have the factor once each.
    assert attention_scale(architecture) == pytest.approx(64**-0.5 * theirs.attention_scaling**2, rel=1e-12)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"swiglu_limit": 5.0}, "swiglu_limit = 5.0 is not supported, only 7.0"),
        ({"swiglu_limit": None}, "swiglu_limit = None is not supported"),
        ({"attention_bias": False}, "attention_bias = False is not supported, only True"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings = True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quant_method = 'fp8' is not supported, only 'mxfp4'"),
        ({"attention_sinks": 4}, "unknown field attention_sinks = 4 may change the model"),
        ({"experts_per_token": 2}, "num_experts_per_tok is 4, experts_per_token is 2; keep one"),
        ({"num_experts": 16}, "num_local_experts is 32, num_experts is 16; keep one"),
        ({"num_experts_per_tok": 64, "experts_per_token": 64}, "num_experts_per_tok 64 is more than num_local_experts 32"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ({"layer_types": ["chunked_attention"] * 24}, "layer_types has 24 entries of .'chunked_attention'."),
        ({"rope_scaling": {**YARN, "mscale": 1.0}}, "rope type 'yarn' with .*mscale.* is not supported"),
        ({"rope_scaling": {**YARN, "truncate": "no"}}, "truncate = 'no' must be true or false"),
        ({"sliding_window": None}, "sliding_window is missing"),
    ],
)
def test_what_would_change_the_math_is_refused(changes: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error) as refusal:
        parse_architecture({**PUBLISHED, **changes})
    assert "\n" not in str(refusal.value)


def test_settings_that_cannot_compute_it_are_refused_in_one_line_each() -> None:
    def refusals(**sections: Any) -> list[str]:
        model = {"path": "/m", **sections.pop("model", {})}
        config = config_from_dict({"model": model, "data": {"train_paths": ["/t"]}, **sections})
        return [str(one) for one in uncut_biases(config, parse_architecture(PUBLISHED), "parallel")]

    fits = {"tp_size": 2, "ep_size": 2, "etp_size": 1, "sequence_parallel": True}
    assert refusals(parallel=fits) == []
    [cut] = refusals(parallel={**fits, "etp_size": 0})
    assert "experts with biases cannot be cut over 2 ranks" in cut and "parallel.etp_size = 1" in cut
    [flash] = refusals(model={"attention_implementation": "flash"})
    assert "torch's flash attention has no sinks" in flash
    [served] = refusals(sglang={"quantization": "fp8"})
    assert "its experts are not served in FP8" in served


def test_adapters_of_its_experts_are_refused_in_one_line() -> None:
    lora = {"rank": 8, "targets": ["o_proj", "up_proj"]}
    config = config_from_dict({"model": {"path": "/m", "lora": lora}, "data": {"train_paths": ["/t"]}})
    [violation] = missing_targets(config, parse_architecture(PUBLISHED))
    assert "names up_proj; this model has q_proj, k_proj, v_proj, o_proj" in str(violation)


def test_engines_that_cannot_serve_it_are_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    with pytest.raises(ValueError, match="cannot serve a gpt_oss on a CPU: its attention there has no sinks"):
        served_architecture(tmp_path, "cpu")
    architecture = served_architecture(tmp_path, "cuda")
    with pytest.raises(ValueError, match="each rank all experts of a gpt_oss .* set sglang.ep_size = 1"):
        sglang_layout(architecture, 4, torch.bfloat16, expert_parallel=2)


# ---- experts in MXFP4


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """A directory as it is published: experts of 4 bits, with the smallest and the largest exponents."""
    config = {**PUBLISHED, **SIZES}
    model = GptOssForCausalLM(GptOssConfig(**{**config, "quantization_config": None})).bfloat16()
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generator = torch.Generator().manual_seed(3)
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        experts, columns, rows = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(90, 160, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
        scales.view(-1)[:2] = torch.tensor([1, 250])
        tensors |= {name + "_blocks": blocks, name + "_scales": scales}
    directory = tmp_path / "packed"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def unpacked(directory: Path) -> dict[str, torch.Tensor]:
    """The tensors as transformers dequantizes them, under the names of its model."""
    tensors = load_file(directory / "model.safetensors")
    for blocks in [name for name in tensors if name.endswith("_blocks")]:
        name = blocks.removesuffix("_blocks")
        tensors[name] = convert_moe_packed_tensors(tensors.pop(blocks), tensors.pop(name + "_scales"))
    return tensors


def test_every_code_is_what_transformers_makes_of_it() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(254, 1, 1)
    exponents = torch.arange(254, dtype=torch.uint8)[:, None].repeat(1, 16)
    want = convert_moe_packed_tensors(codes[None], exponents[None])[0].T
    assert torch.equal(dequantized(codes, exponents), want)


def test_a_published_directory_is_dequantized_as_transformers_does(packed: Path) -> None:
    architecture, want = read_architecture(packed), stored_tensors(unpacked(packed))
    draw = random.Random(5)
    with HFCheckpoint(packed) as stored:
        stored.check(architecture)
        assert stored.num_dequantized == 2 * 2 * 3
        for name, tensor in want.items():
            assert torch.equal(stored.read_tensor(name), tensor), name
            if tensor.dim() == 2:
                for _ in range(4):
                    start = tuple(draw.randrange(size) for size in tensor.shape)
                    shape = tuple(draw.randint(1, size - at) for at, size in zip(start, tensor.shape))
                    out = torch.empty(shape)
                    stored._read(name, out, Slice(start, shape))
                    part = tensor[start[0] : start[0] + shape[0], start[1] : start[1] + shape[1]]
                    assert torch.equal(out, part.float()), (name, start, shape)


def test_an_export_is_unquantized_and_what_transformers_loads(packed: Path, tmp_path: Path) -> None:
    with HFCheckpoint(packed) as stored:
        export_stored_model(tmp_path / "export", stored, packed, shard_bytes=60_000)
    config = json.loads((tmp_path / "export/config.json").read_text())
    assert "quantization_config" not in config
    assert config == {name: value for name, value in {**PUBLISHED, **SIZES}.items() if name != "quantization_config"}
    model, want = GptOssForCausalLM.from_pretrained(tmp_path / "export", dtype="bfloat16"), unpacked(packed)
    assert {name: parameter.shape for name, parameter in model.named_parameters()} == {n: t.shape for n, t in want.items()}
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.to(want[name].dtype), want[name]), name


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda tensors: tensors.pop(EXPERTS + "down_proj_scales"), "its scales down_proj_scales are missing"),
        (
            lambda tensors: tensors.update({EXPERTS + "down_proj_scales": torch.zeros(3, 64, 2, dtype=torch.uint8)}),
            r"its scales down_proj_scales are \(3, 64, 2\) torch.uint8, uint8 \(3, 64, 3\) is needed",
        ),
        (
            lambda tensors: tensors.update({EXPERTS + "down_proj_blocks": torch.zeros(3, 64, 3, 8, dtype=torch.uint8)}),
            r"down_proj_blocks \(3, 64, 3, 8\) torch.uint8 is not MXFP4",
        ),
        (lambda tensors: tensors.pop(EXPERTS + "gate_up_proj_blocks"), "3 missing.*1 unknown: .*gate_up_proj_scales"),
        (lambda tensors: tensors.pop(EXPERTS + "down_proj_bias"), "3 missing: .*mlp.experts.0.down_proj_bias"),
        (lambda tensors: tensors.pop("model.layers.0.self_attn.sinks"), "1 missing: model.layers.0.self_attn.sinks"),
    ],
)
def test_a_damaged_directory_is_refused_in_one_line(packed: Path, change: Any, error: str) -> None:
    tensors = load_file(packed / "model.safetensors")
    change(tensors)
    save_file(tensors, packed / "model.safetensors")
    with pytest.raises(ValueError, match=error) as refusal, HFCheckpoint(packed) as stored:
        stored.check(read_architecture(packed))
    assert "\n" not in str(refusal.value)
