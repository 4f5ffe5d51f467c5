"""DAPO runs of tiny models of DeepSeek-V3 and Qwen3.5, whole and with LoRA: the embedded engine samples what is trained, and a
resumed run ends with the same bits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from actor_checks import MODELS, SIZES
from safetensors.torch import load_file
from whole_runs import STEADY, lines_of, run_command, sets

from benchmarks.options import RANDOM_WEIGHTS
from megatron_dapo.telemetry.batch_dump import load_batch
from tests.spread_weights import spread_weights
from tools.prove_resume import QUICKSTART, write_recipe

pytestmark = pytest.mark.long  # tests/families and tests/distributed have the parts
MIXTURE = "tp2ep2etp1sp"
LORA = ("model.lora.rank=4", "optimizer.learning_rate=1e-2")
NOT_ADAPTED = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")  # matrices that no adapter is next to
RUNS = {
    "DeepSeek-V3 in bf16": ("deepseek", MIXTURE, ("model.dtype=bfloat16", "telemetry.dump_batches=1")),
    "DeepSeek-V3 with LoRA": ("deepseek", MIXTURE, LORA),
    "Qwen3.5 with LoRA": ("qwen3.5", "tp2", LORA),
}


def save_model(directory: Path, name: str, dtype: str) -> Path:
    """A model of `actor_checks` with random weights far from uniform, and the quickstart's tokenizer."""
    import transformers

    family, fields = MODELS[name]
    base = QUICKSTART / "base_model"
    vocab_size = json.loads((base / "config.json").read_text())["vocab_size"]
    sizes = {**SIZES, **fields, "vocab_size": vocab_size, "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "eos_token_id": 2}
    model_class = getattr(transformers, f"{family}ForCausalLM")
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**sizes, dtype=dtype, architectures=[model_class.__name__]))
    spread_weights(model)
    model.to(getattr(torch, dtype)).save_pretrained(directory)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(base / file, directory / file)
    return directory


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("run", RUNS)
def test_a_run_trains_what_it_samples_and_resumes_exactly(run: str, tmp_path: Path) -> None:
    name, layout, settings = RUNS[run]
    is_bf16 = "model.dtype=bfloat16" in settings
    model = save_model(tmp_path / "model", name, "bfloat16" if is_bf16 else "float32")
    chosen = (f'model.path="{model}"', *STEADY, *RANDOM_WEIGHTS, *settings, "checkpoint.interval=1", "run.total_steps=2")
    recipe, whole, resumed = write_recipe(tmp_path), tmp_path / "whole", tmp_path / "resumed"
    for directory in (whole, resumed):
        if directory == resumed:  # as it was after the first step
            shutil.copytree(whole, resumed)
            shutil.rmtree(resumed / "checkpoints" / "step_000002")
        outcome = run_command("train", str(recipe), "--layout", layout, "--output-dir", str(directory), *sets(chosen), timeout_s=700)
        assert outcome.code == 0, outcome.text[-3000:]
    steps = lines_of(whole / "metrics.jsonl")
    gaps = [step["mismatch/abs_logprob_diff_mean"] for step in steps]
    # The trainer rounds as much as the engine does: what the two differ by is at most twice that.
    bound = 2 * engine_error(model, whole / "batches" / "step_000001") if is_bf16 else 1e-4
    assert len(gaps) == 2 and max(gaps) < bound, (gaps, bound)
    assert all(step["actor/grad_norm"] > 0 for step in steps)
    before, after, again = (load_file(path / "model.safetensors") for path in (model, whole / "huggingface", resumed / "huggingface"))
    assert before.keys() == after.keys() == again.keys() and all(torch.equal(after[key], again[key]) for key in after)
    changed = {key for key, tensor in before.items() if not torch.equal(tensor, after[key])}
    if not is_bf16:
        assert changed == {key for key, tensor in before.items() if tensor.dim() == 2 and not key.endswith(NOT_ADAPTED)}
    assert changed and not [key for key in changed if key.endswith("e_score_correction_bias")]


def engine_error(model: Path, batch: Path) -> float:
    """Mean |d log-prob| between what the engine sampled from a model and transformers in fp64, over all tokens."""
    from transformers import AutoModelForCausalLM

    exact = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, experts_implementation="eager")
    errors = []
    for sample in load_batch(batch).samples:
        with torch.no_grad():
            logprobs = exact(sample.tokens[None].long()).logits[0, :-1].log_softmax(-1)
        taken = logprobs.gather(1, sample.tokens[1:, None].long())[sample.prompt_length - 1 :, 0]
        errors.append((taken - sample.rollout_logprobs).abs())
    return float(torch.cat(errors).mean())
