"""Small models, ragged packed batches and a transformers fp64 reference for the tests of the actor; workers run in gloo
ranks.

The reference is computed once, by `write_reference` in the process that starts the ranks, which read it from files.
"""

from __future__ import annotations

import gc
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings
from safetensors.torch import load_file, save_file

from megatron_dapo.checkpoints.layouts.megatron import MegatronLayout
from megatron_dapo.config.model_schema import PrecisionConfig
from megatron_dapo.megatron import schedule
from megatron_dapo.megatron.actor import ActorSettings, MegatronActor, TokenOutputs
from megatron_dapo.megatron.context import context_token_index
from megatron_dapo.megatron.model_config import ModelSettings
from megatron_dapo.megatron.trained_model import TrainedModel
from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.models.blocks import MixtureOfExperts
from megatron_dapo.models.config_json import parse_architecture
from megatron_dapo.models.parts.experts import EXPERT_BIAS
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.proof.oracle import stored_tensors
from megatron_dapo.reshard.layout import Layout
from megatron_dapo.types import MicroBatch

VOCABULARY = 300  # not a multiple of 128 x TP: the last rows are padding
ENTROPY_WEIGHT = 0.05
TEMPERATURE = 0.8
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# Different from the constants built into megatron-core.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.5,
    "high_freq_factor": 6.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
    "original_max_position_embeddings": 64,
}
MOE = {
    "rope_parameters": DEFAULT_ROPE,
    "tie_word_embeddings": False,
    "head_dim": 24,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
}
MIXED_MOE = {  # dense and sparse layers, weights that are not normalized, tied
    "rope_parameters": DEFAULT_ROPE,
    "tie_word_embeddings": True,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": False,
    "mlp_only_layers": [1],
}
DELTA = {  # a gated delta net in all layers but one, partly rotated heads
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.25},
    "head_dim": 24,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "full_attention_interval": 4,  # SGLang reads it instead.
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 6,
    # The output of a sequence's first token is proportional to query x key: if that is almost 0, normalizing it amplifies
    # rounding, by at most the square root of this.
    "rms_norm_eps": 1e-3,
    "pad_token_id": None,  # see gemma3
}
SHARED_MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 32,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 40,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
GROUPED_MOE = {
    "tie_word_embeddings": False,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
}
# Published, and read by SGLang.
SGLANG_FIELDS = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
ONE_GROUP = {"n_group": 1, "topk_group": 1, "n_shared_experts": 1}
KIMI_ROPE = {**YARN_ROPE, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
REPLAYED = "-replayed"  # end of the names of models whose tokens go to the experts of `drawn_routing`
MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {"rope_parameters": DEFAULT_ROPE, "tie_word_embeddings": False}),
    "qwen2-tied": ("Qwen2", {"rope_parameters": DEFAULT_ROPE, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"rope_parameters": DEFAULT_ROPE, "tie_word_embeddings": False, "head_dim": 24}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "qwen3-moe": ("Qwen3Moe", MOE),
    "qwen3-moe-replayed": ("Qwen3Moe", MOE),
    "qwen3-moe-mixed": ("Qwen3Moe", MIXED_MOE),
    "qwen3-moe-mixed-replayed": ("Qwen3Moe", MIXED_MOE),
    "llama-linear": (
        "Llama",
        {
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
            "tie_word_embeddings": False,
        },
    ),
    "deepseek": (
        "DeepseekV3",
        {"rope_parameters": YARN_ROPE, **LATENT, **GROUPED_MOE, **SGLANG_FIELDS},
    ),
    "kimi-k2": (
        "DeepseekV3",
        {"rope_parameters": KIMI_ROPE, **LATENT, **GROUPED_MOE, **ONE_GROUP, **SGLANG_FIELDS, "model_type": "kimi_k2"},
    ),
    "glm4-moe-lite": ("Glm4MoeLite", {"rope_parameters": DEFAULT_ROPE, **LATENT, **GROUPED_MOE, **ONE_GROUP, "rms_norm_eps": 1e-5}),
    "glm4-moe": (
        "Glm4Moe",
        {
            "rope_parameters": {**DEFAULT_ROPE, "partial_rotary_factor": 0.5},
            **GROUPED_MOE,
            **ONE_GROUP,
            "head_dim": 24,
            "attention_bias": True,
            "use_qk_norm": True,
            "rms_norm_eps": 1e-5,
        },
    ),
    "gpt-oss": (  # the published config with its sizes cut, a window shorter than most sequences
        "GptOss",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 8,
            },
            "tie_word_embeddings": False,
            "head_dim": 24,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "sliding_window": 6,
            "pad_token_id": None,  # see gemma3
            # SGLang reads these; transformers has them as constants or under other names.
            "swiglu_limit": 7.0,
            "experts_per_token": 3,
        },
    ),
    "gemma3": (  # two local layers to one global, a window shorter than most sequences
        "Gemma3",
        {
            "hidden_act": None,
            "head_dim": 24,
            "query_pre_attn_scalar": 20,
            "sliding_window": 6,
            "layer_types": [f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding")],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
            # transformers drops the gradient of the padding token's embedding, which the batches here have as a token.
            "pad_token_id": None,
        },
    ),
    "qwen3.5": ("Qwen3_5", {**DELTA, "tie_word_embeddings": True}),
    "qwen3-next": ("Qwen3Next", {**DELTA, **SHARED_MOE, "norm_topk_prob": True, "tie_word_embeddings": False}),
    "qwen3.5-moe": ("Qwen3_5Moe", {**DELTA, **SHARED_MOE, "tie_word_embeddings": False}),
}
# Sequence lengths of each micro-batch: single tokens, equal lengths, one long sequence, many short ones.
LENGTHS: tuple[tuple[int, ...], ...] = ((5, 17, 1, 30), (70, 3), (40, 2, 8, 8, 9, 8), (64,))


def reference_model(name: str) -> Any:
    """A transformers model in fp64 with random weights, biases and norms."""
    import transformers

    family, fields = MODELS[name]
    model_class = getattr(transformers, f"{family}ForCausalLM")
    config = config_of(model_class, {**SIZES, **fields, "architectures": [f"{family}ForCausalLM"]})
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = model_class(config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(random_weight(family, parameter_name, noise))
        for buffer in stored_buffers(model).values():
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    return in_fp64(model)


def config_of(model_class: Any, fields: Mapping[str, Any]) -> Any:
    """Return a config of transformers' class; `fields` has a model_type if it is of a family without one."""
    own, config_class = dict(fields), model_class.config_class
    if (model_type := own.pop("model_type", None)) is not None:
        config_class = type(config_class.__name__, (config_class,), {"model_type": model_type})
    return config_class(**own)


def random_weight(family: str, name: str, noise: torch.Tensor) -> torch.Tensor:
    """Return a parameter's random values from noise of the normal distribution."""
    if "norm" not in name:
        return 0.08 * noise
    # These families store the difference from 1, except in gated delta nets.
    zero_centered = family in ("Gemma3", "Qwen3_5", "Qwen3_5Moe", "Qwen3Next") and "linear_attn." not in name
    return 0.1 * noise if zero_centered else 1 + 0.1 * noise


def in_fp64(model: Any) -> Any:
    """Return the model in fp64, sums of gated delta rules included, with the config's epsilon in all norms."""
    for module in model.modules():
        if hasattr(module, "kv_a_layernorm"):  # transformers has a constant there, SGLang the config's
            module.q_a_layernorm.variance_epsilon = module.kv_a_layernorm.variance_epsilon = model.config.rms_norm_eps
        if hasattr(module, "chunk_gated_delta_rule"):
            module.chunk_gated_delta_rule = wide_rule
    return model.double()


def wide_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    **unused: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The recurrence of arXiv:2412.06464, token by token, in the type of its inputs, in place of transformers' rules, whose sums
    are in fp32. Inputs are [B, T, heads, ...]."""
    q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (query, key))
    zeros = value.new_zeros(value.size(0), value.size(2), key.size(3), value.size(3))
    state, outputs = zeros if initial_state is None else initial_state.to(value), []
    for t in range(query.size(1)):
        state = state * g[:, t, :, None, None].exp()
        error = value[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * error)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) / key.size(3) ** 0.5)
    return torch.stack(outputs, dim=1), state if output_final_state else None


def stored_buffers(model: Any) -> dict[str, torch.Tensor]:
    """Buffers of a checkpoint: what a router adds to scores."""
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith(EXPERT_BIAS)}


@dataclass(frozen=True)
class Reference:
    """Compute in fp64 with transformers, one sequence at a time: weights, loss, gradients, each micro-batch's log-probs of its
    real targets.
    """

    architecture: ModelArchitecture
    weights: Mapping[str, torch.Tensor]
    loss: float
    gradients: Mapping[str, torch.Tensor]
    logprobs: tuple[torch.Tensor, ...]

    @classmethod
    def read(cls, directory: str | Path, name: str) -> Reference:
        tensors = load_file(Path(directory) / f"{name}.safetensors")
        config = json.loads((Path(directory) / f"{name}.json").read_text())
        parts = {
            kind: {key.removeprefix(kind): t for key, t in tensors.items() if key.startswith(kind)}
            for kind in ("weight/", "gradient/")
        }
        logprobs = tuple(tensors[f"logprobs/{index}"] for index in range(len(LENGTHS)))
        architecture = parse_architecture(config)
        return cls(architecture, parts["weight/"], float(tensors["loss"]), parts["gradient/"], logprobs)


def drawn_routing(tokens: torch.Tensor, num_experts: int, experts_per_token: int) -> torch.Tensor:
    """Experts [T - 1, layers, experts a token] that an engine might have chosen, drawn by the tokens; no router chooses them."""
    generator = torch.Generator().manual_seed(int(tokens.sum()) * 1000 + tokens.numel())
    draws = torch.rand((tokens.numel() - 1, SIZES["num_hidden_layers"], num_experts), generator=generator)
    return draws.topk(experts_per_token).indices.to(torch.uint8)


def route(model: Any, routing: torch.Tensor) -> None:
    """Let transformers' routers send the tokens of the next forward to these experts, and the last one to their own."""
    for index, layer in enumerate(model.model.layers):
        if (gate := getattr(layer.mlp, "gate", None)) is not None:
            gate.forward = partial(_routed, gate, routing[:, index].long())


def _routed(gate: Any, chosen: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = hidden.reshape(-1, gate.hidden_dim) @ gate.weight.T
    probabilities = logits.softmax(-1)
    experts = torch.cat((chosen, probabilities[-1:].topk(gate.top_k).indices))
    weights = probabilities.gather(1, experts)
    return logits, weights / weights.sum(1, keepdim=True) if gate.norm_topk_prob else weights, experts


def write_reference(
    directory: str | Path, name: str, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] | None = None
) -> None:
    """Compute the reference of model `name` on `ragged_batch()` and write it to `directory`.

    `change` may write to the model's tensors, by their names on disk; what it returns is written in place of "weight/" tensors.
    """
    model, batch = reference_model(name), ragged_batch()
    stored = {**dict(model.named_parameters()), **stored_buffers(model)}
    with torch.no_grad():
        weights = None if change is None else change(stored_tensors(stored))
    single = ParallelLayout(world_size=1)
    total, logprobs = torch.zeros((), dtype=torch.float64), []
    for index, parts in enumerate(batch.micro_batches):
        packed = make_micro_batch(parts, single, batch.num_targets, seed=100 + index)
        rows = []
        for part in parts:
            if name.endswith(REPLAYED):
                route(model, drawn_routing(part, model.config.num_experts, model.config.num_experts_per_tok))
            log_p = (model(part[None]).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
            rows.append(torch.stack((log_p.gather(1, part[1:, None])[:, 0], -(log_p.exp() * log_p).sum(1)), dim=1))
        values = torch.cat(rows)
        real = packed.loss_mask.bool()
        total = (
            total - ((packed.advantages[real] * values[:, 0] + ENTROPY_WEIGHT * values[:, 1]) / batch.num_targets).sum()
        )
        logprobs.append(values[:, 0].detach().contiguous())
    total.backward()
    tensors: dict[str, torch.Tensor] = {f"logprobs/{index}": values for index, values in enumerate(logprobs)} | {
        "loss": total.detach()
    }
    for kind, whole in (
        ("weight", stored if weights is None else weights),
        ("gradient", {name: parameter.grad for name, parameter in model.named_parameters()}),
    ):
        for parameter_name, tensor in stored_tensors(whole).items():
            tensors[f"{kind}/{parameter_name}"] = tensor.detach().contiguous()
    save_file(tensors, Path(directory) / f"{name}.safetensors")
    (Path(directory) / f"{name}.json").write_text(model.config.to_json_string(use_diff=False))


def median_error_in_bf16(name: str, want: Reference) -> float:
    """Median absolute difference of transformers' log-probs in bf16, with its fp32 buffers, from the reference's."""
    model = reference_model(name).to(torch.bfloat16)
    for buffer_name in stored_buffers(model):
        parent, _, last = buffer_name.rpartition(".")
        model.get_submodule(parent).register_buffer(last, want.weights[buffer_name].float())
    differences = []
    for parts, expected in zip(ragged_batch().micro_batches, want.logprobs, strict=True):
        with torch.no_grad():
            logits = [model(part[None]).logits[0, :-1].float() / TEMPERATURE for part in parts]
        rows = [each.log_softmax(-1).gather(1, part[1:, None])[:, 0] for each, part in zip(logits, parts, strict=True)]
        differences.append((torch.cat(rows) - expected).abs())
    return float(torch.cat(differences).median())


def fill_local(
    local: Mapping[str, torch.Tensor], tensors: Layout, rank: int, source: Mapping[str, torch.Tensor]
) -> None:
    """Cut this rank's local buffers out of whole tensors, padding being zero. Gradients have no buffer of frozen parameters."""
    for buffer in local.values():
        buffer.zero_()
    for piece in tensors.shards(rank):
        if piece.local not in local:
            continue
        there = tuple(slice(start, start + size) for start, size in zip(piece.global_offset, piece.shape, strict=True))
        here = tuple(slice(start, start + size) for start, size in zip(piece.local_offset, piece.shape, strict=True))
        local[piece.local][here] = source[piece.tensor][there].to(local[piece.local].dtype)


def build_actor(want: Reference, layout: ParallelLayout, settings: ActorSettings | None = None) -> MegatronActor:
    def load(local: Mapping[str, torch.Tensor], tensors: MegatronLayout) -> None:
        fill_local(local, tensors, dist.get_rank(), want.weights)

    gc.collect()  # the actors of cases before: their groups have threads
    return MegatronActor(want.architecture, layout, settings or ActorSettings(), load)


def sequences(lengths: Sequence[int], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in lengths]


def make_micro_batch(
    tokens: Sequence[torch.Tensor],
    layout: ParallelLayout,
    total_targets: int,
    seed: int,
    experts: MixtureOfExperts | None = None,
) -> MicroBatch:
    """Pack `tokens` for the layout; every real target has a random advantage and weight 1 / total_targets. With `experts` the
    tokens have a `drawn_routing`.
    """
    padded = [-(-part.numel() // layout.sequence_alignment) * layout.sequence_alignment for part in tokens]
    padded[-1] += -sum(padded) % layout.micro_batch_alignment
    bounds = torch.tensor([0, *padded]).cumsum(0)
    fields = {
        name: torch.zeros(int(bounds[-1]), dtype=torch.int64)
        for name in ("token_ids", "position_ids", "targets", "sequence_ids")
    }
    fields |= {
        name: torch.zeros(int(bounds[-1])) for name in ("loss_mask", "loss_weights", "advantages", "rollout_logprobs")
    }
    if experts is not None:
        sizes = int(bounds[-1]), SIZES["num_hidden_layers"], experts.num_experts_per_token
        fields |= {
            "routing": torch.zeros(sizes, dtype=torch.uint8),
            "is_routed": torch.zeros(sizes[0], dtype=torch.bool),
        }
        for start, part in zip(bounds.tolist(), tokens, strict=False):
            routing = drawn_routing(part, experts.num_experts, experts.num_experts_per_token)
            fields["routing"][start : start + len(routing)] = routing
            fields["is_routed"][start : start + len(routing)] = True
    generator = torch.Generator().manual_seed(seed)
    for index, part in enumerate(tokens):
        start, length, width = int(bounds[index]), part.numel(), padded[index]
        fields["token_ids"][start : start + length] = part
        fields["position_ids"][start : start + width] = torch.arange(width)
        fields["sequence_ids"][start : start + width] = index
        fields["targets"][start : start + length - 1] = part[1:]
        fields["loss_mask"][start : start + length - 1] = 1
        fields["loss_weights"][start : start + length - 1] = 1 / total_targets
        fields["advantages"][start : start + length - 1] = torch.randn(length - 1, generator=generator)
    return MicroBatch(
        cu_seqlens=bounds.to(torch.int32),
        sequence_lengths=tuple(part.numel() for part in tokens),
        sample_ids=tuple(f"{seed}/{index}" for index in range(len(tokens))),
        **fields,
    )


@dataclass(frozen=True)
class Batch:
    """A global batch: the sequences of each micro-batch, and the number of targets."""

    micro_batches: tuple[tuple[torch.Tensor, ...], ...]

    @property
    def num_targets(self) -> int:
        return sum(part.numel() - 1 for micro_batch in self.micro_batches for part in micro_batch)

    def of_rank(
        self, layout: ParallelLayout, rank: int, experts: MixtureOfExperts | None = None
    ) -> list[tuple[int, MicroBatch]]:
        """Return (global index, micro-batch) pairs of the data-parallel rank."""
        mine = range(layout.coordinates(rank).data, len(self.micro_batches), layout.data)
        return [
            (index, make_micro_batch(self.micro_batches[index], layout, self.num_targets, 100 + index, experts))
            for index in mine
        ]


def ragged_batch(seed: int = 3) -> Batch:
    return Batch(tuple(tuple(sequences(lengths, seed * 31 + index)) for index, lengths in enumerate(LENGTHS)))


def loss_fn(micro_batch: MicroBatch, outputs: TokenOutputs, index: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    objective = micro_batch.advantages * outputs.logprobs + ENTROPY_WEIGHT * outputs.entropy
    loss = -(micro_batch.loss_weights * objective).sum()
    return loss, {"loss": loss.detach(), "num_targets": micro_batch.loss_mask.sum()}


def logprob_differences(
    actor: MegatronActor, outputs: TokenOutputs, micro_batch: MicroBatch, expected: torch.Tensor
) -> torch.Tensor:
    """Absolute differences [n] at this context rank's real targets."""
    packed = torch.zeros(micro_batch.num_tokens, dtype=torch.float64)
    packed[micro_batch.loss_mask.bool()] = expected
    if actor.layout.context > 1:
        rank = actor.layout.coordinates(dist.get_rank()).context
        index = context_token_index(micro_batch.cu_seqlens, rank, actor.layout.context)
        packed, mask = packed[index], micro_batch.loss_mask[index].bool()
    else:
        mask = micro_batch.loss_mask.bool()
    return (outputs.logprobs - packed)[mask].abs()


def gradient_error(actor: MegatronActor, gradients: Mapping[str, torch.Tensor]) -> float:
    """Largest over local parameters of |difference| / |reference|, both 2-norms."""
    local = actor.gradients()
    expected = {name: torch.zeros(buffer.shape, dtype=torch.float64) for name, buffer in local.items()}
    fill_local(expected, actor.trained_tensors, dist.get_rank(), gradients)
    return max(float((local[name] - want).norm() / want.norm().clamp(min=1e-12)) for name, want in expected.items())


def parity(want: Reference, layout: ParallelLayout, settings: ActorSettings | None = None) -> dict[str, float]:
    """Errors of log-probs, loss, gradients and gradient norm against the reference, the largest over ranks."""
    return parity_of(build_actor(want, layout, settings), want)


def parity_of(actor: MegatronActor, want: Reference) -> dict[str, float]:
    """Errors of an actor with the reference's weights, see `parity`."""
    layout, batch = actor.layout, ragged_batch()
    mine = batch.of_rank(layout, dist.get_rank(), want.architecture.experts if actor.replays_routing else None)
    micro_batches = [micro_batch for _, micro_batch in mine]
    outputs = actor.forward_logprobs(micro_batches, TEMPERATURE)
    last = layout.coordinates(dist.get_rank()).pipeline == layout.pipeline - 1
    assert all((output is not None) == last for output in outputs), "outputs exist on the last pipeline stage only"
    differences = torch.cat(
        [torch.zeros(0)]
        + [
            logprob_differences(actor, out, micro, want.logprobs[i])
            for (i, micro), out in zip(mine, outputs, strict=True)
            if out is not None
        ]
    )
    metrics = actor.accumulate_gradients(micro_batches, loss_fn, TEMPERATURE)
    gradient = gradient_error(actor, want.gradients)
    result = actor.train_step(micro_batches, loss_fn, TEMPERATURE, learning_rate=1e-3)
    norm = float(torch.stack([grad.norm() for grad in want.gradients.values()]).norm())
    errors = {
        "logprob": float(differences.max()) if len(differences) else 0.0,
        "logprob_median": float(differences.median()) if len(differences) else 0.0,
        "loss": abs(metrics["loss"] - want.loss) / abs(want.loss),
        "targets": abs(metrics["num_targets"] - batch.num_targets),
        "gradient": gradient,
        "norm": abs(result.grad_norm - norm) / norm,
        "not_applied": float(not result.applied),
        "exchanges_lengths": float(actor.config.variable_seq_lengths),
    }
    return largest_over_ranks(errors)


def largest_over_ranks(errors: dict[str, float]) -> dict[str, float]:
    values = torch.tensor(list(errors.values()), dtype=torch.float64)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return dict(zip(errors, values.tolist(), strict=True))


def model_settings(case: Mapping[str, Any]) -> ModelSettings:
    """Settings of a case: "dtype", "recompute", "precision", and "megatron" for megatron-core's own fields."""
    precision = PrecisionConfig(**case.get("precision", {}))
    dtype, recompute = case.get("dtype", "float32"), case.get("recompute", "none")
    return ModelSettings(dtype, recompute, precision, megatron=case.get("megatron", {}))


def parity_of_layouts(arguments: dict[str, Any]) -> list[dict[str, float]]:
    """Worker: `parity` of each case {"model", "layout" (fields), and optionally those of `model_settings`, "distributed", "keep_bytes",
    "fixed_tokens"}.

    Micro-batches of a pipeline are made equal in length if the case has "padded".
    """
    results = []
    for case in arguments["cases"]:
        schedule.MAX_PADDED_SHARE = 10.0 if case.get("padded") else 0.0
        settings = ActorSettings(
            model=model_settings(case),
            use_distributed_optimizer=case.get("distributed", True),
            head_keep_bytes=case.get("keep_bytes", 0),
            replays_routing=case["model"].endswith(REPLAYED),
            fixed_tokens=case.get("fixed_tokens", 0),
        )
        layout = ParallelLayout(world_size=dist.get_world_size(), **case["layout"])
        results.append(parity(Reference.read(arguments["references"], case["model"]), layout, settings))
    return results


def isolation(arguments: dict[str, Any]) -> list[dict[str, float]]:
    """Worker: for each case, how far other tokens in the second of three packed samples move log-probs: those of the other
    two ("others"), and its own ("moved")."""
    return [_isolation(Reference.read(arguments["references"], case["model"]), case) for case in arguments["cases"]]


def _isolation(want: Reference, case: Mapping[str, Any]) -> dict[str, float]:
    layout = ParallelLayout(world_size=dist.get_world_size(), **case["layout"])
    actor, samples = build_actor(want, layout), sequences((13, 21, 10), seed=5)
    changed = [samples[0], (samples[1] + 1) % VOCABULARY, samples[2]]
    packs = [make_micro_batch(parts, layout, 41, seed=100) for parts in (samples, changed)]
    before, after = (actor.forward_logprobs([pack], TEMPERATURE)[0] for pack in packs)
    assert before is not None and after is not None, "no pipeline here: every rank has outputs"
    ids, mask = packs[0].sequence_ids, packs[0].loss_mask.bool()
    if layout.context > 1:
        rank = layout.coordinates(dist.get_rank()).context
        index = context_token_index(packs[0].cu_seqlens, rank, layout.context)
        ids, mask = ids[index], mask[index]
    difference = (before.logprobs - after.logprobs).abs() * mask
    return largest_over_ranks(
        {"others": float(difference[ids != 1].max()), "moved": float(difference[ids == 1].max())}
    )


# Optimizer, guard and exact state on two ranks.

LEARNING_RATE = 3e-3


def train(actor: MegatronActor, seeds: Sequence[int]) -> list[tuple[float, float]]:
    """(loss, gradient norm) of one step on each seed's batch."""
    history = []
    for seed in seeds:
        micro_batches = [micro_batch for _, micro_batch in ragged_batch(seed).of_rank(actor.layout, dist.get_rank())]
        result = actor.train_step(micro_batches, loss_fn, TEMPERATURE, LEARNING_RATE)
        assert result.applied
        history.append((result.metrics["loss"], result.grad_norm))
    return history


def snapshot(model: TrainedModel) -> dict[str, torch.Tensor]:
    return {key: tensor.clone() for key, tensor in model.state_shards().items()}


def take_over(model: TrainedModel, tensors: Mapping[str, torch.Tensor]) -> None:
    """Put a `snapshot` of a model on the same layout in place, by the steps in which a checkpoint is loaded."""
    buffers = model.loading_state()
    with torch.no_grad(), model.on_device(list(buffers.values())):
        for key, buffer in buffers.items():
            buffer.copy_(tensors[key]) if key in tensors else buffer.zero_()
    steps = {name: float(tensors.get(f"step/{name}", 0.0)) for name in model.trained_tensors.local_specs(model.rank)}
    model.finish_loading(buffers, steps)
    model.load_rank_state(tensors)


def differing(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> list[str]:
    """Return keys that only one has, or whose tensors differ in any bit."""
    return sorted(set(first) ^ set(second)) + [
        key for key in first if key in second and not torch.equal(first[key], second[key])
    ]


def resume(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """Worker: 5 steps in a row against 2 steps, save, rebuild, load, 3 steps; the differences of each case."""
    return [resume_case(Reference.read(arguments["references"], case["model"]), case) for case in arguments["cases"]]


def resume_case(want: Reference, case: dict[str, Any]) -> dict[str, Any]:
    layout = ParallelLayout(world_size=dist.get_world_size(), **case["layout"])
    settings = ActorSettings(
        model=model_settings(case),
        use_distributed_optimizer=case["distributed"],
    )
    whole = build_actor(want, layout, settings)
    history = train(whole, range(10, 15))
    first = build_actor(want, layout, settings)
    begun = train(first, range(10, 12))
    tensors = snapshot(first)
    second = build_actor(want, layout, settings)
    take_over(second, tensors)
    loaded = differing(tensors, snapshot(second))
    continued = train(second, range(12, 15))
    difference = differing(snapshot(whole), snapshot(second))
    steps = {float(t) for key, t in snapshot(second).items() if key.startswith("step/")}
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, {"loaded": loaded, "difference": difference, "steps": sorted(steps)})
    return {
        "ranks": everywhere,
        "history": history,
        "continued": begun + continued,
        "kinds": sorted({key.split("/")[0] for key in tensors}),
    }


def guard(arguments: dict[str, Any]) -> dict[str, list[int]]:
    """Worker: a step in which one rank's loss is not finite, between two good steps.

    Returns for each case, largest over ranks: was the step applied, how many tensors changed, did the next step work.
    """
    want = Reference.read(arguments["references"], "qwen2")
    pairs = itertools.product(arguments["layouts"], (True, False))
    cases = [(*pair, float("inf" if index % 3 else "nan")) for index, pair in enumerate(pairs)]
    return {
        f"{layout} {distributed} {bad}": _guard_case(want, layout, distributed, bad)
        for layout, distributed, bad in cases
    }


def _guard_case(want: Reference, fields: dict[str, int], distributed: bool, bad: float) -> list[int]:
    layout = ParallelLayout(world_size=dist.get_world_size(), **fields)
    actor = build_actor(want, layout, ActorSettings(use_distributed_optimizer=distributed))
    train(actor, [10])
    before = snapshot(actor)
    micro_batches = [micro_batch for _, micro_batch in ragged_batch(11).of_rank(layout, dist.get_rank())]

    def poisoned(
        micro_batch: MicroBatch, outputs: TokenOutputs, index: int
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss, metrics = loss_fn(micro_batch, outputs, index)
        return (loss * bad if dist.get_rank() == dist.get_world_size() - 1 and index == 0 else loss), metrics

    result = actor.train_step(micro_batches, poisoned, TEMPERATURE, LEARNING_RATE)
    changed = differing(before, snapshot(actor))
    history = train(actor, [11])
    flags = torch.tensor([result.applied, len(changed), history[0][1] < 1e3], dtype=torch.int64)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return flags.tolist()


def cross_checks(arguments: dict[str, Any]) -> dict[str, Any]:
    """Worker: properties of the actor that need two ranks but no transformers; see test_actor_steps.py."""
    want = Reference.read(arguments["references"], "qwen2")
    layout = ParallelLayout(world_size=2, pipeline=2, virtual_pipeline=2)
    actor = build_actor(want, layout)
    micro_batches = [micro_batch for _, micro_batch in ragged_batch().of_rank(layout, 0)]
    refused = ""
    try:
        actor.forward_logprobs(micro_batches[:3], TEMPERATURE)
    except ValueError as error:
        refused = str(error)
    groups = actor.groups
    again = build_actor(want, layout)
    train(actor, range(10, 12))  # the first model still works on the shared groups
    return {
        "refused": refused,
        "groups_shared": again.groups == groups,
        "many": _many_micro_batches(actor),
        "uneven": _uneven_parts(),
    }


def _uneven_parts() -> dict[str, Any]:
    """Parts of different lengths, one of them empty, through megatron-core's collectives; and what gloo says."""
    group, rank = dist.group.WORLD, dist.get_rank()
    results: dict[str, Any] = {"refused": ""}
    try:
        dist.all_gather([torch.zeros(2, 3), torch.zeros(1, 3)], torch.zeros(2 - rank, 3))
    except (RuntimeError, ValueError) as error:
        results["refused"] = str(error)
    for sizes in ([3, 5], [2, 0], [0, 0]):
        whole = torch.arange(3.0 * sum(sizes)).view(-1, 3)
        mine = whole.split(sizes)[rank]
        gathered = mappings._gather_along_first_dim(mine, group, sizes)
        reduced = mappings._reduce_scatter_along_first_dim(whole * (rank + 1), group, sizes)
        results[str(sizes)] = torch.equal(gathered, whole) and torch.equal(reduced, mine * 3)
    return results


def _many_micro_batches(actor: MegatronActor) -> float:
    """16 micro-batches of different lengths through the interleaved schedule against the same without a pipeline: loss
    difference.
    """
    layout = actor.layout
    parts = [tuple(sequences((3 + 5 * index % 37, 2 + index), 500 + index)) for index in range(16)]
    batch = Batch(tuple(parts))
    pipelined = actor.accumulate_gradients(
        [micro for _, micro in batch.of_rank(layout, dist.get_rank())], loss_fn, TEMPERATURE
    )
    single = ParallelLayout(world_size=2)
    weights = {name: parameter.detach().clone() for name, parameter in actor.named_local_parameters().items()}
    whole: list[dict[str, torch.Tensor] | None] = [None, None]
    dist.all_gather_object(whole, weights)

    def load(local: Mapping[str, torch.Tensor], tensors: MegatronLayout) -> None:
        for name, buffer in local.items():
            buffer.copy_(_pipelined_parameter(name, whole))

    plain = MegatronActor(actor.architecture, single, ActorSettings(), load)
    alone = plain.accumulate_gradients(
        [micro for _, micro in batch.of_rank(single, dist.get_rank())], loss_fn, TEMPERATURE
    )
    return abs(pipelined["loss"] - alone["loss"]) / abs(alone["loss"])


def _pipelined_parameter(name: str, whole: Sequence[Any]) -> torch.Tensor:
    """The parameter of the single chunk of 4 layers in PP2 VPP2, whose chunks hold one layer each: layer i is stage i
    // 2 of rank i % 2.
    """
    path = name.split(".", 1)[1]
    if path.startswith("decoder.layers."):
        layer = int(path.split(".")[2])
        rest = path.split(".", 3)[3]
        return whole[layer % 2][f"{layer // 2}.decoder.layers.0.{rest}"]
    return whole[0][f"0.{path}"] if path.startswith("embedding") else whole[1][f"1.{path}"]
