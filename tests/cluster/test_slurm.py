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

SMALL = """
base = "{base}"

[run]
folder = "{output}"
total_steps = 2

[parallel]
{parallel}

[rollout]
prompts_per_step = 4
group_size = 4
max_response_tokens = 64
{rollout}

[reward.overlong_punishment]
enabled = false

[training]
mini_batch_prompts = 4

[checkpoint]
interval = 1

[evaluation]
interval = 0
num_samples = 1
at_start = false
at_end = false
{rest}
"""


def submit(cluster: VirtualCluster, environment: dict[str, str], layout: Path, num_nodes: int, *arguments: str) -> int:
    """Submit the shipped script as its own header says, from a directory without any of a run's output."""
    data = [str(QUICKSTART / name) for name in ("base_model", "train.jsonl", "heldout.jsonl")]
    options = [f"--nodes={num_nodes}", "--ntasks-per-node=1"]
    return cluster.submit(*options, str(SCRIPT), str(layout), *data, *arguments, cwd=layout.parent, env=environment)


def log_of(directory: Path) -> str:
    return "\n".join(path.read_text(errors="replace")[-4000:] for path in sorted(directory.glob("**/slurm-*")))


def test_nodes_are_machines_of_their_own(two_nodes: VirtualCluster) -> None:
    shown = two_nodes.run(CONTROLLER, "srun", "-N2", "-n2", "bash", "-c", "echo $(hostname) $(hostname -I)")
    assert sorted(shown.split("\n")[:2]) == ["node0 10.77.0.10", "node1 10.77.0.11"]
    two_nodes.run("node0", "touch", "/dev/shm/of_node0")
    with pytest.raises(subprocess.CalledProcessError):
        two_nodes.run("node1", "ls", "/dev/shm/of_node0")


def test_embedded_engine_over_two_nodes(
    two_nodes: VirtualCluster, job_environment: dict[str, str], tmp_path: Path
) -> None:
    output = tmp_path / "out"
    layout = tmp_path / "layout.toml"
    layout.write_text(
        SMALL.format(
            base=QUICKSTART / "quickstart.toml", output=output, parallel="{parallel}", rollout="", rest=""
        ).replace("{parallel}", "tensor = 1\nnum_processes = 2")
    )
    job = two_nodes.wait(submit(two_nodes, job_environment, layout, 2), RUN_S)
    assert (job.state, job.exit_code) == ("COMPLETED", "0:0"), log_of(tmp_path)
    summary = json.loads((output / "summary.json").read_text())
    assert summary["train_steps"] == 2
