"""Lines that sum up a precision recipe for a model on a layout, before the run: the format of every layer, and the
multiples that tokens are padded to."""

from __future__ import annotations

from megatron_dapo.config.schema import Config
from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.precision import RECIPES, recipe_name


def precision_lines(config: Config, architecture: ModelArchitecture, layout: ParallelLayout) -> list[str]:
    """Return the lines of the policy; reference and critic multiply by the same recipe."""
    name = recipe_name(config.precision.recipe, config.model.dtype)
    lines = [f"precision: {name}{_layers(config, architecture)}"]
    if RECIPES[name].is_fp8:
        lines.append(_padding(name, architecture, layout))
    return lines


def _layers(config: Config, architecture: ModelArchitecture) -> str:
    asked, count, dtype = config.precision, architecture.num_layers, config.model.dtype
    recipe = RECIPES[recipe_name(asked.recipe, dtype)]
    if not recipe.is_fp8:
        return f" in all layers, {recipe.products}"
    first, last = asked.num_layers_at_start_in_bf16, count - asked.num_layers_at_end_in_bf16
    mlp = "experts" if architecture.num_experts else "MLP"
    router = ", router" if architecture.num_experts else ""
    others = [_numbers(start, stop) for start, stop in ((0, first), (last, count)) if stop > start]
    others += [f"embedding, norms{router}, attention"]
    return (
        f": projections of attention and {mlp} in {_numbers(first, last)} of {count}, {recipe.products}; "
        f"{', '.join(others)} in {dtype}; log-prob head {config.model.logprob_implementation}"
    )


def _numbers(start: int, stop: int) -> str:
    """Return the numbers of layers, counted from 1."""
    return f"layer {stop}" if stop == start + 1 else f"layers {start + 1} to {stop}"


def _padding(name: str, architecture: ModelArchitecture, layout: ParallelLayout) -> str:
    recipe = RECIPES[name]
    experts = "; an expert's tokens where it multiplies them" if architecture.num_experts else ""
    return (
        f"padding: micro-batches to a multiple of {layout.micro_batch_alignment} tokens ({recipe.token_multiple} on a "
        f"rank){experts}; both sizes of a rank's part of a weight are multiples of {recipe.size_multiple}"
    )
