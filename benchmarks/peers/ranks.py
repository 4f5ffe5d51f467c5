"""Rank processes of a benchmark, on this machine over gloo."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

_PORTS = 3  # tries


def run_ranks(
    program: Path,
    specification: Mapping[str, Any],
    count: int,
    log_prefix: Path,
    environment: Mapping[str, str],
    timeout_s: float,
) -> Any:
    """Run `program SPECIFICATION` as `count` ranks and return the JSON that rank 0 writes to specification["report"].

    `log_prefix`: directory and beginning of the names of the specification and of the ranks' logs. Raises RuntimeError with
    a failed rank's output.
    """
    path = Path(f"{log_prefix}_specification.json")
    path.write_text(json.dumps(specification), encoding="utf-8")
    command = [sys.executable, "-W", "ignore", str(program), str(path)]
    logs = [Path(f"{log_prefix}_{rank}.log") for rank in range(count)]
    for attempt in range(1, _PORTS + 1):
        try:
            _run_once(command, logs, environment, timeout_s)
            break
        except RuntimeError as error:
            # Between the probe and rank 0 another process may have taken the port.
            if attempt == _PORTS or "EADDRINUSE" not in str(error):
                raise
    return json.loads(Path(specification["report"]).read_text(encoding="utf-8"))


def _run_once(command: Sequence[str], logs: Sequence[Path], environment: Mapping[str, str], timeout_s: float) -> None:
    """Run `command` as one rank for each log, at a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    count = len(logs)
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        processes = []
        for rank, log in enumerate(logs):
            process = subprocess.Popen(
                command,
                env={**os.environ, **shared, **environment, "RANK": str(rank)},
                stdout=stack.enter_context(log.open("wb")),
                stderr=subprocess.STDOUT,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        for rank, process in enumerate(processes):
            if process.wait(timeout_s):
                raise RuntimeError(f"rank {rank} of {count}:\n{logs[rank].read_text(errors='replace')[-3000:]}")
