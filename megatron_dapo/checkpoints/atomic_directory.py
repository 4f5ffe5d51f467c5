"""Directories that appear complete or not at all: written under a temporary name, flushed to disk, then renamed."""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dapo.files.durable import sync

if TYPE_CHECKING:
    import torch.distributed as dist

_LONGEST_NAME = 255  # bytes; the limit of file systems
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # renameat2(2)


def plain_file_name(name: object, origin: Path) -> str:
    """Return `name` if it is a file name without a path. Raises ValueError otherwise: a name read from `origin` must
    not lead out of its directory."""
    is_plain = isinstance(name, str) and name not in ("", ".", "..") and not any(c in name for c in "/\\\0")
    if not isinstance(name, str) or not is_plain or len(os.fsencode(name)) > _LONGEST_NAME:
        raise ValueError(
            f"{origin}: {name!r:.300} is not a plain file name; nothing outside the directory is read or written"
        )
    return name


def refuse_existing(target: Path) -> None:
    # lexists: a dangling symbolic link also occupies the name.
    if os.path.lexists(target):
        raise ValueError(f"{target} exists already; choose another name or remove it")


@contextmanager
def atomic_directory(target: str | Path) -> Iterator[Path]:
    """Yield a temporary directory next to `target` that is renamed to `target` at the end, or removed on any error.

    Raises ValueError if `target` exists (before anything is written, and again before the rename).
    """
    target = Path(target)
    refuse_existing(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Next to the target, not in /tmp: a rename is atomic only within one file system.
    temporary = target.parent / f".{target.name}.{secrets.token_hex(4)}.incomplete"
    temporary.mkdir()
    try:
        yield temporary
        # Contents first, then the rename, then the parent: after a power cut the name never refers to empty files.
        for path in sorted(temporary.iterdir()):
            sync(path)
        sync(temporary)
        refuse_existing(target)
        os.rename(temporary, target)
        sync(target.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextmanager
def replace_directory(target: Path, group: dist.ProcessGroup | None = None) -> Iterator[Path]:
    """Yield `target`.new, which every rank of `group` writes together and which then replaces `target`.

    Collective over `group` (None: the default group). A kill at any moment leaves a whole `target`, the previous or the
    new one; see `put_in_place` for file systems that cannot exchange two names.
    """
    import torch.distributed as dist  # imported here, as a rank's file process uses this module without torch

    fresh = target.with_name(target.name + ".new")
    is_first = dist.get_rank(group) == 0
    if is_first:
        _finish_interrupted(target)
        remove_tree(fresh)
    dist.barrier(group)
    yield fresh
    # Every rank must have written its part before rank 0 renames the directory.
    dist.barrier(group)
    if is_first:
        put_in_place(fresh, target)


def put_in_place(fresh: Path, target: Path) -> None:
    """Rename the complete directory `fresh` to `target`, then remove the previous `target`.

    The two names are exchanged atomically. If the file system cannot do that (NFS and Lustre), the previous directory
    is `target`.old for a moment: a process killed in that moment leaves it there intact, and the next call restores it.
    """
    _finish_interrupted(target)
    if not os.path.lexists(target):
        os.rename(fresh, target)
        sync(target.parent)
    elif _exchange(fresh, target):
        sync(target.parent)
        remove_tree(fresh)  # the previous one
    else:
        previous = _previous(target)
        os.rename(target, previous)
        os.rename(fresh, target)
        sync(target.parent)
        remove_tree(previous)


def remove_tree(path: Path) -> None:
    """Remove a directory, or a link to one, if it exists. Raises OSError if it cannot be removed."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _previous(target: Path) -> Path:
    return target.with_name(target.name + ".old")


def _finish_interrupted(target: Path) -> None:
    """Clean up after a process killed between two renames: put `target`.old back, or remove it if it was replaced."""
    if not os.path.lexists(target) and _previous(target).exists():
        os.rename(_previous(target), target)
    remove_tree(_previous(target))


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names atomically. False if the kernel or the file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))
