"""Export of a policy or critic to a Hugging Face directory, a few tensors at a time: from many Megatron ranks, of which
rank 0 writes, or from a model on disk, in one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_dapo.checkpoints.formats.huggingface import HFCheckpoint
from megatron_dapo.checkpoints.formats.huggingface_writer import DEFAULT_SHARD_BYTES, hf_checkpoint_writer, output_specs
from megatron_dapo.checkpoints.formats.peft import AdapterDescription, write_peft
from megatron_dapo.checkpoints.formats.safetensors import StoredModel
from megatron_dapo.checkpoints.layouts.lora import LoraLayout
from megatron_dapo.checkpoints.layouts.megatron import MegatronLayout
from megatron_dapo.checkpoints.load import check_buffers
from megatron_dapo.models.architecture import FINAL_NORM, HEADS, LANGUAGE_MODEL, ModelArchitecture
from megatron_dapo.models.config_json import read_architecture
from megatron_dapo.reshard.execution import DEFAULT_BUCKET_BYTES, Buffers, execute_distributed
from megatron_dapo.reshard.layout import SingleHolderLayout, TensorSpec
from megatron_dapo.reshard.pieces import pieces
from megatron_dapo.reshard.planner import plan

DEFAULT_BATCH_BYTES = 256 << 20  # whole tensors that rank 0 gathers between two writes
# transformers derives num_labels from id2label; without it a head has two labels.
_LABELS = {"id2label": {"0": "value"}, "label2id": {"value": 0}}


@dataclass(frozen=True)
class ExportReport:
    """Contents of an exported directory, the same on every rank."""

    path: Path
    num_tensors: int
    num_bytes: int


def export_to_huggingface(
    target: str | Path,
    source_directory: str | Path,
    layout: MegatronLayout,
    parameters: Buffers,
    group: dist.ProcessGroup | None,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    batch_bytes: int = DEFAULT_BATCH_BYTES,
) -> ExportReport:
    """Write the model of all ranks' `parameters` (group None: of one process) to the directory `target`.

    Names, shapes and types (dtype None) are those of `source_directory`, the model training started from; its config
    and tokenizer are copied. A critic is written as a *ForTokenClassification of one label; a head that its source lacks
    gets the type of the last norm. Rank 0 holds at most `batch_bytes` or the largest tensor at a time. The directory
    appears complete or not at all. Collective over `group`; a ValueError or OSError of rank 0 becomes RuntimeError on
    the others.
    """
    architecture = layout.architecture
    rank = 0 if group is None else dist.get_rank(group)
    num_ranks = 1 if group is None else dist.get_world_size(group)
    check_buffers(layout.local_shapes(rank), parameters, f"rank {rank}")
    device = next(iter(parameters.values())).device
    with HFCheckpoint(source_directory) as stored, ExitStack() as stack:
        source = _checked_source(stored, architecture)
        specs = output_specs(source, architecture, dtype)
        reshard = plan(layout, SingleHolderLayout({name: specs[name] for name in layout.tensors}, num_ranks))
        with _share_failure(group, device):
            if rank == 0:
                context = hf_checkpoint_writer(
                    *(target, source, architecture),
                    dtype=dtype,
                    shard_bytes=shard_bytes,
                    config_fields=_config_fields(architecture),
                )
                writer = stack.enter_context(context)
        for batch in _batches(reshard.destination.tensors, batch_bytes):
            # Whole tensors on rank 0; other ranks only send.
            whole = {n: torch.empty(s.shape, dtype=s.dtype, device=device) for n, s in batch.items() if rank == 0}
            with torch.no_grad():
                execute_distributed(reshard, parameters, whole, group, bucket_bytes=DEFAULT_BUCKET_BYTES, tensors=batch)
            with _share_failure(group, device):
                for name, tensor in whole.items():
                    writer.write(name, tensor)
        with _share_failure(group, device):
            stack.close()  # Rank 0 leaves the writer's context: check, then rename.
    return ExportReport(Path(target), len(specs), sum(spec.num_bytes for spec in specs.values()))


def export_adapters(
    target: Path, layout: LoraLayout, parameters: Buffers, description: AdapterDescription, group: dist.ProcessGroup | None
) -> None:
    """Write the adapters of all ranks' `parameters` as a PEFT directory. Collective over `group`, see
    `export_to_huggingface`."""
    rank, device = 0 if group is None else dist.get_rank(group), next(iter(parameters.values())).device
    # They are small: whole on rank 0 at once.
    whole = {n: torch.empty(s.shape, dtype=s.dtype, device=device) for n, s in layout.tensors.items() if rank == 0}
    reshard = plan(layout, SingleHolderLayout(layout.tensors, layout.num_ranks))
    with torch.no_grad():
        execute_distributed(reshard, parameters, whole, group)
    with _share_failure(group, device):
        if rank == 0:
            write_peft(target, description, layout.tensors, whole.__getitem__)


def export_stored_model(
    target: str | Path,
    model: StoredModel,
    source_directory: str | Path,
    *,
    has_value_head: bool = False,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> ExportReport:
    """Write a model whose parameters are on disk, one tensor in memory at a time, as `export_to_huggingface` writes it.

    model: its tensors by their Hugging Face names, of the shapes of `source_directory`'s model, a critic's with a value
    head. Raises ValueError if it is a different model or `target` exists, and OSError; neither leaves anything behind.
    """
    architecture = read_architecture(source_directory, heads=HEADS)
    if has_value_head:
        architecture = architecture.with_value_head()
    _check_same_tensors(model, architecture, source_directory)
    with HFCheckpoint(source_directory) as stored:
        source = _checked_source(stored, architecture)
        fields = _config_fields(architecture)
        with hf_checkpoint_writer(
            target, source, architecture, shard_bytes=shard_bytes, config_fields=fields
        ) as writer:
            for name in architecture.shapes():
                writer.write(name, model.read_tensor(name))
        return ExportReport(Path(target), len(source.specs), sum(spec.num_bytes for spec in source.specs.values()))


def _config_fields(architecture: ModelArchitecture) -> dict[str, Any] | None:
    """Return the fields of config.json that an export replaces."""
    if architecture.head == LANGUAGE_MODEL:
        return None
    return {**_LABELS, "architectures": [architecture.class_name]}


def _check_same_tensors(model: StoredModel, architecture: ModelArchitecture, source: str | Path) -> None:
    """Raise ValueError naming the first tensor that differs between a stored model and `source`."""
    expected = {name: tuple(shape) for name, shape in architecture.shapes().items()}
    found = {name: tuple(spec.shape) for name, spec in model.specs.items()}
    for name in sorted({*expected, *found}):
        if expected.get(name) != found.get(name):
            raise ValueError(
                f"{model.path} is a checkpoint of another model than {source}: {name} is {found.get(name, 'missing')} and "
                f"{expected.get(name, 'missing')}; name the directory that its run started from"
            )


def _checked_source(stored: HFCheckpoint, architecture: ModelArchitecture) -> StoredModel:
    if architecture.head == LANGUAGE_MODEL:
        stored.check(architecture)
        return stored
    # A critic may have started from a policy or a reward model, whose own head is checked and then dropped.
    started = read_architecture(stored.path, heads=HEADS)
    stored.check(started)
    return _CriticSource(stored, started, architecture)


class _CriticSource(StoredModel):
    """A critic to export: a directory's tensors with the value head in place of its own head."""

    def __init__(self, stored: HFCheckpoint, source: ModelArchitecture, critic: ModelArchitecture) -> None:
        super().__init__()
        # A critic has no output matrix, not even as a second copy of the embedding.
        dropped = {*source.head_shapes(), *source.aliases()}
        kept = {name: spec for name, spec in stored.specs.items() if name not in dropped}
        # A fresh head has no stored type; the last norm is the tensor before it.
        dtype = stored.specs[FINAL_NORM].dtype
        head = {n: stored.specs.get(n, TensorSpec(shape, dtype)) for n, shape in critic.head_shapes().items()}
        self.path = stored.path
        self.specs = kept | head
        self.stored_names = stored.stored_names
        self._stored = stored

    def read_tensor(self, name: str) -> torch.Tensor:
        return self._stored.read_tensor(name)


def _batches(tensors: Mapping[str, TensorSpec], batch_bytes: int) -> Iterator[dict[str, TensorSpec]]:
    named = list(tensors.items())
    for piece in pieces([spec.num_bytes for spec in tensors.values()], batch_bytes):
        yield dict(named[piece])


@contextmanager
def _share_failure(group: dist.ProcessGroup | None, device: torch.device) -> Iterator[None]:
    """Raise RuntimeError on the other ranks if the body fails on rank 0, so that no rank waits for a dead writer."""
    error: Exception | None = None
    try:
        yield
    except Exception as raised:  # re-raised below, once the other ranks know
        error = raised
    if group is not None:
        # An integer: not every backend broadcasts booleans.
        failed = torch.tensor([error is not None], dtype=torch.int64, device=device)
        dist.broadcast(failed, dist.get_global_rank(group, 0), group=group)
        if error is None and int(failed):
            raise RuntimeError("export failed on rank 0, whose error has the reason; nothing was left behind")
    if error is not None:
        raise error
