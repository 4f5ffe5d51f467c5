"""The package's C sources, compiled in each process by the machine's C compiler."""

from __future__ import annotations

import ctypes
import logging
import shutil
import subprocess
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

_COMPILE_S = 60.0


def compiled(source: Path, *flags: str) -> ctypes.CDLL | None:
    """Return the functions of `source`; None without a compiler that understands it and `flags`."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    try:
        with tempfile.TemporaryDirectory(prefix="megatron-dapo-native-") as directory:
            target = Path(directory) / f"{source.stem}.so"
            command = [compiler, "-O3", "-shared", "-fPIC", *flags, "-o", str(target), str(source), "-lm"]
            subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_S)
            return ctypes.CDLL(str(target))  # mapped: its file is no longer needed
    except (OSError, subprocess.SubprocessError) as error:
        logger.debug("%s does not compile %s: %s", compiler, source, error)
        return None
