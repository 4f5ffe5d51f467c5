"""The settings that TRL gets, and that its run is read as one of ours."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

from megatron_dapo.config.loader import load_config
from megatron_dapo.telemetry.summary import read_summary

RECIPE = Path(__file__).resolve().parents[3] / "examples" / "gpu" / "smollm2.toml"
REPORT = {
    "train_steps": 2,
    "train_seconds": 5.0,
    "trained_samples": 1024,
    "useful_samples": 512,
    "response_tokens": 3072,
    "batch_ends": [2.0, 5.0],
    "batches": [
        {"response_tokens": 1024, "repetition": 0.0, "accuracy": 0.25, "entropy": 0.5},
        {"response_tokens": 2048, "repetition": 0.1, "accuracy": 0.5, "entropy": None},
    ],
}


@pytest.fixture
def program(benchmarks_on_the_path: None) -> ModuleType:
    return importlib.import_module("trl_recipe")


def test_a_pass_divides_the_mini_batch_and_fits_a_micro_batch(program: ModuleType) -> None:
    # 128 responses of at most 192 + 192 tokens, 16,384 tokens a pass: 42 would fit.
    assert program.rows_per_pass(load_config(RECIPE).config, 1) == 32
    small = load_config(RECIPE, ["training.micro_batch_tokens=384"]).config
    assert program.rows_per_pass(small, 2) == 1
    with pytest.raises(ValueError, match="3 processes do not divide a mini-batch of 128 responses"):
        program.rows_per_pass(small, 3)


def test_generation_is_vllms_where_it_can_be_imported_on_a_gpu(program: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    assert program.generation_settings("cuda", tmp_path) == {"use_vllm": True, "vllm_mode": "colocate"}
    assert program.generation_settings("cpu", tmp_path) == {}


def test_a_run_of_trl_is_written_as_one_of_ours(program: ModuleType, tmp_path: Path) -> None:
    config = load_config(RECIPE, ["run.max_train_seconds=4"]).config
    program.write_run(config, tmp_path, REPORT, 0.75, 60.0)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["time/step"] for row in rows] == [2.0, 3.0]
    assert [row["rollout/response_tokens_mean"] for row in rows] == [2.0, 4.0]
    summary = read_summary(tmp_path / "summary.json")
    assert (summary.stopped, summary.optimizer_steps, summary.accuracy_after) == ("training seconds used up", 8, 0.75)


def test_dynamic_sampling_is_refused(program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["trl_recipe.py", str(RECIPE), "--trl-packages", str(tmp_path)]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(ValueError, match="TRL has no dynamic sampling: --set rollout.filter_groups=false"):
        program.run(program.parse_arguments(), tmp_path)
