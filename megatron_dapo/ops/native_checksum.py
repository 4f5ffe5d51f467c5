"""Checksums and differences on a CPU near the speed of memory: `checksum.c`, compiled in each process by the machine's C
compiler.

`reshard.checksum` defines the checksum. Without a compiler there is no library; NumPy and torch compute the same.
"""

from __future__ import annotations

import ctypes
import logging
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("checksum.c")
_COMPILE_S = 60.0
_ADDRESS, _SIZE, _STRIDE = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_ssize_t


@cache
def library() -> ctypes.CDLL | None:
    """Return the compiled functions, which take addresses; None without a compiler that understands them."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    try:
        with tempfile.TemporaryDirectory(prefix="megatron-dapo-checksum-") as directory:
            target = Path(directory) / "checksum.so"
            command = [compiler, "-O3", "-shared", "-fPIC", "-o", str(target), str(SOURCE)]
            subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_S)
            return _declared(ctypes.CDLL(str(target)))  # mapped: its file is no longer needed
    except (OSError, subprocess.SubprocessError) as error:
        logger.debug("%s does not compile %s: %s", compiler, SOURCE, error)
        return None


def _declared(functions: ctypes.CDLL) -> ctypes.CDLL:
    rows = (_SIZE, _SIZE, _ADDRESS, _ADDRESS)
    functions.count.argtypes = (_ADDRESS, _STRIDE, *rows)
    functions.copy_and_count.argtypes = (_ADDRESS, _STRIDE, _ADDRESS, _STRIDE, *rows)
    for itemsize in (1, 2, 4, 8):
        differences = getattr(functions, f"differences_{itemsize}")
        differences.argtypes, differences.restype = (_ADDRESS, _ADDRESS, _SIZE, _ADDRESS, _SIZE), _SIZE
    functions.count.restype = functions.copy_and_count.restype = ctypes.c_int64
    return functions
