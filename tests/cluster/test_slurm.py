"""The shipped Slurm script on two nodes, each with an address, a host name and shared memory of its own: it starts, is
stopped, requeued and continues.

`make test-two-nodes` runs only the tests marked `two_nodes`.
"""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest
from jobs import (
    ENGINES,
    RUN_S,
    attempts,
    log_of,
    recorded_steps,
    require_completed,
    submit,
    trained_steps,
    wait_for,
    write_layout,
)

from megatron_dapo.launch.local import worker_pid_file
from megatron_dapo.watch.attempts import STOPPED_BY_SIGNAL
from tools.fault_injection.cluster_run import SERVERS
from tools.resume_proof.compare_runs import run_differences
from tools.virtual_cluster import CONTROLLER, VirtualCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_nodes_have_their_own_address_name_and_shared_memory(two_nodes: VirtualCluster) -> None:
    shown = two_nodes.run(CONTROLLER, "srun", "-N2", "-n2", "bash", "-c", "echo $(hostname) $(hostname -I)")
    assert sorted(shown.split("\n")[:2]) == ["node0 10.77.0.10", "node1 10.77.0.11"]
    two_nodes.run("node0", "touch", "/dev/shm/of_node0")
    with pytest.raises(subprocess.CalledProcessError):
        two_nodes.run("node1", "ls", "/dev/shm/of_node0")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_server_on_every_node(
    two_nodes: VirtualCluster, job_environment: dict[str, str], engine_python: Path, tmp_path: Path, engine: str
) -> None:
    layout = write_layout(tmp_path, engine="sglang", rest=SERVERS.format(python=engine_python) + ENGINES[engine])
    require_completed(two_nodes, submit(two_nodes, job_environment, layout), tmp_path)
    assert trained_steps(tmp_path) == 2
    log = next(tmp_path.glob("**/slurm-*")).read_text()
    assert "version 2: 2 of 2 engines serve it" in log


def test_pretraining_of_a_critic(two_nodes: VirtualCluster, job_environment: dict[str, str], tmp_path: Path) -> None:
    rest = "[critic]\nmini_batch_prompts = 4\n[value_pretraining]\nmin_steps = 2\nmax_steps = 2\n"
    layout = write_layout(tmp_path, base="quickstart_vapo", rest=rest)
    require_completed(two_nodes, submit(two_nodes, {**job_environment, "COMMAND": "pretrain-value"}, layout), tmp_path)
    assert (tmp_path / "out" / "value_pretraining" / "critic" / "config.json").exists()


def test_torchrun_on_every_node(two_nodes: VirtualCluster, job_environment: dict[str, str], tmp_path: Path) -> None:
    layout = write_layout(tmp_path)
    started = []
    for rank, name in enumerate(two_nodes.nodes):
        arguments = ["python", "-m", "megatron_dapo.launch.torchrun", "--nnodes=2", "--nproc-per-node=1"]
        arguments += [f"--node-rank={rank}", "--master-addr=node0", "--master-port=29400"]
        arguments += ["--module", "megatron_dapo.run.worker", str(layout)]
        with (tmp_path / f"{name}.log").open("w") as log:
            command = two_nodes.command(name, arguments, cwd=tmp_path)
            started.append(subprocess.Popen(command, env=job_environment, stdout=log, stderr=subprocess.STDOUT))
    codes = [process.wait(timeout=RUN_S) for process in started]
    assert codes == [0, 0], "\n".join(path.read_text()[-4000:] for path in tmp_path.glob("node*.log"))
    assert trained_steps(tmp_path) == 2


@pytest.mark.two_nodes
def test_a_stopped_job_is_requeued_and_ends_as_if_nothing_had_been(
    two_nodes: VirtualCluster, job_environment: dict[str, str], tmp_path: Path
) -> None:
    """Slurm's signal before the time limit, sent early: every process of the step gets it, the batch script does not."""
    stopped, undisturbed = tmp_path / "stopped", tmp_path / "undisturbed"
    job = submit(two_nodes, job_environment, write_layout(stopped, steps=6))
    wait_for(lambda: recorded_steps(stopped) >= 2, stopped)
    two_nodes.run(CONTROLLER, "scancel", "--signal=TERM", str(job))
    seconds = wait_for(lambda: any("ended" in record for record in attempts(stopped)), stopped)
    assert seconds < 60.0, f"the stop took {seconds:.1f} s, a tenth of the notice of slurm.sh"
    require_completed(two_nodes, job, stopped, restarts=1)
    begun, ended = ([record for record in attempts(stopped) if key in record] for key in ("began", "ended"))
    assert [record["attempt"] for record in begun] == [1, 2] and begun[1]["completed_steps"] < 6
    assert [(record["reason"], record["exit_code"]) for record in ended] == [(STOPPED_BY_SIGNAL, 75), ("finished", 0)]
    log = log_of(stopped)
    assert f"exit code 75: {STOPPED_BY_SIGNAL}" in log and "resuming from" in log, "one log for both attempts"
    # Started once more, it has nothing to do.
    start, again = time.monotonic(), submit(two_nodes, job_environment, stopped / "layout.toml")
    require_completed(two_nodes, submit(two_nodes, job_environment, write_layout(undisturbed, steps=6)), undisturbed)
    require_completed(two_nodes, again, stopped)
    assert "finished: nothing to do" in log_of(stopped) and time.monotonic() - start < RUN_S
    assert next(run_differences(undisturbed / "out", stopped / "out"), "") == ""


def test_the_time_limit_requeues_the_job_which_continues(
    two_nodes: VirtualCluster, job_environment: dict[str, str], tmp_path: Path
) -> None:
    job = submit(two_nodes, job_environment, write_layout(tmp_path, steps=500), "--time=2", "--signal=TERM@60")
    try:
        wait_for(lambda: sum("began" in record for record in attempts(tmp_path)) == 2, tmp_path, 180.0)
        first, end, second = attempts(tmp_path)
        assert (end["reason"], end["exit_code"]) == (STOPPED_BY_SIGNAL, 75)
        assert second["job"] == first["job"] and 0 < second["completed_steps"] < 500
        wait_for(lambda: recorded_steps(tmp_path) > second["completed_steps"], tmp_path)
        # More than one if a busy machine takes the minute that an attempt has for its start.
        assert two_nodes.job(job).restarts >= 1
    finally:
        two_nodes.run(CONTROLLER, "scancel", str(job))
        two_nodes.wait(job, 60.0)


def test_servers_keep_what_an_interrupted_collection_has_generated(
    two_nodes: VirtualCluster, job_environment: dict[str, str], engine_python: Path, tmp_path: Path
) -> None:
    rest = SERVERS.format(python=engine_python) + ENGINES["colocated"]
    layout = write_layout(tmp_path, engine="sglang", rest=rest, steps=3)
    larger = "rollout.prompts_per_step=24 rollout.group_size=8 training.mini_batch_prompts=24"
    longer = f"{larger} rollout.partial_rollout=true rollout.max_response_tokens=800 rollout.filter_groups=false"
    job = submit(two_nodes, job_environment, layout, sets=longer)
    wait_for(lambda: recorded_steps(tmp_path) >= 1, tmp_path, RUN_S)
    # Into the generation of step 2, on servers that get the signal as well; the checkpoint may still be being written.
    time.sleep(1.0)
    two_nodes.run(CONTROLLER, "scancel", "--signal=TERM", str(job))
    kept = tmp_path / "out" / "checkpoints" / "collection" / "step_000001" / "collector.json"
    assert wait_for(kept.is_file, tmp_path, 30.0) < 15.0
    groups = json.loads(kept.read_text())
    assert groups["open_groups"] or groups["buffer"]["groups"]
    require_completed(two_nodes, job, tmp_path, restarts=1)
    assert "continuing the collection kept in" in log_of(tmp_path) and trained_steps(tmp_path) == 3


def test_a_cancelled_job_is_not_requeued(
    two_nodes: VirtualCluster, job_environment: dict[str, str], tmp_path: Path
) -> None:
    job = submit(two_nodes, job_environment, write_layout(tmp_path, steps=500))
    wait_for(lambda: recorded_steps(tmp_path) >= 1, tmp_path)
    two_nodes.run(CONTROLLER, "scancel", str(job))
    state = two_nodes.wait(job, 60.0)
    assert (state.state, state.restarts) == ("CANCELLED", 0)
    time.sleep(two_nodes.settings.requeue_delay_s + 5.0)
    assert two_nodes.job(job).state == "CANCELLED" and len(attempts(tmp_path)) <= 2


def test_what_would_repeat_is_not_requeued(
    two_nodes: VirtualCluster, job_environment: dict[str, str], tmp_path: Path
) -> None:
    layout = write_layout(tmp_path, steps=500)
    short = "data.max_epochs=1 rollout.on_exhausted=error rollout.max_num_gen_batches=1 rollout.filter_groups=true"
    job = submit(two_nodes, job_environment, layout, sets=f"{short} rollout.accuracy_min=0.5")
    state = two_nodes.wait(job, RUN_S)
    assert (state.state, state.exit_code, state.restarts) == ("FAILED", "1:0", 0), log_of(tmp_path)[-6000:]
    assert "exit code 1: first failure: attempt 1, rank 0 (node0), phase generate: CollectionEx" in log_of(tmp_path)


def test_attempts_without_progress_end_the_job(
    two_nodes: VirtualCluster, job_environment: dict[str, str], tmp_path: Path
) -> None:
    """A worker of the second node is killed before the first step, each time."""
    job = submit(two_nodes, job_environment, write_layout(tmp_path), sets="run.max_fruitless_attempts=2")
    for number in (1, 2):
        wait_for(lambda number=number: len(attempts(tmp_path)) == number, tmp_path)
        wait_for(worker_pid_file(tmp_path / "out", 1).is_file, tmp_path)
        two_nodes.run("node1", "kill", "-KILL", worker_pid_file(tmp_path / "out", 1).read_text())
        worker_pid_file(tmp_path / "out", 1).unlink()
        wait_for(lambda number=number: log_of(tmp_path).count("exit code ") >= number, tmp_path)
    state = two_nodes.wait(job, RUN_S)
    assert (state.state, state.exit_code, state.restarts) == ("FAILED", "1:0", 1), log_of(tmp_path)[-6000:]
    assert "2 attempts in a row completed no train step beyond step 0" in log_of(tmp_path)


def test_the_crash_of_a_node_requeues_the_job_which_continues_when_there_are_enough(
    two_nodes: VirtualCluster, job_environment: dict[str, str], tmp_path: Path
) -> None:
    job = submit(two_nodes, job_environment, write_layout(tmp_path, steps=12))
    wait_for(lambda: recorded_steps(tmp_path) >= 3, tmp_path)
    two_nodes.fault("crash", "node1")
    try:
        wait_for(lambda: two_nodes.job(job).restarts >= 1, tmp_path, 180.0)
        # The step of the lost node is completing until Slurm has given the node up.
        wait_for(lambda: two_nodes.job(job).state != "COMPLETING", tmp_path)
        assert two_nodes.job(job).state == "PENDING", "one node is not enough"
    finally:
        two_nodes.fault("boot", "node1")
    require_completed(two_nodes, job, tmp_path, restarts=1)
    begun = [record["completed_steps"] for record in attempts(tmp_path) if "began" in record]
    assert len(begun) >= 2 and begun[1] >= 3 and trained_steps(tmp_path) == 12
