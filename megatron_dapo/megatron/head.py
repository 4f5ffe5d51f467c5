"""From the last chunk's hidden states to what a loss is made of."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.models.gpt.gpt_model import GPTModel

from megatron_dapo.megatron.model import output_weight
from megatron_dapo.ops.lm_head.select import AUTO, Choice, HeadSpec, choose
from megatron_dapo.ops.logprob import vocab_parallel_logprobs
from megatron_dapo.types import MicroBatch


@dataclass(frozen=True)
class TokenOutputs:
    """fp32 log-prob of each target and entropy there, aligned with the (context-sliced) micro-batch's fields."""

    logprobs: torch.Tensor  # [P_local]
    entropy: torch.Tensor  # [P_local]


@dataclass(frozen=True)
class HeadSettings:
    """`vocab_size`: without padding. `chunk_tokens`: tokens whose logits live at a time; None: chosen by size.
    `implementation`: a name of `ops.lm_head.select.IMPLEMENTATIONS`, or "auto" for the rule stated there."""

    vocab_size: int
    temperature: float = 1.0
    chunk_tokens: int | None = None
    implementation: str = AUTO


def token_outputs(
    chunk: GPTModel, hidden: torch.Tensor, micro_batch: MicroBatch, settings: HeadSettings
) -> TokenOutputs:
    """Outputs of the last chunk from its hidden states [1, P_local, h] at `settings.temperature`."""
    group = chunk.pg_collection.tp
    logprobs, entropy = vocab_parallel_logprobs(
        hidden[0],
        output_weight(chunk),
        micro_batch.targets,
        temperature=settings.temperature,
        vocab_size=settings.vocab_size,
        group=group if group.size() > 1 else None,
        implementation=settings.implementation,
        chunk_tokens=settings.chunk_tokens,
    )
    return TokenOutputs(logprobs, entropy)


def implementation(chunk: GPTModel, settings: HeadSettings) -> Choice:
    """Which implementation `token_outputs` takes for this last chunk, and why; ValueError where it cannot run here."""
    weight = output_weight(chunk)
    return choose(settings.implementation, HeadSpec(weight.device, weight.dtype, weight.size(1), weight.size(0)))
