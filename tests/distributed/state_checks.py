"""Worker: the state of a trained model saved under one layout, loaded under another, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import critic_checks
import torch
import torch.distributed as dist
from actor_checks import Reference, build_actor, differing, snapshot, train

from megatron_dapo.checkpoints.formats.saved_model import SavedModel, index_file, rank_file
from megatron_dapo.checkpoints.store import (
    Checkpoint,
    CheckpointStore,
    CheckpointWriter,
    newest_valid,
    save_checkpoint,
)
from megatron_dapo.config.model_schema import LoraConfig, OptimizerConfig
from megatron_dapo.files.checksums import DamagedError
from megatron_dapo.files.durable import HERE
from megatron_dapo.megatron.actor import ActorSettings
from megatron_dapo.megatron.critic import MegatronCritic
from megatron_dapo.megatron.model_config import ModelSettings
from megatron_dapo.megatron.trained_model import TrainedModel
from megatron_dapo.parallel.coordination import coordinate
from megatron_dapo.parallel.layout import ParallelLayout

NAME = "policy"


def build(arguments: Mapping[str, Any], case: Mapping[str, Any], side: Mapping[str, Any]) -> TrainedModel:
    if case.get("critic"):
        directory = Path(arguments["critics"]) / case["model"]
        settings = critic_checks.settings_of({**case, **side})
        return MegatronCritic.build(directory, critic_checks.layout_of(side), settings)
    settings = ActorSettings(
        model=ModelSettings(dtype=case.get("dtype", "float32"), megatron=side.get("megatron", {})),
        optimizer=OptimizerConfig(on_host=side.get("on_host", False)),
        use_distributed_optimizer=side.get("distributed", True),
        is_frozen=case.get("untrained", False),
        lora=LoraConfig.model_validate_json(json.dumps(case.get("lora", {}))),
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
    found = {f"{kind}/{name}": saved.read_tensor(name, kind) for name in saved.specs for kind in saved.kinds_of(name)}
    steps = {
        f"step/{stored.tensor}": torch.tensor(saved.read_step(stored.tensor, stored.file))
        for stored in saved.slices
        if saved.is_trained and not any(stored.bounds.offset)
    }
    return found | steps


def of_model(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in tensors.items() if not key.startswith("random/")}


def there_and_back(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """Train under `source`, save, load under `target`, save, load under `source` again; return what differs."""
    return [_case(arguments, case, Path(arguments["directory"]) / str(i)) for i, case in enumerate(arguments["cases"])]


def scale(model: TrainedModel, seeds: list[int]) -> list[tuple[float, float]]:
    """Change the weights of a model that is not trained."""
    with torch.no_grad():
        for parameter in model.named_local_parameters().values():
            parameter.mul_(1.5)
    return [(0.0, 1.0)]


def _case(arguments: Mapping[str, Any], case: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    steps = scale if case.get("untrained") else critic_checks.train if case.get("critic") else train
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
            "computed": [one.saved_state.layout._known is None for one in (first, second)],
            "steps": sorted({float(value) for key, value in before.items() if key.startswith("step/")}),
        }
    dist.barrier()
    return found


def damaged(arguments: dict[str, Any]) -> dict[str, Any]:
    """Save two steps, change a byte of the newer, and load: return the step that every rank has, and what differs from it."""
    case = {"model": "qwen2", "layout": {"tensor": 2}}
    directory = Path(arguments["directory"])
    model = build(arguments, case, case)
    store = CheckpointStore(directory, 2, coordinate(range(dist.get_world_size()), 60.0))
    states = []

    def write(writer: CheckpointWriter) -> None:
        writer.save_tensors(rank_file(NAME, model.saved_state.rank), model.saved_state.tensors())
        index = model.saved_state.index(NAME)
        if index is not None:
            writer.save_json(index_file(NAME), index)

    for step in (1, 2):
        train(model, [10 + step])
        save_checkpoint(store, step, write)
        states.append(snapshot(model))
    if dist.get_rank() == 0:
        file = store.path(2) / rank_file(NAME, 3)
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1  # a tensor: some layouts do not load the random state at the end
        file.write_bytes(content)
    dist.barrier()
    other = build(arguments, case, {"layout": arguments["loaded"]})
    problems = []

    def load(checkpoint: Checkpoint) -> None:
        try:
            other.saved_state.load(checkpoint.directory, NAME, checkpoint.checksums)
        except DamagedError as error:
            problems.append(str(error))
            raise

    found = newest_valid(store, load)
    again = build(arguments, case, case)
    save(other, directory / "again")
    again.saved_state.load(directory / "again", NAME)
    own = found.step if found else None, problems, differing(of_model(states[0]), of_model(snapshot(again)))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return {
        "steps": [step for step, _, _ in everyone],
        "problems": [each for _, each, _ in everyone],
        "difference": [key for _, _, keys in everyone for key in keys],
    }


def count_reads(model: TrainedModel, directory: Path) -> list[int]:
    """Load, and return the bytes of tensors that this rank read."""
    opened: list[SavedModel] = []
    before = SavedModel.__init__

    def noting(self: SavedModel, *arguments: Any, **options: Any) -> None:
        before(self, *arguments, **options)
        opened.append(self)

    SavedModel.__init__ = noting  # type: ignore[method-assign]
    try:
        model.saved_state.load(directory, NAME)
    finally:
        SavedModel.__init__ = before  # type: ignore[method-assign]
    return [saved.bytes_read for saved in opened]
