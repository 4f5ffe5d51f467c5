"""Checksums and differences on a CPU near the speed of memory: `checksum.c`, compiled by the machine's C compiler.

`reshard.checksum` defines the checksum. Without a compiler there is no library; NumPy and torch compute the same.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

from megatron_dapo.ops.native import compiled

SOURCE = Path(__file__).with_name("checksum.c")
_ADDRESS, _SIZE, _STRIDE = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_ssize_t


@cache
def library() -> ctypes.CDLL | None:
    """Return the compiled functions, which take addresses; None without a compiler that understands them."""
    functions = compiled(SOURCE)
    return functions and _declared(functions)


def _declared(functions: ctypes.CDLL) -> ctypes.CDLL:
    rows = (_SIZE, _SIZE, _ADDRESS, _ADDRESS)
    functions.count.argtypes = (_ADDRESS, _STRIDE, *rows)
    functions.copy_and_count.argtypes = (_ADDRESS, _STRIDE, _ADDRESS, _STRIDE, *rows)
    for itemsize in (1, 2, 4, 8):
        differences = getattr(functions, f"differences_{itemsize}")
        differences.argtypes, differences.restype = (_ADDRESS, _ADDRESS, _SIZE, _ADDRESS, _SIZE), _SIZE
    functions.count.restype = functions.copy_and_count.restype = ctypes.c_int64
    return functions
