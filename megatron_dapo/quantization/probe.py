"""Samples to calibrate and check a checkpoint with: prompts of the run, responses of the model, log-probs of both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from megatron_dapo.quantization.formats import Tolerance

Tokens = list[int]


@dataclass(frozen=True)
class Sample:
    """A prompt with a response, whose log-probs are compared."""

    token_ids: Tokens
    num_prompt_tokens: int

    def scored(self, logprobs: Sequence[float]) -> list[float]:
        """Select the log-probs of the response from those of every token but the first; all of them if it is empty."""
        has_response = len(self.token_ids) > self.num_prompt_tokens
        return list(logprobs[self.num_prompt_tokens - 1 if has_response else 0 :])


@torch.inference_mode()
def sample_responses(
    model: Any, prompts: Sequence[Sequence[int]], num_tokens: int, seed: int, batch_size: int = 16
) -> list[Sample]:
    """Return each prompt with a response of at most `num_tokens` tokens, sampled at temperature 1, as when deployed.

    The first token that ends a turn is its last.
    """
    torch.manual_seed(seed)
    samples: list[Sample] = []
    for start in range(0, len(prompts), batch_size):
        chunk = [list(prompt) for prompt in prompts[start : start + batch_size]]
        whole = _continued(model, chunk, num_tokens) if num_tokens else chunk
        samples += [Sample(tokens, len(prompt)) for tokens, prompt in zip(whole, chunk, strict=True)]
    return samples


def _continued(model: Any, prompts: list[Tokens], num_tokens: int) -> list[Tokens]:
    width = max(map(len, prompts))
    filler = 0  # masked, so any token works
    token_ids = torch.tensor([[filler] * (width - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    output = model.generate(
        input_ids=token_ids,
        attention_mask=mask,
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        max_new_tokens=num_tokens,
        pad_token_id=filler,
    )
    ends = model.generation_config.eos_token_id
    stops = set(ends if isinstance(ends, list) else [] if ends is None else [ends])
    return [prompt + _until(stops, row) for prompt, row in zip(prompts, output[:, width:].tolist(), strict=True)]


def _until(stops: set[int], tokens: Tokens) -> Tokens:
    for index, token in enumerate(tokens):
        if token in stops:
            return tokens[: index + 1]
    return tokens


@torch.inference_mode()
def logprobs_of(model: Any, sample: Sample) -> list[float]:
    """Return the log-probs of a sample in nats, by transformers with an fp32 softmax."""
    token_ids = torch.tensor([sample.token_ids], device=model.device)
    logits = model(input_ids=token_ids, use_cache=False).logits[0, :-1].float()
    targets = token_ids[0, 1:, None]
    return sample.scored((logits.gather(1, targets)[:, 0] - logits.logsumexp(1)).tolist())


@dataclass(frozen=True)
class LogprobDifference:
    """Difference of log-probs before and after, over `num_tokens` tokens of `num_sequences` sequences."""

    num_sequences: int
    num_tokens: int
    mean_abs: float
    max_abs: float
    perplexity_before: float
    perplexity_after: float

    @property
    def perplexity_change(self) -> float:
        return self.perplexity_after / self.perplexity_before - 1

    def record(self) -> dict[str, Any]:
        return asdict(self) | {"perplexity_change": self.perplexity_change}

    def violations(self, tolerance: Tolerance) -> list[str]:
        """Describe every figure out of tolerance, with both numbers. A figure that is not finite is always out."""
        found = {
            "mean |log-prob difference|": (self.mean_abs, tolerance.mean_abs),
            "largest |log-prob difference|": (self.max_abs, tolerance.max_abs),
            "change of perplexity": (abs(self.perplexity_change), tolerance.perplexity),
        }
        return [
            f"{what} {value:.4g}, allowed {limit:g}" for what, (value, limit) in found.items() if not value <= limit
        ]


def compare(before: Sequence[Sequence[float]], after: Sequence[Sequence[float]]) -> LogprobDifference:
    """Compare two sets of log-probs. Raises ValueError unless both are of the same tokens, at least one."""
    lengths = [[len(row) for row in rows] for rows in (before, after)]
    if lengths[0] != lengths[1] or not sum(lengths[0]):
        raise ValueError(f"log-probs of {lengths[0]} tokens before and of {lengths[1]} after cannot be compared")
    first, second = (
        torch.tensor([value for row in rows for value in row], dtype=torch.float64) for rows in (before, after)
    )
    gaps = (first - second).abs()
    return LogprobDifference(
        num_sequences=len(before),
        num_tokens=first.numel(),
        mean_abs=float(gaps.mean()),
        # torch's max of numbers with a NaN is NaN, so a NaN cannot hide.
        max_abs=float(gaps.max()),
        perplexity_before=math.exp(-float(first.mean())),
        perplexity_after=_exp(-float(second.mean())),
    )


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0)) if math.isfinite(value) else math.nan
