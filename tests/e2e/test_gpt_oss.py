"""A DAPO run of a small gpt-oss whose experts are stored in MXFP4: the embedded engine samples what is trained, and the export is
unquantized."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM
from whole_runs import NO_EVALUATION, run_command

from tools.prove_resume import QUICKSTART, write_recipe

pytestmark = pytest.mark.long  # tests/families and tests/unit have the parts
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "experts_per_token": 2,
    "sliding_window": 16,  # shorter than prompts
    "swiglu_limit": 7.0,
    "max_position_embeddings": 1024,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SETTINGS = (
    *NO_EVALUATION,
    # Untrained weights solve nothing: what differs within a group is how improbable responses were.
    "rollout.filter_groups=false",
    "rollout.oversample=1.0",
    "reward.perplexity_penalty.enabled=true",
    "reward.perplexity_penalty.start=0.01",
    "reward.perplexity_penalty.end=20.0",
    "run.total_steps=3",
)


def save_packed(directory: Path) -> Path:
    """A directory as published ones are, with random weights far from uniform and the quickstart's tokenizer."""
    torch.manual_seed(0)
    base = QUICKSTART / "base_model"
    vocab_size = json.loads((base / "config.json").read_text())["vocab_size"]
    model = GptOssForCausalLM(GptOssConfig(**SIZES, vocab_size=vocab_size, dtype="float32"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0) if parameter.dim() > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name and name.endswith("_proj")]:
        experts, columns, rows = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        tensors |= {name + "_blocks": blocks, name + "_scales": torch.full(blocks.shape[:-1], 122, dtype=torch.uint8)}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(base / name, directory / name)
    return directory


def test_a_dapo_run_trains_what_it_samples(tmp_path: Path) -> None:
    model, run = save_packed(tmp_path / "model"), tmp_path / "run"
    settings = (f'model.path="{model}"', *SETTINGS)
    options = ("--layout", "tp2ep2etp1sp", "--output-dir", str(run), *(part for one in settings for part in ("--set", one)))
    done = run_command("train", str(write_recipe(tmp_path)), *options)
    assert done.code == 0 and "16 matrices of experts in MXFP4 are dequantized" in done.text, done.text[-3000:]
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    gaps = [step["mismatch/abs_logprob_diff_mean"] for step in steps]
    assert len(gaps) == 3 and max(gaps) < 1e-4, gaps
    assert all(step["actor/grad_norm"] > 0 for step in steps)
    assert "quantization_config" not in json.loads((run / "huggingface/config.json").read_text())
    exported = GptOssForCausalLM.from_pretrained(run / "huggingface")
    before = load_file(model / "model.safetensors")
    after = dict(exported.named_parameters())
    assert before.keys() - after.keys() == {name for name in before if name.endswith(("_blocks", "_scales"))}
    assert all(not torch.equal(after[name], tensor) for name, tensor in before.items() if name in after)
