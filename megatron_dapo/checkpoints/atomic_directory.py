"""A folder that appears complete or not at all: written beside its final name, flushed, renamed."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def plain_file_name(name: object, origin: Path) -> str:
    """`name` if it is a file name without any folder; names from data never lead elsewhere. Raises ValueError."""
    plain = isinstance(name, str) and name not in ("", ".", "..") and not any(c in name for c in "/\\\0")
    if not plain:
        raise ValueError(f"{origin}: {name!r} is not a plain file name; nothing outside the folder is read or written")
    return name


def refuse_existing(target: Path) -> None:
    if os.path.lexists(target):
        raise ValueError(f"{target} exists already; choose another name or remove it")


@contextmanager
def atomic_directory(target: str | Path) -> Iterator[Path]:
    """Yields a temporary folder beside `target` that becomes `target` at the end, or is removed on any error.

    Raises ValueError where `target` exists (before anything is written, and again before the rename).
    """
    target = Path(target)
    refuse_existing(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f".{target.name}.{secrets.token_hex(4)}.incomplete"
    temporary.mkdir()
    try:
        yield temporary
        for path in sorted(temporary.iterdir()):
            _sync(path)
        _sync(temporary)
        refuse_existing(target)
        os.rename(temporary, target)
        _sync(target.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
