"""A run that was killed, stopped by a signal or robbed of a checkpoint ends exactly as the run that was not."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path

import pytest
from interruptions import Finished, finish, kill_and_resume
from whole_runs import NO_EVALUATION, RUN_TIMEOUT_S, checkpoint_names, lines_of, train

from tools.resume_proof.compare_runs import checkpoint_steps, run_differences
from tools.resume_proof.kill_points import RunProcess

pytestmark = pytest.mark.timeout(400)


@pytest.mark.long
def test_kill_and_resume_with_tensor_parallelism(finished: Finished, tmp_path: Path) -> None:
    kill_and_resume(finished, tmp_path / "killed")


def test_kill_and_resume_with_data_parallelism(recipe: Path, tmp_path: Path) -> None:
    kill_and_resume(finish(recipe, "dp2", tmp_path, "run.total_steps=3"), tmp_path / "killed")


def signaled(run: RunProcess, signum: int, after_steps: int) -> int:
    """The exit code of a run that got a signal once so many steps were on record."""
    metrics = run.directory / "metrics.jsonl"
    came_so_far = run.wait_until(lambda: metrics.is_file() and metrics.read_bytes().count(b"\n") >= after_steps)
    assert came_so_far, run.exit_reason()
    run.process.send_signal(signum)
    return run.wait()


def test_sigterm_and_ctrl_c_save_and_the_resumed_run_ends_the_same(finished: Finished, tmp_path: Path) -> None:
    directory = tmp_path / "stopped"
    # Without an interval only the end and a signal save.
    rare = "checkpoint.interval=0"
    steps: list[int] = []
    for signum in (signal.SIGTERM, signal.SIGINT):
        # A step of its own: the rows of the run before are on record when this one has hardly begun.
        start, least = time.monotonic(), len(steps) + 1
        run = finished.run(directory, rare)
        assert signaled(run, signum, least) == 0, run.exit_reason()
        assert time.monotonic() - start < RUN_TIMEOUT_S
        summary = json.loads((directory / "summary.json").read_text())
        steps = [record["train_step"] for record in lines_of(directory / "metrics.jsonl")]
        assert summary["stopped"] == "stopped by a signal" and summary["train_steps"] == steps[-1] == len(steps)
        assert steps[-1] >= least and checkpoint_steps(directory / "checkpoints")[-1] == steps[-1]
        assert not (directory / "huggingface").exists(), "only a run that came to its end exports"
    run = finished.run(directory, rare)
    assert run.wait() == 0, run.exit_reason()
    assert next(run_differences(finished.directory, directory), "") == ""


def flip_a_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1000] ^= 1
    file.write_bytes(bytes(content))


def test_a_corrupt_checkpoint_is_passed_over_and_said_so(finished: Finished, tmp_path: Path) -> None:
    directory = tmp_path / "corrupt"
    shutil.copytree(finished.directory, directory)
    for step in (1, 2, 5):
        shutil.rmtree(directory / "checkpoints" / f"step_{step:06d}")
    flip_a_byte(directory / "checkpoints" / "step_000004" / "rank_00001.safetensors")
    run = finished.run(directory)
    assert run.wait() == 0, run.exit_reason()
    log = run.log.read_text()
    assert "step_000004: contents of rank_00001.safetensors changed since they were written; trying the one" in log
    assert "checkpoints/step_000003" in log.partition("resuming from ")[2].splitlines()[0]
    assert next(run_differences(finished.directory, directory), "") == ""


def test_without_any_whole_checkpoint_the_run_refuses(finished: Finished, recipe: Path, tmp_path: Path) -> None:
    directory = tmp_path / "broken"
    shutil.copytree(finished.directory / "checkpoints", directory / "checkpoints")
    for step in (1, 2, 3):
        shutil.rmtree(directory / "checkpoints" / f"step_{step:06d}")
    flip_a_byte(directory / "checkpoints" / "step_000004" / "rank_00000.safetensors")
    (directory / "checkpoints" / "step_000005" / "manifest.json").unlink()
    before = checkpoint_names(directory)
    outcome = train(recipe, directory, "tp1", *NO_EVALUATION)
    assert outcome.code != 0
    assert (
        outcome.last.startswith("first failure: attempt ") and f"none of the checkpoints in {directory}" in outcome.last
    )
    assert "step_000004" in outcome.last and "step_000005: no manifest.json" in outcome.last
    assert checkpoint_names(directory) == before, "a checkpoint that cannot be read is not deleted"
