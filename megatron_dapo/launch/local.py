"""Starts the workers of one machine under torchrun and passes Ctrl-C and SIGTERM to the workers, not to torchrun.

torchrun kills its workers 30 s after a signal, which is less than a training step of a large model. It therefore runs
in a separate process group: the launcher forwards the first signal to the workers, which save and exit, and ends
everything at a later one (signals within seconds of the first count as the same request). If the launcher is killed,
torchrun and the workers end too: each asks the kernel for a SIGTERM when its parent dies.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_dapo.engines.sglang.ports import reserve_port
from megatron_dapo.files.linux import signal_at_parents_death
from megatron_dapo.launch.environment import ATTEMPT
from megatron_dapo.launch.lifetime import require_unused
from megatron_dapo.watch.signals import ONE_REQUEST_S

logger = logging.getLogger(__name__)


def worker_pid_file(run_directory: Path, rank: int) -> Path:
    """Return the file in which the worker of `rank` leaves its process id."""
    return run_directory / "workers" / f"{rank}.pid"


def write_worker_pid(run_directory: Path, rank: int) -> None:
    """Write this process's id for the launcher, atomically."""
    file = worker_pid_file(run_directory, rank)
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".new")
    partial.write_text(str(os.getpid()), encoding="utf-8")
    os.replace(partial, file)


class _Forwarder:
    """Passes the first signal to the workers and kills the group at a later one."""

    def __init__(self, process: subprocess.Popen, run_directory: Path) -> None:
        self._process = process
        self._run_directory = run_directory
        self._first: float | None = None  # monotonic time of the first signal
        self.ended_by = 0  # the signal that came before there were workers to pass it to

    def __call__(self, signum: int, frame: object) -> None:
        now, workers = time.monotonic(), self._worker_pids()
        if self._first is not None and now - self._first <= ONE_REQUEST_S:
            return
        if self._first is not None or not workers:
            self.ended_by = 0 if workers else signum
            self.kill_all()
            return
        self._first = now
        logger.warning("stopping with a checkpoint; once more after %.0f s to stop at once", ONE_REQUEST_S)
        for pid in workers:
            _send(pid, signal.SIGTERM)

    def kill_all(self) -> None:
        """Kill torchrun and its workers at once; workers may lead separate sessions, outside torchrun's group."""
        for pid in self._worker_pids():
            _send(pid, signal.SIGKILL)
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def _worker_pids(self) -> list[int]:
        return [int(file.read_text()) for file in _pid_files(self._run_directory)]


def _send(pid: int, signum: int) -> None:
    try:
        os.kill(pid, signum)
    except ProcessLookupError:  # it ended between the read and the signal
        pass


def _pid_files(run_directory: Path) -> list[Path]:
    return sorted((run_directory / "workers").glob("*.pid"))


def torchrun_command(
    num_processes: int, module: str, arguments: Sequence[str], port: int, restarts: int = 0
) -> list[str]:
    """Return torchrun's command for `module` in `num_processes` workers that rendezvous on loopback."""
    # The store of `--standalone` holds its state as a pickle, and any process that reaches its port can run code.
    rendezvous = ["--rdzv-backend=static", "--nnodes=1", "--node-rank=0", "--master-addr=127.0.0.1"]
    return [
        *(sys.executable, "-m", "megatron_dapo.launch.torchrun", *rendezvous, f"--master-port={port}"),
        *(f"--nproc-per-node={num_processes}", f"--max-restarts={restarts}", "--module", module, *arguments),
    ]


def launch_workers(
    module: str, arguments: Sequence[str], num_processes: int, run_directory: Path, restarts: int = 0, attempt: int = 0
) -> int:
    """Run `module` in `num_processes` local workers to their end; return torchrun's exit code (128 + signal number, as
    in shells). The workers rendezvous on loopback only.

    After a failure torchrun restarts all workers, at most `restarts` times. `attempt`: number of the first attempt of this launch, if
    `begin_launch` has noted it. Signals are forwarded as the module docstring says. RuntimeError if another run uses `run_directory`.
    """
    require_unused(run_directory)
    # Ids of an earlier run may belong to other processes by now, which a signal must not reach.
    for file in _pid_files(run_directory):
        file.unlink()
    port = reserve_port("127.0.0.1")  # held until the end: no process may take it before torchrun listens
    command = torchrun_command(num_processes, module, arguments, port.hand_over(), restarts)
    defaults = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // num_processes)),
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # torchrun's own log lines would cut through the progress display
    }
    process = subprocess.Popen(
        command,
        env={**defaults, **os.environ, **({ATTEMPT: str(attempt)} if attempt else {})},
        start_new_session=True,  # a terminal's Ctrl-C reaches its foreground group only
        preexec_fn=signal_at_parents_death(signal.SIGTERM),
    )
    forward = _Forwarder(process, run_directory)
    # Only the main thread receives signals; a caller in another thread is not interrupted by them.
    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    previous = {number: signal.signal(number, forward) for number in numbers}
    try:
        code = process.wait()
        if forward.ended_by:
            return 128 + forward.ended_by
        return code if code >= 0 else 128 - code
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if process.poll() is None:
            forward.kill_all()
        port.release()
