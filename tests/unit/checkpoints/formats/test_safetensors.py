"""The reader and the writer against the safetensors library, and against broken files."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_dapo.checkpoints.formats.safetensors import SafetensorsReader, SafetensorsWriter
from megatron_dapo.files.checksums import DamagedError, PieceChecksums
from megatron_dapo.files.durable import HERE
from megatron_dapo.reshard.layout import TensorSpec
from megatron_dapo.reshard.slices import Slice, flat_range_slices


def _tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "f32": torch.randn(5, 6, 7, generator=generator),
        "bf16": torch.randn(8, 3, generator=generator).to(torch.bfloat16),
        "f8": torch.randn(4, 4, generator=generator).to(torch.float8_e4m3fn),
        "i64": torch.arange(11),
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.zeros(0, 4),
    }


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bytes(_bits(a)) == bytes(_bits(b))


def _bits(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def test_reads_files_of_the_library(tmp_path: Path):
    save_file(_tensors(), tmp_path / "x.safetensors")
    with SafetensorsReader(tmp_path / "x.safetensors") as reader:
        for name, tensor in _tensors().items():
            out = torch.empty_like(tensor)
            reader.read(name, out)
            assert _equal(out, tensor), name
        assert reader.bytes_read == sum(t.nbytes for t in _tensors().values())


def test_the_library_reads_our_files(tmp_path: Path):
    tensors = _tensors()
    writer = SafetensorsWriter(
        tmp_path / "x.safetensors", {n: TensorSpec(tuple(t.shape), t.dtype) for n, t in tensors.items()}
    )
    for name in reversed(tensors):
        writer.write(name, tensors[name])
    writer.close()
    assert writer.num_bytes == (tmp_path / "x.safetensors").stat().st_size
    read = load_file(tmp_path / "x.safetensors")
    assert set(read) == set(tensors)
    assert all(_equal(read[name], tensors[name]) for name in tensors)


def test_slices_read_only_their_bytes(tmp_path: Path):
    values = _tensors()["f32"]
    save_file({"f32": values}, tmp_path / "x.safetensors")
    slices = [
        Slice((1, 0, 0), (3, 6, 7)),
        Slice((0, 2, 0), (5, 3, 7)),
        Slice((2, 1, 3), (2, 4, 2)),
        *flat_range_slices((5, 6, 7), 9, 173),
    ]
    for bounds in slices:
        with SafetensorsReader(tmp_path / "x.safetensors") as reader:
            out = torch.empty(bounds.shape)
            reader.read("f32", out, bounds)
            assert torch.equal(out, values[tuple(slice(o, o + n) for o, n in zip(bounds.offset, bounds.shape))])
            assert reader.bytes_read == 4 * bounds.volume


@pytest.fixture
def large(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor], PieceChecksums]:
    """A file whose tensors of more than one read begin and end within a page, and its checksums."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"a": 5_000_001, "b": 1_048_576, "c": 77, "d": 8_400_003}
    tensors = {name: torch.randint(256, (n,), dtype=torch.uint8, generator=generator) for name, n in sizes.items()}
    entry = HERE.write_tensors(tmp_path / "x.safetensors", tensors)
    return tmp_path / "x.safetensors", tensors, PieceChecksums(entry.pieces)


def _refuses_open(real: Callable[..., int]) -> Callable[..., int]:
    def call(path: object, flags: int, *arguments: int, **options: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *arguments, **options)

    return call


def _refuses_read(real: Callable[..., int]) -> Callable[..., int]:
    def call(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, buffers, offset)

    return call


@pytest.mark.parametrize(
    "refuses", [None, ("open", _refuses_open), ("preadv", _refuses_read)], ids=["direct", "no open", "no read"]
)
def test_reads_past_the_page_cache_by_threads_are_the_same_bytes(
    large: tuple[Path, dict[str, torch.Tensor], PieceChecksums], refuses: Any, monkeypatch: pytest.MonkeyPatch
):
    path, tensors, checksums = large
    if refuses is not None:
        monkeypatch.setattr(os, refuses[0], refuses[1](getattr(os, refuses[0])))
    out = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    bounds = Slice((1_234,), (4_500_001,))
    part = torch.empty(bounds.shape, dtype=torch.uint8)
    with SafetensorsReader(path, checksums, is_read_once=True) as reader, ThreadPoolExecutor(3) as threads:
        list(threads.map(reader.read, out, out.values()))
        assert reader.bytes_read == sum(tensor.nbytes for tensor in tensors.values())
        reader.read("a", part, bounds)
    assert all(torch.equal(out[name], tensor) for name, tensor in tensors.items())
    assert torch.equal(part, tensors["a"][1_234 : 1_234 + 4_500_001])


def test_large_reads_leave_nothing_in_the_page_cache(large: tuple[Path, dict[str, torch.Tensor], PieceChecksums]):
    path, tensors, checksums = large
    with open(path, "rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_inblock
        with SafetensorsReader(path, checksums, is_read_once=True) as reader:
            reader.read("d", torch.empty_like(tensors["d"]))
            first = resource.getrusage(resource.RUSAGE_SELF).ru_inblock - before
            reader.read("d", torch.empty_like(tensors["d"]))
        again = resource.getrusage(resource.RUSAGE_SELF).ru_inblock - before - first
    # In blocks of 512 bytes: what is cached is read without any.
    assert first * 512 >= tensors["d"].nbytes and again * 512 >= tensors["d"].nbytes


@pytest.mark.parametrize("is_read_once", [True, False])
def test_a_flipped_bit_and_a_file_cut_while_open_are_found(
    large: tuple[Path, dict[str, torch.Tensor], PieceChecksums], is_read_once: bool
):
    path, tensors, checksums = large
    out = torch.empty_like(tensors["d"])
    with SafetensorsReader(path, checksums, is_read_once=is_read_once) as reader:
        size, start = path.stat().st_size, reader.tensors["d"].start
        with open(path, "r+b") as stream:
            stream.seek(start + 6_000_000)
            stream.write(bytes([255 - int(tensors["d"][6_000_000])]))
        with pytest.raises(DamagedError, match="contents of x.safetensors changed since they were written"):
            reader.read("d", out)
        os.truncate(path, size - 5_000)
        cut = max(size - 5_000, start)
        with pytest.raises(ValueError, match=rf"ends at byte {cut}, 5000 bytes early; it was cut while being read"):
            reader.read("d", out)


def test_reads_into_strided_and_other_types(tmp_path: Path):
    values = _tensors()["bf16"]
    save_file({"w": values}, tmp_path / "x.safetensors")
    target = torch.zeros(3, 8, dtype=torch.float64)
    with SafetensorsReader(tmp_path / "x.safetensors") as reader:
        reader.read("w", target.t())
    assert torch.equal(target, values.t().double())


@pytest.mark.parametrize("cut", [1, 100, 1000])
def test_truncated_file_names_both_sizes(cut: int, tmp_path: Path):
    path = tmp_path / "x.safetensors"
    save_file({"w": torch.zeros(400)}, path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    with pytest.raises(
        ValueError, match=rf"x.safetensors: truncated: the file has {len(whole) - cut} bytes, .* {len(whole)};"
    ):
        SafetensorsReader(path)
    path.write_bytes(whole + b"more")
    with pytest.raises(ValueError, match="too long"):
        SafetensorsReader(path)


def test_broken_files(tmp_path: Path):
    path = tmp_path / "x.safetensors"
    with pytest.raises(ValueError, match="x.safetensors: the file is missing"):
        SafetensorsReader(path)
    for content in (b"", b"PK\x03\x04", (10**12).to_bytes(8, "little") + b"{}"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"it has {len(content)} bytes"):
            SafetensorsReader(path)
    for header in (
        "[1]",
        "{{",
        '{"w": {"dtype": "F32", "shape": [2]}}',
        '{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        '{"w": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}',
        '{"w": {"dtype": "X9", "shape": [2], "data_offsets": [0, 8]}}',
    ):
        path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(8))
        with pytest.raises(ValueError, match="x.safetensors: broken safetensors header"):
            SafetensorsReader(path)


def _write(path: Path, header: str, data: int) -> Path:
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(data))
    return path


def _entry(name: str, begin: int, end: int, shape: object = (2,)) -> str:
    return json.dumps({name: {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}})[1:-1]


@pytest.mark.parametrize(
    ("entries", "data", "message"),
    [
        ([_entry("a", 0, 8), _entry("b", 4, 12)], 12, "b overlaps the tensor before it"),
        ([_entry("a", 0, 8), _entry("b", 0, 8)], 8, "b overlaps the tensor before it"),
        ([_entry("a", 0, 8), _entry("b", 16, 24)], 24, "b follows a gap"),
        ([_entry("a", 8, 16)], 16, "a follows a gap"),
        ([_entry("a", 0, 8), _entry("a", 8, 16)], 16, "'a' is listed 2 times"),
        ([_entry("a", 0, 4, [1] * 65)], 4, "a has 65 dimensions, at most 64"),
        ([_entry("a", 0, 4, [1.0])], 4, "shape and offsets of a must be integers"),
        ([_entry("a", 0, 0, [0, 10**30])], 0, "shape and offsets of a must be integers"),
        ([_entry("a", 0, 4, [True])], 4, "shape and offsets of a must be integers"),
    ],
)
def test_a_header_that_describes_no_file_is_refused(entries, data, message, tmp_path: Path):
    path = _write(tmp_path / "x.safetensors", "{" + ", ".join(entries) + "}", data)
    with pytest.raises(ValueError, match=f"x.safetensors: broken safetensors header: {message}"):
        SafetensorsReader(path)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("shape", ["[" + ", ".join(["1"] * 100_000) + "]", "[" * 100_000 + "]" * 100_000])
def test_a_hostile_shape_is_refused_immediately(shape: str, tmp_path: Path):
    header = f'{{"a": {{"dtype": "F32", "shape": {shape}, "data_offsets": [0, 4]}}}}'
    with pytest.raises(ValueError, match="broken safetensors header"):
        SafetensorsReader(_write(tmp_path / "x.safetensors", header, 4))


def test_empty_tensors_take_no_place_between_others(tmp_path: Path):
    entries = [_entry("a", 0, 8), _entry("none", 8, 8, [0]), _entry("b", 8, 16), _entry("last", 16, 16, [0, 3])]
    with SafetensorsReader(_write(tmp_path / "x.safetensors", "{" + ", ".join(entries) + "}", 16)) as reader:
        assert list(reader.tensors) == ["a", "none", "b", "last"]


def test_the_writer_refuses_unannounced_tensors(tmp_path: Path):
    pair = TensorSpec((2,), torch.float32)
    specs = {"w": pair, "v": TensorSpec((), torch.int64), "x": pair}
    writer = SafetensorsWriter(tmp_path / "x.safetensors", specs)
    with pytest.raises(ValueError, match=r"w is \(3,\) torch.float32, announced as \(2,\)"):
        writer.write("w", torch.zeros(3))
    with pytest.raises(ValueError, match="u is not a tensor of this file"):
        writer.write("u", torch.zeros(3))
    writer.write("x", torch.zeros(2))
    with pytest.raises(ValueError, match="x is written twice"):
        writer.write("x", torch.zeros(2))
    with pytest.raises(ValueError, match="1 tensors were not written, first v"):
        writer.close()
    header = (tmp_path / "x.safetensors").read_bytes()
    assert json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])["__metadata__"] == {"format": "pt"}
