"""One rank of a pretended run: it beats, meets the others through a file, and then does what its plan says.

python watched_rank.py PLACE_AS_JSON RUN_DIRECTORY PLAN LIMITS_AS_JSON; what looks like torch's is in a module of its name.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path

from megatron_dapo.files.durable import HERE, Files
from megatron_dapo.files.process import FileProcess
from megatron_dapo.watch.heartbeat import Heartbeat, Place
from megatron_dapo.watch.verdict import WatchLimits


class Steps:
    """Stands in for `parallel.coordination.Progress`."""

    count = 0
    idle_s = 0.0

    def mark(self) -> None:
        self.count += 1


_TORCH = """
import time

def all_reduce():
    time.sleep(300)
"""


def in_torch(function: str) -> None:
    """Call a function that looks from outside as if it were torch's: "all_reduce" waits for ever."""
    code: dict = {"__name__": "torch.distributed.distributed_c10d"}
    exec(compile(_TORCH, "/site-packages/torch/distributed/distributed_c10d.py", "exec"), code)
    code[function]()


def compute(seconds: float) -> None:
    """Hash one buffer after the other: pure CPU time without any mark of progress."""
    end, data = time.monotonic() + seconds, bytes(1 << 26)
    while time.monotonic() < end:
        hashlib.sha256(data).digest()


def spin(place: Place, directory: Path, number: int) -> None:
    """Enter `number` collectives of all ranks, then wait as NCCL does: without ever giving up the core."""
    import torch
    import torch.distributed as dist

    store = dist.FileStore(str(directory / "store"), place.world_size)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.world_size)
    value = torch.ones(1)
    for _ in range(number - 1):
        dist.all_reduce(value)
    work = dist.all_reduce(value, async_op=True)
    assert work is not None
    (directory / f"met_{place.rank}").touch()
    while not work.is_completed() or place.rank == 1:
        pass


def wait_for_go(argument: str) -> None:
    while not Path(argument).parents[1].joinpath("go").exists():
        time.sleep(0.05)


def act(plan: str, directory: Path, place: Place, files: Files) -> None:
    kind, _, argument = plan.partition(":")
    if kind == "wait":
        in_torch("all_reduce")
    elif kind == "spin":
        spin(place, directory, int(argument))
    elif kind == "sleep":
        time.sleep(float(argument or 300))
    elif kind == "compute":
        compute(float(argument))
    elif kind == "raise":
        raise ValueError(argument)
    elif kind == "reset":
        time.sleep(float(argument))
        raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection reset by peer [127.0.0.1]:1234")
    elif kind == "append":
        # By hand, as a rank would that has no file process.
        with open(argument, "ab", buffering=0) as file:
            wait_for_go(argument)
            file.write(bytes(1 << 20))
    elif kind == "files":
        wait_for_go(argument)
        files.append(Path(argument), "x" * (1 << 20))


def main() -> None:
    place, directory = Place(**json.loads(sys.argv[1])), Path(sys.argv[2])
    heartbeat = Heartbeat(place.rank)
    heartbeat.connect(place)
    heartbeat.describe(directory, 7, WatchLimits(**json.loads(sys.argv[4])))
    heartbeat.is_on_gpu = "spin" in sys.argv[3]
    files = HERE
    if "files" in sys.argv[3]:
        files = heartbeat.file_process = FileProcess()
    try:
        with heartbeat.phase("train", Steps()):
            time.sleep(1.2)  # a sample of the main thread is taken every half second
            (directory / f"ready_{place.rank}").touch()
            while len(list(directory.glob("ready_*"))) < place.world_size:
                time.sleep(0.05)
            for plan in sys.argv[3].split(","):
                act(plan, directory, place, files)
    except Exception as error:
        os._exit(heartbeat.fail(error))
    heartbeat.close(is_complete=True)


if __name__ == "__main__":
    main()
