"""DeepSeek-V3 and real SGLang servers, which absorb the expansion of keys and values into queries and outputs: every version of
the weights arrives, and a DAPO run trains the policy that was sampled from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sglang_runs import UNTRAINED, add_tokenizer, finish
from sync_simulation import World
from synced_server import SyncedServer
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from megatron_dapo.engines.sglang.server import SglangServer
from megatron_dapo.models.config_json import read_architecture
from megatron_dapo.parallel.layout import ParallelLayout
from tests.spread_weights import spread_weights
from tools.prove_resume import write_recipe

pytestmark = pytest.mark.long  # test_sglang_layout.py and tests/distributed hold layout and log-probs without a server
SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "max_position_embeddings": 1024,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 256,
    },
    # Published, and read by SGLang.
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 1,
}
NEXT = "model.layers.4.eh_proj.weight"  # The layer after the last one predicts a further token.


def save_model(directory: Path, **fields: Any) -> Path:
    """A DeepSeek-V3 with random float32 weights far from uniform, and a tensor that is not trained."""
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**{**SIZES, **fields}, dtype="float32"))
    spread_weights(model)
    model.save_pretrained(directory)
    file = directory / "model.safetensors"
    save_file({**load_file(file), NEXT: torch.randn(64, 128)}, file, metadata={"format": "pt"})
    return directory


def test_every_version_arrives(server_factory: Callable[..., SglangServer], tmp_path: Path) -> None:
    """In SGLang's deterministic mode; test_families.py has the other."""
    directory = save_model(tmp_path / "model")
    server = server_factory(directory, random_weights=True, max_total_tokens=4096, seeded=True)
    layout = ParallelLayout(4, tensor=2, expert=2, expert_tensor=1, pipeline=2, sequence_parallel=True)
    synced = SyncedServer(
        server, directory, World(read_architecture(directory), layout, tensor_parallel=1, bucket_bytes=64 << 10)
    )
    syncs = synced.syncs()
    for version, scale in enumerate((1.0, 1.1), start=1):
        report = synced.run(syncs, version, scale)
        assert report.is_complete, report
        assert synced.gap(scale) < 1e-5


def test_a_dapo_run_trains_what_it_samples(engine_python: Path, tmp_path: Path) -> None:
    """Mean |d log-prob| between the server and the trainer at every step; the export is a model of the same names."""
    model, run = add_tokenizer(save_model, tmp_path / "model"), tmp_path / "run"
    settings = (f'model.path="{model}"', *UNTRAINED)
    finish(write_recipe(tmp_path), run, engine_python, *settings, layout="pp2")
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    gaps = [step["mismatch/abs_logprob_diff_mean"] for step in steps]
    assert len(gaps) == 3 and max(gaps) < 1e-4, gaps
    assert all(step["actor/grad_norm"] > 0 for step in steps)
    before, after = (load_file(path / "model.safetensors") for path in (model, run / "huggingface"))
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert before.keys() == after.keys() and same == {n for n in before if n == NEXT or n.endswith("correction_bias")}
