"""Whole runs through the command, in processes of their own: each has a deadline, none may leave a process behind."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT, ROOT / "tests" / "distributed", ROOT / "tests" / "e2e"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from whole_runs import RUN_TIMEOUT_S, Finished  # noqa: E402

from megatron_dapo.proof.resume import ResumeProofSettings, make_reference  # noqa: E402
from tools.prove_resume import write_recipe  # noqa: E402

ORPHAN_S = 15.0
PR_SET_CHILD_SUBREAPER = 36  # prctl(2)


@pytest.fixture(scope="session", autouse=True)
def reaper() -> None:
    """Orphans become children of this process, where `no_orphans` finds them."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@pytest.fixture(autouse=True)
def no_orphans(reaper: None) -> Iterator[None]:
    """No test leaves a process of its runs behind: no worker, no torchrun, no verifier."""
    before = set(psutil.Process().children(recursive=True))
    yield
    new = [process for process in psutil.Process().children(recursive=True) if process not in before]
    _, left = psutil.wait_procs(new, timeout=ORPHAN_S)
    described = [_describe(process) for process in left]
    for process in left:
        process.kill()
    assert not left, f"left behind: {described}"


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:200]}"
    except psutil.NoSuchProcess:
        return f"{process.pid}"


@pytest.fixture(scope="session")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small configuration of the resume proof."""
    return write_recipe(tmp_path_factory.mktemp("recipe"))


@pytest.fixture(scope="session")
def finished(recipe: Path, tmp_path_factory: pytest.TempPathFactory, reaper: None) -> Finished:
    """Five train steps at TP2, a checkpoint after each, evaluations before, in between and after."""
    settings = ResumeProofSettings(recipe, "tp2", tmp_path_factory.mktemp("tp2"), run_timeout_s=RUN_TIMEOUT_S)
    folder, _, seconds = make_reference(settings)
    return Finished(settings, folder, seconds)
