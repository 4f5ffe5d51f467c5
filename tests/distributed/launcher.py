"""Run a function in N gloo processes and fail with the output of the first rank that failed.

`run_distributed("package.module:function", num_processes, arguments)` joins N processes in a default gloo group of
their own, and each calls `function(arguments)`. `arguments` and the value that rank 0's function returns are JSON. A
directory holds each rank's output; the processes are killed at the deadline, and as soon as one of them fails.

The processes are fresh interpreters. Those that came well through a function stand by for the next one, as importing
torch and megatron-core takes longer than most checks; one that leaves a function of the package replaced fails.

The target may also be a file: "/path/to/file.py:function" (`target_in(__file__, "function")`), so that workers can live
next to their test.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import importlib.util
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

from megatron_dapo.imports import heavy_imports

ROOT = Path(__file__).resolve().parents[2]
POLL_INTERVAL_S = 0.02
OUTPUT_TAIL_CHARS = 6000
MAX_THREADS_LEFT = 32
TORCH_SEED = 67280421310721  # the seed of a fresh interpreter


def target_in(file: str, function: str) -> str:
    """Return the target string of a function defined in `file` (pass `__file__`)."""
    return f"{Path(file).resolve()}:{function}"


def free_port() -> int:
    """Return a port that is free now and that no outgoing connection gets: it may be seconds until a rank listens there."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", random.SystemRandom().randrange(30000, 32768)))
            return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Job:
    """The work of one rank of a run, and the directory of the run."""

    target: str
    rank: int
    num_processes: int
    port: int
    directory: str
    timeout_s: float


class RankProcess:
    """A process that runs jobs until one fails."""

    def __init__(self) -> None:
        parts = (str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(Path(__file__).resolve())],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, parts))},
            stdin=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )
        self._done: Path | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, job: Job) -> None:
        assert self._process.stdin is not None
        self._done = Path(job.directory) / f"done{job.rank}"
        print(json.dumps(asdict(job)), file=self._process.stdin, flush=True)

    def poll(self) -> int | None:
        """Return 0 if the job is done, the exit code of a process that ended first, None while it runs."""
        assert self._done is not None, "no job was started"
        return 0 if self._done.exists() else self._process.poll()

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait(self, timeout_s: float) -> int:
        """Return the exit code of a process that its job ends."""
        return self._process.wait(timeout_s)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()


@cache
def standing() -> list[RankProcess]:
    """Return the idle rank processes of this interpreter; they end with it, when their input closes."""
    return []


def _take(num_processes: int) -> list[RankProcess]:
    ranks = standing()
    ranks[:] = [rank for rank in ranks if rank.is_alive()]
    ranks += [RankProcess() for _ in range(num_processes - len(ranks))]
    return ranks[:num_processes]


def start_job(
    ranks: Sequence[RankProcess], target: str, directory: Path, timeout_s: float, arguments: Any = None
) -> None:
    """Start the job of rank i on `ranks[i]`."""
    (directory / "arguments.json").write_text(json.dumps(arguments))
    port = free_port()
    for number, rank in enumerate(ranks):
        _log(directory, number).touch()
        rank.start(Job(target, number, len(ranks), port, str(directory), timeout_s))


def run_distributed(target: str, num_processes: int, arguments: Any = None, timeout_s: float = 400.0) -> Any:
    """Call `target` in `num_processes` gloo ranks and return what rank 0's call returned.

    Raises AssertionError with the failing rank's output if a rank fails, TimeoutError if the deadline passes.
    """
    with tempfile.TemporaryDirectory(prefix="distributed-test-") as name:
        directory, ranks = Path(name), _take(num_processes)
        try:
            start_job(ranks, target, directory, timeout_s, arguments)
            _wait(ranks, directory, timeout_s)
        except BaseException:
            for rank in ranks:
                rank.kill()
            raise
        return json.loads((directory / "result.json").read_text())


def require_parity(
    worker: str, cases: Sequence[dict[str, Any]], references: str, close: Sequence[str], equal: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the errors of every case on 4 ranks in fp32 against fp64; those named `close` are below 1e-5, those named `equal`
    zero."""
    results = run_distributed(worker, 4, {"cases": cases, "references": references})
    for case, errors in zip(cases, results, strict=True):
        assert max(errors[name] for name in close) < 1e-5, (case, errors)
        assert not any(errors[name] for name in equal), (case, errors)
    return results


def _wait(ranks: Sequence[RankProcess], directory: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        codes = [rank.poll() for rank in ranks]
        # The first failing rank in time is the cause; the others fail because it is gone.
        failed = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
        if failed:
            cause = _first_failure(directory, len(ranks), failed[0])
            code = ranks[cause].wait(timeout_s)  # a rank ends right after its stamp
            raise AssertionError(f"rank {cause} failed with exit code {code}:\n{output_of(directory, cause)}")
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            running = [rank for rank, code in enumerate(codes) if code is None]
            tails = "\n".join(f"--- rank {rank}:\n{output_of(directory, rank)}" for rank in running)
            raise TimeoutError(f"ranks {running} still ran after {timeout_s} s:\n{tails}")
        time.sleep(POLL_INTERVAL_S)


def _first_failure(directory: Path, num_ranks: int, ended: int) -> int:
    """Return the rank that failed first, which may end after the others; `ended` if none could say so."""
    stamps = {rank: directory / f"failed{rank}" for rank in range(num_ranks)}
    stamped = {rank: int(path.read_text()) for rank, path in stamps.items() if path.exists()}
    return min(stamped, key=stamped.__getitem__) if stamped else ended


def _log(directory: Path, rank: int) -> Path:
    return directory / f"rank{rank}.log"


def output_of(directory: Path, rank: int) -> str:
    """Return the last lines that a rank wrote."""
    return _log(directory, rank).read_text(errors="replace")[-OUTPUT_TAIL_CHARS:]


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


def _work(job: Job) -> None:
    """Run one job in this process; an error ends the process."""
    directory = Path(job.directory)
    _write_into(_log(directory, job.rank))
    with heavy_imports():
        import torch
        import torch.distributed as dist

    os.environ.update(
        RANK=str(job.rank),
        LOCAL_RANK=str(job.rank),
        WORLD_SIZE=str(job.num_processes),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(job.port),
    )
    faulthandler.dump_traceback_later(0.7 * job.timeout_s)  # a hang shows where every rank waits
    torch.set_num_threads(1)
    torch.manual_seed(TORCH_SEED)
    random.seed(job.rank)
    try:
        with heavy_imports():
            function, sound = _load(job.target), _package_callables()
            gc.collect()
        dist.init_process_group("gloo", timeout=timedelta(seconds=job.timeout_s))
        result = function(json.loads((directory / "arguments.json").read_text()))
        _require_megatron_core()
        replaced = [name for name, value in _package_callables().items() if sound.get(name, value) is not value]
        assert not replaced, f"{job.target} left {', '.join(replaced)} replaced, which the next test would meet"
    except BaseException:
        _leave(directory / f"failed{job.rank}", str(time.time_ns()))
        raise
    if job.rank == 0:
        (directory / "result.json").write_text(json.dumps(result))
    dist.barrier()
    _leave_groups(job.target)
    faulthandler.cancel_dump_traceback_later()
    _leave(directory / f"done{job.rank}", "")


def _require_megatron_core() -> None:
    """Fail unless all of megatron-core that was imported is of the version that the tests are for."""
    wanted = os.environ.get("MEGATRON_DAPO_MEGATRON_CORE")
    if wanted is None or "megatron.core" not in sys.modules:
        return
    core = sys.modules["megatron.core"]
    directory = str(Path(core.__file__).parent)
    others = [
        name
        for name, module in sys.modules.items()
        if name.startswith("megatron.core.") and not (getattr(module, "__file__", None) or directory).startswith(directory)
    ]
    # megatron-core appends the hash of a commit after a plus sign.
    assert core.__version__.partition("+")[0] == wanted and not others, (
        f"the tests are for megatron-core {wanted}, the rank has {core.__version__} of {directory}, and {others[:3]}"
    )


def _package_callables() -> dict[str, Any]:
    """Return the functions and classes that the package's modules hold, by module and name."""
    modules = [(name, module) for name, module in sys.modules.items() if name.partition(".")[0] == "megatron_dapo"]
    return {
        f"{name}.{key}": value for name, module in modules for key, value in vars(module).items() if callable(value)
    }


def _leave_groups(target: str) -> None:
    """Destroy all groups and drop references to them: each has threads and sockets."""
    import torch.distributed as dist

    dist.destroy_process_group()
    sys.excepthook = sys.__excepthook__  # torch wraps it again with every default group, to name the rank
    if parallel_state := sys.modules.get("megatron.core.parallel_state"):
        parallel_state.destroy_model_parallel()
    if rotary := sys.modules.get("megatron.core.models.common.embeddings.rotary_pos_embedding"):
        rotary.RotaryEmbedding.forward.cache_clear()  # its arguments are modules, which have groups
    for _ in range(2):  # The objects that the first collection ends release more.
        gc.collect()
    threads = len(os.listdir("/proc/self/task"))
    # A hundred groups that nobody uses take a core from every test that follows: their threads look for messages.
    assert threads <= MAX_THREADS_LEFT, f"{threads} threads are left of {target}'s groups: what still refers to them?"


def _write_into(file: Path) -> None:
    """Redirect standard output and error of this process."""
    sys.stdout.flush()
    with file.open("wb") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)


def _leave(file: Path, text: str) -> None:
    """Write the file atomically."""
    temporary = file.with_suffix(".new")
    temporary.write_text(text)
    temporary.rename(file)


if __name__ == "__main__":
    for line in sys.stdin:
        _work(Job(**json.loads(line)))
