"""The Slurm scripts ask for whole nodes, need no directory that is not there, give each job a port of its own, and requeue
what is worth starting again."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[3] / "examples" / "launch"
ARGUMENTS = {
    "slurm.sh": ["layout.toml", "model", "train.jsonl", "eval.jsonl"],
    "dapo_qwen2.5_32b_slurm.sh": ["model", "train.jsonl", "eval.jsonl"],
}
STUBS = {
    "scontrol": '[ "$1" = requeue ] && echo "requeue $2" || { echo node0; echo node1; }',
    "megatron-dapo": "true",
    "squeue": "echo 2026-11-22T10:00:00",
    "srun": 'echo "port $MASTER_PORT host $MASTER_ADDR end $SLURM_JOB_END_TIME"; printf "%s\\n" "$@"; exit $SRUN',
    "python": '[ "${@: -1}" = --verdict ] && exit $VERDICT',
}


def run_script(script: str, directory: Path, job: int, srun: int = 0, verdict: int = 0) -> tuple[int, list[str]]:
    for name, body in STUBS.items():
        (directory / name).write_text(f"#!/bin/bash\n{body}\n")
        (directory / name).chmod(0o755)
    facts = {
        "SLURM_JOB_ID": job,
        "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_CPUS_ON_NODE": 96,
        "SLURM_NTASKS_PER_NODE": 8,
        "TZ": "UTC",
        "SRUN": srun,
        "VERDICT": verdict,
    }
    environment = {"PATH": f"{directory}:{os.environ['PATH']}", **{name: str(value) for name, value in facts.items()}}
    command = ["bash", str(SCRIPTS / script), *ARGUMENTS[script], "--set", "run.name=x"]
    # A script for one recipe is submitted from the root of the checkout, slurm.sh from anywhere.
    where = directory if script == "slurm.sh" else SCRIPTS.parents[1]
    done = subprocess.run(command, env=environment, cwd=where, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize("script", ARGUMENTS)
def test_whole_nodes_and_a_log_that_a_requeue_continues(script: str) -> None:
    options = re.findall(r"^#SBATCH --([a-z-]+)=?(\S*)$", (SCRIPTS / script).read_text(), re.MULTILINE)
    assert {("exclusive", ""), ("mem", "0"), ("open-mode", "append"), ("requeue", "")} <= set(options)
    assert "/" not in dict(options)["output"], "sbatch makes no directory: without it the job fails without a log"


@pytest.mark.parametrize("script", ARGUMENTS)
def test_tasks_share_all_cores_and_jobs_no_port(script: str, tmp_path: Path) -> None:
    (code, first), (_, second) = (run_script(script, tmp_path, job) for job in (123456, 123457))
    assert code == 0 and first[0] == "port 13456 host node0 end 1795341600"
    assert second[0] == "port 13457 host node0 end 1795341600"
    assert {"--cpus-per-task=12", "--cpu-bind=none", "--kill-on-bad-exit=1", "megatron_dapo.launch.worker"} <= set(
        first
    )
    assert first[-2:] == ["--set", "run.name=x"]


@pytest.mark.parametrize("script", ARGUMENTS)
def test_the_record_of_the_attempt_decides_on_a_requeue(script: str, tmp_path: Path) -> None:
    """srun ends with 143 where it has killed the other tasks, whatever the first one's reason was."""
    for verdict in (75, 1, 0):
        code, lines = run_script(script, tmp_path, 17, srun=143, verdict=verdict)
        assert code == verdict
        assert ("requeue 17" in lines) == (verdict == 75)
