"""A sandbox for programs that a model wrote: runs one against tests, within limits that the kernel enforces.

A program runs without capabilities, under a filter of system calls, in namespaces for users, processes, files, network
and System V objects, with a root directory where only a small temporary /tmp is writable. If a site does not allow
namespaces, programs run under Landlock and a stricter filter, and cannot start other processes. `Sandbox.isolation`
says which. This needs no installation and no root; programs started by root run as uid 65534.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_RUNNER = Path(__file__).with_name("runner.py")
_START_S = 60.0
_GRACE_S = 3.0  # time in which a job ends after its budget
_MAX_LINE_BYTES = 64 * 2**20


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of one program. Memory, time and output are per test; files and processes cover all that it starts."""

    cpu_s: float = 5.0  # CPU time of each process; twice that in wall-clock time
    memory_mb: int = 1024
    max_processes: int = 16
    file_mb: int = 16
    workspace_mb: int = 64
    max_files: int = 64
    output_bytes: int = 2**20


class Sandbox:
    """Runs programs one at a time. Starts its processes at first use; they end on close or with this process."""

    def __init__(self, limits: SandboxLimits | None = None) -> None:
        self.limits = limits or SandboxLimits()
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""
        self._start: Mapping[str, Any] = {}

    @property
    def isolation(self) -> str:
        """Kind of isolation: "namespaces and seccomp", "namespaces", "landlock and seccomp" or "none"."""
        self._running()
        return str(self._start["isolation"])

    @property
    def missing(self) -> Sequence[str]:
        """Parts of the isolation that this kernel or site does not allow."""
        self._running()
        return list(self._start["missing"])

    def run(self, program: str, tests: Sequence[Mapping[str, Any]], budget_s: float) -> list[Mapping[str, Any]]:
        """Run the program once per test and return the outcomes: fewer than tests if `budget_s` seconds ran out.

        A test is {"stdin": text}, {"call": {"name", "arguments"}} or {"asserts": Python}; an outcome has `status` ("ended",
        "time", "memory", "output", "budget"), the exit `code`, `stdout`, `stderr` (its end) and `result`.
        """
        process = self._running()
        job = {"program": program, "tests": list(tests), "budget_s": budget_s, "wall_s": 2 * self.limits.cpu_s}
        end, outcomes = time.monotonic() + budget_s + _GRACE_S, []
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps({**job, **vars(self.limits)}).encode() + b"\n")
            process.stdin.flush()
            while "end" not in (message := self._read(end)):
                outcomes.append(message)
        except (TimeoutError, OSError, ValueError):
            self.close()
        return [outcome for outcome in outcomes if outcome["status"] != "budget"]

    def close(self) -> None:
        """Kill everything that was started."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._unread = b""
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(_RUNNER), str(os.getpid())],  # lets `ps` show whose it is
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                # Pass none of the verifier process's variables, which may include a key.
                env={"PATH": os.defpath, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
                | {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ},
                cwd="/",
            )
            self._start = self._read(time.monotonic() + _START_S)
        return self._process

    def _read(self, end: float) -> Mapping[str, Any]:
        """Return the next message. Raises TimeoutError after `end`, and ValueError if there is none."""
        assert self._process is not None and self._process.stdout is not None
        while b"\n" not in self._unread:
            if not select.select([self._process.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError("the sandbox has not answered in time")
            chunk = os.read(self._process.stdout.fileno(), 2**20)
            if not chunk or len(self._unread) > _MAX_LINE_BYTES:
                raise ValueError("the sandbox's processes ended")
            self._unread += chunk
        line, self._unread = self._unread.split(b"\n", 1)
        return dict(json.loads(line))
