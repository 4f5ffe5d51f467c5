"""Versions, machine and data of a run, in provenance.json: what a result was made with.

This module imports only the standard library, as rank 0's file process reads the data.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from megatron_dapo._version import __version__
from megatron_dapo.files.durable import HERE

PROVENANCE = "provenance.json"
_PACKAGES = (
    "torch",
    "megatron-core",
    "transformers",
    "sglang",
    "transformer-engine",
    "numpy",
    "tokenizers",
    "math-verify",
)
_MODEL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
_MAX_HASHED_BYTES = 1 << 32  # larger files are recorded by size only, so that a start does not wait minutes for reading
_GIT_S = 5.0


def installed_versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that results depend on."""
    found = {"megatron_dapo": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            pass  # optional
    return found


def write_provenance(
    run_directory: Path,
    data: Mapping[str, Sequence[str]],
    model: Path,
    versions: Mapping[str, str],
    machine: str,
    operations: str = "",
    turns: Mapping[str, Any] | None = None,
) -> None:
    """Write provenance.json. `data`: paths by configuration key; `machine`: description of layout and devices;
    `operations`: table of the kernels in use; `turns`: the proof that the chat template continues episodes.

    A path that is not a file, such as a name on the Hub, is recorded unchanged.
    """
    document = {
        "versions": dict(versions),
        "commit": _commit(),
        "machine": f"{machine}; {socket.gethostname()}, {platform.platform()}, {os.cpu_count()} CPUs",
        **({"operations": operations.splitlines()} if operations else {}),
        **({"turns": dict(turns)} if turns else {}),
        "data": [{"key": key, **_identity(Path(path))} for key, paths in data.items() for path in paths],
        "model": [_identity(model / name) for name in _MODEL_FILES if (model / name).is_file()],
        "model_bytes": sum(file.stat().st_size for file in model.glob("*.safetensors")),
    }
    HERE.make_directory(run_directory)
    HERE.replace(run_directory / PROVENANCE, json.dumps(document, indent=1) + "\n")


def _identity(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {"path": str(path)}
    size = path.stat().st_size
    if size > _MAX_HASHED_BYTES:
        return {"path": str(path), "bytes": size}
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return {"path": str(path), "bytes": size, "sha256": digest.hexdigest()}


def _commit() -> str:
    """Return the commit of this package's checkout, with "+" if files differ from it; "" for an installed package."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return ""
    try:
        commit, changes = (
            subprocess.run(
                ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=_GIT_S, check=True
            )
            for arguments in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return commit.stdout.strip() + ("+" if changes.stdout.strip() else "")
