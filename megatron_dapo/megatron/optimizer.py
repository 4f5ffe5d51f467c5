"""megatron-core's data-parallel wrapper and optimizer, and a step that either all ranks make or none."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import optimizer as core_optimizer
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig as CoreOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_dapo.config.model_schema import OptimizerConfig
from megatron_dapo.megatron.apex import use_apex
from megatron_dapo.megatron.model_config import data_parallel_fields, optimizer_fields
from megatron_dapo.megatron.parallel_state import world_is
from megatron_dapo.parallel.rank_set import RankSet


def wrap_data_parallel(
    chunks: Sequence[GPTModel], config: TransformerConfig, distributed: bool, options: Mapping[str, Any]
) -> list[DistributedDataParallel]:
    """Wrap the chunks so that gradients are kept and summed in fp32 over data x context ranks. `distributed`: the
    optimizer's state is sharded over these ranks. `options`: megatron-core's own fields that the recipe sets."""
    wrapper = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=distributed,
        fp8_param_gather=config.fp8_param,
        **data_parallel_fields(options),
    )
    # Backward runs the chunks from last to first. All but the first reduce while another computes, so one bucket will do;
    # the first needs several to overlap its own backward pass.
    wrapped = [
        DistributedDataParallel(config, wrapper, chunk, disable_bucketing=stage > 0)
        for stage, chunk in enumerate(chunks)
    ]
    if wrapper.overlap_grad_reduce:
        # The schedules leave the sums to the last micro-batch: else each one would sum what is not complete.
        pauses = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = pauses if len(pauses) > 1 else pauses[0]
    return wrapped


def build_optimizer(
    chunks: Sequence[DistributedDataParallel],
    config: TransformerConfig,
    settings: OptimizerConfig,
    distributed: bool,
    part: RankSet,
    options: Mapping[str, Any],
) -> Any:
    """Build megatron-core's AdamW over the wrapped chunks, with fp32 main params copied from their current weights.

    Collective among the ranks of `part`. ValueError for an implementation that is not installed.
    """
    if settings.implementation == "apex":
        use_apex()
    core_config = CoreOptimizerConfig(
        optimizer="adam",
        lr=0.0,  # set at every step by the caller
        min_lr=0.0,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.betas[0],
        adam_beta2=settings.betas[1],
        adam_eps=settings.epsilon,
        clip_grad=settings.clip_grad,
        bf16=config.bf16,
        params_dtype=config.params_dtype,
        fp8_recipe=config.fp8_recipe if config.fp8 else None,
        use_distributed_optimizer=distributed,
        **optimizer_fields(options),
    )
    # get_megatron_optimizer gathers the kinds of parameters (decayed or not) over the whole world, whatever its groups.
    with world_is(part, core_optimizer):
        return get_megatron_optimizer(core_config, list(chunks), use_gloo_process_groups=False)


def finish_param_gathers(chunks: Sequence[DistributedDataParallel]) -> None:
    """Gather the weights of every bucket that no forward pass has gathered since the last step. Collective over data x context
    ranks."""
    for chunk in chunks:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            group.finish_param_sync(skip_next_bucket_dispatch=True)


@torch.no_grad()
def guarded_step(
    optimizer: Any, learning_rate: float, settings: OptimizerConfig, group: dist.ProcessGroup | None = None
) -> tuple[float, bool]:
    """Clip and step if the gradient norm is finite on every rank of `group`; else change nothing on any rank.

    Returns the norm of the whole model before clipping, and whether the step was made.
    """
    # prepare_grads copies gradients to the main params; step_with_ready_grads below must not do it again.
    found_inf = optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if not _all_ranks(math.isfinite(norm) and not found_inf, group):
        return norm, False
    for group in optimizer.param_groups:
        # megatron-core leaves these factors (no decay for norms and biases) to its scheduler, which is not used here.
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
    # An expert-parallel rank may see a finite norm where another does not: all must take the same branch.
    flag = torch.tensor([int(condition)], dtype=torch.int32, device=torch.cuda.current_device())
    dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=group)
    return bool(flag.item())
