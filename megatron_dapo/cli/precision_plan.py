"""Lines that sum up a precision recipe for a model on a layout, before the run: the format of every layer, the multiples
that tokens are padded to, and the memory of weights, main params and moments on a rank.

Arithmetic from the few facts of a model's shape: norms and biases, a thousandth of the weights, are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_dapo.config.inputs import ArchitectureFacts
from megatron_dapo.config.schema import Config
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.precision import RECIPES, recipe_name

BYTES = {"float32": 4, "bfloat16": 2}
FP32_BYTES = 4
NUM_MOMENTS = 2


@dataclass(frozen=True)
class RankMatrices:
    """Elements of the matrices that a rank holds; `experts` are replicated over other ranks than the `dense` ones."""

    dense: int
    experts: int
    vocabulary: int

    @property
    def total(self) -> int:
        return self.dense + self.experts + self.vocabulary


def fullest_rank(architecture: ArchitectureFacts, layout: ParallelLayout) -> RankMatrices:
    """Return the matrices of a rank of the first or last pipeline stage, which holds the embedding or the output matrix. A
    model in which some layers have experts is taken as one in which all have."""
    hidden, head = architecture.hidden_size, architecture.head_size
    query, groups = architecture.num_attention_heads * head, architecture.num_key_value_heads * head
    layers = -(-architecture.num_layers // layout.pipeline)
    matrices = hidden * (2 * query + 2 * groups) // layout.tensor
    experts = 0
    if architecture.num_experts:
        matrices += architecture.num_experts * hidden  # the router, whole on every rank
        local = architecture.num_experts // layout.expert
        experts = local * 3 * hidden * architecture.moe_intermediate_size // layout.expert_tensor_size
    else:
        matrices += 3 * hidden * architecture.intermediate_size // layout.tensor
    both = layout.pipeline == 1 and not architecture.tie_word_embeddings
    vocabulary = (1 + both) * architecture.vocab_size * hidden // layout.tensor
    return RankMatrices(layers * matrices, layers * experts, vocabulary)


def precision_lines(config: Config, architecture: ArchitectureFacts, layout: ParallelLayout) -> list[str]:
    """Return the lines of the policy; reference and critic multiply by the same recipe."""
    name = recipe_name(config.precision.recipe, config.model.dtype)
    lines = [f"precision: {name}{_layers(config, architecture)}"]
    if RECIPES[name].is_fp8:
        lines.append(_padding(name, architecture, layout))
    parts = _parts(config, fullest_rank(architecture, layout), layout)
    return [*lines, f"memory of the fullest rank, matrices: {', '.join(parts)}"]


def _layers(config: Config, architecture: ArchitectureFacts) -> str:
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


def _padding(name: str, architecture: ArchitectureFacts, layout: ParallelLayout) -> str:
    recipe = RECIPES[name]
    experts = "; an expert's tokens where it multiplies them" if architecture.num_experts else ""
    return (
        f"padding: micro-batches to a multiple of {layout.micro_batch_alignment} tokens ({recipe.token_multiple} on a "
        f"rank){experts}; both sizes of a rank's part of a weight are multiples of {recipe.size_multiple}"
    )


def _parts(config: Config, held: RankMatrices, layout: ParallelLayout) -> Iterator[str]:
    dtype = config.model.dtype
    if config.precision.fp8_param:
        yield f"weights {_gb(held.total - held.vocabulary)} (FP8) and {_gb(held.vocabulary * BYTES[dtype])} ({dtype})"
    else:
        yield f"weights {_gb(held.total * BYTES[dtype])} ({dtype})"
    own, words = _optimizer_share(config, held, layout)
    if dtype == "float32":
        yield "which are their own main params"
    else:
        yield f"fp32 main params {_gb(own * FP32_BYTES)}{words}"
    yield f"fp32 moments {_gb(NUM_MOMENTS * own * FP32_BYTES)}{words}"
    yield f"fp32 gradients {_gb(held.total * FP32_BYTES)}"


def _optimizer_share(config: Config, held: RankMatrices, layout: ParallelLayout) -> tuple[int, str]:
    """Elements whose main params and moments a rank keeps, and over how many ranks they are cut."""
    if not config.parallel.use_distributed_optimizer:
        return held.total, ""
    replicas = layout.data * layout.context
    of_experts = layout.stage_size // (layout.expert_tensor_size * layout.expert)
    own = (held.dense + held.vocabulary) // replicas + held.experts // of_experts
    cut = f" (cut over {replicas} ranks" + (f", of experts {of_experts})" if held.experts else ")")
    return own, cut if replicas > 1 else ""


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.3g} MB"
