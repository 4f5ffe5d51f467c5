"""Shared-memory files of servers that nobody could clean up."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

import pytest

from megatron_dapo.engines.sglang.processes import remove_leftovers


def test_old_files_that_no_process_has_mapped_are_removed() -> None:
    stem = f"sglang_loads_test_{os.getpid()}"
    names = (f"{stem}_old.shm", f"{stem}_mapped.shm", f"{stem}_young.shm", f"other_{stem}.shm")
    old, mapped, young, other = files = [Path("/dev/shm") / name for name in names]
    try:
        for file in files:
            file.write_bytes(bytes(mmap.PAGESIZE))
            if file != young:
                os.utime(file, (time.time() - 120, time.time() - 120))
        with mapped.open("r+b") as stream, mmap.mmap(stream.fileno(), 0):
            remove_leftovers()
            assert [file.exists() for file in (old, mapped, young, other)] == [False, True, True, True]
    finally:
        for file in files:
            file.unlink(missing_ok=True)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
def test_another_users_file_stays() -> None:
    file = Path("/dev/shm") / f"sglang_loads_test_{os.getpid()}_theirs.shm"
    try:
        file.write_bytes(b"0")
        os.chown(file, 12345, 12345)
        os.utime(file, (0, 0))
        remove_leftovers()
        assert file.exists()
    finally:
        file.unlink(missing_ok=True)
