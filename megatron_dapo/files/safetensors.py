"""The header of a safetensors file, encoded and decoded. Imports no torch: types are named by their codes.

Format: 8 bytes little-endian length N, N bytes of JSON {name: {dtype, shape, data_offsets}}, then the data. Offsets count
from the end of the header, and tensors follow each other without gaps.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

from megatron_dapo.untrusted import blamed_on

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the limit of the format
_LFS_POINTER = b"version https://git-lfs"
MAX_DIMENSIONS = 64  # torch's limit; reading a slice takes time quadratic in it

# Code -> (torch's name of the type, bytes of an element).
ELEMENT_TYPES: Mapping[str, tuple[str, int]] = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
}
_CODES = {name: code for code, (name, _) in ELEMENT_TYPES.items()}


@dataclass(frozen=True)
class TensorEntry:
    """A tensor's entry in a header: code of its type, shape, and its bytes [start, end) of the file."""

    code: str
    shape: tuple[int, ...]
    start: int
    end: int


def code_of(name: str, dtype: object) -> str:
    """Return the code of a torch type. Raises ValueError, naming the tensor `name`, for an unsupported type."""
    text = str(dtype).removeprefix("torch.")
    if text not in _CODES:
        raise ValueError(f"tensor {name}: safetensors has no {text}; it has {', '.join(_CODES)}")
    return _CODES[text]


def encode_header(
    tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, TensorEntry]]:
    """Return a file's header, a multiple of 8 bytes, and its tensors in the order of their data.

    Args:
        tensors: name -> (code, shape).
    """
    # Widest types first, so that every tensor is aligned to its type, as readers that mmap the file require.
    order = sorted(tensors, key=lambda name: (-ELEMENT_TYPES[tensors[name][0]][1], name))
    ends = [0]
    for name in order:
        code, shape = tensors[name]
        ends.append(ends[-1] + prod(shape) * ELEMENT_TYPES[code][1])
    document: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    for name, offsets in zip(order, pairwise(ends)):
        code, shape = tensors[name]
        document[name] = {"dtype": code, "shape": list(shape), "data_offsets": offsets}
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)  # the format allows spaces after the JSON; they align the data
    header = len(text).to_bytes(LENGTH_BYTES, "little") + text
    base = len(header)
    return header, {
        name: TensorEntry(tensors[name][0], tuple(tensors[name][1]), base + start, base + end)
        for name, (start, end) in zip(order, pairwise(ends))
    }


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Return the tensors that a file's header lists. Raises ValueError, naming the file, if it is broken or cut off."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(LENGTH_BYTES)
        if start == _LFS_POINTER[:LENGTH_BYTES]:
            raise ValueError(f"{path}: a pointer of Git LFS, not the weights: run `git lfs pull` in {path.parent}")
        length = int.from_bytes(start, "little")
        if len(start) < LENGTH_BYTES or not 2 <= length <= min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
            raise ValueError(f"{path}: no safetensors file, or cut off in its header ({size:,} bytes)")
        with blamed_on(path):
            tensors, expected = decode_header(file.read(length))
    if size != expected:
        raise ValueError(f"{path}: {size:,} bytes, its header asks for {expected:,}: cut off, or not copied whole")
    return tensors


def decode_header(text: bytes) -> tuple[dict[str, TensorEntry], int]:
    """Return the tensors that a header's JSON describes, in its order, and the size of the file in bytes.

    Raises ValueError, KeyError, TypeError, AttributeError, OverflowError or RecursionError if it is not such a header.
    """
    base = LENGTH_BYTES + len(text)
    document = json.loads(text, object_pairs_hook=_without_duplicates)
    tensors = {name: _entry(name, fields, base) for name, fields in document.items() if name != "__metadata__"}
    end = base
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if tensor.start != end:
            kind = "overlaps the tensor before it" if tensor.start < end else "follows a gap"
            raise ValueError(f"{name} {kind}: it begins at byte {tensor.start} of the file, not at {end}")
        end = tensor.end
    return tensors, end


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # json keeps the last of duplicate keys, so which tensor is meant would be a guess.
    entries = dict(pairs)
    if len(entries) != len(pairs):
        (name, count), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name!r} is listed {count} times")
    return entries


def _entry(name: str, fields: Mapping[str, Any], base: int) -> TensorEntry:
    code, shape, (begin, end) = fields["dtype"], fields["shape"], fields["data_offsets"]
    if code not in ELEMENT_TYPES:
        raise ValueError(f"dtype {code!r} of {name} is not one of {', '.join(ELEMENT_TYPES)}")
    if len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"{name} has {len(shape)} dimensions, at most {MAX_DIMENSIONS} are read")
    if any(type(n) is not int or not 0 <= n < 2**63 for n in (*shape, begin, end)):
        raise ValueError(f"shape and offsets of {name} must be integers of at least 0")
    num_bytes = prod(shape) * ELEMENT_TYPES[code][1]
    if end - begin != num_bytes:
        raise ValueError(f"{name} {tuple(shape)} {code} needs {num_bytes} bytes, offsets are [{begin}, {end})")
    return TensorEntry(code, tuple(shape), base + begin, base + end)
