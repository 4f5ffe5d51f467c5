"""Files that are on disk when the call returns, with the size and hash of what was written.

Everything goes through os.write and os.fsync in this module, so that a full disk or a kill at any write point can be
tested.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_READ_BYTES = 1 << 22


@dataclass(frozen=True)
class FileEntry:
    """Identity of a file: name within its directory, bytes, SHA-256 in hex."""

    name: str
    size: int
    sha256: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> FileEntry:
    """Write `chunks` to a new file, flushed to the disk. Raises OSError (ENOSPC where the disk is full)."""
    digest, size = hashlib.sha256(), 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        for chunk in chunks:
            view = memoryview(chunk).cast("B")
            digest.update(view)
            size += len(view)
            while view:  # os.write may take less than it was given
                view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return FileEntry(path.name, size, digest.hexdigest())


def write_json(path: Path, document: Any) -> FileEntry:
    """Write `document` as JSON. Raises ValueError for what JSON cannot hold (NaN included)."""
    return write_file(path, [json.dumps(document, allow_nan=False, indent=1).encode()])


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> FileEntry:
    """Write a safetensors file, one tensor in memory at a time beyond those given. Any layout and device; 0-size
    tensors too."""
    return write_file(path, _safetensors_chunks(tensors, metadata))


def _safetensors_chunks(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None
) -> Iterable[bytes | memoryview]:
    # Widest types first keeps every tensor aligned to its own type, which readers that map the file rely on.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _dtype_name(name, tensor), "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format allows trailing spaces; the data is aligned behind them
    yield len(text).to_bytes(8, "little")
    yield text
    for name in order:
        yield _bytes_of(tensors[name])


def _dtype_name(name: str, tensor: torch.Tensor) -> str:
    # Here and below: files are listed and checked without torch.
    from megatron_dapo.checkpoints.safetensors_file import CODE_OF_DTYPE

    if tensor.dtype not in CODE_OF_DTYPE:
        dtype, *known = (str(each).removeprefix("torch.") for each in (tensor.dtype, *CODE_OF_DTYPE))
        raise ValueError(f"tensor {name}: safetensors has no {dtype}; it has {', '.join(known)}")
    return CODE_OF_DTYPE[tensor.dtype]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    import torch

    # As bytes: numpy has neither bfloat16 nor FP8.
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())


def hash_file(path: Path) -> str:
    """SHA-256 of a file in hex."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while block := stream.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def sync_directory(directory: Path) -> None:
    """Flush a directory's entries (creations and renames in it) to the disk."""
    # fsync of a file does not make its name durable: that is in the directory.
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
