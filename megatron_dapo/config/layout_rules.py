"""Rules for the parallel layout and for precision: sizes that must divide each other, the processes or the model's
shape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_dapo.config.model_schema import ParallelConfig
from megatron_dapo.config.rules import UnusableInput, Violation, value_of
from megatron_dapo.config.schema import Config
from megatron_dapo.config.section import Rule
from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.models.lora import chosen_targets
from megatron_dapo.precision import (
    RECIPES,
    PrecisionRecipe,
    micro_batch_multiple,
    misfits,
    token_multiple,
)

_OVERLAPS = 'megatron.get("tp_comm_overlap", False) or critic.megatron.get("tp_comm_overlap", False)'

LAYOUT_RULES = (
    Rule(
        'parallel.sequence_parallel and model.dtype == "bfloat16" and not computes_in_fp8',
        "set megatron.tp_comm_overlap = false, or parallel.sequence_parallel = true with a bfloat16 model that computes in bf16",
        path="megatron",
        when=_OVERLAPS,
        reason="tp_comm_overlap overlaps the gathers and scatters of sequence parallelism, in buffers of bf16",
    ),
    Rule(
        'model.offload == "none" and critic.offload == "none" and not optimizer.on_host and not critic.optimizer.on_host',
        "set megatron.nccl_ub = false, or offload nothing",
        path="megatron",
        when='megatron.get("nccl_ub", False) or critic.megatron.get("nccl_ub", False)',
        reason="memory that comes back to the device is not the memory that NCCL has registered",
    ),
    # Transformer Engine owns the storage of FP8 weights: it cannot be freed and brought back.
    *(
        Rule(f'{path} != "all"', f'set {path} = "optimizer"', when="precision.fp8_param")
        for path in ("model.offload", "critic.offload")
    ),
    # Quantizing FP8 params needs the maxima over all data ranks' shards at once.
    *(
        Rule(f"not {path}", f"set {path} = false", when="precision.fp8_param")
        for path in ("optimizer.on_host", "critic.optimizer.on_host")
    ),
)

POLICY, CRITIC = "parallel", "critic.parallel"  # the layouts that the rules below are about
START_PROCESSES = "start {padded(processes, model_size) + num_critic_processes} processes"


def world_rules(layout: str, start: str = START_PROCESSES) -> tuple[Rule, ...]:
    """Return the rules between a layout and its processes. `start`: how to get a number of processes that it divides."""
    return (
        Rule(
            "parallel.num_processes == processes",
            "start {parallel.num_processes + num_critic_processes} processes, or set parallel.num_processes = {processes} or 0",
            when="parallel.num_processes > 0",
        ),
        Rule(
            "processes % model_size == 0",
            f"{start}, or choose sizes whose product divides {{processes}}",
            when=f"model_size == {layout}.tp_size * {layout}.pp_size * {layout}.cp_size",
            path=f"{layout}.tp_size",
        ),
        Rule(
            f"expert_ranks % {layout}.ep_size == 0",
            f"set {layout}.ep_size = {{nearest_divisor(expert_ranks, {layout}.ep_size)}}",
            when="processes % model_size == 0 and expert_ranks == "
            f"{layout}.tp_size / (parallel.etp_size or {layout}.tp_size) * data_parallel_size * {layout}.cp_size",
        ),
        # A rank without responses would still have to join every collective of the step.
        Rule(
            "training.mini_batch_prompts * rollout.group_size >= data_parallel_size",
            "set training.mini_batch_prompts = {ceil(data_parallel_size / rollout.group_size)} or more, or use fewer data-parallel ranks",
            when="processes % model_size == 0",
            reason="each rank trains a response in every optimizer step",
        ),
    )


# Divides every size that is split over tensor ranks; a fix for only one of them would move the error to the next.
_COMMON_SIZE = "gcd(num_attention_heads, num_key_value_heads, has_dense_layers * intermediate_size)"


def architecture_rules(layout: str) -> tuple[Rule, ...]:
    """Return the rules between a layout and the sizes of the model."""
    expert_cut = f"(parallel.etp_size or {layout}.tp_size)"
    return (
        *(
            Rule(
                f"{size} % {layout}.tp_size == 0",
                f"set {layout}.tp_size = {{nearest_divisor({_COMMON_SIZE}, {layout}.tp_size)}}",
                when=when,
            )
            for size, when in (
                ("num_attention_heads", "True"),
                ("num_key_value_heads", "True"),
                ("intermediate_size", "has_dense_layers"),
            )
        ),
        # SGLang splits query heads evenly; key-value heads are split or replicated.
        Rule(
            "num_attention_heads % sglang.tp_size == 0 and "
            "(num_key_value_heads % sglang.tp_size == 0 or sglang.tp_size % num_key_value_heads == 0)",
            "set sglang.tp_size = {nearest_divisor(gcd(num_attention_heads, num_key_value_heads), sglang.tp_size)}",
            when='rollout.engine == "sglang"',
        ),
        Rule(
            f"num_layers % ({layout}.pp_size * {layout}.vpp_size) == 0",
            f"choose pp_size * vpp_size = {{nearest_divisor(num_layers, {layout}.pp_size * {layout}.vpp_size)}}, or set "
            "parallel.first_stage_layers and parallel.last_stage_layers",
            path=f"{layout}.pp_size",
            when="not parallel.first_stage_layers and not parallel.last_stage_layers",
        ),
        Rule(
            "stages_fit(num_layers, parallel.pp_size, parallel.vpp_size, parallel.first_stage_layers, parallel.last_stage_layers)",
            "choose them so that the stages between share num_layers - first_stage_layers - last_stage_layers evenly, each a "
            "multiple of vpp_size; pp_size is {parallel.pp_size}, vpp_size {parallel.vpp_size}, num_layers {num_layers}",
            path="parallel.first_stage_layers",
            when="parallel.first_stage_layers or parallel.last_stage_layers",
        ),
        # Strictly below, because a response needs a position, too.
        Rule(
            "data.max_prompt_tokens < max_position_embeddings",
            "set data.max_prompt_tokens below {max_position_embeddings}, or use a model with more positions",
        ),
        *(
            Rule(
                f"data.max_prompt_tokens + {path} <= max_position_embeddings",
                f"set {path} = {{max_position_embeddings - data.max_prompt_tokens}} or less, or use a model with more positions",
                when=f"data.max_prompt_tokens < max_position_embeddings{condition}",
            )
            for path, condition in (
                ("rollout.max_response_tokens", ""),
                ("evaluation.max_response_tokens", " and data.has_held_out and evaluation.max_response_tokens > 0"),
            )
        ),
        Rule(
            f"num_experts > 0 and num_experts % {layout}.ep_size == 0",
            f"set {layout}.ep_size = {{nearest_divisor(num_experts, {layout}.ep_size)}}",
            when=f"{layout}.ep_size > 1",
            reason="a dense model has no experts",
        ),
        Rule(
            f"moe_intermediate_size % {expert_cut} == 0",
            f"set parallel.etp_size = {{nearest_divisor(moe_intermediate_size, {expert_cut})}}",
            when="num_experts > 0",
        ),
        Rule(
            "parallel.sequence_parallel",
            "set parallel.sequence_parallel = true",
            when="num_experts > 0 and parallel.tp_size > 1",
            reason="Megatron-core needs it for experts with tensor parallelism",
        ),
        Rule(
            "num_experts > 0",
            "set rollout.routing_replay = false",
            when="rollout.routing_replay",
            reason="a dense model chooses no experts",
        ),
    )


_LAYER_FIELDS = ("precision.num_layers_at_start_in_bf16", "precision.num_layers_at_end_in_bf16")
_FP8_PARAM = "precision.fp8_param and computes_in_fp8"

PRECISION_RULES = (
    # fp32 and bf16 only restate model.dtype; they convert nothing.
    Rule(
        "model.dtype == recipe_dtype",
        'set precision.recipe = "", or model.dtype = "{recipe_dtype}"',
        when='recipe_dtype != ""',
    ),
    # Without FP8 these keys would have no effect, so they are refused rather than ignored.
    *(
        Rule(
            f"{path} == {off}",
            f'set {path} = {off.lower()}, or precision.recipe = "fp8_blockwise"',
            when="not computes_in_fp8",
            path=path,
        )
        for path, off in ((_LAYER_FIELDS[0], "0"), (_LAYER_FIELDS[1], "0"), ("precision.fp8_param", "False"))
    ),
    Rule(
        "parallel.use_distributed_optimizer",
        "set parallel.use_distributed_optimizer = true, or precision.fp8_param = false",
        when=_FP8_PARAM,
        reason="it makes FP8 weights of the main params",
        path="precision.fp8_param",
    ),
    Rule(
        'model.dtype == "bfloat16"',
        'set model.dtype = "bfloat16", or precision.fp8_param = false',
        when=_FP8_PARAM,
        reason="a float32 weight is its own main param",
        path="precision.fp8_param",
    ),
    *(
        Rule(
            'model.dtype == "bfloat16"',
            f'set model.dtype = "bfloat16", or {path} = "auto"',
            when=f'{path} == "{name}"',
            path=path,
        )
        for path, name in (("model.logprob_implementation", "chunked_bf16"), ("model.attention_implementation", "flash"))
    ),
)

_LORA = "model.lora.rank > 0"
_ADAPTERS = 'model.lora.sync == "adapters"'
LORA_RULES = (
    Rule(_LORA, 'set model.lora.sync = "merged", or model.lora.rank = 16', when=_ADAPTERS),
    Rule(
        "not model.allow_random_init",
        'set model.allow_random_init = false, or model.lora.path = ""',
        when='model.lora.path != ""',
        reason="stored adapters belong to stored weights",
    ),
    Rule(
        'rollout.engine == "sglang" and not sglang.urls',
        'set model.lora.sync = "merged", or rollout.engine = "sglang" without sglang.urls',
        when=_ADAPTERS,
        reason="only SGLang servers that this run starts hold adapters next to weights",
    ),
    Rule(
        'sglang.placement == "disaggregated"',
        'set model.lora.sync = "merged", or sglang.placement = "disaggregated"',
        when=_ADAPTERS,
        reason="a server that gives its memory to the trainer loses its weights, and a sync would not bring them back",
    ),
    Rule(
        'sglang.update_pause == "abort"',
        'set sglang.update_pause = "abort"',
        when=_ADAPTERS,
        reason="an adapter in use cannot be replaced",
    ),
    Rule(
        "not computes_in_fp8",
        'set precision.recipe = "", or model.lora.rank = 0',
        when=_LORA,
        reason="engines that agree with it hold FP8 weights, in which a sum drops most of an adapter",
    ),
    Rule(
        'sglang.quantization == "none"',
        'set sglang.quantization = "none", or model.lora.rank = 0',
        when=_LORA,
        reason="an FP8 weight drops what is smaller than 3 % of it, and so most of an adapter that is merged into it",
    ),
    Rule(
        "sglang.weight_sync_full_interval == 1",
        "set sglang.weight_sync_full_interval = 1",
        when=_LORA,
        reason="an adapter changes every weight of its matrix",
    ),
)

PRECISION_ARCHITECTURE_RULES = (
    *(
        Rule(
            f"{path} <= num_layers // parallel.pp_size",
            f"set {path} = {{num_layers // parallel.pp_size}} or less",
            when="computes_in_fp8",
            reason="Megatron-core keeps them in one stage",
        )
        for path in _LAYER_FIELDS
    ),
    Rule(
        f"{_LAYER_FIELDS[0]} + {_LAYER_FIELDS[1]} < num_layers",
        'lower them, or set precision.recipe = ""',
        when="computes_in_fp8",
        reason="nothing would be computed in FP8",
        path=_LAYER_FIELDS[0],
    ),
)


def layout_facts(config: Config, p: ParallelConfig, processes: int) -> dict[str, Any]:
    """Return the numbers of the layout `p` that formulas name, for `processes` that hold a model."""
    recipe = RECIPES.get(config.precision.recipe, PrecisionRecipe())
    # At least 1: sizes out of their range are reported by their own line, and must not divide by 0 here.
    tensor, context = max(p.tp_size, 1), max(p.cp_size, 1)
    model_size = tensor * max(p.pp_size, 1) * context
    data = processes // model_size
    return {
        "processes": processes,
        "model_size": model_size,
        "data_parallel_size": data,
        "expert_ranks": tensor // max(p.etp_size or tensor, 1) * data * context,
        "num_critic_processes": config.num_critic_processes,
        "multiple": micro_batch_multiple(tensor, context, p.sequence_parallel, token_multiple(config.precision.recipe)),
        "computes_in_fp8": recipe.is_fp8,
        "recipe_dtype": recipe.dtype,
    }


_SIZES = (
    *("num_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size", "has_dense_layers"),
    *("num_experts", "moe_intermediate_size", "max_position_embeddings"),
)


def architecture_facts(architecture: ModelArchitecture) -> dict[str, Any]:
    """Return the sizes of the model that formulas refer to."""
    return {name: getattr(architecture, name) for name in _SIZES}


def missing_targets(config: Config, architecture: ModelArchitecture) -> Iterator[Violation]:
    """Yield the violation of an adapter for a matrix that the model does not have, or that nothing trains."""
    path, lora = "model.lora.targets", config.model.lora
    if not lora.rank:
        return
    try:
        targets = chosen_targets(architecture.shapes(), lora.targets)
    except ValueError as error:
        yield UnusableInput(path, str(error), "leave it out of model.lora.targets")
        return
    in_experts = {"gate_proj", "up_proj", "down_proj"}.intersection(targets)
    if lora.serves_adapters and (architecture.latent is not None or architecture.gated_attention):
        text = f"{architecture.model_type}: adapters next to latent or gated attention are only synced merged"
        yield UnusableInput("model.lora.sync", text, 'set model.lora.sync = "merged"')
    elif lora.serves_adapters and architecture.num_experts and in_experts:
        text = f"adapters of experts ({', '.join(sorted(in_experts))}) are only synced merged"
        yield UnusableInput("model.lora.sync", text, 'set model.lora.sync = "merged", or leave them out of model.lora.targets')


def uncut_biases(config: Config, architecture: ModelArchitecture, layout: str) -> Iterator[Violation]:
    """Yield a violation for each setting under which a model with biases of experts, and sinks, is not computed or served."""
    if not architecture.linear_biases:
        return
    name, expert_tensor = architecture.model_type, config.parallel.etp_size or value_of(config, layout).tp_size
    if expert_tensor > 1:
        reason = f"{name}: experts with biases cannot be cut over {expert_tensor} ranks, each of which would add them"
        fix = f"set parallel.etp_size = 1, and parallel.ep_size to 2 or more if {layout}.tp_size is"
        yield UnusableInput("parallel.etp_size", reason, fix)
    if config.model.attention_implementation == "flash":
        reason = f"{name}: torch's flash attention has no sinks"
        yield UnusableInput("model.attention_implementation", reason, 'set model.attention_implementation = "auto"')
    if RECIPES.get(config.precision.recipe, PrecisionRecipe()).is_fp8:
        yield UnusableInput("precision.recipe", f"{name}: biases of experts are not computed in FP8", "remove it")
    if config.sglang.quantization != "none":
        reason = f"{name}: its experts are not served in FP8"
        yield UnusableInput("sglang.quantization", reason, 'set sglang.quantization = "none"')


def unfit_shapes(config: Config, architecture: ModelArchitecture, layout: str) -> Iterator[Violation]:
    """Yield a violation for every weight whose size on a rank of the layout the FP8 recipe does not support."""
    recipe, tensor = config.precision.recipe, value_of(config, layout).tp_size
    expert_tensor = config.parallel.etp_size or tensor
    if not RECIPES.get(recipe, PrecisionRecipe()).is_fp8 or min(tensor, expert_tensor) < 1 or architecture.linear_biases:
        return
    sizes = architecture.linear_sizes()
    # A smaller parallel size is a fix only if the whole weights have supported sizes.
    fits_whole = not misfits(recipe, sizes, 1)
    # Without etp_size, experts are split like dense layers.
    expert_path = "parallel.etp_size" if config.parallel.etp_size else f"{layout}.tp_size"
    cuts = {"tensor": f"{layout}.tp_size", "expert_tensor": expert_path}
    for one in misfits(recipe, sizes, tensor, expert_tensor, layout):
        path = cuts[one.cut] if one.cut and fits_whole else ""
        values = {name: value_of(config, name) for name in filter(None, (path, "precision.recipe"))}
        yield Violation(
            path=path or "precision.recipe",
            formula=f"{one.what} % {one.multiple} == 0 for precision.recipe = {recipe}",
            suggestion='set precision.recipe = ""' + (f", or a smaller {path}" if path else ""),
            values={**values, "size": one.size, "multiple": one.multiple},
        )
