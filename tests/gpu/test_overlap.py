"""Tensor-parallel communication during the products, on two GPUs: the log-probs and gradients without it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu
PROGRAM = Path(__file__).with_name("overlap_checks.py")


def test_overlapped_communication_changes_rounding_alone(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--stand-in", default=False) or torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, there are {torch.cuda.device_count()}")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(PROGRAM)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in json.loads(done.stdout.splitlines()[-1]):
        assert rank["num_tokens"] > 100 and rank["logprob"] < 0.02 and rank["gradient"] < 0.1, rank
