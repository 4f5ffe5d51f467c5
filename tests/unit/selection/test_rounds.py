"""The stages of a recipe, and what makes them others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_dapo.config import Config, config_from_dict, load_config
from megatron_dapo.selection.rounds import begin, outcome_lines, stages

RECIPE = Path(__file__).resolve().parents[3] / "examples" / "quickstart" / "quickstart.toml"


def config_of(tmp_path: Path, **rounds: object) -> Config:
    for name in ("prompts.jsonl", "given.jsonl"):
        (tmp_path / name).write_text("{}\n")
    sections = {
        "model": {"path": str(tmp_path / "model")},
        "data": {"train_paths": [str(tmp_path / "prompts.jsonl")]},
        "sft": {"train_paths": [str(tmp_path / "given.jsonl")]},
        "checkpoint": {"output_dir": "/ck"},
        "rounds": rounds,
    }
    return config_from_dict(sections)


def started_from(overrides: tuple[str, ...]) -> str:
    """The model, as the command reads the overrides."""
    return load_config(RECIPE, list(overrides)).config.model.path.as_posix()


@pytest.mark.parametrize("start", ["previous", "first"])
def test_each_stage_starts_from_the_model_before_it(start: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    found = {one.name: one for one in stages(config_of(tmp_path, num_rounds=2, start=start), run)}
    model, sft = f"{tmp_path}/model", f"{run}/sft/huggingface"
    tuned = [f"{run}/round_{number}/sft/huggingface" for number in (1, 2)]
    assert {name: started_from(one.overrides) for name, one in found.items()} == {
        "sft": model,
        "round_1/rejection_sampling": sft,
        "round_1/sft": sft,
        "round_2/rejection_sampling": tuned[0],
        "round_2/sft": tuned[0] if start == "previous" else sft,
        "train": tuned[1],
    }
    second = load_config(RECIPE, list(found["round_2/sft"].overrides)).config
    assert second.sft.train_paths == (run / "round_2" / "rejection_sampling" / "examples.jsonl",)
    assert len({load_config(RECIPE, list(one.overrides)).config.checkpoint_dir for one in found.values()}) == 6


def test_stages_that_are_off_are_left_out(tmp_path: Path) -> None:
    config = config_of(tmp_path, num_rounds=0, train=False)
    assert [one.name for one in stages(config, tmp_path)] == ["sft"]
    without = config.model_copy(update={"sft": config.sft.model_copy(update={"train_paths": ()})})
    assert stages(without, tmp_path) == []


def test_other_settings_or_data_are_refused(tmp_path: Path) -> None:
    config, run = config_of(tmp_path, num_rounds=1), tmp_path / "run"
    begin(config, run)
    begin(config, run)
    with pytest.raises(ValueError, match=r"begun with rounds.num_rounds = 1, now 2 \(1 settings differ\)"):
        begin(config_of(tmp_path, num_rounds=2), run)
    (tmp_path / "given.jsonl").write_text("{}\n{}\n")
    with pytest.raises(ValueError, match="begun with sha256 of .*given.jsonl"):
        begin(config, run)


def test_outcomes_are_a_line_each(tmp_path: Path) -> None:
    found = stages(config_of(tmp_path, num_rounds=1), tmp_path)
    assert outcome_lines(found) == []
    for stage in found[:2]:
        stage.directory.mkdir(parents=True)
    summary = {"accuracy_before": 0.25, "accuracy_after": None, "train_steps": 3}
    (found[0].directory / "summary.json").write_text(json.dumps(summary))
    figures = {"pass_rate_mean": 0.5, "fates": {"kept": 7}, "responses": 20}
    (found[1].directory / "report.json").write_text(json.dumps({"figures": figures}))
    assert outcome_lines(found) == [
        "sft: accuracy 0.250 -> not evaluated in 3 train steps",
        "round_1/rejection_sampling: pass rate 0.500, 7 of 20 responses kept",
    ]
