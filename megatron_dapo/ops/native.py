"""The package's C sources, compiled by the machine's C compiler and kept in the user's cache.

A library is kept under a hash of all that decides its code, the machine's processor included, because nodes share a home. Only
a file that no other user can have written is loaded. Without such a cache each process compiles.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from megatron_dapo.files.user_cache import user_cache

logger = logging.getLogger(__name__)

_COMPILE_S = 60.0
_CPU_FIELDS = ("vendor_id", "model name", "flags", "CPU implementer", "CPU part", "Features")  # x86 has the first three, ARM the others.


def compiled(source: Path, *flags: str) -> ctypes.CDLL | None:
    """Return the functions of `source`; None without a compiler that understands it and `flags`."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    command = [compiler, "-O3", "-shared", "-fPIC", *flags]
    kept = _kept(source, command)
    if kept is not None and _is_ours(kept):
        try:
            return ctypes.CDLL(str(kept))
        except OSError as error:
            logger.debug("%s is compiled again: %s", kept, error)
    try:
        with tempfile.TemporaryDirectory(prefix="megatron-dapo-native-") as directory:
            target = Path(directory) / f"{source.stem}.so"
            subprocess.run(
                [*command, "-o", str(target), str(source), "-lm"], check=True, capture_output=True, timeout=_COMPILE_S
            )
            if kept is not None:
                _keep(target, kept)
            return ctypes.CDLL(str(target))  # mapped: its file is no longer needed
    except (OSError, subprocess.SubprocessError) as error:
        logger.debug("%s does not compile %s: %s", compiler, source, error)
        return None


def _kept(source: Path, command: list[str]) -> Path | None:
    """Return where the library is kept; None if the user has no home or the processor is not described."""
    try:
        compiler = Path(command[0]).resolve()
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0].splitlines()
        parts = [source.read_text(encoding="utf-8"), *command, str(compiler), str(compiler.stat().st_mtime_ns)]
        parts += [line for line in lines if line.split("\t")[0].strip() in _CPU_FIELDS]
        name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
        return user_cache() / "native" / f"{source.stem}-{name}.so"
    except (OSError, RuntimeError):
        return None


def _is_ours(file: Path) -> bool:
    """Return True if the file and its directory belong to this user, and no other may write them."""
    try:
        states = [path.lstat() for path in (file, file.parent)]
    except OSError:
        return False
    return all(state.st_uid == os.geteuid() and not state.st_mode & 0o022 for state in states)


def _keep(library: Path, kept: Path) -> None:
    """Copy the library to where it is kept, in one piece; a home that cannot be written keeps nothing."""
    try:
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = kept.with_name(f"{kept.name}.{os.getpid()}")
        shutil.copyfile(library, partial)
        partial.chmod(0o500)
        os.replace(partial, kept)
    except OSError as error:
        logger.debug("%s is not kept: %s", kept, error)
