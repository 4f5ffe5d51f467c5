"""megatron-core's data-parallel wrapper and optimizer, and a step that either all ranks make or none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import optimizer as core_optimizer
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_dapo.megatron.parallel_state import world_is
from megatron_dapo.parallel.rank_set import RankSet


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW's constants. `clip_grad`: largest norm, 0: off. `distributed`: shard the state over data x context."""

    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    weight_decay: float = 0.1
    clip_grad: float = 1.0
    distributed: bool = True


def wrap_data_parallel(
    chunks: Sequence[GPTModel], config: TransformerConfig, settings: OptimizerSettings
) -> list[DistributedDataParallel]:
    """Wrap the chunks so that gradients are kept and summed in fp32 over data x context ranks."""
    wrapper = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=settings.distributed,
        fp8_param_gather=config.fp8_param,
    )
    # Buckets serve the first chunk only: later ones reduce while the first still computes.
    return [
        DistributedDataParallel(config, wrapper, chunk, disable_bucketing=stage > 0)
        for stage, chunk in enumerate(chunks)
    ]


def build_optimizer(
    chunks: Sequence[DistributedDataParallel], config: TransformerConfig, settings: OptimizerSettings, part: RankSet
) -> Any:
    """megatron-core's AdamW over the wrapped chunks; fp32 main params are copied from the weights as they are now.

    Collective among the ranks of `part`.
    """
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=0.0,  # set at every step by the caller
        min_lr=0.0,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        adam_eps=settings.adam_eps,
        clip_grad=settings.clip_grad,
        bf16=config.bf16,
        params_dtype=config.params_dtype,
        fp8_recipe=config.fp8_recipe if config.fp8 else None,
        use_distributed_optimizer=settings.distributed,
    )
    # It gathers the kinds of parameters from the whole world.
    with world_is(part, core_optimizer):
        return get_megatron_optimizer(optimizer_config, list(chunks), use_gloo_process_groups=False)


@torch.no_grad()
def guarded_step(
    optimizer: Any, learning_rate: float, settings: OptimizerSettings, group: dist.ProcessGroup | None = None
) -> tuple[float, bool]:
    """Clip and step if the gradient norm is finite on every rank of `group`, all that hold the model; else change
    nothing anywhere.

    Returns the norm before clipping (over the whole model) and whether the step was made.
    """
    found_inf = optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if not _all_ranks(math.isfinite(norm) and not found_inf, group):
        return norm, False
    for group in optimizer.param_groups:
        # megatron-core leaves these multipliers (no decay for norms and biases) to its scheduler, unused here.
        group["lr"] = learning_rate * group.get("lr_mult", 1.0)
        group["weight_decay"] = settings.weight_decay * group.get("wd_mult", 1.0)
    if settings.clip_grad > 0:
        for part in optimizer.chained_optimizers:
            parameters = part.get_parameters()
            if parameters:
                clip_grad_by_total_norm_fp32(parameters, settings.clip_grad, norm)
    optimizer.step_with_ready_grads()
    return norm, True


def _all_ranks(condition: bool, group: dist.ProcessGroup | None) -> bool:
    flag = torch.tensor([int(condition)], dtype=torch.int32, device=torch.cuda.current_device())
    dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=group)
    return bool(flag.item())
