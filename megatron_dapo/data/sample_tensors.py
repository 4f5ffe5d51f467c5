"""Conversion of train samples to a few flat tensors and back, for batch dumps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from megatron_dapo.types import CriticContext, TrainSample, TurnCredit, Window

RECORDS = ("routing", "support", "teacher_prompts")  # fields of a sample that have any shape, or none
Description = dict[str, Any]  # JSON-serializable


def to_tensors(samples: Sequence[TrainSample]) -> tuple[Description, dict[str, torch.Tensor]]:
    """Return (description, tensors): `tokens` int32 [sum T]; `loss_mask`, `advantages`, `rollout_logprobs`, `staleness` float32
    [sum R]; `observed` bool, `teacher_gains` and the RECORDS, flat, for the samples that have it. Values and returns of a critic are not included: ranks compute them.
    """
    description: Description = {
        "sample_ids": [sample.sample_id for sample in samples],
        "group_index": [sample.group_index for sample in samples],
        "num_tokens": [sample.num_tokens for sample in samples],
        "prompt_length": [sample.prompt_length for sample in samples],
        "segment": [sample.segment for sample in samples],
        "source": [sample.source for sample in samples],
        "has_gains": [sample.teacher_gains is not None for sample in samples],
        "has_observed": [sample.observed is not None for sample in samples],
        "critic_context": [sample.critic_context and asdict(sample.critic_context) for sample in samples],
    }
    records = {name: [getattr(sample, name) for sample in samples] for name in RECORDS}
    for name, parts in records.items():
        description[name] = [None if part is None else list(part.shape) for part in parts]
    tensors = {"tokens": _joined([sample.tokens.to(torch.int32) for sample in samples], torch.int32)}
    for name in ("loss_mask", "advantages", "rollout_logprobs"):
        tensors[name] = _joined([getattr(sample, name) for sample in samples], torch.float32)
    tensors["staleness"] = _joined([_staleness(sample) for sample in samples], torch.float32)
    if any(description["has_observed"]):
        tensors["observed"] = _joined([one.observed for one in samples if one.observed is not None], torch.bool)
    if any(description["has_gains"]):
        tensors["teacher_gains"] = _joined([one.teacher_gains for one in samples if one.teacher_gains is not None], torch.float32)
    for name, parts in records.items():
        if recorded := [part.flatten() for part in parts if part is not None]:
            tensors[name] = _joined(recorded, recorded[0].dtype)
    return description, tensors


def from_tensors(description: Description, tensors: dict[str, torch.Tensor]) -> list[TrainSample]:
    """Invert `to_tensors`. ValueError if lengths and tensors do not match."""
    num_tokens, prompt_length = description["num_tokens"], description["prompt_length"]
    num_response = [total - prompt for total, prompt in zip(num_tokens, prompt_length, strict=True)]
    _check_total("tokens", tensors["tokens"], sum(num_tokens))
    tokens = tensors["tokens"].split(num_tokens)
    responses = {}
    for name in ("loss_mask", "advantages", "rollout_logprobs", "staleness"):
        _check_total(name, tensors[name], sum(num_response))
        responses[name] = tensors[name].split(num_response)
    observed = _of_some(tensors, "observed", description.get("has_observed"), num_response)
    gains = _of_some(tensors, "teacher_gains", description.get("has_gains"), num_response)
    records = {
        name: _split_record(name, tensors, description.get(name, [None] * len(num_tokens))) for name in RECORDS
    }
    return [
        TrainSample(
            sample_id=description["sample_ids"][index],
            group_index=description["group_index"][index],
            tokens=tokens[index],
            prompt_length=prompt_length[index],
            critic_context=critic_context_from_json(description["critic_context"][index]),
            segment=description.get("segment", [0] * len(num_tokens))[index],
            source=description.get("source", [""] * len(num_tokens))[index],
            observed=observed[index],
            teacher_gains=gains[index],
            **{name: parts[index] for name, parts in (responses | records).items()},
        )
        for index in range(len(num_tokens))
    ]


def critic_context_from_json(value: Mapping[str, Any] | None) -> CriticContext | None:
    """Invert `dataclasses.asdict` of a context; None for None."""
    if value is None:
        return None
    turns = tuple(TurnCredit(**turn) for turn in value.get("turns", ()))
    return CriticContext(**{**value, "window": Window(**value["window"]), "turns": turns})


def _of_some(
    tensors: Mapping[str, torch.Tensor], name: str, has: Sequence[bool] | None, num_response: Sequence[int]
) -> list[torch.Tensor | None]:
    """Return the part of a flat tensor for each sample that has one. `has`: None for an older dump, none has."""
    has = [False] * len(num_response) if has is None else has
    lengths = [length for length, is_there in zip(num_response, has, strict=True) if is_there]
    joined = tensors.get(name, torch.zeros(0))
    _check_total(name, joined, sum(lengths))
    parts = iter(joined.split(lengths))
    return [next(parts) if is_there else None for is_there in has]


def _split_record(
    name: str, tensors: Mapping[str, torch.Tensor], shapes: Sequence[Sequence[int] | None]
) -> list[torch.Tensor | None]:
    sizes = [0 if shape is None else math.prod(shape) for shape in shapes]
    numbers = tensors.get(name, torch.zeros(0, dtype=torch.int32))
    _check_total(name, numbers, sum(sizes))
    parts = zip(numbers.split(sizes), shapes, strict=True)
    return [None if shape is None else part.view(tuple(shape)) for part, shape in parts]


def _staleness(sample: TrainSample) -> torch.Tensor:
    return torch.zeros(sample.num_response_tokens) if sample.staleness is None else sample.staleness


def _joined(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    # torch.cat rejects an empty list.
    return torch.cat(list(parts)).to(dtype) if parts else torch.zeros(0, dtype=dtype)


def _check_total(name: str, tensor: torch.Tensor, expected: int) -> None:
    if tensor.numel() != expected:
        raise ValueError(
            f"train samples: {name} holds {tensor.numel()} values, its lengths add up to {expected}; the batch is damaged"
        )
