"""Workers of test_experts.py: a Qwen3-MoE from a directory, trained on several layouts of the same ranks, and exported."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from actor_checks import (
    LEARNING_RATE,
    TEMPERATURE,
    Batch,
    largest_over_ranks,
    loss_fn,
    model_settings,
    parity_of_layouts,
    sequences,
)
from replica_checks import drifted_replicas
from safetensors.torch import load_file

from megatron_dapo.checkpoints.export import export_to_huggingface
from megatron_dapo.converters.convert import first_difference
from megatron_dapo.megatron.actor import ActorSettings, MegatronActor
from megatron_dapo.parallel.layout import ParallelLayout

# Some micro-batches have so few tokens that experts, and whole expert ranks, get none.
TINY_AND_LARGE = ((2,), (1,), (5, 17, 1, 30), (3,), (64,), (1, 1), (9,), (2, 2))
NUM_STEPS = 4


def experts(arguments: dict[str, Any]) -> dict[str, Any]:
    """Worker: `parity_of_layouts` of the cases, then `train_and_export` of each layout; the first one is the reference."""
    directory = Path(arguments["work"])
    trained = [
        train_and_export(arguments["model"], layout, directory / f"layout{number}")
        for number, layout in enumerate(arguments["layouts"])
    ]
    dist.barrier()
    if dist.get_rank() == 0:
        right = load_file(directory / "layout0" / "trained" / "model.safetensors")
        for number, result in enumerate(trained):
            result["weights"] = relative(
                load_file(directory / f"layout{number}" / "trained" / "model.safetensors"), right
            )
    return {"parity": parity_of_layouts(arguments), "trained": trained}


def relative(ours: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert set(ours) == set(right)
    return max(float((ours[name] - right[name]).norm() / right[name].norm()) for name in right)


def train_and_export(model: str, case: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Load the directory `model`, export it as it is, train, export again. Returns the differences, and (loss, norm) of each step.
    `case`: fields of the layout, and "megatron"."""
    fields = {name: value for name, value in case.items() if name != "megatron"}
    layout = ParallelLayout(world_size=dist.get_world_size(), **fields)
    settings = ActorSettings(model=model_settings(case), use_distributed_optimizer=fields.get("expert", 1) != 4)
    gc.collect()  # the actors of cases before: their groups have threads
    actor = MegatronActor.build(model, layout, settings)
    if dist.get_rank() == 0:
        directory.mkdir()
    dist.barrier()
    export(actor, model, directory / "untouched")
    history = [step(actor, seed) for seed in range(NUM_STEPS)]
    export(actor, model, directory / "trained")
    difference = str(first_difference(model, directory / "untouched") or "") if dist.get_rank() == 0 else ""
    return {
        "round_trip": difference,
        "history": history,
        "drifted": drifted_replicas(actor.tensors, actor.named_local_parameters(), dist.group.WORLD),
    }


def export(actor: MegatronActor, model: str, target: Path) -> None:
    export_to_huggingface(target, model, actor.tensors, actor.named_local_parameters(), dist.group.WORLD)


def step(actor: MegatronActor, seed: int) -> tuple[float, float]:
    parts = [tuple(sequences(lengths, 1000 * seed + index)) for index, lengths in enumerate(TINY_AND_LARGE)]
    micro_batches = [micro_batch for _, micro_batch in Batch(tuple(parts)).of_rank(actor.layout, dist.get_rank())]
    result = actor.train_step(micro_batches, loss_fn, TEMPERATURE, LEARNING_RATE)
    largest_over_ranks({"norm": result.grad_norm})  # all ranks are still here
    assert result.applied
    return result.metrics["loss"], result.grad_norm
