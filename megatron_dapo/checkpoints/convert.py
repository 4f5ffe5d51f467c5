"""Hugging Face folder <-> Megatron folder, and the comparison of two: arithmetic and file offsets, no process group.

One buffer or tensor is in memory at a time, whatever the size of the model. Every byte of the source is read once,
except what several ranks hold (norms, a tied embedding).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_dapo.checkpoints.architecture import HEADS, ModelArchitecture
from megatron_dapo.checkpoints.atomic_directory import atomic_directory
from megatron_dapo.checkpoints.huggingface import HFCheckpoint, untouched_names
from megatron_dapo.checkpoints.huggingface_writer import (
    DEFAULT_SHARD_BYTES,
    copy_side_files,
    copy_untouched,
    huggingface_writer,
    written_names,
)
from megatron_dapo.checkpoints.load import check_complete, zero_padding
from megatron_dapo.checkpoints.megatron_checkpoint import (
    MANIFEST_FILE,
    UNTOUCHED_FILE,
    MegatronCheckpoint,
    is_megatron_checkpoint,
    manifest,
    one_replica,
    rank_file,
)
from megatron_dapo.checkpoints.megatron_layout import MegatronLayout, megatron_layout
from megatron_dapo.checkpoints.safetensors_file import SafetensorsWriter
from megatron_dapo.parallel.reshard.executors import execute_from_reader
from megatron_dapo.parallel.reshard.layout import Piece, TensorSpec
from megatron_dapo.parallel.reshard.planner import ReshardPlan, Transfer, plan


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion read and wrote."""

    num_tensors: int  # of the Hugging Face model, aliases and untouched ones included
    num_files: int
    bytes_read: int
    bytes_written: int


@dataclass(frozen=True)
class TensorDifference:
    """The first thing in which two models differ."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def huggingface_to_megatron(
    source: str | Path,
    target: str | Path,
    *,
    tensor: int = 1,
    pipeline: int = 1,
    virtual_pipeline: int = 1,
    expert: int = 1,
    expert_tensor: int | None = None,
) -> ConversionReport:
    """Writes the model of folder `source` as one file a model-parallel rank, types kept, padding zero.

    With `expert` > 1 every expert rank's file also holds the dense tensors, as the ranks do that will read it.

    Raises ValueError where the source is incomplete, does not fit its config.json or the parallel sizes, or `target`
    exists; OSError where the disk is full. Then nothing of `target` is left.
    """
    architecture = ModelArchitecture.from_directory(source, heads=HEADS)
    parallel = one_replica(
        tensor=tensor,
        pipeline=pipeline,
        virtual_pipeline=virtual_pipeline,
        expert=expert,
        expert_tensor=expert_tensor,
    )
    with HFCheckpoint(source) as folder, atomic_directory(target) as output:
        folder.check(architecture)
        folder.check_aliases(architecture)
        layout = megatron_layout(architecture, parallel, folder.dtypes(architecture))
        reshard = plan(folder.layout(architecture), layout)
        file_bytes = {
            rank_file(rank): _write_rank(output / rank_file(rank), rank, reshard, folder)
            for rank in range(parallel.world_size)
        }
        untouched = {name: folder.specs[name] for name in untouched_names(folder.specs, architecture)}
        if untouched:
            file_bytes[UNTOUCHED_FILE] = _write_file(output / UNTOUCHED_FILE, untouched, folder.read_tensor)
        copy_side_files(folder.path, output)
        content = json.dumps(manifest(layout, folder.specs, file_bytes), indent=1)
        (output / MANIFEST_FILE).write_text(content + "\n", encoding="utf-8")
        MegatronCheckpoint(output, architecture).close()  # complete and as announced, or no output
        return ConversionReport(len(folder.specs), len(file_bytes), folder.bytes_read, sum(file_bytes.values()))


def megatron_to_huggingface(
    source: str | Path, target: str | Path, *, shard_bytes: int = DEFAULT_SHARD_BYTES
) -> ConversionReport:
    """Writes the Megatron folder `source` as a Hugging Face folder: names, types and side files it came from."""
    with MegatronCheckpoint(source) as folder:
        architecture = folder.architecture
        with huggingface_writer(target, folder, architecture, shard_bytes=shard_bytes) as writer:
            for name in architecture.shapes():
                tensor = folder.read_tensor(name)
                for stored in written_names(folder, architecture, name):
                    writer.write(stored, tensor)
            copy_untouched(writer, folder, architecture)
        written = sum(spec.num_bytes for spec in folder.specs.values())
        return ConversionReport(
            len(folder.specs), len(list(Path(target).glob("*.safetensors"))), folder.bytes_read, written
        )


def _write_rank(path: Path, rank: int, reshard: ReshardPlan, folder: HFCheckpoint) -> int:
    layout = reshard.destination
    locals_ = dict(_local_parts(layout, rank, reshard))

    def filled(local: str) -> torch.Tensor:
        return _filled(local, layout.local_specs(rank)[local], *locals_[local], folder)

    return _write_file(path, layout.local_specs(rank), filled)


def _write_file(path: Path, specs: Mapping[str, TensorSpec], read: Callable[[str], torch.Tensor]) -> int:
    """One safetensors file, one tensor in memory at a time; its size in bytes."""
    writer = SafetensorsWriter(path, specs)
    try:
        for name in specs:
            writer.write(name, read(name))
    except BaseException:
        writer.abandon()
        raise
    writer.close()
    return writer.num_bytes


def _local_parts(
    layout: MegatronLayout, rank: int, reshard: ReshardPlan
) -> Iterator[tuple[str, tuple[list[Transfer], tuple[Piece, ...]]]]:
    """Local buffer -> (transfers into it, its pieces), the ones without any (padding) included."""
    transfers: dict[str, list[Transfer]] = {name: [] for name in layout.local_specs(rank)}
    pieces: dict[str, list[Piece]] = {name: [] for name in transfers}
    for transfer in reshard.receives(rank):
        transfers[transfer.destination_piece.local].append(transfer)
    for piece in layout.pieces(rank):
        pieces[piece.local].append(piece)
    for name in transfers:
        yield name, (transfers[name], tuple(pieces[name]))


def _filled(
    local: str, spec: TensorSpec, transfers: list[Transfer], pieces: tuple[Piece, ...], folder: HFCheckpoint
) -> torch.Tensor:
    """One local buffer as the source says it should be: each element read once, or padding and zero."""
    buffers = {local: torch.empty(spec.shape, dtype=spec.dtype)}
    written = execute_from_reader(transfers, folder, buffers)
    check_complete(written, zero_padding(pieces, buffers), buffers)
    return buffers[local]


def first_difference(first: str | Path, second: str | Path) -> TensorDifference | None:
    """Compares two models tensor by tensor: names, shapes, types, bits; None where they are the same.

    Each is a Hugging Face or a Megatron folder. Of a Megatron folder every rank's buffer is compared with what a
    Hugging Face folder says it should be, replicas and padding included.
    """
    kinds = (is_megatron_checkpoint(first), is_megatron_checkpoint(second))
    return _COMPARISONS[kinds](first, second)


def _compare_huggingface(first: str | Path, second: str | Path) -> TensorDifference | None:
    with HFCheckpoint(first) as a, HFCheckpoint(second) as b:
        return _compare_tensors(a, b)


def _compare_megatron(first: str | Path, second: str | Path) -> TensorDifference | None:
    with MegatronCheckpoint(first) as a, MegatronCheckpoint(second) as b:
        return _compare_tensors(a, b)


def _compare_tensors(
    a: HFCheckpoint | MegatronCheckpoint, b: HFCheckpoint | MegatronCheckpoint
) -> TensorDifference | None:
    found = _compare_specs(a.specs, b.specs, a.path, b.path)
    if found:
        return found
    values = (_compare_values(name, a.read_tensor(name), b.read_tensor(name)) for name in a.specs)
    return next((difference for difference in values if difference), None)


def _compare_locals(huggingface: str | Path, megatron: str | Path) -> TensorDifference | None:
    with ExitStack() as stack:
        folder = stack.enter_context(HFCheckpoint(huggingface))
        architecture = ModelArchitecture.from_directory(huggingface, heads=HEADS)
        converted = stack.enter_context(MegatronCheckpoint(megatron))
        found = _compare_specs(folder.specs, converted.specs, folder.path, converted.path)
        if found:
            return found
        folder.check_aliases(architecture)
        reshard = plan(folder.layout(architecture), converted.layout)
        for rank in range(converted.layout.num_ranks):
            for local, (transfers, pieces) in _local_parts(converted.layout, rank, reshard):
                expected = _filled(local, converted.layout.local_specs(rank)[local], transfers, pieces, folder)
                found = _compare_values(f"{rank_file(rank)} {local}", expected, converted.read_local(rank, local))
                if found:
                    return found
        untouched = untouched_names(folder.specs, architecture)
        values = (_compare_values(name, folder.read_tensor(name), converted.read_tensor(name)) for name in untouched)
        return next((difference for difference in values if difference), None)


def _compare_locals_reversed(megatron: str | Path, huggingface: str | Path) -> TensorDifference | None:
    return _compare_locals(huggingface, megatron)


_COMPARISONS: Mapping[tuple[bool, bool], Callable[[str | Path, str | Path], TensorDifference | None]] = {
    (False, False): _compare_huggingface,
    (False, True): _compare_locals,
    (True, False): _compare_locals_reversed,
    (True, True): _compare_megatron,
}


def _compare_specs(
    a: Mapping[str, TensorSpec], b: Mapping[str, TensorSpec], first: Path, second: Path
) -> TensorDifference | None:
    for name in (*a, *(name for name in b if name not in a)):
        if name not in a or name not in b:
            return TensorDifference(name, f"only in {first if name in a else second} ({len(a)} and {len(b)} tensors)")
        if tuple(a[name].shape) != tuple(b[name].shape):
            return TensorDifference(name, f"shape {tuple(a[name].shape)} and {tuple(b[name].shape)}")
        if a[name].dtype != b[name].dtype:
            return TensorDifference(name, f"{a[name].dtype} and {b[name].dtype}")
    return None


def _compare_values(name: str, a: torch.Tensor, b: torch.Tensor) -> TensorDifference | None:
    bits_a, bits_b = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    if torch.equal(bits_a, bits_b):
        return None
    different = (bits_a != bits_b).view(-1, a.element_size()).any(dim=1).nonzero().flatten()
    return TensorDifference(
        name, f"{len(different)} of {a.numel()} elements differ in their bits, first at flat index {int(different[0])}"
    )
