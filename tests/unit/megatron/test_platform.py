from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_dapo.megatron.platform import PATCHES, install_cpu_platform

ROOT = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU platform is not used if CUDA is present")


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[str]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(Path(__file__).parent / "platform_checks.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


# These need two ranks: see test_actor_steps.py.
TESTED_BY_RANKS = {"uneven_collectives"}


@pytest.mark.parametrize("name", [name for name in PATCHES if name not in TESTED_BY_RANKS])
def test_megatron_core_needs_the_patch_and_works_with_it(outcomes: dict[str, list[str]], name: str) -> None:
    without, complete = outcomes[name]
    assert without, f"{name}: megatron-core works without this patch; drop it"
    assert complete == "", f"{name}: {complete}"


def test_installing_twice_changes_nothing_more() -> None:
    assert install_cpu_platform()
    tensor_type = torch.Tensor.type
    assert install_cpu_platform()
    assert torch.Tensor.type is tensor_type


@pytest.mark.parametrize("patch", PATCHES.values(), ids=PATCHES)
def test_every_patch_says_which_line_needs_it(patch) -> None:
    assert ".py:" in (patch.__doc__ or "")
