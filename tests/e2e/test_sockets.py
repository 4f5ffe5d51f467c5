"""A run on one node listens on loopback alone, its files are private, and a second run in its directory writes nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from interruptions import Finished
from whole_runs import ROOT, sets

from tools.listening import watch_sockets


def start_ranks(recipe: Path, directory: Path) -> list[subprocess.Popen[str]]:
    """Start the two workers of a run, as srun does."""
    arguments = [str(recipe), *sets([f"run.output_dir={directory}", "parallel.tp_size=2"])]
    names = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "4711", "SLURM_NNODES": "1", "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "megatron_dapo.run.worker", *arguments],
            env={**os.environ, **names, "PYTHONPATH": str(ROOT), "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]


@pytest.mark.long
def test_a_run_listens_on_loopback_alone_and_shares_its_directory_with_no_other(
    finished: Finished, recipe: Path, tmp_path: Path
) -> None:
    run = finished.run(tmp_path / "run")
    try:
        sockets = watch_sockets(run.process.pid, run.is_past_start_up)
        pids = run.worker_pids()
        others = start_ranks(recipe, run.directory)
        outputs = [other.communicate(timeout=400)[0] for other in others]
        assert run.worker_pids() == pids  # untouched
        # Before the run is killed, which its watcher puts on record.
        written = {path.name for path in run.directory.rglob("failure*")}
    finally:
        run.kill()
    files = [run.directory, *run.directory.rglob("*")]
    assert len(files) > 5 and not [path for path in files if path.stat().st_mode & 0o077]
    # torchrun's store, and gloo's connections of the workers.
    assert {socket.program for socket in sockets} == {"megatron_dapo.launch.torchrun", "megatron_dapo.run.worker"}
    assert all(socket.is_loopback for socket in sockets), sorted(sockets)
    for other, output in zip(others, outputs):
        assert other.returncode == 1, output
        assert f"output directory {run.directory} is in use by process" in output
    assert not written, "the refused run left records"
