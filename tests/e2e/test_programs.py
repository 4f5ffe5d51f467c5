"""Every benchmark and tool runs from its command line, at its smallest size, and its JSON has the promised keys.

Speeds are never asserted: only that ratios are positive, that counts add up, and that both sides of a comparison ran.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

TIMEOUT_S = 240.0


def run_program(repository: Path, arguments: Sequence[str], timeout_s: float = TIMEOUT_S) -> str:
    """Run `python ARGUMENTS` from the checkout's root and return its stdout; kill all its processes at the timeout."""
    command = [sys.executable, *arguments]
    # A session of its own, so that a program's workers end with it.
    process = subprocess.Popen(
        command, cwd=repository, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        pytest.fail(f"{' '.join(arguments)}: not finished after {timeout_s:.0f} s; stderr ends with\n{errors[-2000:]}")
    assert process.returncode == 0, (
        f"{' '.join(arguments)}: exit code {process.returncode}; stderr ends with\n{errors[-3000:]}"
    )
    return output


def run_json(repository: Path, *arguments: str) -> dict[str, Any]:
    """Run a program with --json and return the object that it prints."""
    output = run_program(repository, [*arguments, "--json"])
    result = json.loads(output)
    assert isinstance(result, dict), f"{arguments[0]} prints {type(result).__name__}, not an object"
    return result


def test_collector_waste(repository: Path) -> None:
    result = run_json(repository, "benchmarks/collector_waste.py", "--tiny")
    assert 0.5 < result["waste_ratio"] < 2.0  # few groups: the bound is one of the mean
    assert {row["pass_rates"] for row in result["rows"]} >= {"p=0.5", "p=0.02", "uniform"}
    for row in [*result["rows"], result["oversampled"], *result["partial"]]:
        assert row["trained"] == result["num_steps"] * result["num_groups"] <= row["generated"]
    continued = {row["partial"]: row["continued_responses"] for row in result["partial"] if row["max_staleness"] == 2}
    assert continued["restart"] == 0 < continued["continue"]


def test_weight_sync(repository: Path) -> None:
    result = run_json(repository, "benchmarks/weight_sync.py", "--tiny")
    assert set(result["transports"]) == {"peer", "colocated"} and result["mbridge"].startswith("mbridge==")
    for name, figures in result["transports"].items():
        assert figures["bytes_ratio"] == pytest.approx(1.0, abs=0.01), name
        assert min(figures["vs_mbridge"], figures["vs_floor"], figures["with_verification_seconds"]) > 0, name
    assert sum(result["shard_bytes"]) >= result["model_bytes"] > 0
    assert all(
        len(rows) == result["runs"] for side in ("ours", "bytes", "floor") for rows in result["rows"][side].values()
    )
