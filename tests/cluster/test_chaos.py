"""Chaos on four nodes: faults at random moments, after which the run must name the culprit, go on and lose nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import REQUIRED, ROOT

from tools.virtual_cluster import unavailable

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
CELLS = ("sigkill:train", "oom:generate")


def test_chaos_on_four_nodes(tmp_path: Path) -> None:
    if (reason := unavailable()) and not os.environ.get(REQUIRED):
        pytest.skip(f"no virtual cluster on this machine: {reason}; see `make test-cluster`")
    command = [sys.executable, "tools/chaos.py", "--nodes", "4", "--cells", *CELLS, "--json"]
    places = ["--results", str(tmp_path / "results.jsonl"), "--work", str(tmp_path / "work")]
    done = subprocess.run([*command, *places], cwd=ROOT, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    figures = json.loads(done.stdout)
    assert (figures["num_faults"], figures["culprit_named_share"], figures["orphans"]) == (len(CELLS), 1.0, 0), figures
