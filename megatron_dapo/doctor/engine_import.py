"""A real import of SGLang by the engines' interpreter, remembered for its environment: it takes as long as all other checks together."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from megatron_dapo.doctor.gather import ROOT, ProbeFailure, run

IMPORT = "import sglang"
# As a server does it: on a CPU the import needs stand-ins.
_CODE = f"from megatron_dapo.engines.sglang.cpu import prepare_imports; prepare_imports(); {IMPORT}"
_TIMEOUT_S = 300.0  # a first import from a network file system
_MAX_REMEMBERED = 64


def import_problem(python: Path, metadata: Sequence[object]) -> str:
    """Return why `python` cannot import SGLang, "" where it can.

    `metadata` identifies the installation: path, modification time and size of SGLang's RECORD. A success is remembered under
    it in the user's cache directory; a failure is tried again each time.
    """
    key = json.dumps([str(python), *metadata])
    remembered = _remembered()
    if key in remembered:
        return ""
    try:
        # The trainer's PYTHONPATH would show the trainer's packages in place of the engines'.
        run([str(python), "-c", _CODE], {"PYTHONPATH": str(ROOT)}, _TIMEOUT_S)
    except ProbeFailure as failure:
        return f"`{IMPORT}` fails: {failure}"
    _remember([*remembered, key][-_MAX_REMEMBERED:])
    return ""


def cache_file() -> Path:
    """Return the file of remembered imports, in $XDG_CACHE_HOME or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron_dapo" / "engine_imports.json"


def _remembered() -> list[str]:
    try:
        found = json.loads(cache_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return [key for key in found if isinstance(key, str)] if isinstance(found, list) else []


def _remember(keys: Sequence[str]) -> None:
    path = cache_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        partial.write_text(json.dumps(keys), encoding="utf-8")
        os.replace(partial, path)
    except OSError:
        pass  # a home that cannot be written: the import is tried each time
