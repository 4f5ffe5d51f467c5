"""A Python interpreter for programs that the model writes, in the sandbox of the `code` verifier."""

from __future__ import annotations

import atexit
import threading

from megatron_dapo.environments.remote.api import tool
from megatron_dapo.rewards.sandbox.sandbox import Sandbox, SandboxLimits

_BUDGET_S = 10.0
_MAX_OUTPUT = 4000  # characters that the model sees
_LOCK = threading.Lock()  # a sandbox runs one program at a time
_SANDBOXES: list[Sandbox] = []  # this process's, made by the first call


@tool
def python(code: str) -> str:
    """Run a Python program and return what it prints. Each call begins anew; there is no network.

    Args:
        code: the program; print the results
    """
    with _LOCK:
        if not _SANDBOXES:
            _SANDBOXES.append(Sandbox(SandboxLimits(cpu_s=5.0, memory_mb=512)))
            atexit.register(_SANDBOXES[0].close)
        outcomes = _SANDBOXES[0].run(code, [{"stdin": ""}], _BUDGET_S)
    if not outcomes or outcomes[0]["status"] == "time":
        raise TimeoutError
    outcome = outcomes[0]
    text = outcome["stdout"] + (f"\n{outcome['stderr']}" if outcome["stderr"] else "")
    if outcome["status"] != "ended":
        text += f"\n(stopped: {outcome['status']} limit)"
    return text.strip()[:_MAX_OUTPUT] or "(the program printed nothing)"
