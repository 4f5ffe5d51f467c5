"""One rollout batch on disk, as the trainer saw it, for replay through the trainer alone: bit for bit the same samples."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from megatron_dapo.checkpoints.atomic_directory import put_in_place, remove_tree
from megatron_dapo.data.sample_tensors import from_tensors, to_tensors
from megatron_dapo.types import TrainSample

_TENSORS = "batch.safetensors"
_FACTS = "batch.json"


@dataclass(frozen=True)
class DumpedBatch:
    """A batch read from a dump, with the metadata of its step."""

    samples: tuple[TrainSample, ...]
    metadata: Mapping[str, Any]


def dump_batch(directory: Path, samples: Sequence[TrainSample], metadata: Mapping[str, Any]) -> Path:
    """Write `samples` and JSON-serializable `metadata` (train step, learning rate, ...) into the new `directory`."""
    # Renamed when complete: a killed run leaves no half dump under the final name.
    partial = directory.with_name(directory.name + ".tmp")
    remove_tree(partial)
    partial.mkdir(parents=True)
    description, tensors = to_tensors(samples)
    save_file(tensors, partial / _TENSORS)
    facts = {"metadata": dict(metadata), "samples": description}
    (partial / _FACTS).write_text(json.dumps(facts, indent=1), encoding="utf-8")
    put_in_place(partial, directory)
    return directory


def load_batch(directory: Path) -> DumpedBatch:
    """Read a dumped batch. Raises ValueError if a file is missing or the files do not belong together."""
    missing = [name for name in (_TENSORS, _FACTS) if not (directory / name).is_file()]
    if missing:
        raise ValueError(
            f"batch dump {directory}: no {', '.join(missing)}; name a directory written by telemetry.dump_batches"
        )
    facts = json.loads((directory / _FACTS).read_text(encoding="utf-8"))
    try:
        samples = from_tensors(facts["samples"], load_file(directory / _TENSORS))
    except ValueError as error:
        raise ValueError(f"batch dump {directory}: {error}; dump it again") from None
    return DumpedBatch(samples=tuple(samples), metadata=facts["metadata"])
