"""Runs that end without finishing: no more data, no more disk; and unusual layouts."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path

import pytest
from interruptions import Finished
from whole_runs import NO_EVALUATION, ROOT, Outcome, checkpoint_names, lines_of, train

from tools.resume_proof.compare_runs import checkpoint_steps

QUICKSTART = ROOT / "examples" / "quickstart"
ONE_EPOCH = (
    "data.max_epochs=1",
    "rollout.oversample=1.0",
    "rollout.max_staleness=0",
    "checkpoint.interval=0",
    *NO_EVALUATION,
)


def exhausted(mode: str, recipe: Path, directory: Path) -> Outcome:
    """One pass over 16 prompts, 6 groups a step."""
    return train(recipe, directory, "tp1", *ONE_EPOCH, f"rollout.on_exhausted={mode}")


def collector_state(directory: Path) -> dict:
    step = checkpoint_steps(directory / "checkpoints")[-1]
    return json.loads((directory / "checkpoints" / f"step_{step:06d}" / "collector.json").read_text())


def test_the_last_groups_are_trained_where_partial_batches_are_allowed(recipe: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    outcome = exhausted("train_partial", recipe, directory)
    assert outcome.code == 0, outcome.text
    summary = json.loads((directory / "summary.json").read_text())
    trained = [record["rollout/groups_trained"] for record in lines_of(directory / "metrics.jsonl")]
    counters = collector_state(directory)["counters"]
    assert summary["stopped"] == "data exhausted" and summary["train_steps"] == len(trained) >= 2
    assert 0 < trained[-1] < 6 and trained[:-1] == [6] * (len(trained) - 1)
    assert counters["num_started"] == 16 == counters["num_trained"] + counters["num_filtered"]
    assert counters["num_trained"] == sum(trained)
    assert (directory / "huggingface" / "config.json").is_file()


@pytest.mark.long  # an error keeps them, too
def test_the_last_groups_are_kept_for_later_where_the_run_stops(recipe: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    outcome = exhausted("stop", recipe, directory)
    assert outcome.code == 0, outcome.text
    assert json.loads((directory / "summary.json").read_text())["stopped"] == "data exhausted"
    assert [record["rollout/groups_trained"] for record in lines_of(directory / "metrics.jsonl")][-1] == 6
    require_groups_kept(directory)


def require_groups_kept(directory: Path) -> None:
    """Check that nothing is lost: with more epochs the run continues from here."""
    state = collector_state(directory)
    kept = len(state["buffer"]["groups"])
    assert 0 < kept < 6
    assert state["counters"]["num_trained"] + state["counters"]["num_filtered"] + kept == 16


def test_a_run_that_trains_nothing_says_why(recipe: Path, tmp_path: Path) -> None:
    """No response to these prompts can be right: every group is left out, and some of their responses are on record."""
    rows = lines_of(QUICKSTART / "train.jsonl")[:16]
    data = tmp_path / "impossible.jsonl"
    data.write_text("".join(json.dumps({**row, "reward_model": {"ground_truth": "-987654"}}) + "\n" for row in rows))
    outcome = train(recipe, tmp_path / "run", "tp1", *ONE_EPOCH, f"data.train_paths=['{data}']")
    assert outcome.code == 1, outcome.text
    assert (
        "no train step was made: of 16 groups none could be trained" in outcome.last and "16 all_wrong" in outcome.last
    )
    shown = lines_of(tmp_path / "run" / "filtered.jsonl")
    assert str(tmp_path / "run" / "filtered.jsonl") in outcome.last and len({line["prompt_id"] for line in shown}) == 2
    assert all(line["accuracy"] == 0 and line["advantage"] is None and line["response"] for line in shown)
    assert not (tmp_path / "run" / "huggingface").exists(), "an untouched model is no result"


@pytest.mark.long  # test_streamed_steps.py and tests/distributed/test_actor_parity.py have pipelines without a command
def test_a_pipeline_is_one_flag_away(finished: Finished, recipe: Path, tmp_path: Path) -> None:
    outcome = train(recipe, tmp_path / "pp2", "pp2", *NO_EVALUATION, "run.total_steps=1", "optimizer.schedule=constant")
    assert outcome.code == 0, outcome.text
    assert json.loads((tmp_path / "pp2" / "summary.json").read_text())["layout"] == "TP1 PP2 CP1 DP1"
    ours = lines_of(tmp_path / "pp2" / "metrics.jsonl")[0]
    theirs = lines_of(finished.directory / "metrics.jsonl")[0]
    # The first rollout batch is sampled from the same weights with the same seeds: only rounding may differ.
    for name in ("rollout/groups_generated", "actor/trained_tokens", "reward/mean"):
        assert ours[name] == theirs[name], name
    assert ours["actor/loss"] == pytest.approx(theirs["actor/loss"], rel=1e-4)
    assert ours["actor/grad_norm"] == pytest.approx(theirs["actor/grad_norm"], rel=1e-3)


def no_large_files() -> None:
    """A disk that takes nothing beyond 1 MiB a file; a rank's part of a checkpoint is larger."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))


def test_a_checkpoint_that_does_not_fit_leaves_the_earlier_ones(
    finished: Finished, recipe: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "full"
    shutil.copytree(finished.directory / "checkpoints" / "step_000003", directory / "checkpoints" / "step_000003")
    outcome = train(recipe, directory, "tp1", *NO_EVALUATION, limit=no_large_files)
    assert outcome.code not in (0, None)
    assert "CheckpointError: checkpoint of step 4 was not saved" in outcome.last
    assert "File too large" in outcome.last, "the last line is the cause, not what followed from it"
    assert f"the newest earlier checkpoint is {directory / 'checkpoints' / 'step_000003'}" in outcome.last
    assert checkpoint_names(directory) == ["step_000003"]
    original = finished.directory / "checkpoints" / "step_000003"
    for file in original.iterdir():
        assert (directory / "checkpoints" / "step_000003" / file.name).read_bytes() == file.read_bytes()
