"""Gemma 3 and real SGLang servers: every version of the weights arrives, with and without a vision tower next to the language
model, and a DAPO run trains the policy that was sampled from."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sglang_runs import UNTRAINED, add_tokenizer, finish
from sync_simulation import Tensors, World
from synced_server import TOKENS, SyncedServer, transformers_logprobs, weights_of
from transformers import AutoModelForImageTextToText, Gemma3Config, Gemma3ForCausalLM, Gemma3TextConfig

from megatron_dapo.checkpoints.formats.huggingface import HFCheckpoint
from megatron_dapo.engines.sglang.server import SglangServer
from megatron_dapo.models.config_json import read_architecture
from megatron_dapo.models.families.gemma3 import VISION_TENSORS
from megatron_dapo.parallel.layout import ParallelLayout
from tools.prove_resume import write_recipe

pytestmark = pytest.mark.long  # test_sglang_layout.py and tests/distributed hold layout and log-probs without a server
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 20,
    "max_position_embeddings": 1024,
    "sliding_window": 6,  # shorter than the prompts
    "sliding_window_pattern": 3,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    },
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
    "vision_use_head": False,
    "model_type": "siglip_vision_model",
}


def save_model(directory: Path, has_vision: bool, **fields: Any) -> Path:
    """A Gemma 3 with random float32 weights far from uniform."""
    text = {"vocab_size": 300, **SIZES, **fields}
    torch.manual_seed(0)
    if has_vision:
        config = Gemma3Config(text_config=text, vision_config=VISION, mm_tokens_per_image=4, dtype="float32")
        model = AutoModelForImageTextToText.from_config(config)
    else:
        model = Gemma3ForCausalLM(Gemma3TextConfig(**text, dtype="float32"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0) if parameter.dim() > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return directory


@dataclass
class Gemma3Server(SyncedServer):
    """A server of a Gemma 3; the trainer has the language model, a vision tower stays as it is in the directory."""

    has_vision: bool

    def sources(self, scale: float) -> list[Tensors]:
        architecture = self.world.source.architecture
        with HFCheckpoint(self.directory) as stored:
            weights = {name: stored.read_tensor(name) * scale for name in architecture.shapes()}
        return [self.world.shards(weights, rank) for rank in range(self.world.size)]

    def expected(self, scale: float) -> list[float]:
        model_class = AutoModelForImageTextToText if self.has_vision else Gemma3ForCausalLM
        return transformers_logprobs(self.directory, weights_of(self.directory, scale), TOKENS, model_class)


@pytest.mark.parametrize(("has_vision", "tensor_parallel"), [(False, 2), (True, 1)])
def test_every_version_arrives(
    server_factory: Callable[..., SglangServer], tmp_path: Path, has_vision: bool, tensor_parallel: int
) -> None:
    directory = save_model(tmp_path / "model", has_vision)
    server = server_factory(directory, tensor_parallel=tensor_parallel, random_weights=True, max_total_tokens=4096)
    layout = ParallelLayout(4, tensor=2, pipeline=2)
    world = World(read_architecture(directory), layout, tensor_parallel=tensor_parallel, bucket_bytes=64 << 10)
    synced = Gemma3Server(server, directory, world, has_vision)
    syncs = synced.syncs()
    for version, scale in enumerate((1.0, 1.1), start=1):
        report = synced.run(syncs, version, scale)
        assert report.is_complete, report
        assert synced.gap(scale) < 1e-5


@pytest.mark.parametrize("has_vision", [False, True])
def test_a_dapo_run_trains_what_it_samples(engine_python: Path, tmp_path: Path, has_vision: bool) -> None:
    """Mean |d log-prob| between the server and the trainer at every step; the export is a model of the same names."""
    model, run = add_tokenizer(save_model, tmp_path / "model", has_vision=has_vision), tmp_path / "run"
    finish(write_recipe(tmp_path), run, engine_python, f'model.path="{model}"', *UNTRAINED)
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    gaps = [step["mismatch/abs_logprob_diff_mean"] for step in steps]
    assert len(gaps) == 3 and max(gaps) < 1e-4, gaps
    assert all(step["actor/grad_norm"] > 0 for step in steps)
    before, after = (load_file(path / "model.safetensors") for path in (model, run / "huggingface"))
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert before.keys() == after.keys() and any("layers.0.mlp" in name for name in before.keys() - same)
    assert same >= {name for name in before if name.startswith(VISION_TENSORS)}
