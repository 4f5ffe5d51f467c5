"""From Megatron shards on many ranks to a Hugging Face folder written by rank 0, bounded bytes at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_dapo.checkpoints.huggingface import HFCheckpoint, untouched_names
from megatron_dapo.checkpoints.huggingface_writer import (
    DEFAULT_SHARD_BYTES,
    NO_FIELDS,
    HuggingFaceWriter,
    ModelSource,
    copy_untouched,
    huggingface_writer,
    output_specs,
    written_names,
)
from megatron_dapo.checkpoints.load import check_buffers
from megatron_dapo.checkpoints.megatron_layout import MegatronLayout
from megatron_dapo.parallel.reshard.executors import DEFAULT_BUCKET_BYTES, Buffers, execute_distributed
from megatron_dapo.parallel.reshard.layout import SingleHolderLayout, TensorSpec
from megatron_dapo.parallel.reshard.planner import ReshardPlan, plan

DEFAULT_BATCH_BYTES = 256 << 20

T = TypeVar("T")


@dataclass(frozen=True)
class ExportReport:
    """What was written (the same on every rank)."""

    path: Path
    num_tensors: int
    num_bytes: int
    copied: tuple[str, ...]  # tensors taken over from the source folder


def export_to_huggingface(
    target: str | Path,
    source_folder: str | Path,
    layout: MegatronLayout,
    parameters: Buffers,
    group: dist.ProcessGroup | None,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    batch_bytes: int = DEFAULT_BATCH_BYTES,
) -> ExportReport:
    """Writes the model of all ranks' `parameters` (group None: of one process) as the folder `target`.

    Names, shapes, types (dtype None) and bytes are those of `source_folder`, the model training started from; its
    config and tokenizer come along. Rank 0 holds at most `batch_bytes` or the largest tensor at a time. The folder
    appears complete or not at all. Every rank of the group calls it; ValueError or OSError of rank 0 becomes
    RuntimeError on the others.
    """
    with HFCheckpoint(source_folder) as source:
        source.check(layout.architecture)
        return export_model(
            target,
            source,
            layout,
            parameters,
            group,
            dtype=dtype,
            shard_bytes=shard_bytes,
            batch_bytes=batch_bytes,
        )


def export_model(
    target: str | Path,
    source: ModelSource,
    layout: MegatronLayout,
    parameters: Buffers,
    group: dist.ProcessGroup | None,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    batch_bytes: int = DEFAULT_BATCH_BYTES,
    config_fields: Mapping[str, Any] = NO_FIELDS,
) -> ExportReport:
    """`export_to_huggingface` from a source that has been checked; `config_fields` replace those of its config.json."""
    rank = 0 if group is None else dist.get_rank(group)
    num_ranks = 1 if group is None else dist.get_world_size(group)
    check_buffers(layout.local_shapes(rank), parameters, f"rank {rank}")
    device = next(iter(parameters.values())).device
    with ExitStack() as stack:
        specs = output_specs(source, layout.architecture, dtype)
        reshard = plan(layout, SingleHolderLayout({name: specs[name] for name in layout.tensors}, num_ranks))
        writer_context = huggingface_writer(
            target, source, layout.architecture, dtype=dtype, shard_bytes=shard_bytes, config_fields=config_fields
        )
        writer = _on_rank_zero(group, device, lambda: stack.enter_context(writer_context))
        for batch in _batches(reshard.destination.tensors, batch_bytes):
            gathered = _gather(reshard, batch, parameters, group, rank, device)
            _on_rank_zero(group, device, lambda tensors=gathered: _write(writer, source, layout, tensors))
        _on_rank_zero(group, device, lambda: _finish(stack, writer, source, layout))
        return ExportReport(
            path=Path(target),
            num_tensors=len(specs),
            num_bytes=sum(spec.num_bytes for spec in specs.values()),
            copied=untouched_names(source.specs, layout.architecture),
        )


def _batches(tensors: Mapping[str, TensorSpec], batch_bytes: int) -> Iterator[dict[str, TensorSpec]]:
    batch: dict[str, TensorSpec] = {}
    for name, spec in tensors.items():
        if batch and sum(s.num_bytes for s in batch.values()) + spec.num_bytes > batch_bytes:
            yield batch
            batch = {}
        batch[name] = spec
    if batch:
        yield batch


def _gather(
    reshard: ReshardPlan,
    batch: dict[str, TensorSpec],
    parameters: Buffers,
    group: dist.ProcessGroup | None,
    rank: int,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """The batch's tensors, whole, on rank 0; an empty mapping elsewhere."""
    whole = {name: torch.empty(s.shape, dtype=s.dtype, device=device) for name, s in batch.items()} if rank == 0 else {}
    with torch.no_grad():
        execute_distributed(reshard, parameters, whole, group, bucket_bytes=DEFAULT_BUCKET_BYTES, tensors=batch)
    return whole


def _write(
    writer: HuggingFaceWriter, source: ModelSource, layout: MegatronLayout, tensors: Mapping[str, torch.Tensor]
) -> None:
    for name, tensor in tensors.items():
        for stored in written_names(source, layout.architecture, name):
            writer.write(stored, tensor)


def _finish(stack: ExitStack, writer: HuggingFaceWriter, source: ModelSource, layout: MegatronLayout) -> None:
    copy_untouched(writer, source, layout.architecture)
    # Leaves the writer's context: verify, then rename.
    stack.close()


def _on_rank_zero(group: dist.ProcessGroup | None, device: torch.device, action: Callable[[], T]) -> T | None:
    """Runs the action on rank 0 and tells the others whether it worked: no rank waits for a writer that is gone."""
    rank = 0 if group is None else dist.get_rank(group)
    result: T | None = None
    error: Exception | None = None
    if rank == 0:
        try:
            result = action()
        except Exception as raised:  # re-raised below, once the other ranks know
            error = raised
    if group is not None:
        failed = torch.tensor([error is not None], dtype=torch.int64, device=device)
        dist.broadcast(failed, dist.get_global_rank(group, 0), group=group)
        if error is None and int(failed):
            raise RuntimeError("export failed on rank 0, whose error has the reason; nothing was left behind")
    if error is not None:
        raise error
    return result
