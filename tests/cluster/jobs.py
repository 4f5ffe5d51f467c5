"""Jobs on a virtual cluster: the shipped Slurm script with small runs of the quickstart, and what their directories say."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from megatron_dapo.watch.attempts import ATTEMPTS
from tools.virtual_cluster import CONTROLLER, VirtualCluster

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"
SCRIPT = ROOT / "examples" / "launch" / "slurm.sh"
RUN_S = float(os.environ.get("MEGATRON_DAPO_CLUSTER_RUN_S", "420"))  # limit of a run on a machine that others use too
REQUIRED = "MEGATRON_DAPO_CLUSTER"  # set by `make test-cluster`: a machine that cannot run these tests is then an error

# A few steps of the quickstart on 4 prompts; {rest} says what generates.
LAYOUT = """
base = "{base}"
run = {{ output_dir = "{output}", total_steps = {steps}, node_timeout_seconds = 9.0 }}
parallel = {{ tp_size = 1, num_processes = {num_processes} }}
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

ENGINES = {
    "colocated": 'placement = "colocated"\nweight_sync_transport = "shared_memory"',
    "disaggregated": 'placement = "disaggregated"\nweight_sync_transport = "p2p"',
}
DATA = tuple(str(QUICKSTART / name) for name in ("base_model", "train.jsonl", "heldout.jsonl"))


def submit(
    cluster: VirtualCluster,
    environment: dict[str, str],
    layout: Path,
    *options: str,
    sets: str = "",
    num_nodes: int = 2,
) -> int:
    """Submit the shipped script as its header says, in a directory in which nothing has run yet.

    options: of sbatch; sets: overrides, separated by blanks. The run logs how it is built, too (--verbose).
    """
    options = (f"--nodes={num_nodes}", "--ntasks-per-node=1", *options)
    overrides = [part for override in sets.split() for part in ("--set", override)]
    return cluster.submit(*options, str(SCRIPT), str(layout), *DATA, *overrides, "--verbose", cwd=layout.parent, env=environment)


def write_layout(
    directory: Path,
    base: str = "quickstart",
    engine: str = "embedded",
    rest: str = "",
    steps: int = 2,
    num_processes: int = 2,
    output: Path | None = None,
) -> Path:
    """Write the layout of a run whose output is `output`, by default `directory`/out."""
    path = directory / "layout.toml"
    directory.mkdir(exist_ok=True)
    places = {"base": QUICKSTART / f"{base}.toml", "output": output or directory / "out"}
    path.write_text(LAYOUT.format(**places, engine=engine, rest=rest, steps=steps, num_processes=num_processes))
    return path


def log_of(directory: Path) -> str:
    """Return the batch logs of the jobs that were submitted in a directory."""
    return "\n".join(path.read_text(errors="replace") for path in sorted(directory.glob("slurm-*")))


def require_completed(cluster: VirtualCluster, job_id: int, directory: Path, restarts: int = 0) -> None:
    """Wait for a job and assert that it completed; the end of its log says why not."""
    job = cluster.wait(job_id, RUN_S)
    assert (job.state, job.exit_code) == ("COMPLETED", "0:0"), log_of(directory)[-6000:]
    assert job.restarts >= restarts, log_of(directory)[-6000:]


def cancel(cluster: VirtualCluster, job_id: int) -> None:
    """Cancel a job and wait for its end."""
    # More than once: a batch script that is just about to requeue its job does so also after scancel.
    end = time.monotonic() + 90.0
    while not cluster.job(job_id).is_over:
        assert time.monotonic() < end
        cluster.run(CONTROLLER, "scancel", str(job_id))
        time.sleep(2.0)


def wait_for(condition: Callable[[], bool], directory: Path, seconds: float = 300.0) -> float:
    """Wait until a condition holds and return after how many seconds; the end of the job's log says why it does not."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, log_of(directory)[-6000:]
        time.sleep(0.05)
    return time.monotonic() - start


def recorded_steps(directory: Path) -> int:
    """Return how many train steps are on record."""
    metrics = directory / "out" / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.is_file() else 0


def attempts(directory: Path) -> list[dict]:
    """Return the begins and ends of the attempts of a run."""
    path = directory / "out" / ATTEMPTS
    records = [json.loads(line) for line in path.read_text().splitlines() if line] if path.is_file() else []
    return [record for record in records if "attempt" in record]


def trained_steps(directory: Path) -> int:
    """Return how many train steps the summary of a run counts."""
    return json.loads((directory / "out" / "summary.json").read_text())["train_steps"]
