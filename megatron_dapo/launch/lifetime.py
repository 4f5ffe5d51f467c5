"""A lock that allows one run per output directory."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from torch.distributed import Store

logger = logging.getLogger(__name__)


class DirectoryInUse(RuntimeError):
    """Another run uses the directory. A new attempt would find it again (`is_final`).

    `is_consequence`: on ranks that learned of it from rank 0.
    """

    is_final = True
    is_consequence = False


class DirectoryLock:
    """Lock that rank 0 holds while it lives, so that no second run writes into the directory. Any exit releases it."""

    def __init__(self, run_directory: Path) -> None:
        """Take the lock. RuntimeError, naming the process, if another run holds it."""
        run_directory.mkdir(parents=True, exist_ok=True)
        self._stream = _lock(run_directory)
        self._stream.truncate(0)
        self._stream.write(str(os.getpid()))
        self._stream.flush()

    def release(self) -> None:
        self._stream.close()


def hold_directory(run_directory: Path, rank: int, store: Store, group_readable: bool = False) -> DirectoryLock | None:
    """Let rank 0 lock its run's directory and report the outcome to every rank before any of them writes there.

    Every rank calls it; rank 0 gets the lock. RuntimeError on all ranks if another run holds it. `store`: this run's
    store. From then on, only the user, or also members of the files' group, can read what the process and its children
    write.
    """
    restrict_files(group_readable)
    if rank > 0:
        if problem := store.get(_LOCK).decode():
            refusal = DirectoryInUse(problem)
            refusal.is_consequence = True
            raise refusal
        return None
    try:
        lock = DirectoryLock(run_directory)
    except (RuntimeError, OSError) as error:
        store.set(_LOCK, str(error))
        raise DirectoryInUse(str(error)) from None
    _set_mode(run_directory, 0o750 if group_readable else 0o700)
    store.set(_LOCK, "")
    return lock


def restrict_files(group_readable: bool) -> None:
    """Let only the user, or also members of the group, read what this process and its children write."""
    os.umask(0o027 if group_readable else 0o077)


def _set_mode(directory: Path, mode: int) -> None:
    """Set the permissions of a directory even if it already existed; its set-group-id bit stays."""
    found = stat.S_IMODE(directory.stat().st_mode)
    try:
        directory.chmod(found & ~0o777 | mode)
    except PermissionError:
        logger.warning("%s belongs to another user: its mode %04o stays, and should be %04o", directory, found, mode)


def require_unused(run_directory: Path) -> None:
    """Raise RuntimeError if a run is using `run_directory`."""
    if (run_directory / _LOCK).is_file():
        _lock(run_directory).close()


_LOCK = "run.lock"
_NO_LOCKS = (
    errno.ENOSYS,
    errno.ENOLCK,
    errno.EOPNOTSUPP,
)  # file systems without locks, such as Lustre without -o flock


def _lock(run_directory: Path) -> TextIO:
    # "a+": opening must not erase the holder's process id.
    stream = open(run_directory / _LOCK, "a+", encoding="utf-8")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.seek(0)
        holder = stream.read() or "unknown"
        stream.close()
        raise RuntimeError(
            f"output directory {run_directory} is in use by process {holder}: wait for that run, stop it, or choose another "
            "run.output_dir"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            stream.close()
            raise
        logger.warning(
            "%s has no file locks (%s): nothing keeps a second run out of it; mount Lustre with -o flock",
            run_directory,
            error.strerror,
        )
    return stream
