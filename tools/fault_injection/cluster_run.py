"""A training run on a virtual cluster under the shipped Slurm script, as its user and its operator see it.

The phase of a rank is read from its heartbeat: the page of memory that it shares with its node's watcher
(`watch.heartbeat`). Reading changes nothing of the run.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dapo.watch.attempts import ATTEMPTS, completed_steps
from megatron_dapo.watch.evidence import parent
from megatron_dapo.watch.watched_rank import StatusPage
from tools.fault_injection.cells import PHASES
from tools.resume_proof.compare_runs import checkpoint_steps
from tools.virtual_cluster import CONTROLLER, JobState, VirtualCluster

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"
SCRIPT = ROOT / "examples" / "launch" / "slurm.sh"
NUM_TRAIN, NUM_HELD_OUT = 256, 6
EVALUATION_INTERVAL = 2  # train steps
TOTAL_STEPS = 100_000  # never reached: the harness ends a run when its faults are through
FIRST_FAILURE = re.compile(r"^first failure: attempt \d+, .*$", re.MULTILINE)
IN_LOOP = frozenset(phase for phases in PHASES.values() for phase in phases) | {"record", "advantages", "values", "step"}
POLL_S = 0.01

LAYOUT = """
base = "{base}"
run = {{ output_dir = "{output}", total_steps = {steps}, max_fruitless_attempts = 20, node_timeout_seconds = 9.0 }}
parallel = {{ tp_size = 1, num_processes = {num_processes} }}
training = {{ mini_batch_prompts = 2 }}
checkpoint = {{ interval = 1, keep = {keep} }}
evaluation = {{ interval = {evaluation_interval}, num_samples = 2, at_start = false, at_end = false }}
telemetry = {{ samples_per_step = 1000, dump_batches = {dump_batches}, tensorboard = false }}

[reward]
verifier = "tools.fault_injection.slow_verifier:score"
overlong_punishment = {{ enabled = false }}

[rollout]
prompts_per_step = 4
group_size = 4
max_response_tokens = 96
{rollout}
"""
# Tables after [rollout]: one SGLang server on every node.
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
_COLOCATED = f'engine = "sglang"\n{SERVERS}placement = "colocated"\nweight_sync_transport = "shared_memory"\nmax_restarts = 100\n'
# What generates. In `servers_job` servers end with the trainer, so that every restart is one of the whole job. `soak` trains on
# every group: dynamic sampling ends a run of hours by itself, once the model answers every prompt in the same way.
CONFIGURATIONS = {
    "embedded": 'engine = "embedded"',
    "soak": 'engine = "embedded"\nfilter_groups = false',
    "servers": _COLOCATED,
    "servers_job": _COLOCATED + "keep_seconds = 0\n",
}


def layout_text(output: Path, configuration: str, engine_python: Path, num_processes: int, keep: int) -> str:
    """Return the layout file of a run."""
    return LAYOUT.format(
        base=QUICKSTART / "quickstart.toml",
        output=output,
        steps=TOTAL_STEPS,
        num_processes=num_processes,
        keep=keep,
        evaluation_interval=EVALUATION_INTERVAL,
        dump_batches=0 if configuration == "soak" else 1,  # thousands of steps fill the small disk
        rollout=CONFIGURATIONS[configuration].replace("{python}", str(engine_python)),
    )


@dataclass(frozen=True)
class RankProcess:
    """The process of one rank, and the page of its heartbeats."""

    rank: int
    node: str
    pid: int  # machine-wide
    page: StatusPage

    def has_ended(self) -> bool:
        """Return True if the process is gone or a zombie."""
        with suppress(OSError):
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        return True

    def phase(self) -> str:
        """Return the phase, `score` if a generating rank waits for verifiers."""
        page = self.page.read()
        name = str(page.get("phase", ""))
        return "score" if name == "generate" and str(page.get("doing", "")).startswith("verifiers") else name


class ClusterRun:
    """One run, over all its jobs and attempts. Its directory is on `disk`, its log in `directory`."""

    def __init__(
        self,
        cluster: VirtualCluster,
        environment: Mapping[str, str],
        directory: Path,
        disk: Path,
        configuration: str,
        engine_python: Path,
        keep: int = 2,
    ) -> None:
        self.cluster, self._environment, self.directory, self.output = cluster, environment, directory, disk / "out"
        self.job_id, self.ranks, self._read = 0, {}, 0
        self.ranks: dict[int, RankProcess]
        self.job_ids: list[int] = []
        directory.mkdir(parents=True)
        for name, count in (("train.jsonl", NUM_TRAIN), ("heldout.jsonl", NUM_HELD_OUT)):
            lines = (QUICKSTART / name).read_text(encoding="utf-8").splitlines(keepends=True)
            (directory / name).write_text("".join(lines[:count]), encoding="utf-8")
        layout = layout_text(self.output, configuration, engine_python, num_processes=len(cluster.nodes), keep=keep)
        (directory / "layout.toml").write_text(layout, encoding="utf-8")

    # Slurm

    def submit(self) -> None:
        """Submit the shipped script, as its header says."""
        data = (
            str(QUICKSTART / "base_model"),
            *(str(self.directory / f"{name}.jsonl") for name in ("train", "heldout")),
        )
        options = (f"--nodes={len(self.cluster.nodes)}", "--ntasks-per-node=1")
        self.job_id = self.cluster.submit(
            *options, str(SCRIPT), str(self.directory / "layout.toml"), *data, cwd=self.directory, env=self._environment
        )
        self.job_ids.append(self.job_id)

    def job(self) -> JobState:
        """Return the state of the newest job."""
        return self.cluster.job(self.job_id)

    def job_began(self) -> float:
        """Return when the job began to run, in seconds since 1970."""
        return float(self.cluster.run(CONTROLLER, "bash", "-c", f"date +%s -d $(squeue -h -j {self.job_id} -o %S)"))

    def cancel(self, timeout_s: float = 60.0) -> None:
        """End the job and wait until Slurm has ended all of it."""
        for signal_option in ((), ("--signal=KILL",)):
            with suppress(Exception):
                self.cluster.run(CONTROLLER, "scancel", *signal_option, str(self.job_id))
            with suppress(TimeoutError):
                self.cluster.wait(self.job_id, timeout_s)
                return

    # The user's view

    def log(self) -> str:
        """Return the jobs' logs."""
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.directory.glob("slurm-*.log")))

    def first_lines(self) -> list[str]:
        """Return the first lines of all failures printed so far."""
        return FIRST_FAILURE.findall(self.log())

    def completed_steps(self) -> int:
        """Return the train steps on record."""
        return completed_steps(self.output)

    def attempts(self) -> list[dict[str, Any]]:
        """Return the begins and ends of attempts."""
        path = self.output / ATTEMPTS
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        records = []
        for line in lines:
            with suppress(ValueError):
                records.append(json.loads(line))
        return records

    def num_begun(self) -> int:
        """Return how many attempts have begun."""
        return sum("began" in record for record in self.attempts())

    def saved_step(self) -> int:
        """Return the train step of the newest checkpoint that no evaluation belongs to, 0 without one.

        A run that is told to stop saves before it evaluates: it will evaluate when it continues.
        """
        steps = checkpoint_steps(self.output / "checkpoints")
        return max((step for step in steps if step % EVALUATION_INTERVAL), default=0)

    # Processes

    def look(self) -> bool:
        """Find the ranks of the attempt that runs; return True if all are there and in the loop.

        An attempt begins with a weight sync for which its servers come up: one that never does is no fault of this table.
        """
        found = {
            pid: rank
            for node in self.cluster.nodes
            for pid in self.processes("megatron_dapo.run.worker", node)
            if (rank := _rank_process(node, pid)) is not None
        }
        # A rank that starts a process is there twice until that one has become its own program.
        self.ranks = {rank.rank: rank for pid, rank in found.items() if parent(pid) not in found}
        return len(self.ranks) == len(self.cluster.nodes) and all(
            rank.phase() in IN_LOOP - {"weight_sync"} for rank in self.ranks.values()
        )

    def processes(self, module: str, node: str = "") -> list[int]:
        """Return the processes of a node, or of all, whose command line names a module or package."""
        nodes = [node] if node else list(self.cluster.nodes)
        return [pid for each in nodes for pid in node_processes(self.cluster, each) if module in command_line(pid)]

    @staticmethod
    def is_session_leader(pid: int) -> bool:
        """Return True if a process leads a session."""
        with suppress(OSError):
            return os.getsid(pid) == pid
        return False

    def phase(self) -> str:
        """Return the phase of rank 0, which leads the others."""
        return self.ranks[0].phase()


def node_processes(cluster: VirtualCluster, node: str) -> Iterator[int]:
    """Yield the processes of a node but its process 1, as the machine counts; nothing of a node that is off."""
    init = cluster.init_pid(node)
    if init is None:
        return
    space = os.readlink(f"/proc/{init}/ns/pid")
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != init:
            with suppress(OSError):
                if os.readlink(f"/proc/{name}/ns/pid") == space:
                    yield int(name)


def command_line(pid: int) -> str:
    """Return a process's command line, "" if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def _rank_process(node: str, pid: int) -> RankProcess | None:
    """Return the process as a rank; None if it has no page: it is another one, or has not connected to its watcher yet."""
    with suppress(OSError, ValueError):
        maps = Path(f"/proc/{pid}/maps").read_text()
        environment = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
        found = re.search(r"^([0-9a-f]+-[0-9a-f]+) .*/memfd:page", maps, re.MULTILINE)
        rank = re.search(r"(?:^|\0)SLURM_PROCID=(\d+)", environment)
        if found and rank:
            with open(f"/proc/{pid}/map_files/{found.group(1)}", "rb") as stream:
                page = StatusPage(stream.fileno())
            return RankProcess(int(rank.group(1)), node, pid, page)
    return None


def is_given_up(cluster: VirtualCluster, node: str) -> bool:
    """Return True if slurmctld takes a node for down."""
    with suppress(subprocess.SubprocessError):
        return "down" in cluster.run(CONTROLLER, "sinfo", "-h", "-n", node, "-o", "%T")
    return False


def wait_until(condition: Callable[[], bool], timeout_s: float, poll_s: float = POLL_S) -> bool:
    """Wait; return False if the condition does not hold in time."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(poll_s)
    return True
