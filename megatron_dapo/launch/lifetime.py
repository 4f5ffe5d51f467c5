"""A lock that allows one run per output directory."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import secrets
import socket
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from megatron_dapo.files.durable import DirectoryReplaced
from megatron_dapo.watch.attempts import Verdict, is_launched, next_attempt, record_unstarted, verdict
from megatron_dapo.watch.failure import EXIT_CODE

if TYPE_CHECKING:
    from torch.distributed import Store

logger = logging.getLogger(__name__)


_SHARED_S = 30.0  # A network file system may cache for long that there was nothing yet.


class DirectoryInUse(RuntimeError):
    """Another run uses the directory. A new attempt would find it again (`is_final`)."""

    is_final = True


class RefusedByRank0(RuntimeError):
    """Rank 0 could not take the run's directory, and says why."""

    is_consequence = True


class DirectoryLock:
    """Lock that rank 0 holds while it lives, so that no second run writes into the directory. Any exit releases it."""

    def __init__(self, run_directory: Path) -> None:
        """Take the lock. DirectoryInUse, naming the process, if another run holds it; OSError if no file can be written."""
        run_directory.mkdir(parents=True, exist_ok=True)
        self._stream = _lock(run_directory)
        self.holder = f"{os.getpid()} on {socket.gethostname()} ({secrets.token_hex(4)})"  # differs between holders
        self._stream.truncate(0)
        self._stream.write(self.holder)
        self._stream.flush()
        os.fsync(self._stream.fileno())  # other nodes read it

    def release(self) -> None:
        self._stream.close()


def hold_directory(
    run_directory: Path, rank: int, store: Store, group_readable: bool = False, launched_by: str | None = None
) -> tuple[DirectoryLock | None, int]:
    """Let rank 0 lock its run's directory, and every rank see that it has the same one before any of them writes there.

    Every rank calls it. Returns rank 0's lock and the attempt's number. From then on, only the user, or also members of the files'
    group, can read what the process and its children write.

    Args:
        store: this run's.
        launched_by: the batch job, or "", whose launch the directory must know of; None: it may be new.

    Raises DirectoryInUse if another run holds it, DirectoryReplaced if this node has another directory than rank 0's, or rank 0
    another one than its launcher.
    """
    restrict_files(group_readable)
    if rank > 0:
        told = json.loads(store.get(_LOCK))
        if told["problem"]:
            raise RefusedByRank0(told["problem"])
        _require_shared(run_directory, told["holder"])
        return None, told["attempt"]
    try:
        if launched_by is not None and not is_launched(run_directory, launched_by):
            raise DirectoryReplaced(
                f"{run_directory} on {socket.gethostname()} does not know of this launch: its file system was unmounted since, "
                "or the directory was moved. Nothing is written to it"
            )
        lock = DirectoryLock(run_directory)
        attempt = next_attempt(run_directory)
    except (RuntimeError, OSError) as error:
        store.set(_LOCK, json.dumps({"problem": f"{type(error).__name__}: {error}"}))
        raise
    _set_mode(run_directory, 0o750 if group_readable else 0o700)
    store.set(_LOCK, json.dumps({"problem": "", "holder": lock.holder, "attempt": attempt}))
    return lock, attempt


def end_of_launch(run_directory: Path, job: str, first: int, max_fruitless: int) -> Verdict:
    """Return the end of the last attempt of a launch, see `verdict`; one that left no record is noted, and counts."""
    if (found := verdict(run_directory, job, first, max_fruitless)) is not None:
        return found
    if not is_launched(run_directory, job):
        why = "its file system was unmounted since the launch, or the directory was moved"
        return Verdict(EXIT_CODE, f"{run_directory} on {socket.gethostname()} knows nothing of this launch: {why}", DirectoryReplaced.failure_cause)
    try:
        require_unused(run_directory)
        record_unstarted(run_directory, job)
    except (DirectoryInUse, OSError) as error:  # attempts that cannot be counted would never end
        return Verdict(1, f"the workers did not start, and nothing can be noted: {error}")
    return verdict(run_directory, job, first, max_fruitless) or Verdict(1, "")


def _require_shared(run_directory: Path, holder: str) -> None:
    """Raise DirectoryReplaced unless the lock here is the one that rank 0 holds."""
    end = time.monotonic() + _SHARED_S
    while (found := _holder(run_directory)) != holder:
        if time.monotonic() > end:
            what = f"is locked by process {found} there" if found else "has no lock there"
            raise DirectoryReplaced(
                f"{run_directory} on {socket.gethostname()} is not the directory of rank 0, process {holder}: it {what}. Mount one "
                "file system on all nodes, or set run.output_dir to a path on it"
            )
        time.sleep(0.1)


def _holder(run_directory: Path) -> str:
    """Return what the holder of the lock wrote, "" if nothing can be read."""
    try:
        return (run_directory / _LOCK).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


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
    """Raise DirectoryInUse if a run is using `run_directory`."""
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
        raise DirectoryInUse(
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
