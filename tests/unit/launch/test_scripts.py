"""The Slurm scripts ask for whole nodes, need no directory that is not there, and give each job a port of its own."""

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
    "scontrol": "echo node0; echo node1",
    "megatron-dapo": "true",
    "srun": 'echo "port $MASTER_PORT host $MASTER_ADDR"; printf "%s\\n" "$@"',
}


def run_script(script: str, directory: Path, job: int) -> list[str]:
    for name, body in STUBS.items():
        (directory / name).write_text(f"#!/bin/bash\n{body}\n")
        (directory / name).chmod(0o755)
    facts = {
        "SLURM_JOB_ID": job,
        "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_CPUS_ON_NODE": 96,
        "SLURM_NTASKS_PER_NODE": 8,
    }
    environment = {"PATH": f"{directory}:{os.environ['PATH']}", **{name: str(value) for name, value in facts.items()}}
    command = ["bash", str(SCRIPTS / script), *ARGUMENTS[script], "--set", "run.name=x"]
    done = subprocess.run(command, env=environment, cwd=directory, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize("script", ARGUMENTS)
def test_whole_nodes_and_a_log_that_a_requeue_continues(script: str) -> None:
    options = re.findall(r"^#SBATCH --([a-z-]+)=?(\S*)$", (SCRIPTS / script).read_text(), re.MULTILINE)
    assert {("exclusive", ""), ("mem", "0"), ("open-mode", "append")} <= set(options)
    assert "/" not in dict(options)["output"], "sbatch makes no directory: without it the job fails without a log"


@pytest.mark.parametrize("script", ARGUMENTS)
def test_tasks_share_all_cores_and_jobs_no_port(script: str, tmp_path: Path) -> None:
    first, second = (run_script(script, tmp_path, job) for job in (123456, 123457))
    assert first[0] == "port 13456 host node0" and second[0] == "port 13457 host node0"
    assert {"--cpus-per-task=12", "--cpu-bind=none", "--kill-on-bad-exit=1", "megatron_dapo.launch.worker"} <= set(
        first
    )
    assert first[-2:] == ["--set", "run.name=x"]
