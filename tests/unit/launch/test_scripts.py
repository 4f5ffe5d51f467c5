"""The Slurm scripts ask for whole nodes, need no directory that is not there, give each job a port of its own, and requeue
what is worth starting again."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[3] / "examples" / "launch"
ARGUMENTS = {
    "slurm.sh": ["layout.toml", "model", "train.jsonl", "eval.jsonl"],
    "dapo_qwen2.5_32b_slurm.sh": ["model", "train.jsonl", "eval.jsonl"],
}
STUBS = {
    "scontrol": 'case "$1 $2" in requeue*) echo "requeue $2";; update*) echo "$@";; "show config") echo "TaskPlugin = $PLUGIN";; *) echo node0; echo node1;; esac',
    "sinfo": 'for node in $PARTITION; do echo $node; done',
    "megatron-dapo": "true",  # the dry run
    "squeue": 'case "${@: -1}" in %T) echo "$STATE";; %D) left=($NODES_LEFT); [ -s asked ] && echo "${left[-1]}" || echo "${left[0]}"; echo x >> asked;; %x) echo "$EXCLUDED";; *) echo 2026-11-22T10:00:00;; esac',
    # The supervisors' step stays until it is ended; the trainer's step fails ATTEMPTS times as SRUN says.
    "srun": """if [ "${@: -1}" = --keep-servers ]; then
    printf "%s\\n" "$@" > supervisors; echo $$ > supervisor.pid; [ "$KEPT" = 1 ] && exec sleep 600; exit 0
fi
echo "attempt $MEGATRON_DAPO_ATTEMPT port $MASTER_PORT host $MASTER_ADDR end $SLURM_JOB_END_TIME"; printf "%s\\n" "$@"
echo x >> attempts; [ "$SRUN" != 0 ] && [ $(wc -l < attempts) -gt "$ATTEMPTS" ] && exit 0; exit $SRUN""",
    # Attempts of this launch begin with number 3; the verdict is asked of the one that was made last.
    "python": """[ "${@: -1}" = --begin ] && echo "3 20017" && exit $BEGUN
[ "${@: -2:1}" = --verdict ] && echo "$SCOPE" && [ "${@: -1}" = $((2 + $(wc -l < attempts))) ] && exit $VERDICT; exit 99""",
}


def run_script(
    script: str,
    directory: Path,
    job: int,
    srun: int = 0,
    verdict: int = 0,
    scope: str = "job",
    kept: int = 0,
    attempts: int = 99,
    state: str = "RUNNING",
    nodes_left: int | str = 2,
    excluded: str = "",
    options: Sequence[str] = (),
    **variables: object,
) -> tuple[int, list[str]]:
    """Return exit code and output. `kept`: 1 if the supervisors' step stays. `attempts`: that fail before one that does not.

    `nodes_left`: what squeue says, at first and later; "" for no answer. `options`: further ones of the script.
    """
    (directory / "attempts").unlink(missing_ok=True)
    (directory / "asked").unlink(missing_ok=True)
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
        "SCOPE": scope,
        "KEPT": kept,
        "ATTEMPTS": attempts,
        "STATE": state,
        "NODES_LEFT": nodes_left,
        "EXCLUDED": excluded,
        "BEGUN": 0,
        "PLUGIN": "task/affinity,task/cgroup",
        "PARTITION": "node0 node1 node3 node4 node4 node5",
        "SLURM_JOB_PARTITION": "gpu",
        "SLURM_JOB_NUM_NODES": 2,
        "PREFLIGHT": 0,
        **variables,
    }
    environment = {"PATH": f"{directory}:{os.environ['PATH']}", **{name: str(value) for name, value in facts.items()}}
    command = ["bash", str(SCRIPTS / script), *ARGUMENTS[script], "--set", "run.name=x", *options]
    # A script for one recipe is submitted from the root of the checkout, slurm.sh from anywhere.
    if script != "slurm.sh" and not (directory / "examples").exists():
        (directory / "examples").symlink_to(SCRIPTS.parent)
    done = subprocess.run(command, env=environment, cwd=directory, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize("script", ARGUMENTS)
def test_whole_nodes_and_a_log_that_a_requeue_continues(script: str) -> None:
    options = re.findall(r"^#SBATCH --([a-z-]+)=?(\S*)$", (SCRIPTS / script).read_text(), re.MULTILINE)
    assert {("exclusive", ""), ("mem", "0"), ("open-mode", "append"), ("requeue", "")} <= set(options)
    assert "/" not in dict(options)["output"], "sbatch makes no directory: without it the job fails without a log"


@pytest.mark.parametrize("script", ARGUMENTS)
def test_tasks_share_all_cores_and_have_the_port_that_is_free(script: str, tmp_path: Path) -> None:
    code, first = run_script(script, tmp_path, 123456)
    assert code == 0 and first[0] == "attempt 3 port 20017 host node0 end 1795341600"
    _, second = run_script(script, tmp_path, 123456, MASTER_PORT=4444)
    assert second[0] == "attempt 3 port 4444 host node0 end 1795341600"
    assert {"--cpus-per-task=12", "--cpu-bind=none", "--kill-on-bad-exit=1", "megatron_dapo.run.worker"} <= set(
        first
    )
    assert first[-2:] == ["--set", "run.name=x"]


@pytest.mark.parametrize("script", ARGUMENTS)
def test_the_record_of_the_attempt_decides_on_a_requeue(script: str, tmp_path: Path) -> None:
    """srun ends with 143 if it has killed the other tasks, whatever the first one's reason was."""
    for verdict in (75, 1, 0):
        code, lines = run_script(script, tmp_path, 17, srun=143, verdict=verdict)
        assert code == verdict
        assert ("requeue 17" in lines) == (verdict == 75)


def test_a_cancelled_job_is_not_requeued(tmp_path: Path) -> None:
    """Its tasks end with 75, as at every stop."""
    code, lines = run_script("slurm.sh", tmp_path, 17, srun=143, verdict=75, state="COMPLETING")
    assert code == 75 and "requeue 17" not in lines


def test_a_job_that_lost_a_node_before_its_step_began_is_requeued(tmp_path: Path) -> None:
    """No attempt is on record then, which by itself would end the job."""
    code, lines = run_script("slurm.sh", tmp_path, 17, srun=1, verdict=1, nodes_left=1)
    assert code == 75 and lines == ["requeue 17"], "without a step that would wait for the node"
    # Lost after that, when the step begins.
    code, lines = run_script("slurm.sh", tmp_path, 17, srun=1, verdict=1, nodes_left="2 1")
    assert code == 75 and lines[-1] == "requeue 17"
    assert "--immediate=120" in lines and "--immediate=120" in (tmp_path / "supervisors").read_text().split()


def test_a_directory_that_does_not_know_the_job_ends_it(tmp_path: Path) -> None:
    """Nothing is started in the mount point of a file system that is gone."""
    code, lines = run_script("slurm.sh", tmp_path, 17, BEGUN=1, SLURM_RESTART_COUNT=1)
    assert (code, lines) == (1, []) and not (tmp_path / "attempts").exists()


def test_a_controller_that_does_not_answer_is_no_lost_node(tmp_path: Path) -> None:
    assert run_script("slurm.sh", tmp_path, 17, nodes_left="")[0] == 0
    code, lines = run_script("slurm.sh", tmp_path, 17, srun=1, verdict=1, nodes_left="")
    assert code == 1 and "requeue 17" not in lines


@pytest.mark.parametrize(("excluded", "named"), [("", "node3,node5"), ("node9", "node3,node5,node9")])
def test_a_node_that_is_to_go_is_excluded_beside_those_that_were(tmp_path: Path, excluded: str, named: str) -> None:
    code, lines = run_script("slurm.sh", tmp_path, 17, srun=143, verdict=75, scope="job node3,node5", excluded=excluded)
    assert code == 75 and lines[-2:] == ["requeue 17", f"update JobId=17 ExcNodeList={named}"]


def test_a_node_is_excluded_only_if_the_partition_has_enough_others(tmp_path: Path) -> None:
    """The job would wait for nodes that there are not."""
    code, lines = run_script("slurm.sh", tmp_path, 17, srun=143, verdict=75, scope="job node1", PARTITION="node0 node1")
    assert code == 75 and lines[-1] == "requeue 17"


def test_srun_is_not_asked_to_bind_where_nothing_does(tmp_path: Path) -> None:
    lines = run_script("slurm.sh", tmp_path, 17, PLUGIN="(null)")[1]
    assert "--cpu-bind=none" not in lines and "--overlap" in lines


def test_several_nodes_are_measured_first_and_a_slow_one_ends_the_job(tmp_path: Path) -> None:
    code, lines = run_script("slurm.sh", tmp_path, 17, srun=1, verdict=75, options=["--verbose"], PREFLIGHT="")
    assert code == 1 and "requeue 17" not in lines
    assert lines[lines.index("preflight") + 1] == "layout.toml" and "run.name=x" in lines, "with the groups of the layout"
    assert "megatron_dapo.run.worker" not in lines, "nothing is trained"
    assert "--verbose" not in lines[lines.index("preflight") :], "an option that the pre-flight does not have"
    assert "preflight" not in run_script("slurm.sh", tmp_path, 17, PREFLIGHT=0)[1]
    assert "preflight" not in run_script("slurm.sh", tmp_path, 17, PREFLIGHT="", SLURM_JOB_NUM_NODES=1, nodes_left=1)[1]


@pytest.mark.parametrize("script", ["slurm.sh", "node.sh", "dapo_qwen2.5_32b.sh"])
def test_nccl_says_why_it_fails(script: str) -> None:
    assert re.search(r'^export .*NCCL_DEBUG="?\$\{NCCL_DEBUG:-WARN\}', (SCRIPTS / script).read_text(), re.MULTILINE)


def is_running(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.is_file() and status.read_text().rpartition(") ")[2][:1] not in "ZX"


def test_the_trainer_alone_starts_again_while_servers_are_kept(tmp_path: Path) -> None:
    """A step of supervisors on every node, next to the trainer's, which is repeated; it ends with the script."""
    code, lines = run_script("slurm.sh", tmp_path, 17, srun=143, verdict=75, scope="trainer", kept=1, attempts=2)
    assert code == 0 and "requeue 17" not in lines and len((tmp_path / "attempts").read_text().split()) == 3
    options = (tmp_path / "supervisors").read_text().split()
    assert {"--overlap", "--ntasks=2", "--ntasks-per-node=1", "--nodes=2", "--kill-on-bad-exit=1"} <= set(options)
    assert options[-3:] == ["--set", "run.name=x", "--keep-servers"] and lines.count("--overlap") == 3
    assert [line.split()[1] for line in lines if line.startswith("attempt ")] == ["3", "4", "5"]
    end, supervisor = time.monotonic() + 10.0, int((tmp_path / "supervisor.pid").read_text())
    while is_running(supervisor) and time.monotonic() < end:
        time.sleep(0.02)
    assert not is_running(supervisor)


@pytest.mark.parametrize(("scope", "kept", "verdict"), [("job", 1, 75), ("trainer", 0, 75), ("job", 1, 1)])
def test_the_job_ends_where_servers_are_gone_or_not_worth_keeping(
    tmp_path: Path, scope: str, kept: int, verdict: int
) -> None:
    code, lines = run_script("slurm.sh", tmp_path, 17, srun=1, verdict=verdict, scope=scope, kept=kept)
    assert (code, "requeue 17" in lines) == (verdict, verdict == 75)
    assert len((tmp_path / "attempts").read_text().split()) == 1
