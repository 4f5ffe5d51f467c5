"""Own safetensors writer against the reference reader; sizes and hashes against the disk."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import zlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_dapo.checkpoints.formats.safetensors import read_tensors
from megatron_dapo.files.checksums import PieceChecksums
from megatron_dapo.files.durable import HERE, is_intact

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
]


def test_tensors_come_back_bit_for_bit(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {f"t.{i}": (torch.randn(3, 5, generator=generator) * 50).to(dtype) for i, dtype in enumerate(DTYPES)}
    tensors["transposed"] = torch.arange(12.0).reshape(3, 4).t()
    tensors["strided"] = torch.arange(20)[::3]
    tensors["scalar"] = torch.tensor(2.5, dtype=torch.bfloat16)
    tensors["empty"] = torch.zeros(0, 4)
    tensors["flags"] = torch.tensor([True, False, True])
    tensors["special"] = torch.tensor([float("nan"), float("inf"), -0.0])
    tensors["grad"] = torch.nn.Parameter(torch.ones(2))
    path = tmp_path / "t.safetensors"
    entry = HERE.write_tensors(path, tensors)
    loaded = load_file(path)
    assert set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape
        expected = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(loaded[name].contiguous().reshape(-1).view(torch.uint8), expected), name
    assert (entry.size, entry.sha256) == (path.stat().st_size, hashlib.sha256(entry.pieces.encode()).hexdigest())
    assert is_intact(path, entry) and len(entry.pieces.split(" ")) == 1 + len(tensors)
    assert set(read_tensors(path, PieceChecksums(entry.pieces))) == set(tensors)
    # Whichever library computes them, checksums are those of zlib.
    content = memoryview(path.read_bytes())
    for piece in entry.pieces.split(" "):
        size, checksum = int(piece.partition(":")[0]), int(piece.partition(":")[2], 16)
        assert zlib.crc32(content[:size]) == checksum
        content = content[size:]


def test_every_tensor_is_aligned_to_its_type(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    HERE.write_tensors(
        path,
        {
            "a": torch.ones(3, dtype=torch.uint8),
            "b": torch.ones(3, dtype=torch.float64),
            "c": torch.ones(1, dtype=torch.int16),
        },
    )
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    assert (8 + length) % 8 == 0
    assert header["b"]["data_offsets"][0] == 0 and header["c"]["data_offsets"][0] % 2 == 0


def test_a_type_the_format_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tensor z.*complex64"):
        HERE.write_tensors(tmp_path / "t", {"z": torch.ones(1, dtype=torch.complex64)})


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, view: real(descriptor, view[:7]))
    entry = HERE.write(tmp_path / "f", [b"0123456789" * 10, b"x"])
    assert (tmp_path / "f").read_bytes() == b"0123456789" * 10 + b"x" and entry.size == 101


def test_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, view: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        HERE.write_json(tmp_path / "f", {"a": 1})


def test_nan_is_not_json(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        HERE.write_json(tmp_path / "f", {"loss": float("nan")})
