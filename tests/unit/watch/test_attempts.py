"""Attempts: their ends, the budget of those without progress, and runs that are finished."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_dapo.engines.sglang.servers import ServersFailed
from megatron_dapo.rollout.batch import CollectionExhausted
from megatron_dapo.watch.attempts import (
    ATTEMPTS,
    STOPPED_BY_SIGNAL,
    begin_attempt,
    begin_launch,
    completed_steps,
    exit_code_at,
    failing_node,
    first_attempt_since,
    is_finished,
    next_attempt,
    record_end,
    record_unstarted,
    require_new_run,
    verdict,
)
from megatron_dapo.watch.failure import EXIT_CODE, Failure, clear_failures, failure_of, read_failure, write_failures


def begin(directory: Path, job: str = "17") -> None:
    begin_attempt(directory, next_attempt(directory), job)


def fail(directory: Path, error: Exception, attempt: int) -> None:
    write_failures(directory, [replace(failure_of(1, error), attempt=attempt)], "node_0")


def train_to(directory: Path, step: int) -> None:
    (directory / "metrics.jsonl").write_text("".join(json.dumps({"train_step": n + 1}) + "\n" for n in range(step)))


def judged(directory: Path, job: str = "17", first: int = 1, budget: int = 3) -> int | None:
    found = verdict(directory, job, first, budget)
    return found and found.exit_code


def test_an_attempt_ends_by_its_own_record_by_its_failure_or_as_a_kill(tmp_path: Path) -> None:
    assert judged(tmp_path) is None
    begin(tmp_path)
    assert judged(tmp_path) == EXIT_CODE and "killed" in verdict(tmp_path, "17", 1, 3).reason
    fail(tmp_path, ValueError("a bad value"), 1)
    assert judged(tmp_path) == 1 and "rank 1" in verdict(tmp_path, "17", 1, 3).reason
    begin(tmp_path)  # forgets it
    fail(tmp_path, ConnectionError("reset by peer"), 2)
    assert judged(tmp_path) == EXIT_CODE
    train_to(tmp_path, 4)
    begin(tmp_path)
    record_end(tmp_path, STOPPED_BY_SIGNAL)
    assert judged(tmp_path) == EXIT_CODE and verdict(tmp_path, "17", 1, 3).was_stopped
    begin(tmp_path)
    record_end(tmp_path, "finished")
    assert judged(tmp_path) == 0 == exit_code_at("finished")


@pytest.mark.parametrize(("cause", "in_place"), [("signal", True), ("exception", True), ("node lost", False)])
def test_kept_servers_are_worth_it_where_no_node_is_at_fault(tmp_path: Path, cause: str, in_place: bool) -> None:
    begin(tmp_path)
    assert verdict(tmp_path, "17", 1, 3).leaves_nodes_healthy, "killed"
    write_failures(tmp_path, [Failure(1, cause, "it is gone")], "node_0")
    assert verdict(tmp_path, "17", 1, 3).leaves_nodes_healthy == in_place
    assert not verdict(tmp_path, "17", 1, 1).leaves_nodes_healthy, "the budget is used up"
    record_end(tmp_path, STOPPED_BY_SIGNAL)
    assert not verdict(tmp_path, "17", 1, 3).leaves_nodes_healthy, "the job comes to its end"


def test_attempts_without_a_new_step_use_up_the_budget_and_progress_restores_it(tmp_path: Path) -> None:
    for step, code in (
        (0, EXIT_CODE),
        (0, EXIT_CODE),
        (2, EXIT_CODE),
        (2, EXIT_CODE),
        (1, EXIT_CODE),
        (2, 1),
    ):
        begin(tmp_path)
        train_to(tmp_path, step)  # a resumed run cuts off the rows after its checkpoint: fewer are no progress
        assert judged(tmp_path) == code, step
    reason = verdict(tmp_path, "17", 1, 3).reason
    assert "3 attempts in a row completed no train step beyond step 2" in reason and "killed" in reason
    assert judged(tmp_path, budget=4) == EXIT_CODE


def test_attempts_are_numbered_and_an_old_failure_does_not_stay(tmp_path: Path) -> None:
    """Under srun or torchrun no launcher of ours clears the records: rank 0 does, when the next attempt begins."""
    begin(tmp_path)
    write_failures(tmp_path, [Failure(2, "exception", "of attempt 1")], "node_0")
    (tmp_path / "failure_node_1.json").write_text('{"attempt": 1, "ent')  # cut short
    assert next_attempt(tmp_path) == 2
    write_failures(tmp_path, [Failure(2, "exception", "of a rank that failed before rank 0 got that far", attempt=2)], "node_0")
    begin(tmp_path)
    assert [path.name for path in tmp_path.glob("failure*")] == ["failure.json"]
    begin(tmp_path)
    assert next_attempt(tmp_path) == 4 and read_failure(tmp_path) is None
    write_failures(tmp_path, [Failure(2, "exception", "of attempt 4", attempt=4)], "node_0")
    begin(tmp_path)
    assert next_attempt(tmp_path) == 5 and read_failure(tmp_path).message == "of attempt 4"
    clear_failures(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [ATTEMPTS]


def test_another_job_begins_with_a_new_budget(tmp_path: Path) -> None:
    for _ in range(3):
        begin(tmp_path)
    assert judged(tmp_path) == 1
    assert judged(tmp_path, job="18") is None, "no worker of this job has started"
    begin(tmp_path, job="18")
    assert judged(tmp_path, job="18") == EXIT_CODE


def test_only_attempts_of_this_launch_count_outside_a_batch_job(tmp_path: Path) -> None:
    for _ in range(3):
        begin(tmp_path, job="")
    assert judged(tmp_path, job="") == 1
    first = begin_launch(tmp_path, "")
    assert first == 4 and judged(tmp_path, job="", first=first) is None
    with open(tmp_path / ATTEMPTS, "a") as stream:
        stream.write('{"torn": ')
    begin(tmp_path, job="")
    assert judged(tmp_path, job="", first=first) == EXIT_CODE


def test_a_clock_that_steps_back_hides_no_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = begin_launch(tmp_path, "17")
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 90.0)
    begin(tmp_path)
    fail(tmp_path, ConnectionError("reset by peer"), 1)
    assert judged(tmp_path, first=first) == EXIT_CODE


def test_a_launcher_that_does_not_say_which_attempts_are_its_own_finds_them_by_the_clock(tmp_path: Path) -> None:
    assert first_attempt_since(tmp_path, 0.0) == 1
    lines = [{"attempt": n, "began": 100.0 * n, "job": "", "completed_steps": 0} for n in (1, 2, 3)]
    (tmp_path / ATTEMPTS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [first_attempt_since(tmp_path, since) for since in (0.0, 150.0, 201.0, 250.0, 400.0)] == [1, 2, 2, 3, 4]


def test_attempts_that_leave_no_record_are_noted_and_use_up_the_budget(tmp_path: Path) -> None:
    first = begin_launch(tmp_path, "17")
    codes = []
    for _ in range(3):
        record_unstarted(tmp_path, "17")
        codes.append(judged(tmp_path, first=first))
    assert codes == [EXIT_CODE, EXIT_CODE, 1]
    failure = read_failure(tmp_path)
    assert (failure.cause, failure.attempt, failure.phase) == ("not started", 3, "start")
    begin(tmp_path)
    train_to(tmp_path, 1)
    assert judged(tmp_path, first=first) == EXIT_CODE and read_failure(tmp_path) is None


def test_an_attempt_without_a_record_does_not_show_the_failure_of_an_older_one(tmp_path: Path) -> None:
    begin(tmp_path)
    fail(tmp_path, ValueError("of attempt 1"), 1)
    record_unstarted(tmp_path, "17")
    assert read_failure(tmp_path).attempt == 2


def test_a_requeued_job_begins_only_where_it_began_before(tmp_path: Path) -> None:
    """What is there instead is the bare mount point: a run from the initial policy would fill the node's root disk."""
    run = tmp_path / "run"
    with pytest.raises(FileNotFoundError, match=rf"job 17 has been started before, and {run}.*not mounted on"):
        begin_launch(run, "17", is_restarted=True)
    assert not run.exists()
    assert begin_launch(run, "17") == 1
    assert begin_launch(run, "17", is_restarted=True) == 1
    assert (run / ATTEMPTS).stat().st_mode & 0o777 == 0o600
    begin(run)
    assert begin_launch(run, "18") == 2
    with pytest.raises(FileNotFoundError):
        begin_launch(run, "19", is_restarted=True)


def test_a_run_is_finished_while_its_end_is_there_and_its_configuration_the_same(tmp_path: Path) -> None:
    config, checkpoints = {"run": {"total_steps": 2}}, tmp_path / "checkpoints"

    def finished(values: dict = config) -> bool:
        return is_finished(tmp_path, values, checkpoints)

    assert not finished()
    begin(tmp_path)
    train_to(tmp_path, 2)
    (tmp_path / "config.json").write_text(json.dumps({"config": config}))
    (tmp_path / "summary.json").write_text("{}")
    (checkpoints / "step_000002").mkdir(parents=True)
    assert not finished(), "it has not ended"
    record_end(tmp_path, "finished")
    assert finished() and completed_steps(tmp_path) == 2
    begin_launch(tmp_path, "18")
    assert finished(), "started again, it has nothing to do"
    assert not finished({"run": {"total_steps": 3}})
    (checkpoints / "step_000002").rename(checkpoints / "step_000001")
    assert not finished()
    (checkpoints / "step_000001").rename(checkpoints / "step_000002")
    begin(tmp_path)
    record_end(tmp_path, STOPPED_BY_SIGNAL)
    assert not finished()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("bad"), 1),
        (FileNotFoundError("gone"), 1),
        (CollectionExhausted("no prompts"), 1),
        (ServersFailed("server 0 is lost"), EXIT_CODE),
        (torch.OutOfMemoryError("no room"), EXIT_CODE),
        (TimeoutError("late"), EXIT_CODE),
        (OSError(5, "input/output error"), EXIT_CODE),
    ],
)
def test_errors_that_would_repeat_have_a_code_of_their_own(error: Exception, code: int) -> None:
    assert failure_of(0, error).exit_code == code


def test_a_run_whose_checkpoints_are_gone_does_not_start_from_zero(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    require_new_run(tmp_path, checkpoints, 5)  # nothing is on record
    begin(tmp_path)
    train_to(tmp_path, 5)
    require_new_run(tmp_path, checkpoints, 5)  # killed before or while it saved for the first time
    train_to(tmp_path, 6)
    require_new_run(tmp_path, checkpoints, 0)
    with pytest.raises(
        FileNotFoundError, match=r"records 6 train steps, but .*checkpoints is not there \(not mounted"
    ) as gone:
        require_new_run(tmp_path, checkpoints, 5)
    assert "\n" not in str(gone.value) and 'checkpoint.resume = "never"' in str(gone.value)
    checkpoints.mkdir()
    with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
        require_new_run(tmp_path, checkpoints, 5)


def test_an_attempt_that_ended_left_a_checkpoint_and_one_that_started_anew_did_not(tmp_path: Path) -> None:
    begin(tmp_path)
    train_to(tmp_path, 4)
    record_end(tmp_path, STOPPED_BY_SIGNAL)
    with pytest.raises(FileNotFoundError, match="records 4 train steps"):
        require_new_run(tmp_path, tmp_path / "checkpoints", 5)
    begin(tmp_path)  # checkpoint.resume = "never" cuts the metrics off.
    train_to(tmp_path, 3)
    require_new_run(tmp_path, tmp_path / "checkpoints", 5)


@pytest.mark.parametrize(
    ("nodes", "steps", "limit", "excluded"),
    [
        (["node3"], [0], 2, ""),
        (["node3", "node3"], [0, 0], 2, "node3"),
        (["node3", "node3"], [0, 0], 0, ""),
        (["node3", "node3"], [0, 0], 3, ""),
        (["node1", "node3"], [0, 0], 2, ""),
        (["node3", "node1", "node3"], [0, 0, 0], 2, ""),
        (["node3", "node3"], [4, 9], 2, ""),  # it made progress in between
        (["node3", "node3", "node3"], [4, 9, 9], 2, "node3"),
        (["node0 and node3", "node0 and node3"], [0, 0], 2, ""),  # either may be at fault
    ],
)
def test_a_node_on_which_attempts_failed_in_a_row_is_left_out(
    tmp_path: Path, nodes: list[str], steps: list[int], limit: int, excluded: str
) -> None:
    """steps: on record when each attempt ended."""
    for number, (node, step) in enumerate(zip(nodes, steps, strict=True), start=1):
        begin(tmp_path)
        train_to(tmp_path, step)
        write_failures(tmp_path, [Failure(1, "exception", "read-only file system", node, attempt=number)], "node_0")
    assert failing_node(tmp_path, "17", limit) == excluded
    assert failing_node(tmp_path, "18", 2) == "", "of another job"
    begin(tmp_path)
    assert failing_node(tmp_path, "17", limit) == "", "the next attempt has not failed"
