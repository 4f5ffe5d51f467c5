"""A model whose sizes are multiples of 128 on two tensor ranks, and workers of the tests of emulated FP8."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch
import torch.distributed as dist
from actor_checks import (
    TEMPERATURE,
    Reference,
    build_actor,
    gradient_error,
    largest_over_ranks,
    logprob_differences,
    loss_fn,
    ragged_batch,
    resume_case,
)

from megatron_dapo.checkpoints.load import random_normal
from megatron_dapo.config.model_schema import PrecisionConfig
from megatron_dapo.megatron import model_config, trained_model
from megatron_dapo.megatron.actor import ActorSettings, MegatronActor
from megatron_dapo.megatron.experts import GroupedSigmoidRouter, SoftmaxFirstRouter
from megatron_dapo.megatron.model_config import ModelSettings
from megatron_dapo.models.config_json import parse_architecture
from megatron_dapo.ops import fp8
from megatron_dapo.ops.fp8 import quantize_hidden, quantize_weight, quantized_along_tokens
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.precision import FP8_BLOCKWISE, token_multiple

BLOCKWISE = PrecisionConfig(recipe=FP8_BLOCKWISE)
TOKENS = token_multiple(FP8_BLOCKWISE)
WIDE = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 128,
    "head_dim": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}

# Experts that two tensor ranks may cut; every token has the ones of its own.
EXPERTS = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
# One key-value head a tensor rank, local and global layers, norms before and after attention and MLP.
GEMMA3 = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_act": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 128,
    "sliding_window": 6,
    "layer_types": [f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding")],
    "rope_theta": None,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
    "tie_word_embeddings": True,
}
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}
# Gated delta nets in all layers but one, whose last block of in_proj has 16 rows a tensor rank; an expert for every token.
DELTA = {
    **ROUTED,
    "model_type": "qwen3_next",
    "architectures": ["Qwen3NextForCausalLM"],
    "num_experts": 4,
    "shared_expert_intermediate_size": 256,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-3,  # see `actor_checks.DELTA`
    "rope_theta": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
# Keys and values are compressed by a matrix of 192 rows, whole on every rank; the first layer is dense.
LATENT = {
    **ROUTED,
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "head_dim": None,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
FAMILIES: Mapping[str, Mapping[str, Any]] = {"dense": {}, "experts": EXPERTS, "gemma3": GEMMA3, "delta": DELTA, "latent": LATENT}


def wide_model(**changes: Any) -> Reference:
    """Random weights without a transformers reference."""
    architecture = parse_architecture({**WIDE, **changes})
    weights = {name: 0.08 * random_normal(7, name, shape) for name, shape in architecture.shapes().items()}
    for name, tensor in weights.items():
        # Some families store the difference from 1, except in gated delta nets.
        if "norm" in name and (not architecture.zero_centered_norms or "linear_attn." in name):
            weights[name] = 1 + tensor
    return Reference(architecture, weights, 0.0, {}, ())


def settings_of(precision: PrecisionConfig = BLOCKWISE, dtype: str = "float32", **settings: Any) -> ActorSettings:
    return ActorSettings(model=ModelSettings(dtype=dtype, precision=precision), **settings)


def measured(actor: MegatronActor, want: Reference | None = None) -> tuple[Reference, dict[str, float]]:
    """Measure the actor on the ragged batch: its results as a reference for others, and its errors against `want`."""
    layout = actor.layout
    mine = ragged_batch().of_rank(layout, dist.get_rank())
    outputs = actor.forward_logprobs([micro for _, micro in mine], TEMPERATURE)
    metrics = actor.accumulate_gradients([micro for _, micro in mine], loss_fn, TEMPERATURE)
    errors = {}
    if want is not None:
        differences = [
            logprob_differences(actor, out, micro, want.logprobs[index])
            for (index, micro), out in zip(mine, outputs, strict=True)
            if out is not None
        ]
        errors = {
            "logprob": float(torch.cat([torch.zeros(1), *differences]).max()),
            "gradient": gradient_error(actor, want.gradients),
            "loss": abs(metrics["loss"] - want.loss) / abs(want.loss),
        }
        errors = largest_over_ranks(errors)
        return want, errors
    logprobs = tuple(
        out.logprobs[micro.loss_mask.bool()].double() for (_, micro), out in zip(mine, outputs, strict=True)
    )
    return Reference(actor.architecture, {}, metrics["loss"], whole_gradients(actor), logprobs), errors


def whole_gradients(actor: MegatronActor) -> dict[str, torch.Tensor]:
    """Gradients of a model that one rank holds, by Hugging Face names."""
    found, gradients = {}, actor.gradients()
    for piece in actor.tensors.shards(0):
        if piece.local not in gradients:  # Its parameter is frozen.
            continue
        whole = found.setdefault(piece.tensor, torch.zeros(actor.tensors.tensors[piece.tensor].shape))
        there = tuple(slice(start, start + size) for start, size in zip(piece.global_offset, piece.shape, strict=True))
        here = tuple(slice(start, start + size) for start, size in zip(piece.local_offset, piece.shape, strict=True))
        whole[there] = gradients[piece.local][here]
    return found


def layouts(arguments: dict[str, Any]) -> list[dict[str, dict[str, float]]]:
    """Worker: errors of each layout against the replicated model, in "fp32" and, under context parallelism, also in "fp64": its sums
    are of other orders, and values in fp32 that are next to a tie of e4m3 fall to either side."""
    want = wide_model(**FAMILIES[arguments["family"]])

    def errors(case: dict[str, Any], reference: Reference) -> dict[str, float]:
        return measured(build_actor(want, _layout(case), settings_of()), reference)[1]

    # Every rank holds a full replica and the whole batch: nothing is cut.
    reference = _replicated(build_actor(want, _layout({}), settings_of()))
    results = [{"fp32": errors(case, reference)} for case in arguments["layouts"]]
    with computing_in_fp64():
        exact = _replicated(build_actor(want, _layout({}), settings_of()))
        for case, result in zip(arguments["layouts"], results, strict=True):
            if "context" in case:
                result["fp64"] = errors(case, exact)
    return results


def against_exact_sums(arguments: dict[str, Any]) -> list[dict[str, dict[str, float]]]:
    """Worker: errors of each layout against the replicated model in fp64; "fp64" in fp64 as well, "fp32" as it is, but each
    product quantizes what the one in fp64 quantized."""
    want = wide_model(**FAMILIES[arguments["family"]])
    results = []
    for case in arguments["layouts"]:
        layout = _layout(case)
        # Padded alike: torch's attention sums over keys in another order when there is more padding after them.
        alone = ParallelLayout(layout.world_size, token_multiple=layout.micro_batch_alignment)
        operands = Operands()
        with computing_in_fp64():
            reference = _replicated(build_actor(want, alone, settings_of()))
        with computing_in_fp64(operands):
            fp64 = measured(build_actor(want, layout, settings_of()), reference)[1]
        with operands.given():
            fp32 = measured(build_actor(want, layout, settings_of()), reference)[1]
        results.append({"fp64": fp64, "fp32": {**fp32, **largest_over_ranks({"operand": operands.error})}})
    return results


class Operands:
    """What the products of FP8 layers quantize, in the order of the forward passes: inputs, and gradients of outputs.

    A value in fp32 that is next to a tie of e4m3 may fall to the other side when sums are made in another order, and every
    product after it then differs by as much as FP8 rounds. Given operands break the ties alike.
    """

    def __init__(self) -> None:
        self.inputs: list[torch.Tensor] = []
        self.gradients: dict[int, torch.Tensor] = {}
        self.error = 0.0  # the largest of an operand that was replaced, over its largest magnitude

    def replace(self, own: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """Return a copy of `given`, and note how far the values in its place were from it."""
        if given.numel():
            largest = given.abs().max().clamp(min=1e-6)  # Some gradients are 0.
            self.error = max(self.error, float((own - given).abs().max() / largest))
        return given.clone()

    @contextmanager
    def given(self) -> Iterator[None]:
        """Make the products of FP8 layers quantize these operands instead of those that the layers pass."""
        place, multiply = count(), fp8._BlockwiseLinear.apply

        def replaced(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            index = next(place)
            output = multiply(_Replace.apply(hidden, self, self.inputs[index], None), weight)
            return _Replace.apply(output, self, None, self.gradients.get(index)) if output.requires_grad else output

        with _products(replaced):
            yield


class _Replace(torch.autograd.Function):
    """The identity with a given output or gradient."""

    @staticmethod
    def forward(
        ctx: Any, own: torch.Tensor, operands: Operands, output: torch.Tensor | None, gradient: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.operands, ctx.gradient = operands, gradient
        return own.view_as(own) if output is None else operands.replace(own, output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return gradient if ctx.gradient is None else ctx.operands.replace(gradient, ctx.gradient), None, None, None


class _Fp64Product(torch.autograd.Function):
    """The three products of `blockwise_linear`: the same operands, widened from e4m3, with sums and results in fp64."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, operands: Operands) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.operands, ctx.index = operands, len(operands.inputs)
        operands.inputs.append(hidden.detach().float())
        return quantize_hidden(hidden).widened().double() @ quantize_weight(weight).widened().double().t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        hidden, weight = ctx.saved_tensors
        ctx.operands.gradients[ctx.index] = gradient.float()
        to_hidden = quantize_hidden(gradient).widened().double() @ quantize_weight(weight).widened().double()
        to_weight = quantized_along_tokens(gradient).double().t() @ quantized_along_tokens(hidden).double()
        return to_hidden.to(hidden.dtype), to_weight.to(weight.dtype), None


@contextmanager
def _products(multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Replace the emulated product of FP8 layers."""
    with patch.object(fp8, "_BlockwiseLinear", SimpleNamespace(apply=multiply)):
        yield


@contextmanager
def computing_in_fp64(operands: Operands | None = None) -> Iterator[None]:
    """Let models of float32 compute in fp64. `operands` notes what FP8 layers quantize."""
    noted = operands or Operands()
    with ExitStack() as replaced:
        replaced.enter_context(_products(lambda hidden, weight: _Fp64Product.apply(hidden, weight, noted)))
        for module in (model_config, trained_model):
            replaced.enter_context(patch.object(module, "DTYPES", {"float32": torch.float64}))
        # Scores have the type in which tensor ranks' outputs are summed.
        replaced.enter_context(patch.object(SoftmaxFirstRouter, "scores", lambda self, x: (x @ self.weight.t()).softmax(-1)))
        replaced.enter_context(patch.object(GroupedSigmoidRouter, "scores", lambda self, x: (x @ self.weight.t()).sigmoid()))
        # megatron-core has no optimizer of such parameters.
        replaced.enter_context(patch.object(trained_model, "build_optimizer", MagicMock()))
        replaced.enter_context(patch.object(trained_model, "set_main_params"))
        yield


def _layout(fields: dict[str, Any]) -> ParallelLayout:
    return ParallelLayout(dist.get_world_size(), **fields, token_multiple=TOKENS)


def _replicated(actor: MegatronActor) -> Reference:
    """Build the reference from a data-parallel actor: its ranks' log-probs in the batch's order, its summed gradients."""
    mine = ragged_batch().of_rank(actor.layout, dist.get_rank())
    reference, _ = measured(actor)
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, {i: rows for (i, _), rows in zip(mine, reference.logprobs, strict=True)})
    rows = {index: values for part in everywhere for index, values in part.items()}
    ordered = tuple(rows[index] for index in sorted(rows))
    return Reference(reference.architecture, {}, reference.loss, reference.gradients, ordered)


def resume(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """Worker: see `actor_checks.resume`, in FP8."""
    cases: Sequence[dict[str, Any]] = arguments["cases"]
    model = wide_model(**FAMILIES[arguments["family"]])
    return [resume_case(model, {**case, "layout": {**case["layout"], "token_multiple": TOKENS}}) for case in cases]
