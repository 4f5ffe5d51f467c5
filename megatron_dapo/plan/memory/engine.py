"""Bytes of weights on a server's rank, and the tokens that its KV cache holds.

Follows SGLang 0.5.17's `DefaultPoolConfigurator` and `KVCacheConfigurator._profile_available_bytes`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from megatron_dapo.config.schema import Config
from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.models.placement import EngineCut, LayerPart, PerExpert, StackedExperts, Whole, local_shape
from megatron_dapo.plan.cluster import Cluster
from megatron_dapo.plan.memory.communication import SERVER_GROUP
from megatron_dapo.plan.memory.model import CUDA_CONTEXT
from megatron_dapo.plan.memory.parameters import FP32, ITEM_SIZES
from megatron_dapo.rounding import GIB, round_up

SGLANG_VOCABULARY_MULTIPLE = 64  # SGLang pads the vocabulary to a multiple of this
SPARE_POSITIONS = 16  # SGLang keeps a few positions of a sequence free; without them it cuts responses silently
FP8_BLOCK = 128
# SGLang's defaults for states of gated delta nets: their share of what weights leave (mamba_full_memory_ratio 0.9), and how many
# it keeps for a running response with its cached prefixes.
STATES_SHARE = 0.9 / 1.9
PREFIX_STATES = 3
# No formula gives these: orders of magnitude measured on H100, rounded up.
ENGINE_CONTEXT = 1 * GIB  # CUDA context of a server's rank
ENGINE_ASLEEP = 3 * GIB  # kept by a sleeping server of one rank: its context, CUDA graphs and workspaces
# SGLang 0.5.17 reserves at least this much outside mem_fraction_static on GPUs above 60 GB (server_args.py,
# pre_capture_activation_reserve_mb) for CUDA graphs, prefill activations and logits.
ENGINE_WORKSPACE = 10 * GIB


@dataclass(frozen=True)
class EngineMemory:
    """Memory of one engine on each of its ranks."""

    weights: int  # bytes
    bytes_per_token: int  # KV cache
    kv_tokens: int
    budget: int  # bytes for weights, KV cache and states together
    bytes_per_state: int = 0  # a sequence's state in all gated delta nets; 0: the model has none
    states: int = 0  # bytes of all of them
    num_states: int = 0  # states for responses
    states_per_response: int = 1  # states that SGLang keeps for a running response

    @property
    def static(self) -> int:
        """Bytes of weights, KV cache and states together."""
        return self.weights + self.kv_tokens * self.bytes_per_token + self.states

    @property
    def held_by_states(self) -> int | None:
        """Responses whose states fit; None for a model without any."""
        return self.num_states // self.states_per_response if self.bytes_per_state else None

    def holds(self, tokens: float) -> int:
        """Return how many responses of so many tokens a server decodes at a time."""
        held = int(self.kv_tokens / tokens)
        return held if self.held_by_states is None else min(held, self.held_by_states)


class LayerWeights(NamedTuple):
    """Bytes of a layer's parameters on a server's rank."""

    dense: int
    experts: int


@dataclass(frozen=True)
class EngineWeights:
    """Bytes of a server rank's parameters by kind."""

    kinds: tuple[tuple[frozenset[int], LayerWeights], ...]  # layers and what each of them has
    row: int  # bytes of a row of the embedding or the output matrix
    rows: int  # rows of either on this rank, padding included
    matrices: int  # 1: the output matrix is the embedding
    norm: int  # norm after the last layer

    @property
    def total(self) -> int:
        layers = sum(len(layers) * sum(each) for layers, each in self.kinds)
        return layers + self.matrices * self.rows * self.row + self.norm


def engine_weights(
    architecture: ModelArchitecture, tensor: int, expert: int, dtype: str, is_fp8: bool
) -> EngineWeights:
    """Return the parameters of a rank, exactly those of `checkpoints.layouts.sglang` for a GPU; under FP8 those of
    `checkpoints.layouts.fp8`."""
    item, serving, cut = ITEM_SIZES[dtype], architecture.serving, EngineCut(tensor, expert)
    kinds = []
    for parts, layers in architecture.kinds_of_layers.items():
        dense, experts = zip(*(_part_bytes(part, cut, item, is_fp8) for part in parts))
        kinds.append((layers, LayerWeights(sum(dense), sum(experts))))
    num_matrices = 1 if architecture.tie_word_embeddings and serving.ties_output else 2
    rows = round_up(architecture.vocab_size, SGLANG_VOCABULARY_MULTIPLE) // tensor
    if serving.whole_embedding:
        rows = architecture.vocab_size
    return EngineWeights(tuple(kinds), item * architecture.hidden_size, rows, num_matrices, item * architecture.hidden_size)


@lru_cache(maxsize=4096)
def _part_bytes(part: LayerPart, cut: EngineCut, item: int, is_fp8: bool) -> tuple[int, int]:
    """Return the bytes of a layer's part on a rank: those outside its experts, and those inside."""
    shapes, dense, experts = part.shapes(), 0, 0
    for placement in part.sglang(cut):
        if isinstance(placement, StackedExperts):
            inner = placement.inner * cut.expert // cut.tensor
            matrix = "gate_up_proj" if placement.biased else "gate_proj.weight"
            hidden = shapes[placement.name.format(0) + matrix][1]
            copies = placement.num_experts // cut.expert
            experts += copies * item * (2 * inner + hidden) * placement.biased
            experts += copies * sum(
                _matrix_bytes(shape, item, is_fp8) for shape in ((2 * inner, hidden), (hidden, inner))
            )
            continue
        assert not isinstance(placement, PerExpert), f"{placement.local} is Megatron's"
        # SGLang quantizes the layers it calls linear, which are those it cuts.
        shape = local_shape(placement, shapes, cut.tensor)
        each = FP32 if part.is_float32(placement) else item
        dense += _matrix_bytes(shape, each, is_fp8 and len(shape) == 2 and not isinstance(placement, Whole))
    return dense, experts


def engine_weight_bytes(architecture: ModelArchitecture, tensor: int, expert: int, dtype: str, is_fp8: bool) -> int:
    """Return the bytes of a rank's parameters."""
    return engine_weights(architecture, tensor, expert, dtype, is_fp8).total


def _matrix_bytes(shape: tuple[int, ...], item: int, is_fp8: bool) -> int:
    if not is_fp8:
        return item * math.prod(shape)
    rows, columns = shape
    return rows * columns + FP32 * -(-rows // FP8_BLOCK) * -(-columns // FP8_BLOCK)


def kv_bytes_per_token(architecture: ModelArchitecture, tensor: int, dtype: str) -> int:
    """Return the KV cache bytes per token on a rank: keys and values of its heads in all layers."""
    cut = EngineCut(tensor)
    cached = (len(k) * sum(p.cached_per_token(cut) for p in parts) for parts, k in architecture.kinds_of_layers.items())
    return ITEM_SIZES[dtype] * sum(cached)


def state_bytes(architecture: ModelArchitecture, tensor: int, dtype: str) -> int:
    """Return the bytes of a sequence's states on a rank, which do not grow with its length."""
    kinds = architecture.kinds_of_layers.items()
    states = [(len(layers), part.state_elements) for parts, layers in kinds for part in parts]
    return sum(count * (ITEM_SIZES[dtype] * typed + FP32 * wide) for count, (typed, wide) in states) // tensor


def states_per_response(config: Config) -> int:
    """Return how many states SGLang keeps for a running response: its own, those of prefixes, and two that it writes in turns
    if it overlaps scheduling with decoding (`KVCacheConfigurator._calculate_mamba_ratio`)."""
    return PREFIX_STATES if config.sglang.update_pause == "in_place" else PREFIX_STATES + 2


def engine_context(config: Config) -> int:
    """Return the bytes of a server's rank besides weights, cache and graphs: its context, and NCCL's if it has several
    ranks."""
    return ENGINE_CONTEXT + (SERVER_GROUP if config.sglang.tp_size > 1 else 0)


def engine_asleep(config: Config) -> int:
    """Return the bytes that a sleeping server keeps on each of its GPUs."""
    return ENGINE_ASLEEP + engine_context(config) - ENGINE_CONTEXT


def free_at_start(config: Config, cluster: Cluster) -> int:
    """Return the bytes that are free when a server's rank starts, from which it sizes its cache.

    On the trainer's GPUs, the trainer process is already running then, without a model or process groups.
    """
    shared = CUDA_CONTEXT if config.sglang.placement == "colocated" else 0
    return cluster.gpu_bytes - engine_context(config) - shared


def engine_memory(config: Config, architecture: ModelArchitecture, cluster: Cluster) -> EngineMemory:
    """Return the memory of a rank of an SGLang server, or of an embedded engine with all slots full."""
    sglang, dtype = config.sglang, config.model.dtype
    if config.rollout.engine == "embedded":
        weights, cell = (
            engine_weight_bytes(architecture, 1, 1, dtype, False),
            kv_bytes_per_token(architecture, 1, dtype),
        )
        slots, state = config.rollout.slots_per_rank, state_bytes(architecture, 1, dtype)
        tokens = slots * config.longest_sequence
        return EngineMemory(weights, cell, tokens, weights + tokens * cell + slots * state, state, slots * state, slots)
    is_fp8 = sglang.quantization == "fp8"
    weights = engine_weight_bytes(architecture, sglang.tp_size, sglang.ep_size, dtype, is_fp8)
    weights += architecture.vision_parameters * ITEM_SIZES[dtype]
    cell = kv_bytes_per_token(architecture, sglang.tp_size, dtype)
    budget = int(free_at_start(config, cluster) * sglang.mem_fraction_static)
    state, rest, states = state_bytes(architecture, sglang.tp_size, dtype), max(0, budget - weights), 0
    if state:
        states = int(rest * STATES_SHARE) // state  # one of them is padding
        rest -= states * state
    tokens = rest // cell
    if sglang.max_total_tokens:
        tokens = min(tokens, sglang.max_total_tokens)
    return EngineMemory(weights, cell, tokens, budget, state, states * state, max(0, states - 1), states_per_response(config))
