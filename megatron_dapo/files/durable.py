"""Files that are on disk when the call returns, with the size and hash of what was written.

Everything goes through os.write and os.fsync in this module, so that tests can simulate a full disk or a kill at any
write.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_dapo.device_thread import device_thread
from megatron_dapo.files.checksums import PieceChecksums, PieceSums
from megatron_dapo.files.safetensors import code_of, encode_header

if TYPE_CHECKING:
    import torch

# Past the page cache, memory addresses, file offsets and sizes must be multiples of this.
DIRECT_BYTES = 1 << 12
_WRITE_BYTES = 1 << 24  # size of a write past the cache
_READ_BYTES = 1 << 22
FILE_PROCESS = "file process"  # name of a rank's file process, as `ps -o comm` shows it
_FLAGS = {"w": os.O_TRUNC, "x": os.O_EXCL, "a": os.O_APPEND}


@dataclass(frozen=True)
class FileEntry:
    """Identity of a file: name within its directory, bytes, SHA-256 in hex.

    A file with `pieces`, see `PieceChecksums`, is verified piece by piece on reading; `sha256` is then that of their
    text.
    `keepers`: addresses at which a copy in memory may be, see `memory_copies`.
    """

    name: str
    size: int
    sha256: str
    pieces: str = ""
    keepers: Sequence[str] = field(default=(), compare=False)

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value or name not in ("pieces", "keepers")}


class _Sums:
    """Checksums of a file from its bytes in order: of its pieces if their sizes are given, otherwise of the whole
    file."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._digest, self._pieces = hashlib.sha256(), PieceSums(sizes) if sizes else None
        self._size = 0

    def update(self, chunk: memoryview) -> None:
        self._size += len(chunk)
        (self._pieces or self._digest).update(chunk)

    def entry(self, name: str) -> FileEntry:
        """Return the file's entry under a name, after the last byte."""
        if self._pieces is None:
            return FileEntry(name, self._size, self._digest.hexdigest())
        return FileEntry(name, self._size, sha256_of_pieces(self._pieces.text()), self._pieces.text())


def sha256_of_pieces(pieces: str) -> str:
    """Return the SHA-256 by which the entry of a file covers its pieces."""
    return hashlib.sha256(pieces.encode()).hexdigest()


class OpenFile:
    """A file that is being written; its bytes are counted and hashed on the way."""

    def __init__(self, path: Path, mode: str, sizes: Sequence[int] = ()) -> None:
        """mode: "w" to write a file anew, "x" for a new one, "a" to append. `sizes` of its pieces, if any."""
        self._path, self._is_appended = path, mode == "a"
        self._sums = _Sums(sizes)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | _FLAGS[mode], 0o644)

    def write(self, chunk: bytes | memoryview) -> None:
        """Write a chunk. Raises OSError (ENOSPC if the disk is full)."""
        view = memoryview(chunk).cast("B")
        self._sums.update(view)
        while view:  # os.write may write less than requested
            view = view[os.write(self._descriptor, view) :]

    def finish(self) -> FileEntry:
        """Flush the file to the disk. Appended data is left to the kernel, which loses it only if the machine
        crashes."""
        if not self._is_appended:
            os.fsync(self._descriptor)
        return self._sums.entry(self._path.name)

    def close(self) -> None:
        os.close(self._descriptor)


@dataclass(frozen=True)
class Work:
    """Context of a function that a file process runs in a thread: the rank's copy, and a request to end early."""

    memory: memoryview
    cancelled: threading.Event


def write_direct(path: Path, content: memoryview, sizes: Sequence[int] = ()) -> FileEntry:
    """Write a new file from page-aligned memory, past the page cache if the file system supports it.

    The cache would cost a copy of everything and evict what the run reads. Another thread meanwhile computes the
    checksums, of pieces of these `sizes` if there are any.
    """
    sums = _Sums(sizes)
    hashing = device_thread(sums.update, content, name="checksum")
    hashing.start()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        _write_past_cache(descriptor, content)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
        hashing.join()
    return sums.entry(path.name)


def _write_past_cache(descriptor: int, content: memoryview) -> None:
    flags, done = fcntl.fcntl(descriptor, fcntl.F_GETFL), 0
    try:
        # Set now: some file systems make a file before they refuse to open it so.
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        end = len(content) // DIRECT_BYTES * DIRECT_BYTES
        while done < end and done % DIRECT_BYTES == 0:
            done += os.write(descriptor, content[done : min(end, done + _WRITE_BYTES)])
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    # The rest is less than a page, or the file system cannot bypass the cache.
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    while done < len(content):
        done += os.write(descriptor, content[done : done + _WRITE_BYTES])


class DirectoryReplaced(RuntimeError):
    """A path leads to another directory than before: its file system was unmounted, or the directory was moved."""

    failure_cause = "file system lost"  # see `watch.failure`


class HeldDirectory:
    """A directory that stays the one it is now, or `require` fails.

    An unmounted file system leaves its mount point, an empty directory on another disk, in which every write would
    succeed. The open descriptor keeps the directory's inode number from being given to another one.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._descriptor = path.absolute(), os.open(path, getattr(os, "O_PATH", os.O_RDONLY))

    def require(self) -> None:
        """Raise DirectoryReplaced if the path leads elsewhere. Raises OSError if the file system fails."""
        try:
            found = os.stat(self._path)
        except (FileNotFoundError, NotADirectoryError):
            found = None
        if found is None or identity_of(found) != identity_of(os.fstat(self._descriptor)):
            what = "is gone" if found is None else "is another directory than before"
            raise DirectoryReplaced(
                f"{self._path} {what} on {socket.gethostname()}: its file system was unmounted there, or the directory was "
                "moved. Nothing is written to it"
            )


def identity_of(status: os.stat_result) -> tuple[int, int]:
    """Return device and inode number, which no other directory has while this one exists."""
    return status.st_dev, status.st_ino


class Files:
    """Writes files in this process. `FileProcess` has the same methods and does the work in another process."""

    def __init__(self) -> None:
        self._held: list[HeldDirectory] = []

    def hold(self, *directories: Path) -> None:
        """From now on raise DirectoryReplaced, at each request, unless all these directories are what they are now."""
        self._held += map(HeldDirectory, directories)

    def require_held(self) -> None:
        """Raise DirectoryReplaced if one of the held directories has been replaced."""
        for directory in self._held:
            directory.require()

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return function(*arguments), a function of this package that works on files.

        Its module imports only the standard library; arguments and result are paths and JSON values.
        """
        self.require_held()
        return function(*arguments)

    def write(
        self, path: Path, chunks: Iterable[bytes | memoryview], mode: str = "w", sizes: Sequence[int] = ()
    ) -> FileEntry:
        """Write chunks to a file, in the mode of `OpenFile`. Raises OSError (ENOSPC if the disk is full)."""
        self.require_held()
        file = OpenFile(path, mode, sizes)
        try:
            for chunk in chunks:
                file.write(chunk)
            return file.finish()
        finally:
            file.close()

    def write_json(self, path: Path, document: Any) -> FileEntry:
        """Write `document` as JSON. Raises ValueError for what JSON cannot hold (NaN included)."""
        return self.write(path, [json_bytes(document)])

    def write_tensors(self, path: Path, tensors: Mapping[str, torch.Tensor], mode: str = "w") -> FileEntry:
        """Write a safetensors file, with one tensor at a time in memory besides those given. Any layout and device,
        also 0-size tensors."""
        header, order = safetensors_header(tensors)
        ordered = [tensors[name] for name in order]
        chunks: Iterable[bytes | memoryview] = chain([header], map(_bytes_of, ordered))
        return self.write(path, chunks, mode, piece_sizes(header, ordered))

    def append(self, path: Path, text: str) -> None:
        self.run(_append, path, text)

    def replace(self, path: Path, text: str) -> None:
        """Replace a file's text atomically: readers see either the old or the new text."""
        partial = path.with_suffix(".tmp")
        self.write(partial, [text.encode()])
        self.run(_rename, partial, path)

    def make_directory(self, path: Path) -> None:
        """Make a directory and its parents if it does not exist."""
        self.run(_make_directory, path)

    def close(self) -> None:
        """End the process that does the work, if there is one."""


HERE = Files()


def json_bytes(document: Any) -> bytes:
    """Return a document as JSON. Raises ValueError for what JSON cannot hold (NaN included)."""
    return json.dumps(document, allow_nan=False, indent=1).encode()


def _append(path: Path, text: str) -> None:
    HERE.write(path, [text.encode()], "a")


def _rename(path: Path, target: Path) -> None:
    os.replace(path, target)


def _make_directory(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)


def piece_sizes(header: bytes, tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the sizes in bytes of the pieces of a safetensors file, see `files.checksums`."""
    return [len(header), *(tensor.numel() * tensor.element_size() for tensor in tensors)]


def safetensors_header(tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, list[str]]:
    """Return the header of a safetensors file, and the names of its tensors in the order of their data."""
    described = {name: (code_of(name, tensor.dtype), tensor.shape) for name, tensor in tensors.items()}
    header, entries = encode_header(described)
    return header, list(entries)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    import torch

    # Tensors pass as bytes: numpy has neither bfloat16 nor FP8.
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def is_intact(path: Path, entry: FileEntry) -> bool:
    """Return True if every byte of a file is as written. Reads the whole file."""
    with open(path, "rb") as stream:
        if not entry.pieces:
            digest = hashlib.sha256()
            while block := stream.read(_READ_BYTES):
                digest.update(block)
            return digest.hexdigest() == entry.sha256
        sums = _Sums(PieceChecksums(entry.pieces).sizes)
        while block := stream.read(_READ_BYTES):
            sums.update(memoryview(block))
    return sums.entry(entry.name) == entry


def sync(path: Path) -> None:
    """Flush a file, or a directory's entries (creations and renames in it), to the disk."""
    # fsync of a file does not make its name durable, which is stored in the directory.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
