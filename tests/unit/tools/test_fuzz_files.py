"""Hostile files are refused in one line within a second; the fuzzer that says so finds readers that are wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.fuzzing.fuzzer import fuzz
from tools.fuzzing.mutations import change_bytes, change_json, nest
from tools.fuzzing.target import Target


def run_fuzzer(num_inputs: int, seed: int, timeout_s: float) -> dict[str, object]:
    """In a separate process, whose memory it limits."""
    command = [sys.executable, "-W", "ignore", "-m", "tools.fuzz_files", "--json"]
    command += ["--inputs", str(num_inputs), "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.stdout, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def check(report: dict[str, object], num_inputs: int) -> None:
    assert report["findings"] == []
    assert (report["tracebacks"], report["hangs"], report["unreadable_messages"]) == (0, 0, 0)
    assert report["inputs"] == num_inputs == report["accepted"] + report["refused"]
    assert report["refused"] > num_inputs / 2  # most inputs are hostile


def test_two_hundred_hostile_files() -> None:
    report = run_fuzzer(200, seed=1, timeout_s=600)
    check(report, 200)
    assert len(report["by_target"]) >= 12


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_ten_thousand_hostile_files() -> None:
    check(run_fuzzer(10_000, seed=0, timeout_s=1100), 10_000)


# ---- readers with planted bugs


def document(directory: Path) -> dict[str, object]:
    return json.loads((directory / "file.json").read_text())


def takes_a_key_for_granted(directory: Path) -> None:
    document(directory)["layers"]


def loops_as_often_as_the_file_says(directory: Path) -> None:
    try:
        count = document(directory).get("layers", 0)
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{directory}: {type(error).__name__}") from None
    for _ in range(count if isinstance(count, int) else 0):
        pass


@pytest.mark.parametrize(
    ("reader", "kind"),
    [
        (takes_a_key_for_granted, "traceback"),
        (loops_as_often_as_the_file_says, "hang"),
    ],
)
def test_planted_bugs_are_found_and_again_by_their_numbers(reader, kind: str) -> None:
    def write(directory: Path) -> None:
        (directory / "file.json").write_text('{"layers": 2, "name": "x"}')

    target = Target("planted", "file.json", write, reader, (change_json, nest, change_bytes))
    report = fuzz([target], 120, seed=0, seconds=0.3)
    found = [(number, message) for found_kind, _, number, message in report.findings if found_kind == kind]
    assert found, report.findings
    again = fuzz([target], 120, seed=0, only=found[0][0], seconds=0.3)
    assert again.inputs == 1 and again.findings[0][:3] == (kind, "planted", found[0][0])
