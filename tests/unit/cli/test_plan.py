"""`megatron-dapo plan RECIPE`: lines and JSON of a layout, and of a search."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megatron_dapo.cli.main import app
from megatron_dapo.svg import GRAY
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
    named = layout.relative_to(EXAMPLES.parent)  # the documentation prints it so
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
    assert "colocated_16nodes: TP8 PP1 DP16, recompute selective (mlp), 16 x 8 H100" in words
    assert {"kv_tokens", "gradients", "engine_asleep", "weights", "communication"} <= words, "the legend"
    report = json.loads(run(LAYOUT, model, "--json").stdout)
    assert {f"{phase['total'] / 2**30:,.1f} GiB" for phase in report["memory"]} <= words, "totals"
    # A component has the same colour in all phases, and no other component has it; phases of the step have a legend of their own.
    bars = [node for node in tree.iter() if node.tag.endswith("rect") and len(node)]
    pairs = {(bar[0].text.split()[0], bar.get("fill")) for bar in bars if bar[0].text.endswith("GiB")}
    colored = {name: color for name, color in pairs if color != GRAY}
    assert len(set(colored.values())) == len(colored) == len([one for one in pairs if one[1] != GRAY])
    assert run(LAYOUT, model, "--svg", str(tmp_path / "absent" / "plan.svg")).exit_code == 2


def test_a_layout_that_does_not_fit_says_why_with_the_same_numbers_as_the_dry_run(model: Path) -> None:
    arguments = ("--set", "model.offload=none")
    result = run(LAYOUT, model, *arguments)
    assert result.exit_code == 1 and "does not fit: " in result.stdout
    assert "set sglang.mem_fraction_static below" in result.stdout
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


def test_a_written_layout_loads_again_and_has_the_same_plan(model: Path, tmp_path: Path) -> None:
    """Of a search with the first layout's settings, of a single layout with the command's; the paths are absolute."""
    searched = json.loads(run(RECIPE, model, "--gpus", "64", "--json", "--write", str(tmp_path / "found.toml")).stdout)
    for arguments, expected in (
        (("found.toml",), searched["layouts"][0]),
        (("set.toml",), json.loads(run(LAYOUT, model, "--layout", "tp8pp2dp8sp", "--json", "--write", str(tmp_path / "set.toml")).stdout)),
    ):
        result = CliRunner().invoke(app, ["plan", str(tmp_path / arguments[0]), "--json"])
        again = json.loads(result.stdout)
        assert again["memory"] == expected["memory"] and again["step_seconds"] == expected["step_seconds"]
        assert again["layout"] == expected["layout"]
    dapo = tmp_path / "dapo.toml"
    assert run(LAYOUT, model, "--gpus", "64", "--write", str(dapo)).exit_code == 0
    assert "critic." not in dapo.read_text() and "critic." in (tmp_path / "found.toml").read_text()
    assert run(dapo, model, "--write", str(dapo)).exit_code == 2


def test_layouts_that_look_alike_say_what_differs(model: Path) -> None:
    lines = run(LAYOUT, model, "--gpus", "128").stdout.splitlines()
    others = [line.partition(": ")[2] for line in lines if line.strip().startswith("unlike the first: ")]
    assert len(others) == sum(line[2:4] == ". " for line in lines) - 1 and all(" = " in one for one in others)
    settings = next(line for line in lines if line.strip().startswith("--set"))
    assert "critic." not in settings


def test_a_recipe_with_the_embedded_engine_is_planned_for_cpus(tmp_path: Path) -> None:
    recipe = EXAMPLES / "quickstart" / "quickstart.toml"
    command = ["plan", str(recipe), "--svg", str(tmp_path / "plan.svg")]
    text = CliRunner().invoke(app, command).stdout
    assert "cores of this machine" in text and "H100" not in text and "step: 0 s" not in text
    assert "a step: 256 responses of up to 256 tokens; about" in text
    report = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert set(report["seconds"]) == {"generate", "log_probs", "train"} and report["step_seconds"] > 0.1
    assert "cores of this machine" in (tmp_path / "plan.svg").read_text()
    assert "1 x 8 H100" in CliRunner().invoke(app, [*command, "--gpu", "H100"]).stdout


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
