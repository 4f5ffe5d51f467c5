"""Stand-ins for CPUs: SGLang still needs them to be imported, or they must be removed."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from megatron_dapo.engines.sglang.cpu import TORCHVISION_STAND_INS

pytestmark = pytest.mark.long  # each test starts an interpreter that imports SGLang

# Records which kernels are taken out of the stand-in for sgl_kernel while a server's modules are imported.
_RECORD = """
import json, sys
from megatron_dapo.engines.sglang import cpu

cpu.prepare_imports()
package, taken = sys.modules["sgl_kernel"], []
kernel = package.__getattr__
package.__getattr__ = lambda name: taken.append(name) or kernel(name)
import sglang.srt.entrypoints.http_server, sglang.srt.managers.scheduler
import sglang.srt.model_executor.model_runner
print("TAKEN" + json.dumps(taken))
"""
# torchvision imported with all stand-ins declared but one.
_WITHOUT = """
import sys
from megatron_dapo.engines.sglang import cpu

cpu.TORCHVISION_STAND_INS = tuple(name for name in cpu.TORCHVISION_STAND_INS if name != sys.argv[1])
cpu.prepare_imports()
import torchvision
"""


def run(python: Path, repository: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, PYTHONPATH=str(repository), SGLANG_USE_CPU_ENGINE="1", TORCHDYNAMO_DISABLE="1")
    return subprocess.run(
        [str(python), "-c", code, *arguments], env=environment, capture_output=True, text=True, timeout=600, check=False
    )


def test_stand_ins_for_kernels_are_needed(engine_python: Path, repository: Path) -> None:
    done = run(engine_python, repository, _RECORD)
    lines = [line for line in done.stdout.splitlines() if line.startswith("TAKEN")]
    assert lines, done.stderr[-3000:]
    # Every supported version asks for these; which others it asks for differs.
    taken = json.loads(lines[0].removeprefix("TAKEN"))
    assert {"copy_all_layer_kv_cache_cpu", "assign_req_to_token_pool_cpu"} <= set(taken), taken


@pytest.mark.parametrize("name", TORCHVISION_STAND_INS)
def test_every_torchvision_stand_in_is_needed(engine_python: Path, repository: Path, name: str) -> None:
    without = run(engine_python, repository, _WITHOUT, name)
    assert without.returncode != 0 and f"torchvision::{name}" in without.stderr
