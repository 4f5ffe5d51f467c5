"""The culprit comes first, consequences after it, and an old attempt's records do not stay."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from megatron_dapo.watch.failure import (
    EXIT_CODE,
    Failure,
    failure_of,
    first_line,
    in_order,
    read_failure,
    reserve_space,
    write_failures,
)


def raised(error: BaseException, cause: BaseException | None = None) -> Failure:
    try:
        raise error from cause
    except BaseException as caught:
        return failure_of(2, caught, "score", "node1")


def test_evidence_of_the_kernel_comes_before_reports_and_reports_before_broken_connections() -> None:
    """Whatever the order in which they were noticed: a connection breaks before its peer's death is seen."""
    reset = Failure(0, "connection lost", "Connection reset by peer", is_consequence=True, time=1.0)
    error = Failure(1, "exception", "RuntimeError: x", time=2.0)
    killed = Failure(3, "signal", "killed by signal 9", time=3.0)
    later = Failure(2, "signal", "killed by signal 9", time=4.0)
    assert [failure.rank for failure in in_order([later, reset, killed, error])] == [3, 2, 1, 0]
    assert [failure.is_consequence for failure in in_order([later, reset, killed, error])] == [False, True, True, True]
    assert in_order([error, reset])[0] == error
    assert in_order([reset])[0].is_consequence and "a consequence: no rank reported its cause" in first_line(reset)


def test_a_message_of_several_lines_becomes_one() -> None:
    failure = raised(ValueError("such as\n  first\n  second\nFix: this"))
    assert failure.message == "ValueError: such as first second Fix: this" and "test_failure.py" in failure.detail
    assert first_line(failure) == (
        f"first failure: attempt 1, rank 2 (node1), phase score: {failure.message}; to do: {failure.advice}"
    )


class Remote(RuntimeError):
    is_consequence = True


@pytest.mark.parametrize(
    ("error", "cause", "is_consequence", "exit_code"),
    [
        (ValueError("bad gold"), "exception", False, 1),
        (OSError(28, "No space left on device"), "disk full", False, 1),
        (
            RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer"),
            "connection lost",
            True,
            EXIT_CODE,
        ),
        (TimeoutError("rank 1 of 2 waited for rank 0's next command: x"), "connection lost", True, EXIT_CODE),
        (Remote("another rank failed"), "exception", True, EXIT_CODE),
        (ConnectionRefusedError("SGLang server 1 refused"), "exception", False, EXIT_CODE),
        (FileNotFoundError("model.safetensors"), "exception", False, 1),
    ],
)
def test_errors_have_causes(error: Exception, cause: str, is_consequence: bool, exit_code: int) -> None:
    failure = raised(error)
    assert (failure.cause, failure.is_consequence, failure.exit_code) == (cause, is_consequence, exit_code)


def test_the_cause_of_a_wrapped_error_counts() -> None:
    assert raised(RuntimeError("checkpoint was not saved"), OSError(28, "full")).cause == "disk full"


def test_the_record_names_the_culprit_first_and_a_second_writer_keeps_its_own(tmp_path: Path) -> None:
    killed = Failure(3, "signal", "killed by signal 9 (SIGKILL)", "node1", "train_actor", time=5.0, attempt=4)
    reset = Failure(0, "connection lost", "reset", "node0", "train_actor", is_consequence=True, time=5.25, attempt=4)
    assert write_failures(tmp_path / "new", [killed, reset], "node_0")
    document = json.loads((tmp_path / "new" / "failure.json").read_text())
    first, second = document["entries"]
    assert (document["version"], document["attempt"], document["writer"], document["exit_code"]) == (2, 4, "node_0", 75)
    assert (first["rank"], first["node"], first["phase"], first["cause"]) == (3, "node1", "train_actor", "signal")
    assert (second["is_consequence"], second["seconds_after_first"]) == (True, 0.25)
    assert document["line"].startswith(
        "first failure: attempt 4, rank 3 (node1), phase train_actor: killed by signal 9"
    )
    assert not write_failures(tmp_path / "new", [reset], "node_1")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["failure.json", "failure_node_1.json"]
    assert read_failure(tmp_path / "new") == killed


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a small file system")
def test_the_record_of_a_full_disk_is_written_on_it(tmp_path: Path) -> None:
    """Not a byte is left for the record but what was reserved for it."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(tmp_path)], check=True, timeout=20)
    try:
        reserve_space(tmp_path / "run")
        with pytest.raises(OSError, match="No space left") as raised:
            (tmp_path / "file").write_bytes(bytes(1 << 20))
        failure = failure_of(1, raised.value)
        assert failure.cause == "disk full" and write_failures(tmp_path / "run", [failure], "node_0")
        assert read_failure(tmp_path / "run") == failure
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True, timeout=20)
