"""Kill processes of a run while it saves, again and again: python tools/kill_saves.py --kills 500 --json

Two ranks save a small state in a loop, as training does: copied, written by their file processes, put in place by rank
0's. At a random moment of each life a random one of the four processes gets SIGKILL, and what is left soon after, as by
a launcher. Then the newest checkpoint must be whole: all files as they were written, of one step, and no older than the
last one that a rank was told to be in place. The next life goes on from it in the same directory.

    wrong        lives after which that did not hold
    unfinished   kills that left an unfinished checkpoint behind: they hit a save
    victims      kills by process
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from megatron_dapo.bridge.protocol.arena import is_running  # noqa: E402
from megatron_dapo.checkpoints.save import BackgroundSaves  # noqa: E402
from megatron_dapo.checkpoints.store import (  # noqa: E402
    CheckpointError,
    CheckpointStore,
    CheckpointWriter,
    newest_valid,
)
from megatron_dapo.files.process import FileProcess  # noqa: E402

NUM_RANKS = 2
LONGEST_S = 0.2  # longest time between the first checkpoint of a life and its kill
AFTER_S = 0.02  # time between the kill and that of the others
VICTIMS = ("rank 0", "rank 1", "file process 0", "file process 1")


def save_forever(rank: int, directory: Path, first: int, other: socket.socket, report: int) -> None:
    """Save step after step; write the ids of the own processes, then each step that is in place, to `report`."""

    def agree(ok: bool) -> bool:
        other.sendall(b"1" if ok else b"0")
        theirs = other.recv(1)
        if not theirs:
            os._exit(1)
        return ok and theirs == b"1"

    files = FileProcess()
    coordination: Any = SimpleNamespace(rank=rank, size=NUM_RANKS, all_true=agree)
    saves = BackgroundSaves(CheckpointStore(directory, 2, coordination, files))
    os.write(report, f"{files.pid}\n".encode())
    state = {name: torch.zeros(20_000) for name in "abc"}
    step = first
    while True:
        for tensor in state.values():
            tensor.fill_(step)

        def write(writer: CheckpointWriter, step: int = step) -> None:
            writer.save_tensors(f"rank_{rank}.safetensors", state)
            writer.save_json(f"rank_{rank}.json", {"step": step})

        saves.start(step, write, {"step": step})
        saves.wait_for_copy()
        for tensor in state.values():
            tensor.fill_(-1.0)  # the run goes on
        saves.finish()
        os.write(report, f"{step}\n".encode())
        step += 1


def one_life(directory: Path, first: int, draw: random.Random) -> tuple[str, int]:
    """Start the ranks, kill one process, then the others. Return which it was, and the newest step told."""
    pairs = socket.socketpair()
    pids, reports = [], []
    for rank in range(NUM_RANKS):
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            pairs[1 - rank].close()
            try:
                save_forever(rank, directory, first, pairs[rank], theirs)
            finally:
                os._exit(1)
        os.close(theirs)
        pids.append(pid)
        reports.append(os.fdopen(ours))
    for one in pairs:
        one.close()
    file_pids = [int(report.readline()) for report in reports]
    assert int(reports[0].readline()) == first, "the first save of a life succeeds"
    time.sleep(draw.uniform(0.0, LONGEST_S))
    victim = draw.randrange(len(VICTIMS))
    os.kill([*pids, *file_pids][victim], signal.SIGKILL)
    time.sleep(AFTER_S)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)
    told = [int(line) for report in reports for line in report.read().split()]
    # The kernel kills the file processes with their ranks; a directory is looked at once they are gone,
    # or zombies: their new parent need not reap them.
    for pid in file_pids:
        while is_running(pid):
            time.sleep(0.001)
    for report in reports:
        report.close()
    return VICTIMS[victim], max(told, default=first)


def problem_of(directory: Path, told: int) -> tuple[int, str]:
    """Return the newest step that is whole, and why it should not be: "" for no reason."""
    try:
        found = newest_valid(CheckpointStore(directory, 2))
    except CheckpointError as error:
        return told, str(error)
    if found is None or not told <= found.step <= told + 1:
        return told, f"step {told} was in place, the newest is {found and found.step}"
    for rank in range(NUM_RANKS):
        tensors = found.load_tensors(f"rank_{rank}.safetensors")
        if found.load_json(f"rank_{rank}.json") != {"step": found.step} or found.metadata != {"step": found.step}:
            return found.step, f"step {found.step}: rank {rank} saved the counters of another"
        if not all(bool((tensor == found.step).all()) for tensor in tensors.values()):
            return found.step, f"step {found.step}: rank {rank} saved tensors of another moment"
    return found.step, ""


def kill_saves(num_kills: int, seed: int, directory: Path) -> dict[str, Any]:
    """Return the report of `num_kills` lives in one directory."""
    draw, start = random.Random(seed), time.monotonic()
    victims: Counter[str] = Counter()
    problems: list[str] = []
    newest = unfinished = saved = 0
    for _ in range(num_kills):
        victim, told = one_life(directory, newest + 1, draw)
        victims[victim] += 1
        unfinished += any(path.suffix for path in directory.iterdir())
        saved += told - newest
        newest, problem = problem_of(directory, told)
        if problem:
            problems.append(f"{victim}: {problem}")
    return {
        "kills": num_kills,
        "wrong": len(problems),
        "problems": problems[:10],
        "unfinished": unfinished,
        "victims": dict(sorted(victims.items())),
        "saves": saved,
        "seconds": round(time.monotonic() - start, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        report = kill_saves(arguments.kills, arguments.seed, Path(directory) / "checkpoints")
    print(json.dumps(report) if arguments.json else "\n".join(f"{name}: {value}" for name, value in report.items()))
    sys.exit(1 if report["wrong"] else 0)


if __name__ == "__main__":
    main()
