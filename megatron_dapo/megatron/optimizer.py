"""megatron-core's data-parallel wrapper and optimizer, and a step that either all ranks make or none."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
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

from megatron_dapo.config.model_schema import PIECE_ELEMENTS, OptimizerConfig
from megatron_dapo.megatron.apex import use_apex
from megatron_dapo.megatron.host_memory import HostMemory
from megatron_dapo.megatron.model import named_local_parameters
from megatron_dapo.megatron.model_config import data_parallel_fields, optimizer_fields
from megatron_dapo.megatron.parallel_state import world_is
from megatron_dapo.megatron.state import OwnedShard, has_main_param, owned_shards, update_tensors
from megatron_dapo.parallel.rank_set import RankSet
from megatron_dapo.reshard.pieces import pieces


def wrap_data_parallel(
    chunks: Sequence[GPTModel], config: TransformerConfig, distributed: bool, options: Mapping[str, Any]
) -> list[DistributedDataParallel]:
    """Wrap the chunks so that gradients are kept and summed in fp32 over data x context ranks. `distributed`: the
    optimizer's state is sharded over these ranks. `options`: megatron-core's fields that the recipe sets."""
    wrapper = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=distributed,
        fp8_param_gather=config.fp8_param,
        **data_parallel_fields(options),
    )
    # Backward runs the chunks from last to first. All but the first reduce while another computes, so one bucket is
    # enough; the first needs several to overlap with its own backward pass.
    wrapped = [
        DistributedDataParallel(config, wrapper, chunk, disable_bucketing=stage > 0)
        for stage, chunk in enumerate(chunks)
    ]
    if wrapper.overlap_grad_reduce:
        # The schedules leave the sums to the last micro-batch; otherwise each would sum incomplete gradients.
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

    Collective among the ranks of `part`. Raise ValueError if the implementation is not installed.
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
    # get_megatron_optimizer gathers the kinds of parameters (decayed or not) over the whole world, regardless of
    # groups.
    with world_is(part, core_optimizer):
        return get_megatron_optimizer(core_config, list(chunks), use_gloo_process_groups=False)


def finish_param_gathers(chunks: Sequence[DistributedDataParallel]) -> None:
    """Gather every bucket's weights that no forward pass has gathered since the last step. Collective over data x
    context ranks."""
    for chunk in chunks:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            group.finish_param_sync(skip_next_bucket_dispatch=True)


@torch.no_grad()
def guarded_step(
    optimizer: Any,
    learning_rate: float,
    settings: OptimizerConfig,
    chunks: Sequence[DistributedDataParallel],
    host: HostMemory,
    group: dist.ProcessGroup | None = None,
) -> tuple[float, bool]:
    """Clip and step if the gradient norm is finite on every rank of `group`; otherwise change nothing on any rank.

    Under `settings.on_host`, main params and moments are in `host`. Return the norm of the whole model before clipping,
    and whether the step was made.
    """
    # prepare_grads copies gradients to the main params; the step below must not do it again.
    found_inf = optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if not _all_ranks(math.isfinite(norm) and not found_inf, group):
        return norm, False
    for parameters in optimizer.param_groups:
        # megatron-core's scheduler, which is not used here, would apply these factors (no decay for norms and biases).
        parameters["lr"] = learning_rate * parameters.get("lr_mult", 1.0)
        parameters["weight_decay"] = settings.weight_decay * parameters.get("wd_mult", 1.0)
    if settings.clip_grad > 0:
        for part in optimizer.chained_optimizers:
            parameters = part.get_parameters()
            if parameters:
                clip_grad_by_total_norm_fp32(parameters, settings.clip_grad, norm)
    if settings.on_host:
        step_by_pieces(optimizer, chunks, host)
    else:
        optimizer.step_with_ready_grads()
    return norm, True


def step_by_pieces(optimizer: Any, chunks: Sequence[DistributedDataParallel], host: HostMemory) -> None:
    """Do the work of `step_with_ready_grads` with main params and moments in host memory, and leave them there.

    AdamW updates each element independently, so the results are bit for bit the same.
    """
    for _, shards in groupby(
        owned_shards(named_local_parameters(chunks), optimizer), key=lambda shard: id(shard.inner)
    ):
        _step_inner(list(shards), host)
    wrapper = chunks[0].ddp_config
    if wrapper.use_distributed_optimizer and not wrapper.overlap_param_gather:
        for chunk in chunks:
            chunk.start_param_sync()


def _step_inner(shards: Sequence[OwnedShard], host: HostMemory) -> None:
    """Step one optimizer piece by piece, and round the main params into the model's weights."""
    groups = shards[0].inner.param_groups
    whole, counts = [group["params"] for group in groups], [group.get("step") for group in groups]
    stepped = list(counts)
    for span in pieces([shard.main.numel() for shard in shards], PIECE_ELEMENTS):
        piece = shards[span]
        mains = {id(shard.main) for shard in piece}
        host.onload(tensor for shard in piece for tensor in update_tensors(shard))
        for index, group in enumerate(groups):
            group["params"] = [main for main in whole[index] if id(main) in mains]
            # Fused optimizers count steps per group, and would count each piece as one.
            _set_count(group, counts[index])
        shards[0].inner.step()
        stepped = [
            group.get("step") if group["params"] else count for group, count in zip(groups, stepped, strict=True)
        ]
        for shard in piece:
            if has_main_param(shard):
                shard.parameter.view(-1)[shard.start : shard.end].copy_(shard.main.view(-1))
        # The first step has only just created its moments.
        host.offload((tensor for shard in piece for tensor in update_tensors(shard)), release=False)
    for group, params, count in zip(groups, whole, stepped, strict=True):
        group["params"] = params
        _set_count(group, count)


def _set_count(group: dict[str, Any], count: int | None) -> None:
    if count is None:
        group.pop("step", None)
    else:
        group["step"] = count


def _all_ranks(condition: bool, group: dist.ProcessGroup | None) -> bool:
    # One expert-parallel rank may see a finite norm and another not; all must take the same branch.
    flag = torch.tensor([int(condition)], dtype=torch.int32, device=torch.cuda.current_device())
    dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=group)
    return bool(flag.item())
