"""A run that was killed, stopped by a signal or robbed of a checkpoint ends exactly as the run that was not."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from interruptions import Finished, finish, kill_and_resume, signaled
from whole_runs import NO_EVALUATION, RUN_TIMEOUT_S, checkpoint_names, lines_of, train

from megatron_dapo.watch.attempts import ATTEMPTS
from megatron_dapo.watch.failure import EXIT_CODE
from tools.resume_proof.compare_runs import checkpoint_steps, run_differences
from tools.resume_proof.kill_points import RunProcess, after_seconds, kill_at


@pytest.mark.long
def test_kill_and_resume_with_data_parallelism(recipe: Path, tmp_path: Path) -> None:
    kill_and_resume(finish(recipe, "dp2", tmp_path, "run.total_steps=3"), tmp_path / "killed")


def num_rows(directory: Path) -> int:
    metrics = directory / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.is_file() else 0


def stop_one_rank(run: RunProcess, rank: int, after_steps: int) -> None:
    """Send SIGTERM twice, once so many steps are on record, and wait for the checkpoint and the end. A second signal right
    after the first changes nothing."""
    assert run.wait_until(lambda: num_rows(run.directory) >= after_steps), run.exit_reason()
    start = time.monotonic()
    for _ in range(2):
        os.kill(run.worker_pids()[rank], signal.SIGTERM)
        time.sleep(0.1)
    assert run.wait() == EXIT_CODE, run.exit_reason()
    assert time.monotonic() - start < 60.0
    steps = num_rows(run.directory)
    assert after_steps <= steps <= after_steps + rank, "the step under way was finished"
    assert checkpoint_steps(run.directory / "checkpoints")[-1] == steps


def test_killed_and_then_stopped_by_a_signal_the_run_ends_the_same(finished: Finished, tmp_path: Path) -> None:
    """kill -9 at a random moment of the first steps, then SIGTERM to one of two processes while it generates."""
    directory = tmp_path / "interrupted"

    def early(directory: Path) -> Callable[[], bool]:
        is_time = after_seconds(random.uniform(0.1, 0.4) * finished.seconds)[1](directory)
        # The machine may be faster by now than when the finished run was made.
        return lambda: is_time() or num_rows(directory) >= 2

    killed = kill_at(finished.settings, directory, early)
    assert not killed.left and not (directory / "summary.json").exists()
    stop_one_rank(finished.run(directory), 0, killed.trained_steps + 1)
    assert not (directory / "huggingface").exists(), "only a run that came to its end exports"
    run = finished.run(directory)
    assert run.wait() == 0, run.exit_reason()
    drop_unevaluated(directory)
    assert next(run_differences(finished.directory, directory), "") == ""


@pytest.mark.long
def test_sigterm_and_ctrl_c_save_and_the_resumed_run_ends_the_same(finished: Finished, tmp_path: Path) -> None:
    directory = tmp_path / "stopped"
    # Without an interval only the end and a signal save.
    rare = "checkpoint.interval=0"
    steps: list[int] = []
    for signum in (signal.SIGTERM, signal.SIGINT):
        # A separate step: the rows of the run before are on record when this one has hardly begun.
        start, least = time.monotonic(), len(steps) + 1
        run = finished.run(directory, rare)
        assert signaled(run, signum, least) == EXIT_CODE, run.exit_reason()
        assert time.monotonic() - start < RUN_TIMEOUT_S
        summary = json.loads((directory / "summary.json").read_text())
        steps = [record["train_step"] for record in lines_of(directory / "metrics.jsonl")]
        assert summary["stopped"] == "stopped by a signal" and summary["train_steps"] == steps[-1] == len(steps)
        assert steps[-1] >= least and checkpoint_steps(directory / "checkpoints")[-1] == steps[-1]
        assert not (directory / "huggingface").exists(), "only a run that came to its end exports"
    run = finished.run(directory, rare)
    assert run.wait() == 0, run.exit_reason()
    drop_unevaluated(directory)
    assert next(run_differences(finished.directory, directory), "") == ""


def drop_unevaluated(directory: Path) -> None:
    """Remove checkpoints that a signal had written before the evaluation of their step, which came after the resume."""
    for step in checkpoint_steps(directory / "checkpoints"):
        checkpoint = directory / "checkpoints" / f"step_{step:06d}"
        progress = json.loads((checkpoint / "run.json").read_text())["progress"]
        if step in (0, 2, 4) and str(step) not in progress["evaluations"]:
            shutil.rmtree(checkpoint)


@pytest.mark.long
@pytest.mark.parametrize(("phase", "after_steps", "rank"), [("evaluate", 2, 0), ("generate", 1, 1)])
def test_a_signal_ends_generation_and_evaluation_at_once_and_the_resumed_run_ends_the_same(
    finished: Finished, tmp_path: Path, phase: str, after_steps: int, rank: int
) -> None:
    """It reaches one process of the two. Rank 0 learns of another's within a second, in which a step may pass."""
    directory = tmp_path / phase
    stop_one_rank(finished.run(directory, "checkpoint.interval=0"), rank, after_steps)
    assert len(checkpoint_steps(directory / "checkpoints")) == 1
    run = finished.run(directory, "checkpoint.interval=0")
    assert run.wait() == 0, run.exit_reason()
    drop_unevaluated(directory)
    assert next(run_differences(finished.directory, directory), "") == ""


@pytest.mark.long
def test_without_the_time_for_a_checkpoint_the_last_one_stands(finished: Finished, tmp_path: Path) -> None:
    directory = tmp_path / "short"
    run = finished.run(directory, "checkpoint.interval=2", "run.stop_notice_seconds=0.001")
    assert signaled(run, signal.SIGTERM, 3) == EXIT_CODE, run.exit_reason()
    steps = [record["train_step"] for record in lines_of(directory / "metrics.jsonl")]
    kept = checkpoint_steps(directory / "checkpoints")
    if steps[-1] % 2:
        assert "no checkpoint of train step" in run.log.read_text() and kept[-1] == steps[-1] - 1
    run = finished.run(directory, "checkpoint.interval=2")
    assert run.wait() == 0, run.exit_reason()
    drop_unevaluated(directory)
    assert next(run_differences(finished.directory, directory), "") == ""


@pytest.mark.long
def test_torchrun_starts_again_what_was_killed_but_not_what_would_repeat(finished: Finished, tmp_path: Path) -> None:
    directory = tmp_path / "restarted"
    run = finished.run(directory, command=("--restarts", "2"))
    metrics = directory / "metrics.jsonl"
    assert run.wait_until(lambda: metrics.is_file() and metrics.read_bytes().count(b"\n") >= 2), run.exit_reason()
    os.kill(run.worker_pids()[1], signal.SIGKILL)
    assert run.wait() == 0, run.exit_reason()
    assert next(run_differences(finished.directory, directory), "") == ""
    assert len([record for record in lines_of_attempts(directory) if "began" in record]) == 2
    # Both ranks refuse before they load torch: torchrun's two further tries take seconds.
    directory = tmp_path / "repeating"
    run = finished.run(directory, "data.max_epochs=1", "rollout.on_exhausted=error", command=("--restarts", "2"))
    assert run.wait() == 1, run.exit_reason()
    assert len([record for record in lines_of_attempts(directory) if "began" in record]) == 1
    log = run.log.read_text()
    assert log.count("not started again: first failure: attempt 1, rank 0") >= 2 and "CollectionExhausted" in log


def lines_of_attempts(directory: Path) -> list[dict]:
    """Return the records of attempts.jsonl, which has empty lines between them."""
    return [json.loads(line) for line in (directory / ATTEMPTS).read_text().splitlines() if line]


def flip_a_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= (
        1  # a tensor that every layout reads; random states, at the end, are read by the same one
    )
    file.write_bytes(bytes(content))


def test_a_run_goes_on_in_another_layout_from_the_last_whole_checkpoint(
    finished: Finished, recipe: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "narrower"
    shutil.copytree(finished.directory, directory)
    shutil.rmtree(directory / "checkpoints" / "step_000005")
    flip_a_byte(directory / "checkpoints" / "step_000004" / "policy_00001.safetensors")
    outcome = train(recipe, directory, "tp1", *NO_EVALUATION, *finished.settings.overrides)
    assert outcome.code == 0, outcome.text
    told = "step_000004: contents of policy_00001.safetensors changed since they were written; trying the one"
    assert told in outcome.text
    assert "checkpoints/step_000003" in outcome.text.partition("resuming from ")[2].splitlines()[0]
    assert "policy was saved by another layout" in outcome.text
    rows, before = (lines_of(run / "metrics.jsonl") for run in (directory, finished.directory))
    assert [row["train_step"] for row in rows] == [row["train_step"] for row in before]
    # The first step in the new layout trains what the old one would have, up to the order of floating-point sums.
    for key in ("actor/grad_norm", "actor/loss"):
        assert rows[3][key] == pytest.approx(before[3][key], rel=1e-3, abs=1e-5), key


@pytest.mark.long
def test_without_any_whole_checkpoint_the_run_refuses(finished: Finished, recipe: Path, tmp_path: Path) -> None:
    directory = tmp_path / "broken"
    shutil.copytree(finished.directory / "checkpoints", directory / "checkpoints")
    for step in (1, 2, 3):
        shutil.rmtree(directory / "checkpoints" / f"step_{step:06d}")
    flip_a_byte(directory / "checkpoints" / "step_000004" / "policy_00000.safetensors")
    (directory / "checkpoints" / "step_000005" / "manifest.json").unlink()
    before = checkpoint_names(directory)
    outcome = train(recipe, directory, "tp1", *NO_EVALUATION)
    assert outcome.code == 1, "it would repeat"
    assert (
        outcome.last.startswith("first failure: attempt ") and f"none of the checkpoints in {directory}" in outcome.last
    )
    assert "step_000004" in outcome.last and "step_000005: no manifest.json" in outcome.last
    assert checkpoint_names(directory) == before, "a checkpoint that cannot be read is not deleted"
