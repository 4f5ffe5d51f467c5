"""Workers that count the bytes of real models, for `test_memory`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import critic_checks
import torch.distributed as dist
from actor_checks import TEMPERATURE, Reference, build_actor, loss_fn, ragged_batch

from megatron_dapo.config.model_schema import LoraConfig
from megatron_dapo.megatron.actor import ActorSettings
from megatron_dapo.megatron.critic import CriticSettings, MegatronCritic
from megatron_dapo.megatron.model_config import ModelSettings
from megatron_dapo.megatron.state import optimizer_tensors
from megatron_dapo.megatron.trained_model import TrainedModel
from megatron_dapo.parallel.layout import ParallelLayout


def bytes_of_ranks(arguments: dict[str, Any]) -> list[list[dict[str, int]]]:
    """Return bytes of weights, gradients and optimizer on every rank, for each case {"model", "layout", "dtype"}; of a critic
    if the case has "freeze", with adapters of rank "lora"."""
    return [[*_all_ranks(_bytes_of(case, arguments))] for case in arguments["cases"]]


def _bytes_of(case: dict[str, Any], arguments: dict[str, Any]) -> dict[str, int]:
    layout = ParallelLayout(world_size=dist.get_world_size(), **case["layout"])
    common = {
        "model": ModelSettings(dtype=case["dtype"]),
        "use_distributed_optimizer": case.get("distributed", True),
        "lora": LoraConfig(rank=case.get("lora", 0)),
        "freeze": case.get("freeze", ()),
    }
    # Adam makes its moments in the first step.
    micro_batches = [micro_batch for _, micro_batch in ragged_batch().of_rank(layout, dist.get_rank())]
    model: TrainedModel
    if "freeze" in case:
        directory = Path(arguments["configs"]) / case["model"]
        model = critic = MegatronCritic.build(directory, layout, CriticSettings(**common), random_seed=0)
        critic.train_step(micro_batches, critic_checks.loss_fn, learning_rate=0.0)
    else:
        model = actor = build_actor(Reference.read(arguments["references"], case["model"]), layout, ActorSettings(**common))
        actor.train_step(micro_batches, loss_fn, TEMPERATURE, learning_rate=0.0)
    parameters = {**model.named_local_parameters(), **model.trained_parameters()}
    return {
        "stage": layout.coordinates(dist.get_rank()).pipeline,
        "weights": sum(parameter.nbytes for parameter in parameters.values()),
        "gradients": sum(each.main_grad.nbytes for each in parameters.values() if each.requires_grad),
        "optimizer": sum(tensor.nbytes for tensor in optimizer_tensors(model.trained_parameters(), model.optimizer)),
    }


def _all_ranks(own: dict[str, int]) -> list[dict[str, int]]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone
