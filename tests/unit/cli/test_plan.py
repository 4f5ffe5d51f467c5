"""`megatron-dapo plan RECIPE`: lines and JSON of a layout, and of a search."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megatron_dapo.cli.main import app
from tests.unit.config.architectures import QWEN_7B, QWEN_32B, write_model

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
SHIPPED = sorted((EXAMPLES / "layouts").glob("*.toml")) + sorted((EXAMPLES / "recipes").glob("*.toml"))
LAYOUT, RECIPE = EXAMPLES / "layouts" / "colocated_16nodes.toml", EXAMPLES / "recipes" / "vapo_qwen2.5_32b.toml"


def run(recipe: Path, model: Path, *arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", str(recipe), "--set", f"model.path={model}", *arguments])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "Qwen2.5-32B", QWEN_32B)


@pytest.mark.parametrize("layout", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_layout_fits_by_its_plan_from_an_empty_directory(
    layout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    host = ["--host-memory", "2000"] if layout.stem == "colocated_1node_32b" else []
    named = layout.relative_to(EXAMPLES.parent)  # as the documentation prints it
    result = CliRunner().invoke(app, ["plan", str(named), "--json", *host])
    report = json.loads(result.stdout)
    assert result.exit_code == 0 and not report["problems"]
    assert max(phase["total"] for phase in report["memory"]) == report["peak_bytes"] <= report["gpu_bytes"]
    assert report["warnings"] == [] and (report["inter_node_gb"] == 0) == ("network" not in report["seconds"]["weight_update"])
    assert report["queue"]["seconds"] > 0 and report["step_seconds"] > 0


def test_a_layout_is_planned_by_phase(model: Path) -> None:
    result = run(LAYOUT, model)
    assert result.exit_code == 0, result.output
    for words in (
        "model: 32.8 B parameters; TP8 PP1 DP16, recompute selective (mlp); 16 x 8 H100",
        "  train         shared",
        "sequences of 22528; 32 engines",
        "bytes: weight update 2.1 TB into all servers, none of it between nodes, checkpoint 459 GB every 10 steps",
    ):
        assert words in result.stdout
    report = json.loads(run(LAYOUT, model, "--json").stdout)
    assert report["problems"] == [] and report["peak_bytes"] <= report["gpu_bytes"]
    assert report["step_seconds"] == pytest.approx(sum(sum(parts.values()) for parts in report["seconds"].values()))
    for phase in report["memory"]:
        assert phase["total"] == sum(phase["parts"].values())


def test_a_picture_has_a_bar_of_each_phase(model: Path, tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    assert run(LAYOUT, model, "--svg", str(picture)).exit_code == 0
    tree = ElementTree.fromstring(picture.read_text(encoding="utf-8"))
    words = {node.text for node in tree.iter() if node.text}
    assert {"generate", "train", "weight_update", "Memory of a GPU by phase, of 79 GiB"} <= words
    assert any(word.startswith("kv_tokens ") for word in words)
    assert run(LAYOUT, model, "--svg", str(tmp_path / "absent" / "plan.svg")).exit_code == 2


def test_a_layout_that_does_not_fit_says_why_with_the_same_numbers_as_the_dry_run(model: Path) -> None:
    arguments = ("--set", "model.offload=none")
    result = run(LAYOUT, model, *arguments)
    assert result.exit_code == 1 and "does not fit: sglang.mem_fraction_static: " in result.stdout
    report = json.loads(run(LAYOUT, model, *arguments, "--json").stdout)
    assert f"generating_gib = {report['peak_bytes'] / 2**30:.1f}" in report["problems"][0]


def test_layouts_for_a_number_of_gpus_are_ranked(model: Path) -> None:
    result = run(RECIPE, model, "--gpus", "64", "--gpu", "H200")
    assert result.exit_code == 0 and " 1. " in result.stdout and "settings of the first:" in result.stdout
    report = json.loads(run(RECIPE, model, "--gpus", "64", "--gpu", "H200", "--json").stdout)
    assert report["layouts"][0]["seconds"]["train_critic"]
    # The first layout's settings are those of a recipe that fits.
    settings = [
        part
        for path, value in report["layouts"][0]["settings"].items()
        for part in ("--set", f"{path}={json.dumps(value)}")
    ]
    again = json.loads(run(RECIPE, model, *settings, "--gpu", "H200", "--json").stdout)
    assert again["step_seconds"] == pytest.approx(report["layouts"][0]["step_seconds"]) and not again["problems"]


def test_what_cannot_be_planned_is_refused(model: Path, tmp_path: Path) -> None:
    for arguments, words in (
        (("--gpu", "V100"), "--gpu V100: not known"),
        (("--set", "parallel.tp_size=3"), "parallel.tp_size"),
        (("--set", f"model.path={tmp_path / 'absent'}"), "no config.json"),
    ):
        result = run(LAYOUT, model, *arguments)
        assert result.exit_code == 2 and words in result.output
    none = run(LAYOUT, model, "--gpus", "2")
    assert none.exit_code == 1 and "none fits: trainer memory in" in none.stdout


def test_a_small_model_fits_one_node(tmp_path: Path) -> None:
    result = run(EXAMPLES / "recipes" / "dapo_qwen2.5_7b.toml", write_model(tmp_path / "7b", QWEN_7B), "--gpus", "8")
    assert result.exit_code == 0 and "8 H100: " in result.stdout
