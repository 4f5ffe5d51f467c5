"""The optimizer state of a critic beside its Hugging Face folder, so that training goes on where pretraining stopped.

training_state/layout.json                     the layout it is of
training_state/rank_00000.safetensors, .json   a rank's fp32 main params, moments and steps

Another layout, type of numbers or division of the state over ranks starts from the folder's weights with moments of 0; that
is said, not refused.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from megatron_dapo.parallel.collectives import max_over
from megatron_dapo.parallel.layout import ParallelLayout

logger = logging.getLogger(__name__)

FOLDER = "training_state"


class Stateful(Protocol):
    """A model whose rank-local state can be taken and put back."""

    def state_shards(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]: ...

    def load_state_shards(self, tensors: Mapping[str, torch.Tensor], description: Mapping[str, Any]) -> None: ...


def save_training_state(folder: Path, model: Stateful, layout: ParallelLayout, rank: int) -> None:
    """Every rank writes its part into <folder>/training_state."""
    target = folder / FOLDER
    target.mkdir(parents=True, exist_ok=True)
    tensors, description = model.state_shards()
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, _tensors(target, rank))
    _description(target, rank).write_text(json.dumps(description) + "\n", encoding="utf-8")
    if rank == 0:
        (target / "layout.json").write_text(json.dumps(asdict(layout)) + "\n", encoding="utf-8")


def load_training_state(
    folder: Path, model: Stateful, layout: ParallelLayout, rank: int, group: dist.ProcessGroup | None = None
) -> bool:
    """Put back what is there for this layout; False where there is nothing, or it does not fit (logged). `group`: the ranks
    of the model, all of which call this."""
    source = folder / FOLDER
    if not (source / "layout.json").is_file():
        return False
    saved = json.loads((source / "layout.json").read_text(encoding="utf-8"))
    if saved != asdict(layout):
        _log_new_start(source, f"layout {saved}, now {asdict(layout)}")
        return False
    description = json.loads(_description(source, rank).read_text(encoding="utf-8"))
    own = model.state_shards()[1]
    different = [name for name in own if description.get(name) != own[name]]
    if _anywhere(bool(different), group):
        _log_new_start(source, ", ".join(different) or "the parts of other ranks")
        return False
    model.load_state_shards(load_file(_tensors(source, rank)), description)
    return True


def _anywhere(mine: bool, group: dist.ProcessGroup | None) -> bool:
    return bool(max_over({"mine": float(mine)}, group)["mine"]) if dist.is_initialized() else mine


def _log_new_start(source: Path, difference: str) -> None:
    logger.warning(
        "%s does not fit this critic (%s): its optimizer begins anew, from the same weights", source, difference
    )


def _tensors(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}.safetensors"


def _description(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}.json"
