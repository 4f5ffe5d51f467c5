"""Checkpoints of models that no rank trained: states of given or random numbers, cut into slices of several files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from megatron_dapo.checkpoints.formats.saved_model import (
    STEP,
    index_file,
    kinds_of,
    rank_file,
    slice_name,
    state_index,
)
from megatron_dapo.checkpoints.store import CheckpointStore, CheckpointWriter, save_checkpoint
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.reshard.layout import Shard, TensorSpec, slice_view

State = dict[str, dict[str, torch.Tensor]]  # kind -> tensor -> numbers; steps are scalars


def random_state(parameters: Mapping[str, torch.Tensor], seed: int = 0, step: float = 3.0) -> State:
    """Return a state of these parameters with random main params and moments."""
    generator = torch.Generator().manual_seed(seed)
    [dtype] = {tensor.dtype for tensor in parameters.values()}
    state: State = {
        kind: {name: torch.randn(tensor.shape, generator=generator) for name, tensor in parameters.items()}
        for kind in kinds_of(dtype)
    }
    state["parameter"] = dict(parameters)
    state[STEP] = {name: torch.tensor(step) for name in parameters}
    return state


def save_states(directory: Path, step: int, states: Mapping[str, State], num_files: int = 2) -> Path:
    """Save states by their models' names as a checkpoint of `step`, each tensor cut by rows over `num_files` files."""

    directory.parent.mkdir(parents=True, exist_ok=True)

    def write(writer: CheckpointWriter) -> None:
        for name, state in states.items():
            specs = {tensor: TensorSpec(tuple(each.shape), each.dtype) for tensor, each in state["parameter"].items()}
            slices: dict[str, list[Shard]] = {rank_file(name, rank): [] for rank in range(num_files)}
            for tensor, spec in specs.items():
                rows = spec.shape[0]
                cuts = sorted({0, *(rows * rank // num_files for rank in range(1, num_files)), rows})
                for rank, (start, end) in enumerate(zip(cuts, cuts[1:])):
                    offset, shape = (start, *[0] * (len(spec.shape) - 1)), (end - start, *spec.shape[1:])
                    slices[rank_file(name, rank)].append(Shard(tensor, offset, shape, tensor, (0,)))
            for file, shards in slices.items():
                tensors = {
                    f"{kind}/{slice_name(shard.tensor, shard.bounds)}": slice_view(numbers[shard.tensor], shard.bounds)
                    for kind, numbers in state.items()
                    if kind != STEP
                    for shard in shards
                }
                begins = [shard.tensor for shard in shards if not any(shard.global_offset)]
                writer.save_tensors(file, tensors | {f"{STEP}/{one}": state[STEP][one] for one in begins})
            writer.save_json(index_file(name), state_index(specs, ParallelLayout(num_files), True, slices))

    return save_checkpoint(CheckpointStore(directory, keep=9), step, write, metadata={"train_step": step})
