"""Directories that appear complete or not at all: written under a temporary name, flushed to disk, then renamed."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist


def plain_file_name(name: object, origin: Path) -> str:
    """Return `name` if it is a file name without a path. Raises ValueError: a name read from `origin` must not lead out
    of its directory."""
    plain = isinstance(name, str) and name not in ("", ".", "..") and not any(c in name for c in "/\\\0")
    if not plain:
        raise ValueError(
            f"{origin}: {name!r} is not a plain file name; nothing outside the directory is read or written"
        )
    return name


def refuse_existing(target: Path) -> None:
    """Raise ValueError if `target` exists."""
    # lexists: a dangling symbolic link also occupies the name.
    if os.path.lexists(target):
        raise ValueError(f"{target} exists already; choose another name or remove it")


@contextmanager
def atomic_directory(target: str | Path) -> Iterator[Path]:
    """Yield a temporary directory beside `target` that becomes `target` at the end, or is removed on any error.

    Raises ValueError if `target` exists (before anything is written, and again before the rename).
    """
    target = Path(target)
    refuse_existing(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, not in /tmp: a rename is atomic only within one file system.
    temporary = target.parent / f".{target.name}.{secrets.token_hex(4)}.incomplete"
    temporary.mkdir()
    try:
        yield temporary
        # Contents first, then the rename, then the parent: after a power cut the name never refers to empty files.
        for path in sorted(temporary.iterdir()):
            _sync(path)
        _sync(temporary)
        refuse_existing(target)
        os.rename(temporary, target)
        _sync(target.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextmanager
def replace_directory(target: Path, group: dist.ProcessGroup | None = None) -> Iterator[Path]:
    """Yield `target`.new, which every rank of `group` writes together and which then replaces `target`.

    Collective over `group` (None: the default group). The previous `target` stays until the new one is complete; a
    process killed between the two renames leaves it as `target`.old.
    """
    fresh, previous = (target.with_name(target.name + suffix) for suffix in (".new", ".old"))
    is_first = dist.get_rank(group) == 0
    if is_first:
        shutil.rmtree(fresh, ignore_errors=True)
    dist.barrier(group)
    yield fresh
    # Every rank has written its part before rank 0 gives the directory its name.
    dist.barrier(group)
    if is_first:
        if target.exists():
            shutil.rmtree(previous, ignore_errors=True)
            target.rename(previous)
        fresh.rename(target)
        _sync(target.parent)
        shutil.rmtree(previous, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
