"""Rules of the parallel layout: of its sizes among themselves, of the number of processes, and of the model's shape."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_dapo.config.architecture import ArchitectureFacts
from megatron_dapo.config.errors import Violation
from megatron_dapo.config.rule import nearest_divisor, value_of, violation
from megatron_dapo.config.schema import Config


def _layout(config: Config) -> Iterator[Violation]:
    p = config.parallel
    if p.virtual_pipeline > 1 and p.pipeline == 1:
        yield violation(
            config,
            "parallel.virtual_pipeline",
            "parallel.virtual_pipeline == 1 where parallel.pipeline == 1",
            "set parallel.virtual_pipeline = 1, or parallel.pipeline = 2 or more",
            "parallel.pipeline",
        )
    if p.sequence_parallel and p.tensor == 1:
        yield violation(
            config,
            "parallel.sequence_parallel",
            "parallel.tensor > 1 where parallel.sequence_parallel is on",
            "set parallel.sequence_parallel = false, or parallel.tensor = 2 or more",
            "parallel.tensor",
        )


def _expert_tensor(config: Config) -> Iterator[Violation]:
    p = config.parallel
    if p.expert_tensor < 1 or p.tensor < 1:
        return
    if p.tensor % p.expert_tensor:
        yield violation(
            config,
            "parallel.expert_tensor",
            "parallel.tensor % parallel.expert_tensor == 0",
            f"set parallel.expert_tensor = {nearest_divisor(p.tensor, p.expert_tensor)}",
            "parallel.tensor",
        )
    elif p.expert_tensor != p.tensor and p.expert == 1:
        yield violation(
            config,
            "parallel.expert_tensor",
            "parallel.expert_tensor == parallel.tensor where parallel.expert == 1",
            "set parallel.expert_tensor = 0, or parallel.expert = 2 or more",
            "parallel.tensor",
            "parallel.expert",
        )


def _offload(config: Config) -> Iterator[Violation]:
    """The storage of an FP8 weight is Transformer Engine's."""
    for path in ("model.offload", "critic.offload"):
        if value_of(config, path) == "all" and config.precision.fp8_parameters:
            yield violation(
                config,
                path,
                f'{path} is "none" or "optimizer" where precision.fp8_parameters is on',
                f'set {path} = "optimizer"',
                "precision.fp8_parameters",
            )


def world_rules(config: Config, world_size: int) -> Iterator[Violation]:
    """Rules of the number of processes that hold the policy; those of the critic alone are not among them."""
    p = config.parallel
    if min(p.tensor, p.pipeline, p.context, p.expert) < 1 or world_size < 1:
        return
    model_size = p.tensor * p.pipeline * p.context
    axes = ("parallel.pipeline", "parallel.context")
    if p.num_processes and p.num_processes != world_size:
        yield violation(
            config,
            "parallel.num_processes",
            "parallel.num_processes == the processes there are",
            f"start {p.num_processes + config.num_critic_processes} processes, or set parallel.num_processes = "
            f"{world_size} or 0",
            processes=world_size,
        )
    if world_size % model_size:
        needed = math.ceil(world_size / model_size) * model_size
        yield violation(
            config,
            "parallel.tensor",
            "processes % (tensor * pipeline * context) == 0",
            f"start {needed + config.num_critic_processes} processes, or choose sizes whose product divides {world_size}",
            *axes,
            processes=world_size,
            model_size=model_size,
        )
        return
    yield from _data_parallel(config, world_size // model_size)


def _data_parallel(config: Config, data: int) -> Iterator[Violation]:
    p = config.parallel
    cut = p.expert_tensor or p.tensor
    if p.tensor % cut == 0 and (p.tensor // cut * data * p.context) % p.expert:
        yield violation(
            config,
            "parallel.expert",
            "(tensor / expert_tensor * data * context) % expert == 0",
            f"set parallel.expert = {nearest_divisor(p.tensor // cut * data * p.context, p.expert)}",
            "parallel.context",
            "parallel.expert_tensor",
            data=data,
        )
    responses = config.training.mini_batch_prompts * config.rollout.group_size
    needed = math.ceil(data / max(config.rollout.group_size, 1))
    if 1 <= responses < data:
        yield violation(
            config,
            "training.mini_batch_prompts",
            "mini_batch_prompts * group_size >= data-parallel ranks (each trains a response in every optimizer step)",
            f"set training.mini_batch_prompts = {needed} or more, or use fewer data-parallel ranks",
            "rollout.group_size",
            data=data,
        )


def _heads(config: Config, architecture: ArchitectureFacts) -> Iterator[Violation]:
    tensor = config.parallel.tensor
    names = ("num_attention_heads", "num_key_value_heads", *(("intermediate_size",) * architecture.has_dense_layers))
    common = math.gcd(*(getattr(architecture, name) for name in names))
    for name in names:
        size = getattr(architecture, name)
        if tensor >= 1 and size % tensor:
            yield violation(
                config,
                "parallel.tensor",
                f"{name} % parallel.tensor == 0",
                f"set parallel.tensor = {nearest_divisor(common, tensor)}",
                **{name: size},
            )


def _engine_heads(config: Config, architecture: ArchitectureFacts) -> Iterator[Violation]:
    """SGLang cuts query heads evenly; key-value heads are cut or repeated."""
    tensor, heads, groups = config.sglang.tensor, architecture.num_attention_heads, architecture.num_key_value_heads
    if config.rollout.engine != "sglang" or tensor < 1:
        return
    if heads % tensor or (groups % tensor and tensor % groups):
        yield violation(
            config,
            "sglang.tensor",
            "num_attention_heads % sglang.tensor == 0, and sglang.tensor divides num_key_value_heads or is a multiple",
            f"set sglang.tensor = {nearest_divisor(math.gcd(heads, groups), tensor)}",
            num_attention_heads=heads,
            num_key_value_heads=groups,
        )


def _layers(config: Config, architecture: ArchitectureFacts) -> Iterator[Violation]:
    p = config.parallel
    chunks = p.pipeline * p.virtual_pipeline
    if chunks >= 1 and architecture.num_layers % chunks:
        yield violation(
            config,
            "parallel.pipeline",
            "num_layers % (pipeline * virtual_pipeline) == 0",
            f"choose pipeline * virtual_pipeline = {nearest_divisor(architecture.num_layers, chunks)}",
            "parallel.virtual_pipeline",
            num_layers=architecture.num_layers,
        )


def _positions(config: Config, architecture: ArchitectureFacts) -> Iterator[Violation]:
    limit = architecture.max_position_embeddings
    prompt = config.data.max_prompt_tokens
    lengths = {"rollout.max_response_tokens": config.rollout.max_response_tokens}
    if config.data.eval_paths and config.evaluation.max_response_tokens:
        lengths["evaluation.max_response_tokens"] = config.evaluation.max_response_tokens
    for path, response in lengths.items():
        if prompt + response > limit:
            fits = limit - prompt
            fix = f"set {path} = {fits} or less" if fits >= 1 else f"set data.max_prompt_tokens below {limit}"
            yield violation(
                config,
                path,
                f"data.max_prompt_tokens + {path} <= max_position_embeddings",
                f"{fix}, or use a model with more positions",
                "data.max_prompt_tokens",
                max_position_embeddings=limit,
            )


def _experts(config: Config, architecture: ArchitectureFacts) -> Iterator[Violation]:
    expert = config.parallel.expert
    if expert > 1 and (architecture.num_experts == 0 or architecture.num_experts % expert):
        fix = "set parallel.expert = 1 (the model is dense)"
        if architecture.num_experts:
            fix = f"set parallel.expert = {nearest_divisor(architecture.num_experts, expert)}"
        yield violation(
            config, "parallel.expert", "num_experts % parallel.expert == 0", fix, num_experts=architecture.num_experts
        )


def _expert_matrices(config: Config, architecture: ArchitectureFacts) -> Iterator[Violation]:
    p, size = config.parallel, architecture.moe_intermediate_size
    cut = p.expert_tensor or p.tensor
    if not architecture.num_experts or min(p.tensor, cut) < 1:
        return
    if size % cut:
        yield violation(
            config,
            "parallel.expert_tensor",
            "moe_intermediate_size % expert_tensor == 0 (0: tensor)",
            f"set parallel.expert_tensor = {nearest_divisor(size, cut)}",
            "parallel.tensor",
            moe_intermediate_size=size,
        )
    if p.tensor > 1 and not p.sequence_parallel:
        yield violation(
            config,
            "parallel.sequence_parallel",
            "parallel.sequence_parallel where experts meet parallel.tensor > 1 (Megatron-core needs it)",
            "set parallel.sequence_parallel = true",
            "parallel.tensor",
        )


LAYOUT_RULES = (_layout, _expert_tensor, _offload)
ARCHITECTURE_RULES = (_heads, _engine_heads, _layers, _positions, _experts, _expert_matrices)
