"""One rollout batch on disk, as the trainer saw it, for replay through the trainer alone: bit for bit the same
samples."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from megatron_dapo.types import TrainSample

_TENSORS = "batch.safetensors"
_FACTS = "batch.json"
_PER_SEQUENCE = ("tokens",)  # [T]
_PER_RESPONSE = ("loss_mask", "advantages", "rollout_logprobs")  # [R]


@dataclass(frozen=True)
class DumpedBatch:
    """What `dump_batch` wrote."""

    samples: tuple[TrainSample, ...]
    metadata: Mapping[str, Any]


def dump_batch(folder: Path, samples: Sequence[TrainSample], metadata: Mapping[str, Any]) -> Path:
    """Write `samples` and JSON-serialisable `metadata` (train step, learning rate, ...) into the new folder
    `folder`."""
    partial = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(_packed(samples), partial / _TENSORS)
    facts = {
        "metadata": dict(metadata),
        "samples": [
            {
                "sample_id": s.sample_id,
                "group_index": s.group_index,
                "prompt_length": s.prompt_length,
                "num_tokens": s.num_tokens,
            }
            for s in samples
        ],
    }
    (partial / _FACTS).write_text(json.dumps(facts, indent=1), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(partial, folder)
    return folder


def _packed(samples: Sequence[TrainSample]) -> dict[str, torch.Tensor]:
    """Each field of all samples end to end: tokens [sum T], the others [sum R]."""
    fields = (*_PER_SEQUENCE, *_PER_RESPONSE)
    return {
        name: torch.cat([getattr(sample, name) for sample in samples]) if samples else torch.zeros(0) for name in fields
    }


def load_batch(folder: Path) -> DumpedBatch:
    """Read a dumped batch. Raises ValueError where its parts do not fit each other."""
    missing = [name for name in (_TENSORS, _FACTS) if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"batch dump {folder}: no {', '.join(missing)}; name a folder written by telemetry.dump_batches"
        )
    facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
    tensors = load_file(folder / _TENSORS)
    rows = facts["samples"]
    sequence_lengths = [row["num_tokens"] for row in rows]
    response_lengths = [row["num_tokens"] - row["prompt_length"] for row in rows]
    split = {name: _split(folder, name, tensors[name], sequence_lengths) for name in _PER_SEQUENCE}
    split |= {name: _split(folder, name, tensors[name], response_lengths) for name in _PER_RESPONSE}
    samples = tuple(
        TrainSample(
            sample_id=row["sample_id"],
            group_index=row["group_index"],
            prompt_length=row["prompt_length"],
            **{name: parts[index] for name, parts in split.items()},
        )
        for index, row in enumerate(rows)
    )
    return DumpedBatch(samples=samples, metadata=facts["metadata"])


def _split(folder: Path, name: str, packed: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
    if packed.numel() != sum(lengths):
        raise ValueError(
            f"batch dump {folder}: {name} holds {packed.numel()} values, {_FACTS} says {sum(lengths)}; dump it again"
        )
    return [part.clone() for part in packed.split(list(lengths))] if lengths else []
