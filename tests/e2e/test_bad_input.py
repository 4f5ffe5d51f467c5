"""Bad input through the command: a non-zero exit, a last line that names the cause, and nothing half-written."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from whole_runs import NO_EVALUATION, checkpoint_names, train


def test_refused_before_anything_starts(recipe: Path, tmp_path: Path) -> None:
    """The command ends as the validator does (tests/unit/config, doctor); the number of processes is the launcher's to refuse."""
    outcome = train(recipe, tmp_path / "run", "", "parallel.tp_size=2", "parallel.num_processes=1")
    assert outcome.code == 2 and outcome.lines[0].startswith("error: ")
    assert "start 2 processes" in outcome.last and "processes = 1" in outcome.last, outcome.text
    assert not (tmp_path / "run").exists()


def copied_model(recipe: Path, tmp_path: Path) -> Path:
    source = next(line for line in recipe.read_text().splitlines() if line.startswith("path = ")).split('"')[1]
    return Path(shutil.copytree(source, tmp_path / "model"))


def boxed_prompts(recipe: Path, tmp_path: Path) -> tuple[str, ...]:
    rows = [json.loads(line) for line in (recipe.parent / "train.jsonl").read_text().splitlines()]
    for row in rows:
        row["prompt"] = [{"role": "user", "content": "Put your final answer within \\boxed{}. What is 1 + 1?"}]
        row["prompt"][0]["content"] += f" And {row['extra_info']}?"
    path = tmp_path / "changed.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return (f"data.train_paths=['{path}']",)


@pytest.mark.parametrize("layout", [pytest.param("tp1", marks=pytest.mark.long), "dp2"])
def test_an_error_that_only_a_rank_sees_is_one_line(layout: str, recipe: Path, tmp_path: Path) -> None:
    """Prompts that ask for another format than the verifier reads; the other rank of dp2 fails as a consequence."""
    directory = tmp_path / "run"
    outcome = train(recipe, directory, layout, *NO_EVALUATION, *boxed_prompts(recipe, tmp_path))
    assert outcome.code not in (0, None)
    assert re.match(r"first failure: attempt 1, rank 0 \(\S+\), phase \w+: ValueError: self-test", outcome.last), (
        outcome.text
    )
    for name in ("dapo", "boxed"):
        assert name in outcome.last, outcome.last
    # With several ranks it comes again, after what followed from it.
    num_lines = sum(line.startswith("first failure") for line in outcome.lines)
    assert num_lines == (1 if layout == "tp1" else 2), outcome.text
    # The traceback is in failure.json, and torchrun's box does not come.
    for word in ("Traceback", "ChildFailedError", "Root Cause", "====="):
        assert word not in outcome.text, outcome.text
    assert checkpoint_names(directory) == []
    assert not (directory / "huggingface").exists() and not (directory / "summary.json").exists()
    assert json.loads((directory / "failure.json").read_text())["entries"][0]["detail"].startswith("Traceback")


@pytest.mark.long
def test_a_prompt_filter_of_another_policy_is_never_loaded(recipe: Path, tmp_path: Path) -> None:
    """The filter's model is in the checkpoint of the policy that it was fitted to, so the policy is what is refused: in one line,
    before a process starts."""
    directory, filtered = tmp_path / "run", ("rollout.prompt_filter.name=model", "optimizer.warmup_steps=0")
    first = train(recipe, directory, "tp1", *NO_EVALUATION, *filtered, "run.total_steps=1")
    assert first.code == 0, first.text
    [checkpoint] = checkpoint_names(directory)
    collector = json.loads((directory / "checkpoints" / checkpoint / "collector.json").read_text())
    assert collector["source"]["model"]["features"], "the filter is in the checkpoint"

    model = copied_model(recipe, tmp_path)
    config = json.loads((model / "config.json").read_text())
    config["num_hidden_layers"] -= 1
    config.pop("layer_types", None)
    (model / "config.json").write_text(json.dumps(config))
    (model / "model.safetensors").unlink()
    other = (f"model.path={model}", "model.allow_random_init=true", "run.total_steps=2")
    outcome = train(recipe, directory, "tp1", *NO_EVALUATION, *filtered, *other)
    assert outcome.code not in (0, None)
    for words in ("step_000001 is of another model", "12 tensors differ", "set checkpoint.output_dir", "or model.path"):
        assert words in outcome.last, outcome.text
    assert "Traceback" not in outcome.text
    assert checkpoint_names(directory) == [checkpoint]
