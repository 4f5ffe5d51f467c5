"""Bytes that a training step keeps for its backward pass, over layers, recomputation and micro-batches.

Parts of layers state what they keep (`models.activations`), by kernels. `benchmarks/plan_memory.py` compares torch's
with real runs tensor by tensor; `benchmarks/results/gpu_step_*.json` has measurements to compare Transformer Engine's with
(arXiv 2205.05198, table 2, without dropout, with grouped heads and gated MLPs).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_dapo.config.model_schema import ParallelConfig
from megatron_dapo.config.schema import Config
from megatron_dapo.models.activations import FP32, Kernels, TrainerCut
from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.models.placement import LayerPart
from megatron_dapo.plan.memory.parameters import ITEM_SIZES, layers_of_stage
from megatron_dapo.precision import RECIPES, PrecisionRecipe, padded_tokens


@dataclass(frozen=True)
class LayerBytes:
    """Bytes per token that one layer keeps for its backward pass, by what can be recomputed."""

    mixer: float  # norm and attention, or what is in its place
    core: float  # share of core attention, except the inputs that its recomputation needs
    core_again: float  # held by one recomputation of core attention
    expansion: float  # share of the mixer from latent vectors to core attention
    mlp: float  # norm, and the MLP or router and experts
    residual: float  # the layer's input, from which recomputation starts
    input: float  # the norm's input, if the norm keeps the tensor itself and not a copy

    @property
    def whole(self) -> float:
        return self.mixer + self.mlp


def trainer_cut(
    parallel: ParallelConfig, item: int, kernels: Kernels, is_fp8: bool = False, sequence_tokens: int = 1
) -> TrainerCut:
    """Return a rank's share of a layer. `sequence_tokens`: length of the sequences."""
    return TrainerCut(
        kernels,
        item,
        1 if is_fp8 and kernels != "torch" else item,
        parallel.tp_size,
        parallel.cp_size,
        parallel.etp_size or parallel.tp_size,
        parallel.sequence_parallel,
        sequence_tokens,
    )


def layer_bytes(parts: Sequence[LayerPart], hidden_size: int, cut: TrainerCut) -> LayerBytes:
    """Return the bytes per token that a layer of these parts keeps; its attention keeps no scores."""
    mixer, *others = (part.kept(cut) for part in parts)
    residual = cut.item * cut.stream(hidden_size)
    # torch's norm keeps an fp32 copy of a 16-bit input.
    kept = 0 if cut.is_torch and cut.item < FP32 else residual
    mlp = sum(part.whole for part in others)
    return LayerBytes(mixer.whole, mixer.core, mixer.core_again, mixer.expansion, mlp, residual, kept)


# ---- what is kept, over layers and micro-batches


@dataclass(frozen=True)
class Recompute:
    """Layers and parts of layers that are recomputed."""

    modules: frozenset[str] = frozenset()  # parts of every layer, by megatron-core's names
    block: int = 0  # layers that are recomputed together; 0: no whole layers
    num_layers: int | None = None  # recomputed layers of a chunk; None: all


def recompute_of(config: Config) -> Recompute:
    """Return the recomputation set by model.recompute_granularity and megatron-core's fields."""
    options, granularity = config.megatron, config.model.recompute_granularity
    if granularity == "selective":
        return Recompute(modules=frozenset(options.get("recompute_modules") or ("core_attn",)))
    if granularity == "full":
        count = int(options.get("recompute_num_layers") or 1)
        is_block = options.get("recompute_method") == "block"
        return Recompute(block=1, num_layers=count) if is_block else Recompute(block=count)
    return Recompute()


def kept_bytes(layers: Sequence[LayerBytes], recompute: Recompute) -> tuple[float, float]:
    """Return the bytes per token that a chunk of layers keeps, and the most that its backward pass holds beyond them while it
    recomputes; later layers are freed by then."""
    pieces = list(_pieces(layers, recompute))
    total = held = sum(kept for kept, _ in pieces)
    most = 0.0
    for kept, again in reversed(pieces):
        most = max(most, held + again - total)
        held -= kept
    return total, most


def _pieces(layers: Sequence[LayerBytes], recompute: Recompute) -> Iterator[tuple[float, float]]:
    """Yield the bytes that each piece keeps, and those that its recomputation adds; it is a layer, or layers that are
    recomputed together."""
    if not recompute.block:
        yield from (_layer_piece(layer, recompute.modules) for layer in layers)
        return
    first = len(layers) if recompute.num_layers is None else min(recompute.num_layers, len(layers))
    for start in range(0, first, recompute.block):
        block = layers[start : min(start + recompute.block, first)]
        yield block[0].residual, sum(layer.whole for layer in block) - block[0].input
    yield from ((layer.whole, 0) for layer in layers[first:])


def _layer_piece(layer: LayerBytes, modules: frozenset[str]) -> tuple[float, float]:
    kept, again, after_attention = layer.whole, 0.0, layer.mlp
    if modules & {"mlp", "moe"}:
        kept += layer.residual - after_attention
        again, after_attention = after_attention - layer.input, layer.residual
    # The part of the layer after attention is freed before attention is recomputed.
    attention_again = -after_attention
    if "mla_up_proj" in modules:
        kept, attention_again = kept - layer.expansion, attention_again + layer.expansion
    if "core_attn" in modules:
        kept, attention_again = kept - layer.core, attention_again + layer.core_again
    return kept, max(again, attention_again)


def chunks_of_stage(architecture: ModelArchitecture, parallel: ParallelConfig, stage: int) -> list[list[int]]:
    """Return the layers of each chunk of a stage, in the order of a forward pass."""
    layers = sorted(layers_of_stage(architecture, parallel, stage))
    size = len(layers) // parallel.vpp_size
    return [layers[chunk * size : (chunk + 1) * size] for chunk in range(parallel.vpp_size)]


def chunks_in_flight(parallel: ParallelConfig, stage: int) -> int:
    """Return how many chunks of layers, summed over micro-batches, hold activations at a stage's peak."""
    if parallel.vpp_size > 1:
        return parallel.pp_size * parallel.vpp_size + parallel.pp_size - 2 * stage - 1
    return parallel.pp_size - stage


def tokens_of_rank(config: Config) -> int:
    """Return the tokens of a full micro-batch on a context rank, with padding."""
    parallel = config.parallel
    sizes = (parallel.tp_size, parallel.cp_size, parallel.sequence_parallel)
    return padded_tokens(config.training.micro_batch_tokens, *sizes, config.precision.recipe) // parallel.cp_size


def is_fp8(config: Config) -> bool:
    """Return True if linear layers compute in FP8."""
    return RECIPES.get(config.precision.recipe, PrecisionRecipe()).is_fp8


def cut_of(config: Config, kernels: Kernels) -> TrainerCut:
    """Return a rank's share of a layer of the configuration."""
    longest = min(config.longest_sequence, config.training.micro_batch_tokens)
    return trainer_cut(config.parallel, ITEM_SIZES[config.model.dtype], kernels, is_fp8(config), longest)


def activation_bytes(
    config: Config, architecture: ModelArchitecture, stage: int, kernels: Kernels = "transformer_engine"
) -> int:
    """Return the peak bytes kept for the backward pass, without the log-prob head."""
    recompute, cut, parallel = recompute_of(config), cut_of(config, kernels), config.parallel
    kinds = {parts: layer_bytes(parts, architecture.hidden_size, cut) for parts in architecture.kinds_of_layers}
    chunks = [
        kept_bytes([kinds[architecture.parts(layer)] for layer in layers], recompute)
        for layers in chunks_of_stage(architecture, parallel, stage)
    ]
    tables = last = 0.0
    if kernels == "torch":
        tables, last = _shared_bytes(config, architecture, stage, recompute, cut)
    return int(tokens_of_rank(config) * (_peak(chunks, parallel, stage, last) + tables))


def _peak(chunks: Sequence[tuple[float, float]], parallel: ParallelConfig, stage: int, last: float) -> float:
    """Return the most bytes per token that a stage's chunks hold, while one forward and one backward pass alternate; `last`:
    bytes after the last layer, which are freed before it."""
    # Both passes go through the chunks in turns of as many micro-batches as there are stages (arXiv:2104.04473, section 2.2).
    size = len(chunks)
    order = [index // parallel.pp_size % size for index in range(2 * parallel.pp_size * size + chunks_in_flight(parallel, stage))]
    held, most = sum(chunks[chunk][0] for chunk in order[: chunks_in_flight(parallel, stage)]), 0.0
    for index, begun in enumerate(order[chunks_in_flight(parallel, stage) :]):
        kept, again = chunks[size - 1 - order[index]]
        most = max(most, held + max(again, last))
        held += chunks[begun][0] - kept
    return most


def _shared_bytes(
    config: Config, architecture: ModelArchitecture, stage: int, recompute: Recompute, cut: TrainerCut
) -> tuple[float, float]:
    """Return the bytes per token outside the layers on a CPU: cosines and sines of each micro-batch, and the last
    norm."""
    parallel, layers = config.parallel, layers_of_stage(architecture, config.parallel, stage)
    width = architecture.rotary_dim or architecture.head_dim
    if architecture.latent is not None:
        width = architecture.latent.rotary_dim
    tables = float(2 * cut.item * width * _num_tables(architecture, layers))
    if not (recompute.block and recompute.num_layers is None):
        # All chunks of a micro-batch share the cosines and sines.
        tables *= -(-chunks_in_flight(parallel, stage) // parallel.vpp_size)
    return tables, cut.norm(architecture.hidden_size) if stage == parallel.pp_size - 1 else 0


def _num_tables(architecture: ModelArchitecture, layers: frozenset[int]) -> int:
    """Return how many rotary bases these layers have."""
    delta, local = (one.layers if one else frozenset() for one in (architecture.delta, architecture.local))
    attending = layers - delta
    return bool(attending & local) + bool(attending - local)


def working_bytes(
    config: Config, architecture: ModelArchitecture, kernels: Kernels = "transformer_engine"
) -> tuple[int, int]:
    """Return the bytes of the gradients inside the layer whose backward pass is running, and those that a layer holds in a
    pass without gradients: inputs, outputs and inner products, as large as their gradients."""
    cut, tokens = cut_of(config, kernels), tokens_of_rank(config)
    found = [part.kept(cut) for part in {part for parts in architecture.kinds_of_layers for part in parts}]
    stream = 2 * cut.item * architecture.hidden_size
    working = max(part.working for part in found)
    return int(tokens * (stream + working)), int(tokens * (stream + max(working, *(part.forward for part in found))))
