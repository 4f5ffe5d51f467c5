"""Judges what is left of a run: did it lose or repeat responses, has it the bits of an undisturbed run, what lives on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.fault_injection.cluster_run import ClusterRun, command_line, node_processes, wait_until
from tools.resume_proof.compare_runs import differences_until, value_differences
from tools.virtual_cluster import VirtualCluster

_OF_SLURM = ("slurmd", "slurmctld", "munged")
_LISTENING = "0A"  # proc(5), net/tcp
_SLURMD_PORT = 6818
REPLAY_S = 240.0


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the records of a JSONL file."""
    return (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line] if path.is_file() else []
    )


def unaccounted_responses(output: Path, until: int) -> int:
    """Count responses lost or trained twice, up to a train step, by the dumped batches and the recorded samples.

    A response is known by its id, which names its prompt, round and place. Each step up to `until` has one dump; its
    responses are those on record for that step and no other.
    """
    recorded: dict[int, set[str]] = {}
    for sample in lines_of(output / "samples.jsonl"):
        recorded.setdefault(sample["train_step"], set()).add(sample["sample_id"])
    trained: Counter[str] = Counter()
    num_wrong = 0
    for step in range(1, until + 1):
        dump = output / "batches" / f"step_{step:06d}" / "batch.json"
        ids = json.loads(dump.read_text(encoding="utf-8"))["samples"]["sample_ids"] if dump.is_file() else []
        trained.update(ids)
        num_wrong += len(set(ids) ^ recorded.get(step, set())) + (not ids)
    return num_wrong + sum(count - 1 for count in trained.values())


def lost_responses(reference: Path, output: Path, until: int) -> int:
    """Count the responses that only one of two runs has trained up to a step; for runs that repeat each other's bits."""
    ids = [
        {sample["sample_id"] for sample in lines_of(run / "samples.jsonl") if sample["train_step"] <= until}
        for run in (reference, output)
    ]
    return len(ids[0] ^ ids[1])


def first_difference(reference: Path, output: Path, until: int) -> str:
    """Return the first difference of a run's state and records at a step from the undisturbed run's, "" if none."""
    return next(differences_until(until, reference, output), "")


def replay_difference(layout: Path, output: Path, step: int, environment: Mapping[str, str]) -> str:
    """Train a recorded batch again from the checkpoint before it; return the first metric that differs, "" if none."""
    batch = output / "batches" / f"step_{step:06d}"
    command = [sys.executable, "-m", "megatron_dapo.cli.main", "replay", str(layout), str(batch)]
    done = subprocess.run(
        [*command, "--output-dir", str(output)],
        env=dict(environment), capture_output=True, text=True, check=False, timeout=REPLAY_S,
    )  # fmt: skip
    if done.returncode:
        return f"replay of step {step} ended with exit code {done.returncode}: {done.stderr[-500:]}"
    replayed = json.loads((batch / "replay.json").read_text(encoding="utf-8"))
    [recorded] = [each for each in lines_of(output / "metrics.jsonl") if each["train_step"] == step]
    common = {name: recorded[name] for name in replayed if name in recorded}
    assert len(common) > 5, f"replay and metrics of step {step} share only {sorted(common)}"
    return next(value_differences({name: replayed[name] for name in common}, common, f"step {step}"), "")


def useful_seconds(output: Path, until: int) -> float:
    """Return the seconds of the train steps that count: a step that was repeated counts once."""
    return sum(record["time/step"] for record in lines_of(output / "metrics.jsonl") if record["train_step"] <= until)


def orphans(cluster: VirtualCluster, grace_s: float = 20.0) -> list[str]:
    """Return what no job owns on nodes without a job, once `grace_s` has passed: processes, shared memory, ports."""
    found: list[str] = []

    def is_clean() -> bool:
        found[:] = [entry for node in cluster.nodes for entry in _leftovers(cluster, node)]
        return not found

    wait_until(is_clean, grace_s, poll_s=0.5)
    return found


def _leftovers(cluster: VirtualCluster, node: str) -> list[str]:
    init = cluster.init_pid(node)
    if init is None:
        return []
    left = []
    for pid in node_processes(cluster, node):
        line = command_line(pid)
        if line and not line.split()[0].endswith(_OF_SLURM):
            left.append(f"{node}: process {line[:120]}")
    left += [f"{node}: /dev/shm/{name}" for name in _listed(Path(f"/proc/{init}/root/dev/shm"))]
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/{init}/net/{table}").read_text().splitlines()[1:]:
            fields = row.split()
            port = int(fields[1].rpartition(":")[2], 16)
            if fields[3] == _LISTENING and port != _SLURMD_PORT:
                left.append(f"{node}: port {port} ({table})")
    return left


def _listed(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def read_verdict(run: ClusterRun, since: float, timeout_s: float) -> Mapping[str, Any]:
    """Return the first entry of failure.json, written after `since`; {} if there is none in time."""
    path = run.output / "failure.json"

    def is_there() -> bool:
        try:
            return path.stat().st_mtime >= since - 0.05
        except OSError:
            return False

    if not is_there() and not wait_until(is_there, timeout_s, poll_s=0.1):
        return {}
    return json.loads(path.read_text(encoding="utf-8"))["entries"][0]


# Words of the printed line by cause, if they differ from the cause's name.
_WORDS = {
    "signal": ("killed by signal", "exited without reporting an error"),
    "file system lost": ("is another directory than before", " is gone on ", "is not the directory of rank 0"),
}


def is_cause_printed(cause: str, line: str) -> bool:
    """Return True if a printed first line gives the cause, in its message: the advice after it names others."""
    message = line.partition("; to do:")[0]
    return any(word in message for word in _WORDS.get(cause, (cause,)))


def place_of(line: str) -> tuple[str, int]:
    """Return (node, rank) of a printed first line; rank -1 for a whole node."""
    found = re.match(r"first failure: attempt \d+, (?:rank (\d+) \((\S+?)\)|([^\s,:]+))", line)
    if found is None:
        return "", -2
    return (found.group(2), int(found.group(1))) if found.group(1) else (found.group(3), -1)


def load_average() -> float:
    """Return the machine's load of the last minute."""
    return round(os.getloadavg()[0], 2)


def now() -> str:
    """Return the time as text."""
    return time.strftime("%Y-%m-%dT%H:%M:%S")
