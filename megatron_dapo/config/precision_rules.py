"""Rules of precision: one type of the model, and shapes that a recipe can multiply."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_dapo.config.architecture import ArchitectureFacts
from megatron_dapo.config.errors import Violation
from megatron_dapo.config.rule import violation
from megatron_dapo.config.schema import Config
from megatron_dapo.precision import FP8_DELAYED, RECIPES, LinearSizes, Recipe, misfits

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
