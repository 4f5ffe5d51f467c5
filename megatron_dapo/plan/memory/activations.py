"""Bytes that a training step keeps for its backward pass, depending on the layers' kernels and on recomputation.

There are two inventories of the tensors that one layer saves: for Transformer Engine's kernels on a GPU (arXiv
2205.05198, table 2, without dropout, with grouped heads and gated MLPs), and for the layers of
`megatron_dapo.megatron.layers` on a CPU, whose norms, rotary embedding and activation function keep intermediates that
fused kernels recompute. `benchmarks/plan_memory.py` compares the second with real runs tensor by tensor;
`benchmarks/results/gpu_step_*.json` has measurements to compare the first with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_dapo.config.model_schema import ParallelConfig
from megatron_dapo.config.schema import Config
from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.plan.memory.parameters import FP32, ITEM_SIZES, attention_sizes, layers_of_stage
from megatron_dapo.precision import RECIPES, PrecisionRecipe, padded_tokens

Kernels = Literal["transformer_engine", "torch"]

INDEX = 8  # bytes of a torch index


@dataclass(frozen=True)
class LayerBytes:
    """Bytes per token that one layer keeps for its backward pass, by the part that can be recomputed."""

    attention: int  # norm, queries, keys, values and the output of core attention
    core: int  # inside core attention, without the inputs that its recomputation needs
    norm: int  # before the MLP or the experts
    mlp: int  # the MLP, or router and experts
    residual: int  # the layer's input, from which recomputation starts
    input: int  # the norm's input, if the norm keeps the tensor itself and not a copy
    core_again: int  # held by one recomputation of core attention

    @property
    def whole(self) -> int:
        return self.attention + self.core + self.norm + self.mlp


@dataclass(frozen=True)
class _Shape:
    """Sizes of a layer on a rank. Widths are numbers per token, counted over all tokens of a tensor-parallel group."""

    architecture: ModelArchitecture
    parallel: ParallelConfig
    item: int  # bytes of a number

    @property
    def residual(self) -> int:
        """Width of the residual stream, per token of the whole sequence."""
        cut = self.parallel.tp_size if self.parallel.sequence_parallel else 1
        return self.architecture.hidden_size // cut

    @property
    def query(self) -> int:
        return attention_sizes(self.architecture)[0] // self.parallel.tp_size

    @property
    def group(self) -> int:
        return attention_sizes(self.architecture)[1] // self.parallel.tp_size

    @property
    def heads(self) -> int:
        """Query heads; each has a sum and a maximum in fp32."""
        return self.architecture.num_attention_heads // self.parallel.tp_size

    @property
    def groups(self) -> int:
        """Key-value heads."""
        return self.architecture.num_key_value_heads // self.parallel.tp_size

    @property
    def inner(self) -> int:
        return self.architecture.intermediate_size // self.parallel.tp_size

    @property
    def local(self) -> float:
        """Share of the tokens that a rank routes."""
        return 1 / self.parallel.tp_size if self.parallel.sequence_parallel else 1.0

    @property
    def copies(self) -> float:
        """Rows per token that a rank's experts compute under balanced routing."""
        expert_tensor = self.parallel.etp_size or self.parallel.tp_size
        return self.local * self.architecture.num_experts_per_token * expert_tensor

    @property
    def expert_inner(self) -> int:
        return self.architecture.moe_intermediate_size // (self.parallel.etp_size or self.parallel.tp_size)


def layer_bytes(
    architecture: ModelArchitecture,
    parallel: ParallelConfig,
    item: int,
    kernels: Kernels = "transformer_engine",
    is_fp8: bool = False,
    sequence_tokens: int = 0,
) -> LayerBytes:
    """Return the bytes per token that one layer keeps, with `item` bytes per number and an attention that keeps no
    scores.

    `sequence_tokens`: length of the sequences; under context parallelism, torch's attention has a mask of this size.
    """
    shape = _Shape(architecture, parallel, item)
    if kernels == "torch":
        return _of_torch(shape, sequence_tokens)
    return _of_transformer_engine(shape, 1 if is_fp8 else item)


def _of_transformer_engine(shape: _Shape, factor: int) -> LayerBytes:
    """`factor`: bytes per number of the kept inputs of linear layers."""
    a, item = shape.architecture, shape.item
    norm = (item + factor) * shape.residual + FP32  # input, output and a scale
    after = (item * shape.residual + FP32) if a.sandwich_norms else 0
    heads = item * (2 * shape.query + 2 * shape.group)
    if factor < item:  # attention keeps the output, the projection its copy
        heads += factor * shape.query
    if a.qk_norm:
        heads += item * (shape.query + shape.group) + FP32 * (shape.heads + shape.groups)
    if a.num_experts:
        # Per copy of a token: its expert's input and output, and the three products inside.
        mlp = int(shape.copies * ((2 * a.hidden_size + 3 * shape.expert_inner) * item + FP32))
    else:
        mlp = (2 * item + factor) * shape.inner
    residual, core = item * shape.residual, FP32 * shape.heads
    core_again = core + item * shape.query
    return LayerBytes(norm + heads + after, core, norm, mlp + after, residual, residual, core_again)


def _of_torch(shape: _Shape, sequence_tokens: int) -> LayerBytes:
    a, item = shape.architecture, shape.item
    # Input and normalized input in fp32, a scale, and the output.
    norm = _torch_norm(shape.residual) + item * shape.residual
    after = _torch_norm(shape.residual) if a.sandwich_norms else 0
    heads, core, core_again = _torch_heads(shape, sequence_tokens)
    mlp = _torch_experts(shape) if a.num_experts else 5 * shape.inner * item
    residual = item * shape.residual
    # A 16-bit input is kept as an fp32 copy.
    kept = residual if item == FP32 else 0
    return LayerBytes(norm + heads + after, core, norm, mlp + after, residual, kept, core_again)


def _torch_norm(width: int) -> int:
    return 2 * FP32 * width + FP32


def _torch_heads(shape: _Shape, sequence_tokens: int) -> tuple[int, int, int]:
    """Return the bytes from the norm to the output of core attention, those that core attention keeps instead of its
    inputs, and those that its recomputation holds."""
    context, item = shape.parallel.cp_size, shape.item
    projected = item * (shape.query + 2 * shape.group)  # kept whole, because the values are part of it
    inputs = item * (shape.query + shape.group) + projected
    core = FP32 * shape.heads
    core_again, freed = core + item * shape.query, 0
    is_fp32_norm = shape.architecture.qk_norm and item == FP32
    if context > 1:
        # Keys and values of all ranks instead of the rank's, and the mask in the model's type.
        gathered = 2 * item * shape.group * context + item * sequence_tokens
        core, core_again = core + gathered, core_again + gathered
        freed = item * shape.group + (0 if is_fp32_norm else projected)
    num_bytes = inputs + item * shape.query
    if shape.architecture.qk_norm:
        num_bytes += FP32 * (2 * shape.query + shape.group) + FP32 * (shape.heads + shape.groups)
        # In fp32, keys are part of the projection, otherwise fp32 copies; the same holds for the queries of a single
        # group.
        num_bytes += 0 if is_fp32_norm else FP32 * shape.group
        num_bytes -= FP32 * shape.query if is_fp32_norm and shape.groups == 1 else 0
    return num_bytes, core - freed, core_again


def _torch_experts(shape: _Shape) -> int:
    a, item = shape.architecture, shape.item
    # A token's probabilities and indices over all experts, and over the chosen ones.
    router = shape.local * (2 * FP32 * a.num_experts + a.num_experts + FP32)
    router += shape.local * a.num_experts_per_token * (FP32 + 2 * INDEX)
    # Per copy: the expert's input, [gate; up], the activation, up, their product, and the product times its
    # probability.
    return int(router + shape.copies * (item * (a.hidden_size + 6 * shape.expert_inner) + FP32))


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


def kept_bytes(layer: LayerBytes, recompute: Recompute, num_layers: int) -> tuple[float, float]:
    """Return the bytes per token that a chunk of layers keeps, and those that the first recomputation of its backward
    pass adds before anything is freed."""
    if recompute.block:
        first = num_layers if recompute.num_layers is None else min(recompute.num_layers, num_layers)
        kept = first * layer.residual / recompute.block + (num_layers - first) * layer.whole
        # Later layers are freed before the first ones are recomputed.
        return kept, recompute.block * layer.whole - layer.input if first == num_layers else 0
    kept, again, after_attention = float(layer.whole), 0, layer.mlp + layer.norm
    if recompute.modules & {"mlp", "moe"}:
        kept += layer.residual - after_attention
        again, after_attention = after_attention - layer.input, layer.residual
    if "core_attn" in recompute.modules:
        kept -= layer.core
        # The part of the layer after attention is freed before attention is recomputed.
        again = max(again, layer.core_again - after_attention)
    return num_layers * kept, again


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


def layer_of(config: Config, architecture: ModelArchitecture, kernels: Kernels) -> LayerBytes:
    """Return the bytes per token that one layer of the configuration keeps."""
    item = ITEM_SIZES[config.model.dtype]
    longest = min(config.longest_sequence, config.training.micro_batch_tokens)
    return layer_bytes(architecture, config.parallel, item, kernels, is_fp8(config), longest)


def activation_bytes(
    config: Config, architecture: ModelArchitecture, stage: int, kernels: Kernels = "transformer_engine"
) -> int:
    """Return the peak bytes kept for the backward pass, without the log-prob head."""
    parallel, tokens = config.parallel, tokens_of_rank(config)
    layer = layer_of(config, architecture, kernels)
    recompute = recompute_of(config)
    layers_of_chunk = len(layers_of_stage(architecture, parallel, stage)) // parallel.vpp_size
    kept, again = kept_bytes(layer, recompute, layers_of_chunk)
    num_bytes = chunks_in_flight(parallel, stage) * kept
    if kernels == "torch":
        tables, last = _shared_bytes(config, architecture, stage, recompute)
        # The last norm is freed before anything is recomputed.
        num_bytes, again = num_bytes + tables, max(again, last)
    return int(tokens * (num_bytes + again))


def _shared_bytes(config: Config, architecture: ModelArchitecture, stage: int, recompute: Recompute) -> tuple[int, int]:
    """Return the bytes per token outside the layers on a CPU: cosines and sines of each micro-batch, and the last
    norm."""
    item, parallel = ITEM_SIZES[config.model.dtype], config.parallel
    tables = 2 * item * architecture.head_dim
    if not (recompute.block and recompute.num_layers is None):
        # All chunks of a micro-batch share the cosines and sines.
        tables *= -(-chunks_in_flight(parallel, stage) // parallel.vpp_size)
    width = _Shape(architecture, parallel, item).residual
    return tables, _torch_norm(width) if stage == parallel.pp_size - 1 else 0


def working_bytes(config: Config, architecture: ModelArchitecture) -> int:
    """Return the bytes of the gradients inside the layer whose backward pass is running."""
    shape = _Shape(architecture, config.parallel, ITEM_SIZES[config.model.dtype])
    mlp = 3 * shape.inner
    if architecture.num_experts:
        mlp = int(shape.copies * (2 * architecture.hidden_size + 3 * shape.expert_inner))
    return tokens_of_rank(config) * shape.item * (mlp + 2 * architecture.hidden_size)
