"""The API key of a run: made for it, in a file that only its owner can read, and in no command line or log."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

_NAME = "engine.key"
_NUM_BYTES = 32
_MAX_BYTES = 4096


def create_key(directory: Path, name: str = _NAME) -> Path:
    """Write a fresh key into `directory` (made if missing) and return the file, mode 0600 from its first byte.

    A key that is there already is replaced: a resumed run starts its own servers.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / name
    scratch = directory / f".{name}.{os.getpid()}"
    scratch.unlink(missing_ok=True)
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as stream:
        os.fchmod(stream.fileno(), 0o600)  # whatever the umask
        stream.write(secrets.token_urlsafe(_NUM_BYTES))
    os.replace(scratch, path)
    return path


def read_key(path: Path) -> str:
    """The key in `path`. ValueError if the file is missing or empty, belongs to another user, or others may read or write it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise ValueError(f"engine key {path}: {error.strerror}; it must be a plain file that holds the key") from error
    try:
        _require_private(path, os.fstat(descriptor))
        key = os.read(descriptor, _MAX_BYTES).decode("ascii", errors="replace").strip()
    finally:
        os.close(descriptor)
    if not key or any(character.isspace() for character in key):
        raise ValueError(f"engine key {path}: the file must hold one word, the key")
    return key


def _require_private(path: Path, status: os.stat_result) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"engine key {path}: it must be a plain file")
    if status.st_uid != os.geteuid():
        raise ValueError(f"engine key {path}: belongs to user {status.st_uid}, this process runs as {os.geteuid()}")
    if mode & 0o077:
        raise ValueError(f"engine key {path}: mode {mode:04o} lets others at it; run: chmod 600 {path}")
