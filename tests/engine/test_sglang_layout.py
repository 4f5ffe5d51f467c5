"""The engine's layout against SGLang's own model classes and weight loaders: names, shapes and every element; and the KV cache
that the plan of memory computes against SGLang's own sizing. One process of the engine's environment computes both."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from megatron_dapo.checkpoints.formats.huggingface import HFCheckpoint
from megatron_dapo.checkpoints.layouts.sglang import sglang_layout
from megatron_dapo.config import config_from_dict
from megatron_dapo.models.config_json import read_architecture
from megatron_dapo.plan.cluster import Cluster
from megatron_dapo.plan.memory import EngineMemory, engine_memory, free_at_start
from megatron_dapo.reshard.layout import SingleHolderLayout
from megatron_dapo.reshard.planner import plan
from tests.reshard_oracles import execute_in_memory
from tests.unit.config.architectures import DENSE, GEMMA3_1B, QWEN_7B, QWEN_14B, QWEN_32B, write_model
from tests.unit.config.architectures import EXPERTS as SPARSE
from tests.unit.plan.models import DEEPSEEK_V3, QWEN3_NEXT_80B

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, "sglang.srt.models.llama"),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, "sglang.srt.models.qwen2"),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, "sglang.srt.models.qwen3"),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, "sglang.srt.models.qwen3_moe"),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM, "sglang.srt.models.deepseek_v2"),
    "glm4_moe": (Glm4MoeConfig, Glm4MoeForCausalLM, "sglang.srt.models.glm4_moe"),
    "glm4_moe_lite": (Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM, "sglang.srt.models.glm4_moe_lite"),
    "gemma3_text": (Gemma3TextConfig, Gemma3ForCausalLM, "sglang.srt.models.gemma3_causal"),
    "gemma3": (
        lambda **text: Gemma3Config(text_config=text, vision_config=VISION, mm_tokens_per_image=4),
        Gemma3ForConditionalGeneration,
        "sglang.srt.models.gemma3_mm",
    ),
    "gpt_oss": (GptOssConfig, GptOssForCausalLM, "sglang.srt.models.gpt_oss"),
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM, "sglang.srt.models.qwen3_next"),
    "qwen3_5_text": (Qwen3_5TextConfig, Qwen3_5ForCausalLM, "sglang.srt.models.qwen3_5_text"),
    "qwen3_5_moe_text": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM, "sglang.srt.models.qwen3_5_text"),
}
DELTA = {  # 2 is the number of layers
    "layer_types": ["linear_attention", "full_attention"],
    "full_attention_interval": 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
}
LATENT = {
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
GROUPED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
ONE_GROUP = {**GROUPED, "n_group": 1, "n_shared_experts": 1}
# On a CPU, SGLang knows latent attention only with it.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
# Fields of published configs that SGLang reads, and transformers does not know.
SGLANG_FIELDS = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
VISION = {
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
    "vision_use_head": False,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
# SGLang reads the last two, and transformers has them as constants or under other names.
BIASED = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "swiglu_limit": 7.0,
    "experts_per_token": 2,
}
SHARED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}
# name of a model -> family, tied, key-value heads, vocabulary
MODELS = {
    "llama": ("llama", False, 4, 301),
    "llama-tied": ("llama", True, 2, 128),
    "qwen2": ("qwen2", False, 2, 301),
    "qwen2-tied": ("qwen2", True, 1, 301),
    "qwen3": ("qwen3", False, 1, 150),
    "qwen3-tied": ("qwen3", True, 4, 301),
    "qwen3_moe": ("qwen3_moe", False, 2, 301),
    "deepseek_v3": ("deepseek_v3", False, 4, 301),
    "deepseek_v3-whole": ("deepseek_v3", False, 4, 150),
    "glm4_moe": ("glm4_moe", False, 2, 301),
    "glm4_moe_lite": ("glm4_moe_lite", False, 4, 301),
    "gpt_oss": ("gpt_oss", False, 2, 301),
    "gemma3_text": ("gemma3_text", True, 2, 301),
    "gemma3": ("gemma3", True, 1, 301),
    "qwen3_next": ("qwen3_next", False, 2, 301),
    "qwen3_5_text": ("qwen3_5_text", True, 2, 301),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", False, 1, 301),
}
LATENT_FAMILIES = ("deepseek_v3", "glm4_moe_lite")
DELTA_MODELS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
# tensor parallel, expert parallel, device: 4 exceeds most models' key-value heads, 3 divides no size and needs padding
SIZES = [(1, 1, "cuda"), (2, 1, "cuda"), (4, 1, "cuda"), (1, 1, "cpu"), (2, 1, "cpu"), (3, 1, "cpu"), (4, 1, "cpu")]
EXPERT_SIZES = [(4, 2, "cuda"), (2, 2, "cpu"), (4, 4, "cuda")]


def _cases() -> list[tuple[str, int, int, str]]:
    cases = [(model, *sizes) for model in MODELS for sizes in SIZES]
    cases += [(model, *sizes) for model in ("qwen3_moe", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "qwen3_next") for sizes in EXPERT_SIZES]
    # SGLang does not pad the heads of latent attention; those of gated delta nets are not padded here.
    return [case for case in cases if case[1] != 3 or not (MODELS[case[0]][0] in LATENT_FAMILIES or case[0] in DELTA_MODELS)]


def _save(directory: Path, model: str) -> None:
    family, tied, kv_heads, vocab_size = MODELS[model]
    config_class, model_class, _ = FAMILIES[family]
    is_gemma3, is_latent = family.startswith("gemma3"), family in LATENT_FAMILIES
    rope = YARN if is_latent else {"rope_type": "default", "rope_theta": 1000.0}
    config = config_class(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=4 if is_latent else 8,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        rope_parameters={"full_attention": rope, "sliding_attention": rope} if is_gemma3 else rope,
        **({"sliding_window_pattern": 2} if is_gemma3 else {}),
        **(EXPERTS if family in ("qwen3_moe", "qwen3_next") else {}),
        **(BIASED if family == "gpt_oss" else {}),
        **(DELTA if family in DELTA_MODELS else {}),
        **({"shared_expert_intermediate_size": 24} if family == "qwen3_next" else {}),
        **(SHARED if family == "qwen3_5_moe_text" else {}),
        **({**LATENT, "q_lora_rank": None if model.endswith("-whole") else 20} if is_latent else {}),
        **({**GROUPED, **SGLANG_FIELDS} if family == "deepseek_v3" else ONE_GROUP if family.startswith("glm4") else {}),
        **({"attention_bias": True, "use_qk_norm": True} if family == "glm4_moe" else {}),
    )
    torch.manual_seed(0)
    instance = model_class(config)
    for parameter in instance.parameters():
        torch.nn.init.normal_(parameter)
    instance.save_pretrained(directory)


CACHE_MODELS = {
    **{"7B": QWEN_7B, "14B": QWEN_14B, "32B": QWEN_32B, "tiny": DENSE, "experts": SPARSE},
    **{"latent": {**DEEPSEEK_V3, "num_hidden_layers": 4}, "delta": QWEN3_NEXT_80B, "local": GEMMA3_1B},
}
# model, ranks of a server, mem_fraction_static, colocated
CACHES = [
    ("7B", 1, 0.78, True),
    ("14B", 2, 0.78, True),
    ("32B", 4, 0.78, True),
    ("32B", 8, 0.78, True),
    ("32B", 4, 0.85, False),
    ("32B", 2, 0.6, True),
    ("7B", 8, 0.5, False),  # more ranks than key-value heads
    ("tiny", 1, 0.1, False),
    ("experts", 2, 0.1, False),
    ("latent", 8, 0.5, False),  # every rank caches the latent vectors whole
    ("delta", 4, 0.85, False),
    ("delta", 8, 0.7, True),
    ("local", 1, 0.5, False),  # SGLang caches Gemma 3's local layers whole
]


@pytest.fixture(scope="module")
def cache_cases(tmp_path_factory) -> list[tuple[dict[str, Any], EngineMemory]]:
    """SGLang's inputs for each of CACHES, and our result."""
    root, cluster, cases = tmp_path_factory.mktemp("caches"), Cluster(), []
    for name, tensor, fraction, is_colocated in CACHES:
        directory = write_model(root / name, CACHE_MODELS[name])
        placement = "colocated" if is_colocated else "disaggregated"
        config = config_from_dict(
            {
                "model": {"path": str(directory), "dtype": "bfloat16"},
                "data": {"train_paths": ["/t"]},
                "rollout": {"engine": "sglang"},
                "sglang": {"tp_size": tensor, "mem_fraction_static": fraction, "placement": placement},
            }
        )
        memory, free = engine_memory(config, read_architecture(directory), cluster), free_at_start(config, cluster)
        sizes = {"tensor_parallel": tensor, "fraction": fraction, "free_before": free, "free_after": free - memory.weights}
        cases.append(({"directory": str(directory), **sizes}, memory))
    return cases


@pytest.fixture(scope="module")
def loaded(tmp_path_factory, engine_python, repository, cache_cases):
    """(model, tp, ep, device) -> directory with SGLang's parameters on each rank."""
    root = tmp_path_factory.mktemp("sglang_layout")
    for model in MODELS:
        _save(root / model, model)
    cases = {case: root / f"out{number}" for number, case in enumerate(_cases())}
    models = [
        {
            "directory": str(root / model),
            "model_module": FAMILIES[MODELS[model][0]][2],
            "tensor_parallel": tp,
            "expert_parallel": ep,
            "device": device,
            "output": str(output),
        }
        for (model, tp, ep, device), output in cases.items()
    ]
    (root / "cases.json").write_text(json.dumps({"models": models, "caches": [case for case, _ in cache_cases]}))
    result = subprocess.run(
        [str(engine_python), str(Path(__file__).with_name("sglang_probe.py")), str(root / "cases.json")],
        env={
            "PYTHONPATH": str(repository),
            "OMP_NUM_THREADS": "1",
            "SGLANG_USE_CPU_ENGINE": "1",
            "HF_HUB_OFFLINE": "1",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return root, cases


@pytest.mark.parametrize("case", _cases(), ids=lambda case: "-".join(map(str, case)))
def test_layout_matches_what_sglang_loads(case, loaded):
    root, outputs = loaded
    model, tp, ep, device = case
    architecture = read_architecture(root / model)
    engine = sglang_layout(architecture, tp, torch.float32, expert_parallel=ep, device=device)
    with HFCheckpoint(root / model) as checkpoint:
        stored = {name: checkpoint.read_tensor(name) for name in engine.tensors}
    mine = [
        {name: torch.zeros(spec.shape, dtype=spec.dtype) for name, spec in engine.local_specs(rank).items()}
        for rank in range(tp)
    ]
    execute_in_memory(plan(SingleHolderLayout(engine.tensors), engine), [stored], mine)
    for rank in range(tp):
        loaded_here = load_file(outputs[case] / f"{rank}.safetensors")
        theirs = {name: tensor for name, tensor in loaded_here.items() if not architecture.is_carried(name)}
        assert {n: t.shape for n, t in mine[rank].items()} == {n: t.shape for n, t in theirs.items()}
        assert all(torch.equal(mine[rank][name], tensor) for name, tensor in theirs.items())


def test_a_cache_has_the_tokens_that_sglang_computes(loaded, cache_cases):
    theirs = json.loads((loaded[0] / "caches.json").read_text())
    for (case, memory), (bytes_per_token, num_tokens, with_states) in zip(cache_cases, theirs, strict=True):
        assert memory.bytes_per_token == bytes_per_token, case
        assert memory.kv_tokens == pytest.approx(num_tokens, abs=1), case  # SGLang computes in GiB
        assert (memory.held_by_states or 0) == with_states, case
