"""Worker: the state of a trained model saved under one layout, loaded under another, and back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import critic_checks
import torch
import torch.distributed as dist
from actor_checks import Reference, build_actor, differing, snapshot, train

from megatron_dapo.checkpoints.saved_model import SavedModel, index_file, rank_file
from megatron_dapo.megatron.actor import ActorSettings
from megatron_dapo.megatron.critic import MegatronCritic
from megatron_dapo.megatron.model_config import ModelSettings
from megatron_dapo.megatron.trained_model import TrainedModel
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.recovery.durable_files import HERE

NAME = "policy"


def build(arguments: Mapping[str, Any], case: Mapping[str, Any], side: Mapping[str, Any]) -> TrainedModel:
    if case.get("critic"):
        directory = Path(arguments["critics"]) / case["model"]
        settings = critic_checks.settings_of({**case, **side})
        return MegatronCritic.build(directory, critic_checks.layout_of(side), settings)
    settings = ActorSettings(
        model=ModelSettings(dtype=case.get("dtype", "float32")), use_distributed_optimizer=side.get("distributed", True)
    )
    layout = ParallelLayout(world_size=dist.get_world_size(), **side["layout"])
    return build_actor(Reference.read(arguments["references"], case["model"]), layout, settings)


def save(model: TrainedModel, directory: Path) -> None:
    state = model.saved_state
    directory.mkdir(parents=True, exist_ok=True)
    HERE.write_tensors(directory / rank_file(NAME, state.rank), state.tensors())
    index = state.index(NAME)
    if index is not None:
        HERE.write_json(directory / index_file(NAME), index)
    dist.barrier()


def whole_state(directory: Path) -> dict[str, torch.Tensor]:
    saved = SavedModel(directory, NAME)
    found = {f"{kind}/{name}": saved.read_tensor(name, kind) for kind in saved.kinds for name in saved.specs}
    steps = {
        f"step/{piece.tensor}": torch.tensor(saved.read_step(piece.tensor, piece.file))
        for piece in saved.pieces
        if not any(piece.bounds.offset)
    }
    return found | steps


def of_model(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in tensors.items() if not key.startswith("random/")}


def there_and_back(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """Train under `source`, save, load under `target`, save, load under `source` again; return what differs."""
    return [_case(arguments, case, Path(arguments["directory"]) / str(i)) for i, case in enumerate(arguments["cases"])]


def _case(arguments: Mapping[str, Any], case: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    steps = critic_checks.train if case.get("critic") else train
    first = build(arguments, case, case["source"])
    steps(first, [10, 11][: case.get("steps", 2)])
    save(first, directory / "first")
    second = build(arguments, case, case["target"])
    reads = count_reads(second, directory / "first")
    save(second, directory / "second")
    [(_, norm)] = steps(second, [12])
    third = build(arguments, case, case["source"])
    third.saved_state.load(directory / "second", NAME)
    back = differing(of_model(snapshot(first)), of_model(snapshot(third)))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (back, reads))
    found = {"back": sorted({key for keys, _ in everyone for key in keys}), "norm": norm}
    if dist.get_rank() == 0:
        before, after = whole_state(directory / "first"), whole_state(directory / "second")
        files = [each.stat().st_size for each in sorted((directory / "first").glob("*.safetensors"))]
        needed = sum(each.numel() * each.itemsize for each in before.values())
        found |= {
            "difference": differing(before, after),
            "read": sum(sum(read) for _, read in everyone) / needed,
            "written": sum(files) / needed,
            "steps": sorted({float(value) for key, value in before.items() if key.startswith("step/")}),
        }
    dist.barrier()
    return found


def count_reads(model: TrainedModel, directory: Path) -> list[int]:
    """Load, and return the bytes of tensors that this rank read."""
    opened: list[SavedModel] = []
    before = SavedModel.__init__

    def noting(self: SavedModel, *arguments: Any) -> None:
        before(self, *arguments)
        opened.append(self)

    SavedModel.__init__ = noting  # type: ignore[method-assign]
    try:
        model.saved_state.load(directory, NAME)
    finally:
        SavedModel.__init__ = before  # type: ignore[method-assign]
    return [saved.bytes_read for saved in opened]
