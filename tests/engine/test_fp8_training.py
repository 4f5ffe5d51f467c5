"""Runs with FP8 rollouts: weights quantized in the sync, sampling corrected, log-probs compared with the trainer's."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from fp8_world import CUT_HEADS, PARITY, RANDOM_MODEL_SETTINGS, ROUNDING, save_quickstart_model
from sglang_runs import ENVIRONMENT, RUN_S, command

from tools.prove_resume import write_recipe

NUM_STEPS = 3
SETTINGS = (
    *RANDOM_MODEL_SETTINGS,
    "sglang.weight_sync_bucket_mb=1",
    "rollout.max_response_tokens=32",
    f"run.total_steps={NUM_STEPS}",
    "checkpoint.export_huggingface=false",
)


def train(
    tmp_path: Path, model: Path, python: Path, *settings: str, layout: str = "tp2"
) -> subprocess.CompletedProcess[str]:
    overrides = (f'model.path="{model}"', *SETTINGS, *settings)
    started = [*command(write_recipe(tmp_path), tmp_path / "run", python, *overrides, layout=layout), "--verbose"]
    return subprocess.run(started, env=ENVIRONMENT, capture_output=True, text=True, timeout=RUN_S, check=False)


@pytest.mark.parametrize(
    ("transport", "family", "layout"),
    [
        ("shared_memory", "qwen3", "tp2"),
        ("p2p", "qwen3", "tp2"),
        ("p2p", "qwen3_5_text", "tp2"),
        ("shared_memory", "deepseek_v3", "tp2ep2etp1sp"),
    ],
)
@pytest.mark.long
def test_a_corrected_run_in_fp8(transport: str, family: str, layout: str, engine_python, tmp_path) -> None:
    model = save_quickstart_model(tmp_path / "model", family, **(CUT_HEADS if family == "qwen3" else {}))
    placement = {"shared_memory": "colocated", "p2p": "disaggregated"}[transport]
    where = [f'sglang.weight_sync_transport="{transport}"', f'sglang.placement="{placement}"']
    finished = train(tmp_path, model, engine_python, *where, layout=layout)
    log = finished.stdout + finished.stderr
    assert finished.returncode == 0, log[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == NUM_STEPS
    # The sampling policy differs from the trained one only by the quantization error; TIS corrects for it.
    assert all(1e-3 < row["mismatch/abs_logprob_diff_mean"] < 0.2 for row in rows)
    # With the same weights both sides agree within float32 rounding, at the start and after every step.
    parity, rounding = PARITY.findall(log), ROUNDING.findall(log)
    assert len(parity) == len(rounding) == NUM_STEPS + 1
    assert all(float(mean) < 1e-4 for mean, _ in parity)
    assert all(1e-3 < float(mean) < 0.2 for mean, _ in rounding)
    assert len({mean for mean, _ in rounding}) > 1  # the weights change


@pytest.mark.long
def test_experts_that_train_in_fp8_are_served_in_fp8(engine_python, tmp_path) -> None:
    """Both sides compute with the same weights. The remaining difference, in both comparisons, is the trainer's
    quantization of activations."""
    whole_heads = {"head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = save_quickstart_model(tmp_path / "model", "qwen3_moe", **whole_heads)
    settings = ('precision.recipe="fp8_blockwise"', "run.total_steps=1", "optimizer.warmup_steps=0")
    settings = (*settings, "megatron.moe_grouped_gemm=true")
    finished = train(tmp_path, model, engine_python, *settings, layout="tp2ep2etp1sp")
    log = finished.stdout + finished.stderr
    assert finished.returncode == 0, log[-3000:]
    assert "experts in layers 1 to 2 of 2, e4m3 x e4m3" in log
    parity, rounding = PARITY.findall(log), ROUNDING.findall(log)
    assert len(parity) == len(rounding) == 2
    for (served, _), (trained, _) in zip(parity, rounding, strict=True):
        assert 1e-3 < float(served) < 0.3 and abs(float(served) - float(trained)) < 0.05 * float(served)


def test_a_run_without_a_correction_is_refused(engine_python, tmp_path) -> None:
    model = save_quickstart_model(tmp_path / "model")
    refused = train(tmp_path, model, engine_python, 'algorithm.off_policy.correction="none"')
    assert refused.returncode != 0
    assert "sglang.allow_quantization_bias = true" in refused.stdout + refused.stderr
    assert not (tmp_path / "run" / "engines").exists()
