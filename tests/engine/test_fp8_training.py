"""A run with FP8 rollouts: rounded on the way, corrected, and compared with the trainer in both forms."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
sys.path.insert(0, str(Path(__file__).parent))
from fp8_world import save_model

from tools.prove_resume import QUICKSTART, write_recipe

RUN_S = 400.0
NUM_STEPS = 3
pytestmark = pytest.mark.timeout(RUN_S + 30)
PARITY = re.compile(r"parity with server 0 on \d+ prompts: mean \|d log-prob\| (\S+), max (\S+)$", re.M)
ROUNDING = re.compile(r"server 0 serves rounded weights: mean \|d log-prob\| (\S+), max (\S+) against", re.M)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A random model with the quickstart's tokenizer; 6 heads of 64, which the trainer's TP 2 cuts inside blocks."""
    base = QUICKSTART / "base_model"
    vocab_size = json.loads((base / "config.json").read_text())["vocab_size"]
    folder = save_model(
        tmp_path / "model", vocab_size=vocab_size, num_attention_heads=6, num_key_value_heads=6, pad_token_id=0
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(base / name, folder / name)
    return folder


def train(tmp_path: Path, repository: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", "megatron_dapo.cli.main", "train"]
    command += [str(write_recipe(tmp_path)), "--layout", "tp2", "--run-folder", str(tmp_path / "run")]
    command += [part for setting in settings for part in ("--set", setting)]
    environment = {**os.environ, "PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_S, check=False)


def settings_of(model: Path, engine_python: Path) -> list[str]:
    return [
        f'model.path="{model}"',
        'rollout.engine="sglang"',
        f'sglang.python="{engine_python}"',
        'sglang.quantization="fp8"',
        "sglang.bucket_mb=1",
        "sglang.parity_interval=1",
        "rollout.filter_groups=false",  # a random model solves nothing
        "rollout.oversample=1.0",
        "rollout.max_staleness=0",
        "rollout.max_response_tokens=32",
        f"run.total_steps={NUM_STEPS}",
        "data.eval_paths=[]",
        "evaluation.interval=0",
        "evaluation.at_start=false",
        "evaluation.at_end=false",
        "checkpoint.export_huggingface=false",
        "mismatch.step0_max_mean_abs=1e-4",
        "sglang.fp8_step0_max_mean_abs=0.2",  # weights of a model that nobody trained
    ]


@pytest.mark.parametrize("transport", ["memory", "peer"])
def test_a_corrected_run_in_fp8(transport: str, model, engine_python, repository, tmp_path) -> None:
    placement = {"memory": "colocated", "peer": "disaggregated"}[transport]
    where = [f'sglang.transport="{transport}"', f'sglang.placement="{placement}"']
    finished = train(tmp_path, repository, *settings_of(model, engine_python), *where)
    log = finished.stdout + finished.stderr
    assert finished.returncode == 0, log[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == NUM_STEPS
    # What is sampled from is not what is trained, by the rounding and no more; TIS weighs it.
    assert all(1e-3 < row["mismatch/abs_logprob_diff_mean"] < 0.2 for row in rows)
    # The same weights on both sides agree as two programs in float32 do, at the start and after every step.
    parity, rounding = PARITY.findall(log), ROUNDING.findall(log)
    assert len(parity) == len(rounding) == NUM_STEPS + 1
    assert all(float(mean) < 1e-4 for mean, _ in parity)
    assert all(1e-3 < float(mean) < 0.2 for mean, _ in rounding)
    assert len({mean for mean, _ in rounding}) > 1  # the weights change


def test_without_a_correction_nothing_starts(model, engine_python, repository, tmp_path) -> None:
    settings = [*settings_of(model, engine_python), 'algorithm.off_policy.correction="none"']
    refused = train(tmp_path, repository, *settings)
    assert refused.returncode != 0
    assert "sglang.accept_quantization_bias = true" in refused.stdout + refused.stderr
    assert not (tmp_path / "run" / "engines").exists()
