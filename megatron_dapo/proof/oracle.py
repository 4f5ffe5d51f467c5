"""The expected gradients: a plain transformers model in fp64, one sequence at a time, and the loss from the papers.

It shares nothing with the training path: no packing, no weights from `algorithms`, no log-prob kernel, no process
group. Gradients are linear in the samples' weights, so one backward pass a sequence serves every aggregation.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from megatron_dapo.models.parts.biased_experts import experts_of
from megatron_dapo.proof.cases import MAX_RESPONSE_TOKENS, ProofBatch
from megatron_dapo.proof.losses import ProofLoss
from megatron_dapo.types import TrainSample

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TEMPERATURE = 0.9

# Small enough for a laptop, with everything that a layout can get wrong: grouped queries, a bias on the fused QKV, a
# vocabulary that does not divide, norms and biases away from 1 and 0.
MODEL_FIELDS: dict[str, Any] = {
    "vocab_size": 203,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "architectures": ["Qwen2ForCausalLM"],
}


# Dense and sparse layers, and more experts than a token uses.
EXPERT_FIELDS: dict[str, Any] = {
    **MODEL_FIELDS,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
    "architectures": ["Qwen3MoeForCausalLM"],
}
_FUSED: Mapping[str, tuple[str, ...]] = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True)
class Answer:
    loss: float
    loss_scale: float  # the same sum of absolute values, to which errors of the loss are relative
    gradients: Mapping[str, torch.Tensor]  # Hugging Face name -> fp64


def make_model(directory: str = "", experts: bool = False, seed: int = 7) -> PreTrainedModel:
    """Return the model of a Hugging Face directory in fp32, or a small random Qwen2 (`experts`: Qwen3-MoE)."""
    import transformers

    if directory:
        return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
    model: PreTrainedModel
    if experts:
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**EXPERT_FIELDS))
    else:
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**MODEL_FIELDS))
    return with_random_weights(model, seed)


def with_random_weights(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Draw the model's weights, far from uniform distributions, with norms and biases away from 1 and 0; return it."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if "norm" in name else 0.15 * noise)
    return model


def stored_tensors(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors under their names and shapes on disk: transformers fuses a layer's experts in memory only."""
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in parameters.items():
        prefix, _, kind = name.rpartition(".")
        if not prefix.endswith(".mlp.experts"):
            stored[name] = tensor
            continue
        if f"{prefix}.down_proj_bias" in parameters:
            stored |= experts_of(name, tensor)
            continue
        for expert, whole in enumerate(tensor):
            parts = whole.chunk(2) if kind == "gate_up_proj" else (whole,)
            for projection, part in zip(_FUSED[kind], parts, strict=True):
                stored[f"{prefix}.{expert}.{projection}.weight"] = part
    return stored


def in_fp64(model: PreTrainedModel) -> PreTrainedModel:
    """Turn the model to fp64, norms included, and return it."""
    model = model.double().eval()
    # Other implementations of experts, and transformers' RMSNorm, round to fp32 or less.
    model.config._experts_implementation = "eager"
    for module in list(model.modules()):
        for name, child in module.named_children():
            if hasattr(child, "variance_epsilon"):
                theirs: Any = child
                norm = torch.nn.RMSNorm(theirs.weight.shape, theirs.variance_epsilon, dtype=torch.float64)
                norm.weight = theirs.weight
                setattr(module, name, norm)
    return model


def solve(model: PreTrainedModel, batch: ProofBatch, loss: ProofLoss) -> tuple[list[TrainSample], dict[str, Answer]]:
    """Return the samples with old log-probs that give the batch's ratios (in `rollout_logprobs`), and the answer of
    every aggregation. Turns the model to fp64."""
    model = in_fp64(model)
    names, parameters = zip(*model.named_parameters(), strict=True)
    samples, losses, scales, gradients = [], [], [], []
    for sample, ratios in zip(batch.samples, batch.ratios, strict=True):
        logprobs = _response_logprobs(model, sample)
        sample = replace(sample, rollout_logprobs=(logprobs.detach() - ratios.log()).float())
        if loss.has_sequence_advantage:
            sample = replace(sample, advantages=sample.advantages[:1].repeat(sample.num_response_tokens))
        mask = sample.loss_mask.double()
        token_losses = mask * loss.token_losses(
            logprobs, sample.rollout_logprobs.double(), sample.advantages.double(), mask
        )
        # Unweighted; the weights of each aggregation multiply them below.
        gradients.append(torch.autograd.grad(token_losses.sum(), parameters))
        losses.append(float(token_losses.detach().sum()))
        scales.append(float(token_losses.detach().abs().sum()))
        samples.append(sample)
    answers = {}
    for name, weight_fn in WEIGHTS.items():
        weights = weight_fn(
            [int(sample.loss_mask.sum()) for sample in samples], [sample.group_index for sample in samples]
        )
        total = [sum(w * g for w, g in zip(weights, column, strict=True)) for column in zip(*gradients, strict=True)]
        total_loss, scale = (math.fsum(map(operator.mul, weights, values)) for values in (losses, scales))
        answers[name] = Answer(total_loss, scale, stored_tensors(dict(zip(names, total, strict=True))))
    return samples, answers


def _response_logprobs(model: PreTrainedModel, sample: TrainSample) -> torch.Tensor:
    tokens = sample.tokens.to(model.device)
    logits = model(tokens[None]).logits[0] / TEMPERATURE
    supports = [slice(None)] * sample.num_response_tokens if sample.support is None else _supports(sample.support)
    positions = range(sample.prompt_length, sample.num_tokens)
    # The logits at a position predict the next token; top-p and top-k leave those of its support.
    return torch.stack(
        [
            logits[position - 1, tokens[position]] - logits[position - 1, support].logsumexp(0)
            for position, support in zip(positions, supports, strict=True)
        ]
    ).cpu()


def _supports(flat: torch.Tensor) -> list[Any]:
    """Return each token's ids; the last one of each is stored as its complement."""
    rows: list[list[int]] = [[]]
    for number in flat.tolist():
        rows[-1].append(number if number >= 0 else ~number)
        if number < 0:
            rows.append([])
    return rows[:-1]


def _sample_mean(lengths: Sequence[int], groups: Sequence[int]) -> list[float]:
    num_samples = sum(length > 0 for length in lengths)
    return [1 / (num_samples * length) if length else 0.0 for length in lengths]


def _per_group(lengths: Sequence[int], groups: Sequence[int]) -> list[float]:
    tokens = {
        group: sum(length for length, other in zip(lengths, groups, strict=True) if other == group)
        for group in set(groups)
    }
    num_groups = sum(count > 0 for count in tokens.values())
    return [1 / (num_groups * tokens[group]) if tokens[group] else 0.0 for group in groups]


# Functions of the trained tokens and the group of each sample that return the weight of each of its trained tokens.
WEIGHTS = {
    "token_mean": lambda lengths, groups: [1 / sum(lengths)] * len(lengths),
    "sample_mean": _sample_mean,
    "per_group": _per_group,
    "dr_grpo": lambda lengths, groups: [1 / (len(lengths) * MAX_RESPONSE_TOKENS)] * len(lengths),
    "seq_sum_mean": lambda lengths, groups: [1 / sum(length > 0 for length in lengths)] * len(lengths),
}
