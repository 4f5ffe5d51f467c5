"""The first failure stays the first."""

from __future__ import annotations

from pathlib import Path

from megatron_dapo.recovery.failure import Failure, clear_failures, failure_of, last_line, read_failure, record_failure


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
    class Elsewhere(RuntimeError):
        is_consequence = True

    assert not record_failure(tmp_path, failure_of(1, Elsewhere("another rank failed")))
    assert read_failure(tmp_path) is not None and read_failure(tmp_path).rank == 1  # all there is
    assert record_failure(tmp_path, failure_of(0, OSError("the disk is full")))
    assert read_failure(tmp_path).message == "OSError: the disk is full"
    clear_failures(tmp_path)
    assert read_failure(tmp_path) is None
