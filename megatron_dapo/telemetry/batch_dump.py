"""One rollout batch on disk, as the trainer saw it, to replay only the trainer on bitwise identical samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_dapo.checkpoints.atomic_directory import put_in_place, remove_tree
from megatron_dapo.checkpoints.formats.safetensors import read_tensors
from megatron_dapo.data.sample_tensors import from_tensors, to_tensors
from megatron_dapo.types import TrainSample
from megatron_dapo.untrusted import blamed_on, read_json

if TYPE_CHECKING:
    from megatron_dapo.files.durable import Files

_TENSORS = "batch.safetensors"
_FACTS = "batch.json"


@dataclass(frozen=True)
class DumpedBatch:
    samples: tuple[TrainSample, ...]
    metadata: Mapping[str, Any]


def dump_batch(directory: Path, samples: Sequence[TrainSample], metadata: Mapping[str, Any], files: Files) -> Path:
    """Write `samples` and JSON-serializable `metadata` (train step, learning rate, ...) into the new `directory`."""
    # Renamed when complete: a killed run leaves no partial dump under the final name.
    partial = directory.with_name(directory.name + ".tmp")
    files.run(remove_tree, partial)
    files.make_directory(partial)
    description, tensors = to_tensors(samples)
    files.write_tensors(partial / _TENSORS, tensors)
    files.write_json(partial / _FACTS, {"metadata": dict(metadata), "samples": description})
    files.run(put_in_place, partial, directory)
    return directory


def load_batch(directory: Path) -> DumpedBatch:
    """Read a dumped batch. Raises ValueError if a file is missing or the files do not belong together."""
    missing = [name for name in (_TENSORS, _FACTS) if not (directory / name).is_file()]
    if missing:
        raise ValueError(
            f"batch dump {directory}: no {', '.join(missing)}; name a directory written by telemetry.dump_batches"
        )
    with blamed_on(directory, RuntimeError):  # torch's own
        facts = read_json(directory / _FACTS)
        metadata, samples = facts["metadata"], from_tensors(facts["samples"], read_tensors(directory / _TENSORS))
        if not isinstance(metadata, dict):
            raise ValueError(
                f"metadata of {_FACTS} is a {type(metadata).__name__}, not an object; dump the batch again"
            )
    return DumpedBatch(samples=tuple(samples), metadata=metadata)
