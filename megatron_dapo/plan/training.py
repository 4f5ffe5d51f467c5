"""Estimates seconds of log-probs and train steps: products, recomputation, communication, pipeline bubble."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_dapo.config.schema import Config
from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.models.parts.experts import RoutedExperts
from megatron_dapo.plan.device import SHARES, Gpu, collective_seconds
from megatron_dapo.plan.memory import (
    ITEM_SIZES,
    optimizer_ranks,
    optimizer_share,
    rank_adapters,
    rank_parameters,
    recompute_of,
)
from megatron_dapo.plan.memory.activations import is_fp8
from megatron_dapo.plan.memory.parameters import FP32, NUM_MOMENTS, attention_sizes, layers_of_stage
from megatron_dapo.plan.rollout import Lengths

# A backward pass costs two forward passes. The head computes its logits twice.
FORWARD, TRAINING = 1.0, 3.0
HEAD_TRAINING = 4.0
UPDATE_BYTES = 30  # read and written per parameter in an optimizer step: gradient, main param, two moments, weight


@dataclass(frozen=True)
class Batch:
    """Sequences of one pass."""

    sequences: int
    tokens: float
    squares: float  # sum of the squared lengths
    longest: int

    @classmethod
    def of(cls, sequences: int, lengths: Lengths) -> Batch:
        """Return a batch with this number of sequences of these lengths."""
        tokens = sequences * (lengths.prompt + lengths.mean)
        return cls(sequences, tokens, sequences * lengths.mean_square, int(lengths.prompt) + max(lengths.responses))


@dataclass(frozen=True)
class Pass:
    """A kind of pass over a model."""

    layers: float = TRAINING  # forward passes that layers cost
    mlp_again: float = 0.0  # additional forward passes of their MLPs
    attention_again: float = 0.0
    head: float = HEAD_TRAINING
    collectives: int = 10  # a layer's, over tensor ranks; the backward pass gathers its inputs again
    sends_back: bool = True

    @classmethod
    def of(cls, config: Config, has_adapters: bool = False) -> Pass:
        """Return the training pass with the configured recomputation. With adapters no weight has a gradient."""
        recompute = recompute_of(config)
        layers, head = TRAINING - has_adapters, HEAD_TRAINING - has_adapters
        if recompute.block:
            return cls(layers=layers + 1, attention_again=has_adapters, head=head, collectives=14)
        return cls(
            layers=layers,
            head=head,
            mlp_again=1.0 if recompute.modules & {"mlp", "moe"} else 0.0,
            # Attention has no weights: its backward pass costs the same with adapters.
            attention_again=("core_attn" in recompute.modules) + has_adapters,
        )


LOG_PROBS = Pass(layers=FORWARD, head=FORWARD, collectives=4, sends_back=False)


@dataclass(frozen=True)
class Model:
    """A model with its layout."""

    config: Config
    architecture: ModelArchitecture
    processes: int
    gpu: Gpu
    gpus_per_node: int
    has_value_head: bool = False

    @property
    def has_adapters(self) -> bool:
        """True if only adapters are trained."""
        return self.config.model.lora.rank > 0 and not self.has_value_head

    @property
    def data(self) -> int:
        p = self.config.parallel
        return max(1, self.processes // (p.tp_size * p.pp_size * p.cp_size))

    @property
    def stages(self) -> list[int]:
        """Layers of each pipeline stage."""
        p = self.config.parallel
        return [len(layers_of_stage(self.architecture, p, stage)) for stage in range(p.pp_size)]


def pass_seconds(model: Model, batch: Batch, kind: Pass) -> dict[str, float]:
    """Return the seconds of one pass over a batch, by purpose."""
    p = model.config.parallel
    # A data rank computes at least the longest sequence, which balancing cannot split.
    share = max(batch.tokens / model.data, min(batch.longest, batch.tokens)) / SHARES.packing
    micro_batches = max(1, math.ceil(share / model.config.training.micro_batch_tokens))
    layers, head = _flops(model, batch, kind, share)
    rate = model.gpu.flops * SHARES.training * (SHARES.fp8_speedup if is_fp8(model.config) else 1.0)
    ranks = p.tp_size * p.cp_size
    layer, head = layers / ranks / model.architecture.num_layers / rate, head / ranks / rate
    stages = model.stages
    longest = max(stages) * layer
    found = {"products": longest + (head if p.pp_size == 1 else 0.0)}
    if p.pp_size > 1:
        # The last stage has the head, and the others wait for it.
        found["head_imbalance"] = max(0.0, stages[-1] * layer + head - longest)
        found["bubble"] = (p.pp_size - 1) / p.vpp_size * (longest + found["head_imbalance"]) / micro_batches
    return {**found, **_communication(model, kind, share / p.cp_size)}


def _flops(model: Model, batch: Batch, kind: Pass, tokens: float) -> tuple[float, float]:
    """Return the FLOPs of a data rank's `tokens` in all layers and in the head."""
    a = model.architecture
    # An expert's product reaches less of the rate: counted as so many more FLOPs.
    slower, layers = SHARES.training / SHARES.experts, 0.0
    for (mixer, *others), kind_layers in a.kinds_of_layers.items():
        products = sum(part.weights_per_token * (slower if isinstance(part, RoutedExperts) else 1.0) for part in others)
        passed = kind.layers * mixer.weights_per_token + (kind.layers + kind.mlp_again) * products
        # Two products a head with every token before, 4 FLOPs: causality needs half of the squares, a window less.
        num_local = len(kind_layers & a.local.layers) if a.local else 0
        pairs = (len(kind_layers) - num_local) * batch.squares / 2
        if a.local:
            pairs += num_local * min(batch.squares / 2, a.local.window * batch.tokens)
        core = 4.0 * mixer.attention_width * pairs * tokens / batch.tokens
        core += len(kind_layers) * 2.0 * tokens * mixer.fp32_products * SHARES.fp32_slowdown
        layers += len(kind_layers) * 2.0 * tokens * passed + (kind.layers + kind.attention_again) * core
    head = 0.0 if model.has_value_head else kind.head * 2.0 * tokens * a.vocab_size * a.hidden_size
    return layers, head


def _communication(model: Model, kind: Pass, tokens: float) -> dict[str, float]:
    """Return the seconds that tensor, context, expert and pipeline ranks communicate for `tokens` of a context rank."""
    a, p, item = model.architecture, model.config.parallel, ITEM_SIZES[model.config.model.dtype]
    layers, found = max(model.stages), dict[str, float]()
    stream = tokens * a.hidden_size * item
    if p.tp_size > 1:
        once = collective_seconds(stream, p.tp_size, model.gpu, model.gpus_per_node)
        found["tensor_ranks"] = kind.collectives * layers * once
    if p.cp_size > 1:
        keys = 2 * attention_sizes(a)[1] // p.tp_size * tokens * p.cp_size * item
        once = collective_seconds(keys, p.cp_size, model.gpu, model.gpus_per_node, p.tp_size)
        found["context_ranks"] = kind.layers * layers * once * SHARES.hidden
    if p.ep_size > 1:
        copies = stream / (p.tp_size if p.sequence_parallel else 1) * a.num_experts_per_token
        stride = p.etp_size or p.tp_size
        once = collective_seconds(copies, p.ep_size, model.gpu, model.gpus_per_node, stride)
        found["expert_ranks"] = 2 * kind.layers * layers * once
    if p.pp_size > 1:
        cut = p.tp_size if p.sequence_parallel else 1
        rate = model.gpu.network_bytes_s * SHARES.network
        found["stages"] = stream / cut / rate * p.vpp_size * (2 if kind.sends_back else 1)
    return found


def update_seconds(model: Model) -> dict[str, float]:
    """Return the seconds of an optimizer step outside its passes: gradient reductions, weight gathers, AdamW."""
    p, a = model.config.parallel, model.architecture
    held = rank_adapters(model.config, a) if model.has_adapters else rank_parameters(a, p, 0, model.has_value_head)
    replicas, of_experts = optimizer_ranks(p, model.processes)
    share, item = optimizer_share(p, held, model.processes), ITEM_SIZES[model.config.model.dtype]
    found = {"optimizer": UPDATE_BYTES * share / model.gpu.memory_bytes_s}
    if model.config.optimizer.on_host:
        each = FP32 * (NUM_MOMENTS + (model.config.model.dtype != "float32"))
        found["optimizer_on_host"] = 2 * each * share / model.gpu.host_bytes_s
    dense = held.dense + held.vocabulary
    gpu, per_node = model.gpu, model.gpus_per_node
    stride = p.tp_size  # context and data ranks follow the tensor ranks
    gradients = collective_seconds(FP32 * dense, replicas, gpu, per_node, stride)
    gradients += collective_seconds(FP32 * held.experts, of_experts, gpu, per_node, stride * p.ep_size)
    weights = collective_seconds(item * dense, replicas, gpu, per_node, stride)
    weights += collective_seconds(item * held.experts, of_experts, gpu, per_node, stride * p.ep_size)
    found["data_ranks"] = gradients * SHARES.hidden + weights
    return found


def add(*parts: Mapping[str, float], times: float = 1.0) -> dict[str, float]:
    """Return the sum of seconds by name."""
    found: dict[str, float] = {}
    for part in parts:
        for name, seconds in part.items():
            found[name] = found.get(name, 0.0) + seconds * times
    return found
