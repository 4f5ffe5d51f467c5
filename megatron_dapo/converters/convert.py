"""Convert between Hugging Face directories and Megatron checkpoints, and compare two models, without a process group.

One buffer or tensor is in memory at a time, whatever the size of the model. Every byte of the source is read once,
except tensors that several ranks hold (norms, a tied embedding).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_dapo.checkpoints.atomic_directory import atomic_directory
from megatron_dapo.checkpoints.formats.huggingface import HFCheckpoint, untouched_names
from megatron_dapo.checkpoints.formats.huggingface_writer import (
    DEFAULT_SHARD_BYTES,
    copy_side_files,
    hf_checkpoint_writer,
)
from megatron_dapo.checkpoints.formats.safetensors import SafetensorsWriter, StoredModel
from megatron_dapo.checkpoints.layouts.megatron import MegatronLayout, megatron_layout
from megatron_dapo.checkpoints.load import check_complete, zero_padding
from megatron_dapo.converters.megatron_checkpoint import (
    MANIFEST_FILE,
    UNTOUCHED_FILE,
    MegatronCheckpoint,
    is_megatron_checkpoint,
    manifest,
    one_replica,
    rank_file,
)
from megatron_dapo.models.architecture import HEADS
from megatron_dapo.models.config_json import read_architecture
from megatron_dapo.reshard.execution import execute_from_reader
from megatron_dapo.reshard.layout import Shard, TensorSpec
from megatron_dapo.reshard.planner import ReshardPlan, Transfer, plan


@dataclass(frozen=True)
class ConversionReport:
    num_tensors: int  # stored in the Hugging Face model, including aliases and non-parameters
    num_files: int
    bytes_read: int
    bytes_written: int

    def __str__(self) -> str:
        return (
            f"{self.num_tensors} tensors, {self.bytes_read:,} bytes read, "
            f"{self.num_files} files of {self.bytes_written:,} bytes"
        )


@dataclass(frozen=True)
class TensorDifference:
    """The first tensor or buffer in which two models differ."""

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
    """Write the model of directory `source` as one file a model-parallel rank; types are kept, padding is zero.

    With `expert` > 1 the file of every expert rank also holds the dense tensors, as that rank does.

    Raises ValueError if the source is incomplete or does not fit its config.json or the parallel sizes, or if `target`
    exists, and OSError if the disk is full. Then nothing of `target` is left.
    """
    architecture = read_architecture(source, heads=HEADS)
    parallel = one_replica(
        tensor=tensor,
        pipeline=pipeline,
        virtual_pipeline=virtual_pipeline,
        expert=expert,
        expert_tensor=expert_tensor,
    )
    with HFCheckpoint(source) as stored, atomic_directory(target) as output:
        stored.check(architecture)
        stored.check_aliases(architecture)
        layout = megatron_layout(architecture, parallel, stored.dtypes(architecture))
        reshard = plan(stored.layout(architecture), layout)
        file_bytes = {}
        for rank in range(parallel.world_size):
            buffers = _rank_buffers(layout, rank, reshard, stored)
            file_bytes[rank_file(rank)] = _write_file(output / rank_file(rank), layout.local_specs(rank), buffers)
        untouched = {name: stored.specs[name] for name in untouched_names(stored.specs, architecture)}
        if untouched:
            tensors = ((name, stored.read_tensor(name)) for name in untouched)
            file_bytes[UNTOUCHED_FILE] = _write_file(output / UNTOUCHED_FILE, untouched, tensors)
        copy_side_files(stored.path, output)
        specs = {stored.stored_names.get(name, name): spec for name, spec in stored.specs.items()}
        content = json.dumps(manifest(layout, specs, file_bytes), indent=1)
        (output / MANIFEST_FILE).write_text(content + "\n", encoding="utf-8")
        # Opening it checks files, sizes and buffers before the directory gets its name.
        MegatronCheckpoint(output, architecture).close()
        return ConversionReport(len(stored.specs), len(file_bytes), stored.bytes_read, sum(file_bytes.values()))


def megatron_to_huggingface(
    source: str | Path, target: str | Path, *, shard_bytes: int = DEFAULT_SHARD_BYTES
) -> ConversionReport:
    """Write the Megatron checkpoint `source` as a Hugging Face directory with the names, types and side files of the
    model it was converted from. Raises ValueError and OSError like `huggingface_to_megatron`."""
    with MegatronCheckpoint(source) as stored:
        architecture = stored.architecture
        with hf_checkpoint_writer(target, stored, architecture, shard_bytes=shard_bytes) as writer:
            for name in architecture.shapes():
                writer.write(name, stored.read_tensor(name))
        written = sum(spec.num_bytes for spec in stored.specs.values())
        num_files = len(list(Path(target).glob("*.safetensors")))
        return ConversionReport(len(stored.specs), num_files, stored.bytes_read, written)


def _write_file(path: Path, specs: Mapping[str, TensorSpec], tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
    """Write one safetensors file, taking one tensor at a time from `tensors`; return its size in bytes."""
    writer = SafetensorsWriter(path, specs)
    try:
        for name, tensor in tensors:
            writer.write(name, tensor)
            del tensor  # Free it before the next one is made.
    except BaseException:
        writer.abandon()
        raise
    writer.close()
    return writer.num_bytes


def _rank_buffers(
    layout: MegatronLayout, rank: int, reshard: ReshardPlan, source: HFCheckpoint
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every local buffer of a rank as the source defines it: each element is read once, or is zero padding."""
    transfers: dict[str, list[Transfer]] = {name: [] for name in layout.local_specs(rank)}
    shards: dict[str, list[Shard]] = {name: [] for name in transfers}
    for transfer in reshard.receives(rank):
        transfers[transfer.destination_shard.local].append(transfer)
    for shard in layout.shards(rank):
        shards[shard.local].append(shard)
    for name, spec in layout.local_specs(rank).items():
        buffers = {name: torch.empty(spec.shape, dtype=spec.dtype)}
        written = execute_from_reader(transfers[name], source, buffers)
        check_complete(written, zero_padding(tuple(shards[name]), buffers), buffers)
        yield name, buffers.pop(name)  # pop: nothing here keeps the buffer while the next one is made


def first_difference(first: str | Path, second: str | Path) -> TensorDifference | None:
    """Compare two models tensor by tensor: names, shapes, types, bits; return None if they are equal.

    Each is a Hugging Face directory or a Megatron checkpoint. If one of them is a Hugging Face directory, every rank's
    buffer of the other is compared with what follows from it, replicas and padding included.
    """
    with _open(first) as a, _open(second) as b:
        found = _compare_specs(a.specs, b.specs, a.path, b.path)
        if found is not None:
            return found
        if isinstance(a, HFCheckpoint) and isinstance(b, MegatronCheckpoint):
            differences = _compare_buffers(a, b)
        elif isinstance(a, MegatronCheckpoint) and isinstance(b, HFCheckpoint):
            differences = _compare_buffers(b, a)
        else:
            differences = _compare_tensors(a, b, a.specs)
        return next(differences, None)


def _open(path: str | Path) -> HFCheckpoint | MegatronCheckpoint:
    return MegatronCheckpoint(path) if is_megatron_checkpoint(path) else HFCheckpoint(path)


def _compare_tensors(a: StoredModel, b: StoredModel, names: Iterable[str]) -> Iterator[TensorDifference]:
    for name in names:
        yield from _compare_values(name, a.read_tensor(name), b.read_tensor(name))


def _compare_buffers(source: HFCheckpoint, converted: MegatronCheckpoint) -> Iterator[TensorDifference]:
    architecture = read_architecture(source.path, heads=HEADS)
    source.check_aliases(architecture)
    reshard = plan(source.layout(architecture), converted.layout)
    for rank in range(converted.layout.num_ranks):
        for local, expected in _rank_buffers(converted.layout, rank, reshard, source):
            yield from _compare_values(f"{rank_file(rank)} {local}", expected, converted.read_local(rank, local))
            del expected
    yield from _compare_tensors(source, converted, untouched_names(source.specs, architecture))


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


def _compare_values(name: str, a: torch.Tensor, b: torch.Tensor) -> Iterator[TensorDifference]:
    # Bits, not values: NaN is equal to itself here, and -0.0 differs from 0.0.
    bits_a, bits_b = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    if torch.equal(bits_a, bits_b):
        return
    # Bytes grouped by element, to report elements and not bytes.
    different = (bits_a != bits_b).view(-1, a.element_size()).any(dim=1).nonzero().flatten()
    yield TensorDifference(
        name, f"{len(different)} of {a.numel()} elements differ in their bits, first at flat index {int(different[0])}"
    )
