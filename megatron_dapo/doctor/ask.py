"""Asks a probe in a process of its own, and other interpreters about themselves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_dapo.doctor.probes import MARK

_PROBES = "megatron_dapo.doctor.probes"
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 300.0


class ProbeFailure(RuntimeError):
    """A probe that crashed, did not end in time, or raised; the text is the cause in one line."""


def ask(name: str, environment: Mapping[str, str] | None = None, timeout_s: float = TIMEOUT_S, **arguments: Any) -> Any:
    """The answer of probe `name`, run with `environment` besides this process's. ProbeFailure where there is none."""
    paths = [str(_PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    return _answer(
        run(
            [sys.executable, "-m", _PROBES, name, json.dumps(arguments)],
            {"PYTHONPATH": os.pathsep.join(paths), **(environment or {})},
            timeout_s,
        )
    )


def run(command: list[str], environment: Mapping[str, str], timeout_s: float) -> str:
    """The standard output of a command. ProbeFailure where it does not end well."""
    try:
        done = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise ProbeFailure(f"no answer within {timeout_s:g} s") from None
    except OSError as error:
        raise ProbeFailure(f"{command[0]}: {error.strerror}") from None
    if done.returncode != 0:
        raise ProbeFailure(_cause(done.returncode, done.stderr))
    return done.stdout


def _answer(output: str) -> Any:
    lines = [line for line in output.splitlines() if line.startswith(MARK)]
    if not lines:
        raise ProbeFailure("it ended without an answer")
    return json.loads(lines[-1].removeprefix(MARK))


def _cause(code: int, errors: str) -> str:
    if code < 0:
        return f"the process crashed ({signal.Signals(-code).name})"
    lines = [line for line in errors.splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"exit code {code}"
