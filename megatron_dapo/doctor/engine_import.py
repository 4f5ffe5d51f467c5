"""Libraries of the engines' environment, remembered: importing SGLang takes as long as all other checks together."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_dapo.doctor import engine_probe
from megatron_dapo.doctor.engine_probe import EngineLibraries
from megatron_dapo.doctor.gather import ROOT, ProbeFailure, run
from megatron_dapo.doctor.probes import MARK
from megatron_dapo.files.user_cache import user_cache
from megatron_dapo.launch.environment import DRIVER_DEVICE

_TIMEOUT_S = 300.0  # a first import from a network file system
_MAX_REMEMBERED = 64


def engine_libraries(python: Path, metadata: Sequence[object]) -> EngineLibraries:
    """Import SGLang and what it needs on a GPU with `python`, and return what was found.

    `metadata` identifies the installation: path, modification time and size of SGLang's RECORD. An answer without a failure
    is remembered under it in the user's cache directory; a failure is tried again each time.
    """
    # One home serves nodes with and without GPUs.
    key = json.dumps([str(python), *metadata, DRIVER_DEVICE.exists()])
    remembered = _remembered()
    if key in remembered:
        return EngineLibraries(**remembered[key])
    try:
        # The trainer's PYTHONPATH would make the trainer's packages shadow the engines'.
        output = run([str(python), "-m", engine_probe.__name__], {"PYTHONPATH": str(ROOT)}, _TIMEOUT_S)
        answer = next(line.removeprefix(MARK) for line in reversed(output.splitlines()) if line.startswith(MARK))
    except (ProbeFailure, StopIteration) as failure:
        return EngineLibraries(error=f"`import sglang` fails: {str(failure) or 'it ended without an answer'}")
    libraries = EngineLibraries(**json.loads(answer))
    if not libraries.failures:
        _remember({**remembered, key: asdict(libraries)})
    return libraries


def cache_file() -> Path:
    """Return the file of remembered answers."""
    return user_cache() / "engine_libraries.json"


def _remembered() -> dict[str, dict[str, Any]]:
    try:
        entries = json.loads(cache_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    names = set(EngineLibraries.__dataclass_fields__)
    is_ours = isinstance(entries, dict)
    return {k: v for k, v in entries.items() if isinstance(v, dict) and set(v) == names} if is_ours else {}


def _remember(entries: dict[str, dict[str, Any]]) -> None:
    path = cache_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        partial.write_text(json.dumps(dict(list(entries.items())[-_MAX_REMEMBERED:])), encoding="utf-8")
        os.replace(partial, path)
    except OSError:
        pass  # a home that cannot be written: the import is tried each time
