"""Configurations that the command refuses before any process starts, by name and with the number."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_dapo.cli.main import app
from tests.unit.cli.conftest import QUICKSTART

REFUSALS = {
    "no model": ("quickstart", "tp1", "model.path=/no/such/model", ("model.path", "/no/such/model")),
    "no data": ("quickstart", "tp1", "data.train_paths=['/no/such.jsonl']", ("data.train_paths", "/no/such.jsonl")),
    "uneven batch": ("quickstart", "tp1", "training.mini_batch_prompts=7", ("training.mini_batch_prompts", "7")),
    "unknown key": ("quickstart", "tp1", "rollout.group_sise=4", ("group_sise", "group_size")),
    "uneven heads": ("quickstart", "tp3", "run.seed=1", ("parallel.tp_size", "3")),
    "no critic": ("quickstart_vapo", "tp2", 'critic.path="/no/such/critic"', ("critic.path", "/no/such/critic")),
    "mixture of nothing": ("quickstart", "tp1", "reward.verifier=mix", ("1 problem", "reward.mix = ()")),
    "critic's heads": ("quickstart_vapo", "tp2", "critic.parallel.tp_size=3", ("critic.parallel.tp_size", "3")),
    "filtered windows": ("quickstart_tppo", "tp2", "rollout.filter_groups=true", ("rollout.filter_groups", "tppo")),
}


def refusal(recipe: str, layout: str, *overrides: str) -> str:
    """Return what `train --dry-run` says in refusing."""
    settings = [word for override in overrides for word in ("--set", override)]
    arguments = ["train", str(QUICKSTART / f"{recipe}.toml"), "--layout", layout, "--dry-run", *settings]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2, result.output
    return result.output


@pytest.mark.parametrize("case", REFUSALS)
def test_it_is_refused_by_name(case: str) -> None:
    recipe, layout, override, words = REFUSALS[case]
    output = refusal(recipe, layout, override)
    for word in words:
        assert word in output, output


def test_recipes_that_cannot_share_a_base_are_refused_by_name(tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text(f"base = '{QUICKSTART / 'quickstart.toml'}'\nrun.name = 'other'\nmodel.lora.rank = 4\n")
    arguments = ["train", str(QUICKSTART / "quickstart.toml"), "--with", str(other), "--layout", "tp1", "--dry-run", "--no-inputs"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2, result.output
    for line in ("quickstart: model.lora.rank = 0: full training", "quickstart and other write to "):
        assert line in result.output, result.output
    result = CliRunner().invoke(app, [*arguments, "--output-dir", str(tmp_path)])
    assert result.exit_code == 2 and "--output-dir: with --with each recipe has its own run.output_dir" in result.output


def test_an_unknown_model_type_is_refused(tmp_path: Path) -> None:
    shutil.copytree(QUICKSTART / "base_model", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "model_type": "mamba2"}))
    output = refusal("quickstart", "tp1", f"model.path={tmp_path / 'model'}")
    assert "model_type 'mamba2' is not supported" in output and "qwen2" in output


def test_rows_without_a_column_are_refused(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (QUICKSTART / "train.jsonl").read_text().splitlines()[:9]]
    changed = tmp_path / "changed.jsonl"
    changed.write_text("".join(json.dumps({k: v for k, v in row.items() if k != "reward_model"}) + "\n" for row in rows))
    output = refusal("quickstart", "tp1", f"data.train_paths=['{changed}']")
    assert "changed.jsonl" in output and "reward_model" in output
