"""Workers that count the bytes of real models, for `test_memory`."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from actor_checks import TEMPERATURE, Reference, build_actor, loss_fn, ragged_batch

from megatron_dapo.megatron.actor import ActorSettings
from megatron_dapo.megatron.model_config import ModelSettings
from megatron_dapo.megatron.state import optimizer_tensors
from megatron_dapo.parallel.layout import ParallelLayout


def bytes_of_ranks(arguments: dict[str, Any]) -> list[list[dict[str, int]]]:
    """Return bytes of weights, gradients and optimizer on every rank, for each case {"model", "layout", "dtype"}."""
    return [[*_all_ranks(_bytes_of(case, arguments["references"]))] for case in arguments["cases"]]


def _bytes_of(case: dict[str, Any], references: str) -> dict[str, int]:
    layout = ParallelLayout(world_size=dist.get_world_size(), **case["layout"])
    settings = ActorSettings(
        model=ModelSettings(dtype=case["dtype"]), use_distributed_optimizer=case.get("distributed", True)
    )
    actor = build_actor(Reference.read(references, case["model"]), layout, settings)
    parameters = actor.named_local_parameters()
    # Adam makes its moments in the first step.
    micro_batches = [micro_batch for _, micro_batch in ragged_batch().of_rank(layout, dist.get_rank())]
    actor.train_step(micro_batches, loss_fn, TEMPERATURE, learning_rate=0.0)
    return {
        "stage": layout.coordinates(dist.get_rank()).pipeline,
        "weights": sum(parameter.nbytes for parameter in parameters.values()),
        "gradients": sum(parameter.main_grad.nbytes for parameter in parameters.values()),
        "optimizer": sum(tensor.nbytes for tensor in optimizer_tensors(parameters, actor.optimizer)),
    }


def _all_ranks(own: dict[str, int]) -> list[dict[str, int]]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone
