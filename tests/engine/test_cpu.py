"""Stand-ins for CPUs: each is still needed by the SGLang import it names, or must be removed."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from megatron_dapo.engines.sglang.cpu import KERNEL_STAND_INS, TORCHVISION_STAND_INS

pytestmark = pytest.mark.long  # each test starts an interpreter that imports SGLang

# Records which module takes which name out of the stand-in for sgl_kernel while a server's modules are imported.
_RECORD = """
import json, sys, types
from megatron_dapo.engines.sglang import cpu

cpu.prepare_imports()
taken = {}

class Recorder(types.ModuleType):
    def __getattribute__(self, name):
        if name in cpu.KERNEL_STAND_INS:
            frame = sys._getframe(1)
            while "importlib" in frame.f_globals["__name__"]:
                frame = frame.f_back
            taken.setdefault(name, []).append(frame.f_globals["__name__"])
        return super().__getattribute__(name)

sys.modules["sgl_kernel"].__class__ = Recorder
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


def test_every_kernel_stand_in_is_taken_by_the_module_it_names(engine_python: Path, repository: Path) -> None:
    done = run(engine_python, repository, _RECORD)
    lines = [line for line in done.stdout.splitlines() if line.startswith("TAKEN")]
    assert lines, done.stderr[-3000:]
    taken = json.loads(lines[0].removeprefix("TAKEN"))
    assert {name: module in taken.get(name, []) for name, module in KERNEL_STAND_INS.items()} == dict.fromkeys(
        KERNEL_STAND_INS, True
    ), taken


@pytest.mark.parametrize("name", TORCHVISION_STAND_INS)
def test_every_torchvision_stand_in_is_needed(engine_python: Path, repository: Path, name: str) -> None:
    without = run(engine_python, repository, _WITHOUT, name)
    assert without.returncode != 0 and f"torchvision::{name}" in without.stderr
