"""Safetensors files read and written by offset: any slice of a tensor, without loading the rest of the file.

`files.safetensors` describes the format. The reader does not mmap files, so host memory holds only what is read.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import torch

from megatron_dapo.files.checksums import DamagedError, PieceChecksums, crc32
from megatron_dapo.files.safetensors import ELEMENT_TYPES, LENGTH_BYTES, MAX_HEADER_BYTES, decode_header, encode_header
from megatron_dapo.reshard.layout import TensorSpec, slice_view
from megatron_dapo.reshard.slices import Slice, whole
from megatron_dapo.untrusted import one_line

DTYPE_OF_CODE: Mapping[str, torch.dtype] = {code: getattr(torch, name) for code, (name, _) in ELEMENT_TYPES.items()}
CODE_OF_DTYPE: Mapping[torch.dtype, str] = {dtype: code for code, dtype in DTYPE_OF_CODE.items()}

Model = TypeVar("Model", bound="StoredModel")
_CHUNK_BYTES = 1 << 22  # one read; small enough to stay in the CPU cache until it is verified and copied
_MIN_DIRECT_BYTES = 1 << 20  # minimum for a read past the page cache, which takes whole pages


@dataclass(frozen=True)
class StoredTensor:
    """The bytes of a tensor: [start, start + spec.num_bytes) of the file."""

    spec: TensorSpec
    start: int


class SafetensorsReader:
    """Random access to one file. Raises ValueError with the file's name if it is missing, truncated or broken.

    With checksums of its pieces, all reads are verified: DamagedError if they differ from what was written.
    Threads may share it.
    """

    def __init__(
        self, path: str | Path, checksums: PieceChecksums | None = None, *, is_read_once: bool = False
    ) -> None:
        """`is_read_once`: the same bytes are not read again soon, so large tensors should not fill the page cache."""
        self.path = Path(path)
        self._checksums = checksums
        self._counting = threading.Lock()
        self.bytes_read = 0  # tensor data only
        try:
            # Unbuffered: slices are read by offset, and a buffer would read bytes that no rank needs.
            self._file = open(self.path, "rb", buffering=0)
        except FileNotFoundError:
            raise ValueError(f"{self.path}: the file is missing; download the model again") from None
        try:
            self.tensors: dict[str, StoredTensor] = self._header()
        except BaseException:
            self._file.close()
            raise
        self._direct = _open_direct(self.path) if is_read_once else None

    def __enter__(self) -> SafetensorsReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()
        if self._direct is not None:
            os.close(self._direct)
            self._direct = None

    def read(self, name: str, out: torch.Tensor, bounds: Slice | None = None) -> None:
        """Fill `out` (shape of `bounds`; any dtype, device and strides) with `bounds` of tensor `name`, by default all of it."""
        stored = self.tensors[name]
        everything = whole(stored.spec.shape)
        bounds = bounds or everything
        assert tuple(out.shape) == tuple(bounds.shape), (
            f"{name}: slice {bounds} into a tensor of shape {tuple(out.shape)}"
        )
        if self._checksums is not None and bounds != everything:
            # Slices have no checksums.
            complete = torch.empty(stored.spec.shape, dtype=stored.spec.dtype)
            self._read_slice(stored, everything, complete)
            out.copy_(slice_view(complete, bounds))
            return
        # Bytes go straight into the destination if its memory has the file's layout.
        direct = out.is_contiguous() and out.dtype == stored.spec.dtype and out.device.type == "cpu"
        if direct:
            self._read_slice(stored, bounds, out)
            return
        staging = torch.empty(bounds.shape, dtype=stored.spec.dtype)
        self._read_slice(stored, bounds, staging)
        out.copy_(staging)

    def _read_slice(self, stored: StoredTensor, bounds: Slice, out: torch.Tensor) -> None:
        """Read exactly the bytes of the slice, one read for each contiguous run, and verify them."""
        bits = out.detach().reshape(-1).view(torch.uint8)
        target = bits.numpy().data
        position = checksum = 0
        for start, size in _runs(stored.spec, bounds):
            end = position + size
            if self._direct is not None and size >= _MIN_DIRECT_BYTES:
                checksum = self._read_direct(self._direct, stored.start + start, bits[position:end], checksum)
            else:
                self._read_at(stored.start + start, target[position:end])
                checksum = self._checksum(target[position:end], checksum)
            position = end
        assert position == len(target), f"{self.path}: {position} of {len(target)} bytes"
        with self._counting:
            self.bytes_read += position
        self._verify(stored.start, position, checksum)

    def _verify(self, start: int, size: int, checksum: int) -> None:
        """Raise DamagedError unless the piece that begins at byte `start` is what was written."""
        if self._checksums is not None and not self._checksums.fits(start, size, checksum):
            raise DamagedError(
                f"checkpoint {self.path.parent}: contents of {self.path.name} changed since they were written"
            )

    def _checksum(self, content: memoryview, before: int = 0) -> int:
        return 0 if self._checksums is None else crc32(content, before)

    def _read_at(self, offset: int, target: memoryview) -> None:
        while target:
            # preadv returns at most 2 GiB at a time, so a large tensor takes several calls.
            count = os.preadv(self._file.fileno(), [target], offset)
            if count == 0:
                raise self._cut(offset, len(target))
            target, offset = target[count:], offset + count

    def _read_direct(self, descriptor: int, offset: int, out: torch.Tensor, checksum: int) -> int:
        """Read bytes into `out` through this thread's page-aligned memory; return the updated checksum."""
        pages = _pages()
        content, done = pages.numpy().data, 0
        while done < len(out):
            skipped = (offset + done) % mmap.PAGESIZE
            wanted = min(len(content), -(-(skipped + len(out) - done) // mmap.PAGESIZE) * mmap.PAGESIZE)
            end = os.preadv(descriptor, [content[:wanted]], offset + done - skipped)
            end = min(end, skipped + len(out) - done)
            if end <= skipped:
                raise self._cut(offset + done, len(out) - done)
            checksum = self._checksum(content[skipped:end], checksum)
            out[done : done + end - skipped].copy_(pages[skipped:end])
            done += end - skipped
        return checksum

    def _cut(self, offset: int, missing: int) -> ValueError:
        return ValueError(f"{self.path}: ends at byte {offset}, {missing} bytes early; it was cut while being read")

    def _header(self) -> dict[str, StoredTensor]:
        size = os.fstat(self._file.fileno()).st_size
        length = int.from_bytes(self._file.read(LENGTH_BYTES), "little") if size >= LENGTH_BYTES else -1
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
            # With checksums it was one when it was written.
            raise (ValueError if self._checksums is None else DamagedError)(
                f"{self.path}: not a safetensors file, or truncated: it has {size} bytes "
                f"and its header should have {length}"
            )
        header = bytearray(length)
        self._read_at(LENGTH_BYTES, memoryview(header))
        everything = length.to_bytes(LENGTH_BYTES, "little") + header
        self._verify(0, len(everything), self._checksum(memoryview(everything)))
        try:
            entries, expected = decode_header(bytes(header))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"{self.path}: broken safetensors header: {one_line(error)}") from None
        if size != expected:
            raise ValueError(
                f"{self.path}: {'truncated' if size < expected else 'too long'}: the file has {size} bytes, "
                f"its header describes {expected}; download or copy it again"
            )
        return {
            name: StoredTensor(TensorSpec(entry.shape, DTYPE_OF_CODE[entry.code]), entry.start)
            for name, entry in entries.items()
        }


_own = threading.local()


def _pages() -> torch.Tensor:
    """Return this thread's page-aligned memory as bytes; the thread's next read reuses it."""
    if not hasattr(_own, "pages"):
        _own.pages = torch.frombuffer(mmap.mmap(-1, _CHUNK_BYTES), dtype=torch.uint8)
    return _own.pages


def _open_direct(path: Path) -> int | None:
    """Open a file for reads past the page cache; None if its file system does not support them."""
    if not hasattr(os, "O_DIRECT"):
        return None
    descriptor = None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        os.preadv(descriptor, [_pages().numpy().data[: mmap.PAGESIZE]], 0)  # some file systems refuse only this
    except OSError as error:
        if descriptor is not None:
            os.close(descriptor)
        if error.errno != errno.EINVAL:
            raise
        return None
    return descriptor


def read_tensors(path: Path, checksums: PieceChecksums | None = None) -> dict[str, torch.Tensor]:
    """Return all tensors of a file, on the CPU. Raises ValueError, naming the file, if it is broken."""
    with SafetensorsReader(path, checksums) as reader:
        tensors = {
            name: torch.empty(stored.spec.shape, dtype=stored.spec.dtype) for name, stored in reader.tensors.items()
        }
        for name, tensor in tensors.items():
            reader.read(name, tensor)
    return tensors


def _runs(spec: TensorSpec, bounds: Slice) -> list[tuple[int, int]]:
    """Return (byte offset in the tensor, number of bytes) of each contiguous run of a slice, in row-major order."""
    if bounds.volume == 0:
        return []
    dims = len(spec.shape)
    strides = [prod(spec.shape[dim + 1 :]) for dim in range(dims)]
    # Dimensions from `inner` on are contiguous within the slice.
    inner = dims
    while inner > 0 and all(bounds.shape[dim] == spec.shape[dim] for dim in range(inner, dims)):
        inner -= 1
    size = prod(bounds.shape[inner:]) * spec.dtype.itemsize
    starts = [sum(o * s for o, s in zip(bounds.offset, strides))]
    for dim in range(inner):
        starts = [start + index * strides[dim] for start in starts for index in range(bounds.shape[dim])]
    return [(start * spec.dtype.itemsize, size) for start in starts]


class StoredModel(ABC):
    """A model on disk that is read tensor by tensor; a context manager that closes its files."""

    path: Path  # directory with config.json and the tokenizer
    specs: Mapping[str, TensorSpec]  # Hugging Face name -> shape and type, in stored order
    stored_names: Mapping[str, str] = MappingProxyType({})  # name -> name in the files, if the two differ

    def __init__(self) -> None:
        self._readers: dict[str, SafetensorsReader] = {}  # keyed by file name

    def __enter__(self: Model) -> Model:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @abstractmethod
    def read_tensor(self, name: str) -> torch.Tensor:
        """Return one whole tensor by its Hugging Face name."""

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()

    @property
    def bytes_read(self) -> int:
        """Bytes of tensor data read so far, from all files."""
        return sum(reader.bytes_read for reader in self._readers.values())


class SafetensorsWriter:
    """Write one file tensor by tensor, in any order; `close` fails unless every tensor was written exactly once.

    A failed write (full disk) raises OSError; the file is then incomplete and the caller removes it.
    """

    def __init__(self, path: str | Path, specs: Mapping[str, TensorSpec]) -> None:
        self.path = Path(path)
        # "x": an existing file belongs to another model.
        self._file = open(self.path, "xb", buffering=0)
        self._stored: dict[str, StoredTensor] = {}
        self._missing = dict(specs)
        shapes = {name: (CODE_OF_DTYPE[spec.dtype], spec.shape) for name, spec in specs.items()}
        header, entries = encode_header(shapes, {"format": "pt"})
        self._stored.update({name: StoredTensor(specs[name], entry.start) for name, entry in entries.items()})
        self.num_bytes = len(header) + sum(spec.num_bytes for spec in specs.values())
        self._write_at(0, memoryview(header))

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor at its offset. Raises ValueError for a repeated or unknown name, or another shape or type."""
        spec = self._missing.pop(name, None)
        if spec is None:
            raise ValueError(
                f"{self.path}: {name} is {'written twice' if name in self._stored else 'not a tensor of this file'}"
            )
        if TensorSpec(tuple(tensor.shape), tensor.dtype) != spec:
            raise ValueError(
                f"{self.path}: {name} is {tuple(tensor.shape)} {tensor.dtype}, announced as {spec.shape} {spec.dtype}"
            )
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        self._write_at(self._stored[name].start, data.numpy().data)

    def _write_at(self, offset: int, data: memoryview) -> None:
        while data:
            count = os.pwrite(self._file.fileno(), data, offset)
            data, offset = data[count:], offset + count

    def close(self) -> None:
        """Flush to disk and close. Raises ValueError if a tensor is missing."""
        try:
            if self._missing:
                raise ValueError(
                    f"{self.path}: {len(self._missing)} tensors were not written, first {next(iter(self._missing))}"
                )
            os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def abandon(self) -> None:
        """Close without the check, for a file about to be removed."""
        self._file.close()
