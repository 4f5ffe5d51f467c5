"""Files of a demo: settings from a run's directory, modules that are enough, and a Space whose models are copied."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_dapo.cli.main import app
from megatron_dapo.config import load_config
from megatron_dapo.config.loader import write_resolved
from megatron_dapo.demo.space import GRADIO_VERSION, write_demo, write_space
from megatron_dapo.telemetry.summary import RunSummary

ROOT = Path(__file__).resolve().parents[3]
QUICKSTART = ROOT / "examples" / "quickstart"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run of the quickstart, as far as a demo reads it."""
    directory = tmp_path / "run"
    write_resolved(load_config(QUICKSTART / "quickstart.toml"), directory / "config.json")
    (directory / "huggingface").symlink_to(QUICKSTART / "base_model")
    scores = {
        step: {"eval/avg_at_k": value, "eval/avg_at_k_low": value - 0.05, "eval/avg_at_k_high": value + 0.05}
        for step, value in (("0", 0.41), ("24", 0.87), ("6", 0.6))
    }
    summary = RunSummary(
        "quickstart", "TP2", "finished", 24, 48, 0.41, 0.87, 1.0, 1.0, 1.0, 1.0, extra={"evaluations": scores}
    )
    (directory / "summary.json").write_text(json.dumps(asdict(summary)))
    return directory


def test_settings_are_the_runs(run: Path, tmp_path: Path) -> None:
    write_demo(run, tmp_path / "demo")
    settings = json.loads((tmp_path / "demo" / "demo.json").read_text())
    assert settings["base"] == settings["trained"] == str((QUICKSTART / "base_model").resolve())
    assert "avg@8: 0.410 [0.360, 0.460] before, 0.870 [0.820, 0.920] after" in settings["text"]
    row = json.loads((QUICKSTART / "heldout.jsonl").read_text().splitlines()[0])
    assert settings["examples"][0] == [row["prompt"][0]["content"], row["reward_model"]["ground_truth"]]
    assert settings["sampling"]["max_new_tokens"] > 0 and settings["verifier"] == "dapo"


def test_the_modules_beside_the_page_are_enough(run: Path, tmp_path: Path) -> None:
    program = write_demo(run, tmp_path / "demo")
    imported = re.findall(r"^from (megatron_dapo\.[\w.]+) import", program.read_text(), re.MULTILINE)
    code = f"import {', '.join(imported)}, megatron_dapo; from megatron_dapo.rewards.verifiers.verifier import load_verifier\n"
    code += "print(megatron_dapo.__file__, load_verifier('dapo').score('Answer: 4', '4').outcome, load_verifier('lenient').name)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "demo")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(tmp_path / "demo" / "megatron_dapo" / "__init__.py"), "correct", "lenient"]


def test_a_space_is_whole(run: Path, tmp_path: Path) -> None:
    space = tmp_path / "space"
    result = CliRunner().invoke(app, ["export", str(run), "--space", str(space), "--base", "org/base-model"])
    assert result.exit_code == 0, result.output
    settings = json.loads((space / "demo.json").read_text())
    assert (settings["base"], settings["trained"]) == ("org/base-model", "trained")
    assert (space / "trained" / "config.json").is_file() and not (space / "base").exists()
    head = (space / "README.md").read_text().split("---")[1]
    assert "sdk: gradio" in head and f"sdk_version: {GRADIO_VERSION}" in head and "app_file: app.py" in head
    assert "math-verify" in (space / "requirements.txt").read_text()
    again = CliRunner().invoke(app, ["export", str(run), "--space", str(space)])
    assert again.exit_code == 2 and "is not empty" in again.stderr


def test_gradios_version_is_the_locks() -> None:
    lock = (ROOT / "requirements" / "demo-cpu-py311.txt").read_text()
    assert f"\ngradio=={GRADIO_VERSION}\n" in lock


def test_runs_that_cannot_be_shown_are_one_line(run: Path, tmp_path: Path) -> None:
    loaded = load_config(QUICKSTART / "quickstart.toml")
    own = loaded.config.reward.model_copy(update={"verifier": "mine:score"})
    other = tmp_path / "own"
    write_resolved(replace(loaded, config=loaded.config.model_copy(update={"reward": own})), other / "config.json")
    unfinished = tmp_path / "unfinished"
    write_resolved(loaded, unfinished / "config.json")
    for directory, message in (
        (tmp_path, "is no run's directory"),
        (other, "a demo has the presets dapo and lenient alone"),
        (unfinished, "has no exported model"),
    ):
        with pytest.raises(ValueError, match=message):
            write_space(directory, tmp_path / "space")
    result = CliRunner().invoke(app, ["demo", str(run), "--packages", str(tmp_path)])
    assert result.exit_code == 2 and "has no gradio: run `make .venv-demo`" in result.stderr
