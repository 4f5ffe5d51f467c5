"""One rank of a pretended run: it beats, meets the others through a file, and then does what its plan says.

python watched_rank.py PLACE_AS_JSON RUN_DIRECTORY PLAN; what looks like torch's is in a module of its name.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import time
from pathlib import Path

from megatron_dapo.recovery.durable_files import HERE, Files
from megatron_dapo.recovery.file_process import FileProcess
from megatron_dapo.recovery.heartbeat import Heartbeat, Place


class Steps:
    """Stands in for `parallel.coordination.Progress`."""

    count = 0
    idle_s = 0.0

    def mark(self) -> None:
        self.count += 1


_TORCH = """
import socket, time

def all_reduce():
    time.sleep(300)

def barrier(path):
    while not path.exists():
        time.sleep(1.0)
    time.sleep(1.5)  # the rank that came last may be gone already

def broadcast(address, num_bytes):
    with socket.create_connection(address) as connection:
        connection.sendall(bytes(num_bytes))
        connection.recv(1)

def receive(listener, num_bytes):
    with listener.accept()[0] as connection:
        while num_bytes:
            num_bytes -= len(connection.recv(num_bytes))
        connection.send(b"x")
"""


def in_torch(function: str, *arguments: object) -> None:
    """Call a function that looks from outside as if it were torch's: "all_reduce" waits for ever."""
    code: dict = {"__name__": "torch.distributed.distributed_c10d"}
    exec(compile(_TORCH, "/site-packages/torch/distributed/distributed_c10d.py", "exec"), code)
    code[function](*arguments)


def stream(place: Place, directory: Path, num_bytes: int) -> None:
    """Send bytes from rank 0 to rank 1, which listens on its address towards the leader."""
    file = directory / "address"
    if place.rank == 0:
        while not file.exists():
            time.sleep(0.05)
        in_torch("broadcast", tuple(json.loads(file.read_text())), num_bytes)
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(tuple(place.leader))
        own = probe.getsockname()[0]
    with socket.create_server((own, 0)) as listener:
        file.with_suffix(".tmp").write_text(json.dumps(listener.getsockname()))
        file.with_suffix(".tmp").rename(file)
        in_torch("receive", listener, num_bytes)


def compute(seconds: float) -> None:
    """Hash one buffer after the other: pure CPU time without any mark of progress."""
    end, data = time.monotonic() + seconds, bytes(1 << 26)
    while time.monotonic() < end:
        hashlib.sha256(data).digest()


def gloo(place: Place, directory: Path, number: int) -> None:
    """Enter `number` real collectives of all ranks, then wait for the message that none sends."""
    import torch
    import torch.distributed as dist

    store = dist.FileStore(str(directory / "store"), place.world_size)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.world_size)
    value, pair = torch.ones(1), dist.new_group([0, 1])
    (directory / f"met_{place.rank}").touch()
    for _ in range(number):
        dist.all_reduce(value)
    dist.recv(value, src=1 - place.rank % 2, group=pair)


def wait_for_go(argument: str) -> None:
    while not Path(argument).parents[1].joinpath("go").exists():
        time.sleep(0.05)


def act(plan: str, directory: Path, place: Place, files: Files) -> None:
    kind, _, argument = plan.partition(":")
    if kind == "wait":
        in_torch("all_reduce")
    elif kind == "last":
        compute(float(argument))
        (directory / "last").touch()
    elif kind == "barrier":
        in_torch("barrier", directory / "last")
    elif kind == "stream":
        stream(place, directory, int(argument))
    elif kind == "gloo":
        gloo(place, directory, int(argument))
    elif kind == "sleep":
        time.sleep(float(argument or 300))
    elif kind == "compute":
        compute(float(argument))
    elif kind == "raise":
        raise {"value": ValueError("bad gold"), "full": OSError(28, "No space left on device", "x")}[argument]
    elif kind == "reset":
        time.sleep(float(argument))
        raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection reset by peer [127.0.0.1]:1234")
    elif kind == "eat":
        hoard = []
        while True:
            hoard.append(bytearray(os.urandom(1 << 20) * 8))
    elif kind == "write":
        (Path(argument) / f"file_{os.getpid()}").write_bytes(bytes(1 << 20))
    elif kind == "append":
        # By hand, as a rank would that has no file process.
        with open(argument, "ab", buffering=0) as file:
            wait_for_go(argument)
            file.write(bytes(1 << 20))
    elif kind == "files":
        wait_for_go(argument)
        files.append(Path(argument), "x" * (1 << 20))
    elif kind == "exit":
        os._exit(int(argument))


def main() -> None:
    place, directory = Place(**json.loads(sys.argv[1])), Path(sys.argv[2])
    heartbeat = Heartbeat(place.rank)
    heartbeat.connect(place)
    heartbeat.describe(directory, 7 if place.rank == 0 else None)
    files = HERE
    if "files" in sys.argv[3]:
        files = heartbeat.file_process = FileProcess()
    try:
        with heartbeat.phase("train_actor", Steps()):
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
