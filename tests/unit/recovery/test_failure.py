"""The first failure stays the first."""

from __future__ import annotations

import time
from pathlib import Path

from megatron_dapo.recovery.failure import (
    Failure,
    begin_attempt,
    clear_failures,
    failure_of,
    last_line,
    read_failure,
    record_failure,
)


def test_first_failure_wins_and_all_are_kept(tmp_path: Path) -> None:
    assert read_failure(tmp_path) is None
    try:
        {}["weights"]
    except KeyError as error:
        first = failure_of(2, error)
    assert record_failure(tmp_path, first)
    assert not record_failure(tmp_path, Failure(rank=0, kind="exception", message="connection closed by peer"))
    assert read_failure(tmp_path) == first
    assert "KeyError" in last_line(first) and "rank 2" in last_line(first) and "test_failure.py" in first.detail
    assert (tmp_path / "failure_rank_0.json").is_file()
    clear_failures(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_message_of_several_lines_becomes_one() -> None:
    failure = failure_of(2, ValueError("such as\n  first\n  second\nFix: this"))
    assert failure.message == "ValueError: such as first second Fix: this"
    assert last_line(failure) == f"first failure: rank 2, exception: {failure.message}"


def test_a_consequence_never_stands_for_the_cause(tmp_path: Path) -> None:
    class RemoteFailure(RuntimeError):
        is_consequence = True

    assert not record_failure(tmp_path, failure_of(1, RemoteFailure("another rank failed")))
    assert read_failure(tmp_path) is not None and read_failure(tmp_path).rank == 1  # all there is
    assert record_failure(tmp_path, failure_of(0, OSError("the disk is full")))
    assert read_failure(tmp_path).message == "OSError: the disk is full"
    clear_failures(tmp_path)
    assert read_failure(tmp_path) is None


def test_attempts_are_numbered_and_an_old_failure_does_not_stay(tmp_path: Path) -> None:
    """Under srun or torchrun no launcher of ours clears the records: rank 0 does, when the next attempt begins."""
    assert begin_attempt(tmp_path, started=time.time()) == 1
    record_failure(tmp_path, Failure(rank=2, kind="exception", message="of attempt 1"))
    assert read_failure(tmp_path).attempt == 1
    time.sleep(0.01)
    started = time.time()
    record_failure(tmp_path, Failure(rank=3, kind="exception", message="early"))  # before rank 0 gets that far
    assert begin_attempt(tmp_path, started) == 2
    assert not (tmp_path / "failure.json").exists() and not (tmp_path / "failure_rank_2.json").exists()
    assert read_failure(tmp_path).message == "early"
    failure = Failure(rank=1, kind="exception", message="of attempt 2")
    assert record_failure(tmp_path, failure) and read_failure(tmp_path).attempt == 2
    assert last_line(read_failure(tmp_path)) == "first failure: attempt 2, rank 1, exception: of attempt 2"
    assert begin_attempt(tmp_path, started=time.time()) == 3 and read_failure(tmp_path) is None
