"""FP8 of each family against transformers' model, whose linear layers round to the nearest of all values of e4m3."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from actor_checks import ENTROPY_WEIGHT, TEMPERATURE, build_actor, in_fp64, loss_fn, make_micro_batch, sequences
from fp8_checks import FAMILIES, LATENT, ROUTED, TOKENS, WIDE, settings_of, whole_gradients, wide_model
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_dapo.engines.embedded_model import weights_by_name
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.proof.oracle import stored_tensors
from tests.unit.ops.fp8_bounds import rounded

pytestmark = pytest.mark.usefixtures("single_process")
LAYOUT = ParallelLayout(1, token_multiple=TOKENS)
# GLM-4.5: attention with biases, and DeepSeek-V3's experts.
GLM = {
    **{name: value for name, value in LATENT.items() if name in ROUTED or name.startswith(("n_", "routed_", "first_", "topk_g"))},
    "model_type": "glm4_moe",
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "use_qk_norm": True,
    "rope_theta": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
MODELS = {**FAMILIES, "glm": GLM}


class Product(torch.autograd.Function):
    """The three products of a linear layer, of rounded operands, in fp64."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        return rounded(hidden, 1, 128) @ rounded(weight, 128, 128).T

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, weight = ctx.saved_tensors
        to_hidden = rounded(gradient, 1, 128) @ rounded(weight, 128, 128)
        return to_hidden, rounded(gradient, 128, 1).T @ rounded(hidden, 128, 1)


def linear(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, exact: Any = torch.nn.functional.linear
) -> torch.Tensor:
    """Replace torch's linear layer, except those of routers, gates and the vocabulary, whose rows 16 does not divide."""
    if weight.size(0) % 16:
        return exact(hidden, weight, bias)
    output = Product.apply(hidden.flatten(0, -2), weight).unflatten(0, hidden.shape[:-1])
    return output if bias is None else output + bias


def mixture(experts: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Compute experts as megatron-core does: weights multiply the input of the second product, in transformers its output."""
    output, functions = torch.zeros_like(hidden), torch.nn.functional
    for expert in chosen.unique().tolist():
        token, place = (chosen == expert).nonzero(as_tuple=True)
        gate, up = functions.linear(hidden[token], experts.gate_up_proj[expert]).chunk(2, dim=-1)
        inner = functions.silu(gate) * up * weights[token, place, None]
        output = output.index_add(0, token, functions.linear(inner, experts.down_proj[expert]))
    return output


class Transformers:
    """The model of `wide_model` in transformers, fp64."""

    def __init__(self, family: str) -> None:
        fields = {**WIDE, **MODELS[family]}
        config = AutoConfig.for_model(**{name: value for name, value in fields.items() if value is not None})
        config._attn_implementation = "eager"
        self.model = in_fp64(AutoModelForCausalLM.from_config(config))
        for module in self.model.modules():
            if hasattr(module, "gate_up_proj") and not hasattr(module, "gate"):
                module.forward = partial(mixture, module)
        self.weights = wide_model(**MODELS[family])
        with torch.no_grad():
            for name, tensor in weights_by_name(self.model).items():
                tensor.copy_(self.weights.weights[name])

    def log_probs(self, tokens: torch.Tensor, num_targets: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Map tokens [T] to log-probs and entropies of the first targets."""
        log_p = (self.model(tokens[None]).logits[0, :num_targets] / TEMPERATURE).log_softmax(-1)
        return log_p.gather(1, tokens[1 : num_targets + 1, None])[:, 0], -(log_p.exp() * log_p).sum(1)

    def gradients(self, tokens: torch.Tensor, advantages: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the gradients of `loss_fn` by the names of a checkpoint."""
        self.model.zero_grad()
        log_probs, entropy = self.log_probs(tokens, len(advantages))
        (-(advantages * log_probs + ENTROPY_WEIGHT * entropy).mean()).backward()
        return stored_tensors({name: p.grad for name, p in self.model.named_parameters() if p.grad is not None})


@pytest.mark.parametrize("family", MODELS)
def test_logprobs_are_those_of_rounded_linear_layers_in_transformers(family: str) -> None:
    """Median over tokens of 8 short sequences: in fp32, a few operands fall to the other side of a tie of e4m3."""
    parts, theirs = sequences((8,) * 8, seed=3), Transformers(family)
    micro_batch = make_micro_batch(parts, LAYOUT, 56, seed=1)
    [outputs] = build_actor(theirs.weights, LAYOUT, settings_of()).forward_logprobs([micro_batch], TEMPERATURE)
    mine = outputs.logprobs[micro_batch.loss_mask.bool()]
    with torch.no_grad():
        exact = torch.cat([theirs.log_probs(part, 7)[0] for part in parts])
        with patch.object(torch.nn.functional, "linear", linear):
            want = torch.cat([theirs.log_probs(part, 7)[0] for part in parts])
    assert float((mine - want).abs().median()) < 1e-5 < 1e-3 < float((mine - exact).abs().median())


@pytest.mark.parametrize("family", [pytest.param(one, marks=[pytest.mark.long] * (one != "latent")) for one in MODELS])
def test_gradients_are_those_of_rounded_linear_layers_in_transformers(family: str) -> None:
    """The best of short sequences, each padded to a block of tokens: one tie moves a gradient by as much as FP8 does."""
    theirs = Transformers(family)
    actor, errors, effects = build_actor(theirs.weights, LAYOUT, settings_of()), [], []
    for index, tokens in enumerate(sequences((3,) * 5, seed=4)):
        micro_batch = make_micro_batch([tokens], LAYOUT, 2, seed=index)
        actor.accumulate_gradients([micro_batch], loss_fn, TEMPERATURE)
        mine, advantages = whole_gradients(actor), micro_batch.advantages[:2].double()
        exact = theirs.gradients(micro_batch.token_ids, advantages)
        with patch.object(torch.nn.functional, "linear", linear):
            want = theirs.gradients(micro_batch.token_ids, advantages)
        errors.append(distance(mine, want) / distance(want))
        effects.append(distance(mine, exact) / distance(want))
    assert min(errors) < 1e-4 < 1e-2 < min(effects), (errors, effects)


def distance(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor] | None = None) -> float:
    """Return the 2-norm of all gradients, or of their difference."""
    norms = [(tensor if others is None else tensor - others[name]).norm() for name, tensor in some.items()]
    return float(torch.stack(norms).norm())
