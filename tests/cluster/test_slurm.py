"""The shipped Slurm script on two nodes, each with an address, a host name and shared memory of its own."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tools.virtual_cluster import CONTROLLER, VirtualCluster

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"
SCRIPT = ROOT / "examples" / "launch" / "slurm.sh"
RUN_S = 420.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# Two steps of the quickstart on 4 prompts; {rest} says what generates.
LAYOUT = """
base = "{base}"
run = {{ output_dir = "{output}", total_steps = 2 }}
parallel = {{ tp_size = 1, num_processes = 2 }}
reward = {{ overlong_punishment = {{ enabled = false }} }}
training = {{ mini_batch_prompts = 4 }}
checkpoint = {{ interval = 1 }}
evaluation = {{ interval = 0, at_start = false, at_end = false }}

[rollout]
prompts_per_step = 4
group_size = 4
max_response_tokens = 64
engine = "{engine}"
{rest}
"""

# One server on every node.
SERVERS = """
[mismatch]
step0_max_mean_abs = 1e-4 # float32 on both sides
alarm = 1e-3

[sglang]
python = "{python}"
tp_size = 1
servers_per_node = 1
weight_sync_bucket_mb = 8
max_running_requests = 64
"""
ENGINES = {
    "colocated": 'placement = "colocated"\nweight_sync_transport = "shared_memory"',
    "disaggregated": 'placement = "disaggregated"\nweight_sync_transport = "p2p"',
    "router": 'placement = "disaggregated"\nweight_sync_transport = "p2p"\nrouter = true',
}
DATA = tuple(str(QUICKSTART / name) for name in ("base_model", "train.jsonl", "heldout.jsonl"))


def submit(cluster: VirtualCluster, environment: dict[str, str], layout: Path) -> int:
    """Submit the shipped script as its header says, in a directory in which nothing has run yet."""
    options = ["--nodes=2", "--ntasks-per-node=1"]
    return cluster.submit(*options, str(SCRIPT), str(layout), *DATA, cwd=layout.parent, env=environment)


def write_layout(directory: Path, base: str = "quickstart", engine: str = "embedded", rest: str = "") -> Path:
    """Write the layout of a run whose output is `directory`/out."""
    path = directory / "layout.toml"
    path.write_text(LAYOUT.format(base=QUICKSTART / f"{base}.toml", output=directory / "out", engine=engine, rest=rest))
    return path


def require_completed(cluster: VirtualCluster, job_id: int, directory: Path) -> None:
    """Wait for a job and assert that it completed; the end of its log says why not."""
    job = cluster.wait(job_id, RUN_S)
    log = "\n".join(path.read_text(errors="replace")[-6000:] for path in sorted(directory.glob("**/slurm-*")))
    assert (job.state, job.exit_code) == ("COMPLETED", "0:0"), log


def trained_steps(directory: Path) -> int:
    """Return how many train steps the summary of a run counts."""
    return json.loads((directory / "out" / "summary.json").read_text())["train_steps"]


def test_nodes_have_their_own_address_name_and_shared_memory(two_nodes: VirtualCluster) -> None:
    shown = two_nodes.run(CONTROLLER, "srun", "-N2", "-n2", "bash", "-c", "echo $(hostname) $(hostname -I)")
    assert sorted(shown.split("\n")[:2]) == ["node0 10.77.0.10", "node1 10.77.0.11"]
    two_nodes.run("node0", "touch", "/dev/shm/of_node0")
    with pytest.raises(subprocess.CalledProcessError):
        two_nodes.run("node1", "ls", "/dev/shm/of_node0")


def test_embedded_engine(two_nodes: VirtualCluster, job_environment: dict[str, str], tmp_path: Path) -> None:
    require_completed(two_nodes, submit(two_nodes, job_environment, write_layout(tmp_path)), tmp_path)
    assert trained_steps(tmp_path) == 2


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
        arguments = ["torchrun", "--nnodes=2", "--nproc-per-node=1", f"--node-rank={rank}", "--master-addr=node0"]
        arguments += ["--master-port=29400", "--module", "megatron_dapo.launch.worker", str(layout)]
        with (tmp_path / f"{name}.log").open("w") as log:
            command = two_nodes.command(name, arguments, cwd=tmp_path)
            started.append(subprocess.Popen(command, env=job_environment, stdout=log, stderr=subprocess.STDOUT))
    codes = [process.wait(timeout=RUN_S) for process in started]
    assert codes == [0, 0], "\n".join(path.read_text()[-4000:] for path in tmp_path.glob("node*.log"))
    assert trained_steps(tmp_path) == 2
