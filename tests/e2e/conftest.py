"""Whole runs through the command, in separate processes: each has a deadline, none may leave a process behind."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
for directory in (ROOT, ROOT / "tests" / "distributed", ROOT / "tests" / "e2e"):
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))

from interruptions import Finished, finish  # noqa: E402
from launcher import standing  # noqa: E402

from tools.prove_resume import write_recipe  # noqa: E402

ORPHAN_S = 60.0
PR_SET_CHILD_SUBREAPER = 36  # prctl(2)


@pytest.fixture(scope="session", autouse=True)
def reaper() -> None:
    """Orphans become children of this process, where `no_orphans` finds them."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@pytest.fixture(autouse=True)
def no_orphans(reaper: None) -> Iterator[None]:
    """Check that no test leaves a process of its runs behind: no worker, no torchrun, no verifier. Idle ranks that
    wait for the next test are exempt."""
    before = set(psutil.Process().children(recursive=True))
    yield
    own = {rank.pid for rank in standing()}
    new = [p for p in psutil.Process().children(recursive=True) if p not in before and p.pid not in own]
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
    return finish(recipe, "tp2", tmp_path_factory.mktemp("tp2"))


@pytest.fixture(scope="session")
def finished_vapo(tmp_path_factory: pytest.TempPathFactory, reaper: None) -> Finished:
    """Three train steps of policy, critic and reference policy at DP2."""
    directory = tmp_path_factory.mktemp("vapo")
    steps = ("run.total_steps=3", "algorithm.kl_reward_coefficient=0.05")
    return finish(write_recipe(directory, "vapo"), "dp2", directory, *steps)
