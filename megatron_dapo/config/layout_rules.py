"""Rules of parallel layouts and of precision: sizes among themselves, processes, and the model's shape."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_dapo.config.errors import Violation, nearest_divisor, value_of, violation
from megatron_dapo.config.inputs import ArchitectureFacts
from megatron_dapo.config.schema import Config
from megatron_dapo.precision import FP8_DELAYED, RECIPES, LinearSizes, Recipe, misfits


def _layout(config: Config) -> Iterator[Violation]:
    p = config.parallel
    if p.vpp_size > 1 and p.pp_size == 1:
        yield violation(
            config,
            "parallel.vpp_size",
            "parallel.vpp_size == 1 where parallel.pp_size == 1",
            "set parallel.vpp_size = 1, or parallel.pp_size = 2 or more",
            "parallel.pp_size",
        )
    if p.sequence_parallel and p.tp_size == 1:
        yield violation(
            config,
            "parallel.sequence_parallel",
            "parallel.tp_size > 1 where parallel.sequence_parallel is on",
            "set parallel.sequence_parallel = false, or parallel.tp_size = 2 or more",
            "parallel.tp_size",
        )


def _expert_tensor(config: Config) -> Iterator[Violation]:
    p = config.parallel
    if p.etp_size < 1 or p.tp_size < 1:
        return
    if p.tp_size % p.etp_size:
        yield violation(
            config,
            "parallel.etp_size",
            "parallel.tp_size % parallel.etp_size == 0",
            f"set parallel.etp_size = {nearest_divisor(p.tp_size, p.etp_size)}",
            "parallel.tp_size",
        )
    elif p.etp_size != p.tp_size and p.ep_size == 1:
        yield violation(
            config,
            "parallel.etp_size",
            "parallel.etp_size == parallel.tp_size where parallel.ep_size == 1",
            "set parallel.etp_size = 0, or parallel.ep_size = 2 or more",
            "parallel.tp_size",
            "parallel.ep_size",
        )


def _offload(config: Config) -> Iterator[Violation]:
    """The storage of an FP8 weight is Transformer Engine's."""
    for path in ("model.offload", "critic.offload"):
        if value_of(config, path) == "all" and config.precision.fp8_param:
            yield violation(
                config,
                path,
                f'{path} is "none" or "optimizer" where precision.fp8_param is on',
                f'set {path} = "optimizer"',
                "precision.fp8_param",
            )


def world_rules(config: Config, world_size: int) -> Iterator[Violation]:
    """Rules of the number of processes that hold the policy; those of the critic alone are not among them."""
    p = config.parallel
    if min(p.tp_size, p.pp_size, p.cp_size, p.ep_size) < 1 or world_size < 1:
        return
    model_size = p.tp_size * p.pp_size * p.cp_size
    axes = ("parallel.pp_size", "parallel.cp_size")
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
            "parallel.tp_size",
            "processes % (tp_size * pp_size * cp_size) == 0",
            f"start {needed + config.num_critic_processes} processes, or choose sizes whose product divides {world_size}",
            *axes,
            processes=world_size,
            model_size=model_size,
        )
        return
    yield from _data_parallel(config, world_size // model_size)


def _data_parallel(config: Config, data: int) -> Iterator[Violation]:
    p = config.parallel
    cut = p.etp_size or p.tp_size
    if p.tp_size % cut == 0 and (p.tp_size // cut * data * p.cp_size) % p.ep_size:
        yield violation(
            config,
            "parallel.ep_size",
            "(tp_size / etp_size * data * cp_size) % ep_size == 0",
            f"set parallel.ep_size = {nearest_divisor(p.tp_size // cut * data * p.cp_size, p.ep_size)}",
            "parallel.cp_size",
            "parallel.etp_size",
            data=data,
        )
    # A rank without a response would still have to join every collective of the step.
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
    tensor = config.parallel.tp_size
    names = ("num_attention_heads", "num_key_value_heads", *(("intermediate_size",) * architecture.has_dense_layers))
    # The fix names a size that divides all of them, or it would only move the error to the next one.
    common = math.gcd(*(getattr(architecture, name) for name in names))
    for name in names:
        size = getattr(architecture, name)
        if tensor >= 1 and size % tensor:
            yield violation(
                config,
                "parallel.tp_size",
                f"{name} % parallel.tp_size == 0",
                f"set parallel.tp_size = {nearest_divisor(common, tensor)}",
                **{name: size},
            )


def _engine_heads(config: Config, architecture: ArchitectureFacts) -> Iterator[Violation]:
    """SGLang cuts query heads evenly; key-value heads are cut or repeated."""
    tensor, heads, groups = config.sglang.tp_size, architecture.num_attention_heads, architecture.num_key_value_heads
    if config.rollout.engine != "sglang" or tensor < 1:
        return
    if heads % tensor or (groups % tensor and tensor % groups):
        yield violation(
            config,
            "sglang.tp_size",
            "num_attention_heads % sglang.tp_size == 0, and sglang.tp_size divides num_key_value_heads or is a multiple",
            f"set sglang.tp_size = {nearest_divisor(math.gcd(heads, groups), tensor)}",
            num_attention_heads=heads,
            num_key_value_heads=groups,
        )


def _layers(config: Config, architecture: ArchitectureFacts) -> Iterator[Violation]:
    p = config.parallel
    chunks = p.pp_size * p.vpp_size
    if chunks >= 1 and architecture.num_layers % chunks:
        yield violation(
            config,
            "parallel.pp_size",
            "num_layers % (pp_size * vpp_size) == 0",
            f"choose pp_size * vpp_size = {nearest_divisor(architecture.num_layers, chunks)}",
            "parallel.vpp_size",
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
    expert = config.parallel.ep_size
    if expert > 1 and (architecture.num_experts == 0 or architecture.num_experts % expert):
        fix = "set parallel.ep_size = 1 (the model is dense)"
        if architecture.num_experts:
            fix = f"set parallel.ep_size = {nearest_divisor(architecture.num_experts, expert)}"
        yield violation(
            config, "parallel.ep_size", "num_experts % parallel.ep_size == 0", fix, num_experts=architecture.num_experts
        )


def _expert_matrices(config: Config, architecture: ArchitectureFacts) -> Iterator[Violation]:
    p, size = config.parallel, architecture.moe_intermediate_size
    cut = p.etp_size or p.tp_size
    if not architecture.num_experts or min(p.tp_size, cut) < 1:
        return
    if size % cut:
        yield violation(
            config,
            "parallel.etp_size",
            "moe_intermediate_size % etp_size == 0 (0: tp_size)",
            f"set parallel.etp_size = {nearest_divisor(size, cut)}",
            "parallel.tp_size",
            moe_intermediate_size=size,
        )
    if p.tp_size > 1 and not p.sequence_parallel:
        yield violation(
            config,
            "parallel.sequence_parallel",
            "parallel.sequence_parallel where experts meet parallel.tp_size > 1 (Megatron-core needs it)",
            "set parallel.sequence_parallel = true",
            "parallel.tp_size",
        )


LAYOUT_RULES = (_layout, _expert_tensor, _offload)
ARCHITECTURE_RULES = (_heads, _engine_heads, _layers, _positions, _experts, _expert_matrices)


_LAYER_FIELDS = ("precision.num_layers_at_start_in_bf16", "precision.num_layers_at_end_in_bf16")


def _recipe(config: Config) -> Recipe:
    return RECIPES.get(config.precision.recipe, Recipe())


def _type(config: Config) -> Iterator[Violation]:
    wanted = _recipe(config).dtype
    if wanted and wanted != config.model.dtype:
        yield violation(
            config,
            "precision.recipe",
            f'model.dtype == "{wanted}" where precision.recipe == "{config.precision.recipe}"',
            f'set precision.recipe = "", or model.dtype = "{wanted}"',
            "model.dtype",
        )


def _only_with_fp8(config: Config) -> Iterator[Violation]:
    asked = config.precision
    fields = [path for path in _LAYER_FIELDS if getattr(asked, path.rpartition(".")[2]) > 0]
    fields += ["precision.fp8_param"] * asked.fp8_param
    for path in () if _recipe(config).is_fp8 else fields:
        off = "false" if path.endswith("fp8_param") else "0"
        yield violation(
            config,
            path,
            f"{path} == {off} without an FP8 recipe",
            f'set {path} = {off}, or precision.recipe = "fp8_blockwise"',
            "precision.recipe",
        )


def _layers_in_bf16(config: Config) -> Iterator[Violation]:
    asked = config.precision
    if asked.recipe == FP8_DELAYED and max(asked.num_layers_at_start_in_bf16, asked.num_layers_at_end_in_bf16) > 0:
        yield violation(
            config,
            "precision.recipe",
            "num_layers_at_start_in_bf16 == num_layers_at_end_in_bf16 == 0 for fp8_delayed (its maxima are reduced over all layers at once)",
            'set both to 0, or precision.recipe = "fp8_blockwise"',
            *_LAYER_FIELDS,
        )


def _parameters(config: Config) -> Iterator[Violation]:
    if not config.precision.fp8_param or not _recipe(config).is_fp8:
        return
    if not config.parallel.use_distributed_optimizer:
        yield violation(
            config,
            "precision.fp8_param",
            "parallel.use_distributed_optimizer where precision.fp8_param (it makes FP8 weights of the main params)",
            "set parallel.use_distributed_optimizer = true, or precision.fp8_param = false",
            "parallel.use_distributed_optimizer",
        )
    if config.model.dtype != "bfloat16":
        yield violation(
            config,
            "precision.fp8_param",
            'model.dtype == "bfloat16" where precision.fp8_param (a float32 weight is its own main param)',
            'set model.dtype = "bfloat16", or precision.fp8_param = false',
            "model.dtype",
        )


def _shapes(config: Config, architecture: ArchitectureFacts) -> Iterator[Violation]:
    recipe, tensor = config.precision.recipe, config.parallel.tp_size
    expert_tensor = config.parallel.etp_size or tensor
    if not _recipe(config).is_fp8 or min(tensor, expert_tensor) < 1:
        return
    sizes = LinearSizes(
        architecture.hidden_size,
        architecture.num_attention_heads,
        architecture.num_key_value_heads,
        architecture.head_size,
        architecture.intermediate_size if architecture.has_dense_layers else 0,
        architecture.moe_intermediate_size if architecture.num_experts else 0,
    )
    fits_whole = not misfits(recipe, sizes, 1)
    # Experts are cut as dense layers where nothing else is said.
    cuts = {"tensor": "parallel.tp_size", "expert_tensor": "parallel.etp_size"}
    if config.parallel.etp_size == 0:
        cuts["expert_tensor"] = "parallel.tp_size"
    for one in misfits(recipe, sizes, tensor, expert_tensor):
        path = cuts[one.cut] if one.cut and fits_whole else ""
        yield violation(
            config,
            path or "precision.recipe",
            f"{one.what} % {one.multiple} == 0 for precision.recipe = {recipe}",
            'set precision.recipe = ""' + (f", or a smaller {path}" if path else ""),
            *(("precision.recipe",) if path else ()),
            size=one.size,
            multiple=one.multiple,
        )


def _num_layers(config: Config, architecture: ArchitectureFacts) -> Iterator[Violation]:
    asked, stages = config.precision, config.parallel.pp_size
    if not _recipe(config).is_fp8 or stages < 1:
        return
    a_stage = architecture.num_layers // stages
    for path in _LAYER_FIELDS:
        if getattr(asked, path.rpartition(".")[2]) > a_stage:
            yield violation(
                config,
                path,
                f"{path} <= num_layers / parallel.pp_size (Megatron-core keeps them in one stage)",
                f"set {path} = {a_stage} or less",
                "parallel.pp_size",
                num_layers=architecture.num_layers,
            )
    if asked.num_layers_at_start_in_bf16 + asked.num_layers_at_end_in_bf16 >= architecture.num_layers:
        yield violation(
            config,
            "precision.num_layers_at_start_in_bf16",
            "num_layers_at_start_in_bf16 + num_layers_at_end_in_bf16 < num_layers (else nothing is computed in FP8)",
            'lower them, or set precision.recipe = ""',
            "precision.num_layers_at_end_in_bf16",
            num_layers=architecture.num_layers,
        )


PRECISION_RULES = (_type, _only_with_fp8, _layers_in_bf16, _parameters)
PRECISION_ARCHITECTURE_RULES = (_shapes, _num_layers)
