"""Run a function in N gloo processes and fail with the output of the first rank that failed.

`run_distributed("package.module:function", num_processes, arguments)` starts N fresh interpreters. Each joins the
default gloo group and calls `function(arguments)`. `arguments` and the value that rank 0's function returns are JSON. A
folder holds each rank's output; the processes are killed at the deadline, and as soon as one of them fails.

The target may also be a file: "/path/to/file.py:function" (`target_in(__file__, "function")`), so that workers can live
beside their test.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
POLL_INTERVAL_S = 0.05
OUTPUT_TAIL_CHARS = 6000


def target_in(file: str, function: str) -> str:
    """The target of a function that stands in `file` (pass `__file__`)."""
    return f"{Path(file).resolve()}:{function}"


def free_port() -> int:
    """A port the operating system says is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_distributed(target: str, num_processes: int, arguments: Any = None, timeout_s: float = 120.0) -> Any:
    """Call `target` in `num_processes` gloo ranks and return what rank 0's call returned.

    Raises AssertionError with the failing rank's output where a rank fails, TimeoutError where the deadline passes.
    """
    with tempfile.TemporaryDirectory(prefix="distributed-test-") as name:
        folder = Path(name)
        (folder / "arguments.json").write_text(json.dumps(arguments))
        port = free_port()
        processes = [_start(target, rank, num_processes, port, folder, timeout_s) for rank in range(num_processes)]
        try:
            _wait(processes, folder, timeout_s)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
        return json.loads((folder / "result.json").read_text())


def _start(
    target: str, rank: int, num_processes: int, port: int, folder: Path, timeout_s: float
) -> subprocess.Popen[bytes]:
    environment = dict(os.environ)
    environment.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_processes),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
        PYTHONPATH=os.pathsep.join(
            part for part in (str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")) if part
        ),
    )
    with (folder / f"rank{rank}.log").open("wb") as output:
        command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), target, str(folder), str(timeout_s)]
        return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT)


def _wait(processes: list[subprocess.Popen[bytes]], folder: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        codes = [process.poll() for process in processes]
        # The first failing rank in time is the cause; the others fail because it is gone.
        failed = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
        if failed:
            cause = _first_failure(folder, failed)
            raise AssertionError(f"rank {cause} failed with exit code {codes[cause]}:\n{_tail(folder, cause)}")
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            running = [rank for rank, code in enumerate(codes) if code is None]
            tails = "\n".join(f"--- rank {rank}:\n{_tail(folder, rank)}" for rank in running)
            raise TimeoutError(f"ranks {running} still ran after {timeout_s} s:\n{tails}")
        time.sleep(POLL_INTERVAL_S)


def _first_failure(folder: Path, failed: list[int]) -> int:
    stamps = {rank: folder / f"failed{rank}" for rank in failed}
    stamped = {rank: int(path.read_text()) for rank, path in stamps.items() if path.exists()}
    return min(stamped, key=stamped.__getitem__) if stamped else failed[0]


def _tail(folder: Path, rank: int) -> str:
    return (folder / f"rank{rank}.log").read_text(errors="replace")[-OUTPUT_TAIL_CHARS:]


def _load(target: str) -> Any:
    place, _, function = target.rpartition(":")
    if not place.endswith(".py"):
        return getattr(importlib.import_module(place), function)
    sys.path.insert(0, str(Path(place).parent))
    specification = importlib.util.spec_from_file_location(Path(place).stem, place)
    assert specification is not None and specification.loader is not None, f"cannot load {place}"
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return getattr(module, function)


def _worker(target: str, folder: Path, timeout_s: float) -> None:
    import torch
    import torch.distributed as dist

    faulthandler.dump_traceback_later(0.7 * timeout_s)  # a hang shows where every rank waits
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    rank = dist.get_rank()
    try:
        result = _load(target)(json.loads((folder / "arguments.json").read_text()))
    except BaseException:
        temporary = folder / f"failing{rank}"
        temporary.write_text(str(time.time_ns()))
        temporary.rename(folder / f"failed{rank}")
        raise
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _worker(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))
