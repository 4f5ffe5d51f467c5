"""Exact conversion of groups and responses to values, and of a collector's state to a JSON document plus tensors.

In a state, a response, or a segment of an episode, is a mapping with `token_ids` and `logprobs`, arrays of N numbers
each, and `routing` and `support` if they are recorded; everything else is JSON. `split_state` moves the arrays into
tensors. In their place the document has `token_span` = [start, start + N), the response's place in the first two tensors,
and `routing_span` and `support_span`, which include the shapes. For 8,192 responses of 12K tokens the tensors take 0.8 GB; JSON text
would take 4.3 GB (measured at an eighth of that size).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from megatron_dapo.engines.base import completion_from_json, completion_to_json
from megatron_dapo.types import Group, Prompt, Repetition, Score, ScoredSample, Window

_SPAN = "token_span"
# Arrays that some responses have, by the names of their spans.
_RECORDS = {"routing": "routing_span", "support": "support_span"}
_NUMBERS = ("token_ids", "logprobs", *_RECORDS)


def group_to_json(group: Group) -> dict[str, Any]:
    """Return `group` as JSON values; tokens and log-probs stay arrays, because there may be millions."""
    return {
        "group_id": group.group_id,
        "prompt": asdict(group.prompt),
        "samples": tuple(_sample_to_json(sample) for sample in group.samples),
        "policy_version": group.policy_version,
        "generation_step": group.generation_step,
    }


def _sample_to_json(sample: ScoredSample) -> dict[str, Any]:
    return {
        "sample_id": sample.sample_id,
        "completion": completion_to_json(sample.completion),
        "text": sample.text,
        "score": asdict(sample.score),
        "reward_parts": dict(sample.reward_parts),
        "window": asdict(sample.window),
        "repetition": asdict(sample.repetition),
    }


def group_from_json(value: Mapping[str, Any]) -> Group:
    """Invert `group_to_json`. Raises KeyError or TypeError for any other value."""
    prompt = value["prompt"]
    return Group(
        group_id=value["group_id"],
        prompt=Prompt(**{**prompt, "messages": tuple(prompt["messages"]), "token_ids": tuple(prompt["token_ids"])}),
        samples=tuple(_sample(sample) for sample in value["samples"]),
        policy_version=value["policy_version"],
        generation_step=value["generation_step"],
    )


def _sample(value: Mapping[str, Any]) -> ScoredSample:
    return ScoredSample(
        sample_id=value["sample_id"],
        completion=completion_from_json(value["completion"]),
        text=value["text"],
        score=Score(**value["score"]),
        reward_parts=dict(value["reward_parts"]),
        window=Window(**value["window"]),
        repetition=Repetition(**value["repetition"]),
    )


def split_state(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return (document, tensors): `token_ids` int32, `logprobs` float32, and `routing` and `support` if a response has them."""
    tokens, logprobs, records = _Joined(np.int32), _Joined(np.float32), {name: _Joined() for name in _RECORDS}

    def moved(value: Any) -> Any:
        if isinstance(value, Mapping):
            if "token_ids" in value and "logprobs" in value:
                value = _moved_response(value, tokens, logprobs, records)
            return {name: moved(part) for name, part in value.items()}
        return [moved(part) for part in value] if _has_mappings(value) else value

    document = moved(state)
    tensors = {"token_ids": tokens.tensor(), "logprobs": logprobs.tensor()}
    return document, tensors | {name: joined.tensor() for name, joined in records.items() if joined.size}


def join_state(document: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Invert `split_state`. Raises KeyError for a missing tensor, ValueError for one that is too short."""
    tokens, logprobs = tensors["token_ids"].numpy(), tensors["logprobs"].numpy()
    records = {name: tensors[name].numpy() if name in tensors else np.zeros(0, np.int32) for name in _RECORDS}

    def restored(value: Any) -> Any:
        if isinstance(value, Mapping):
            parts = {name: restored(part) for name, part in value.items() if name not in (_SPAN, *_RECORDS.values())}
            numbers = _response(value[_SPAN], tokens, logprobs) if _SPAN in value else {}
            recorded = {name: _record(name, value[span], records[name]) for name, span in _RECORDS.items() if span in value}
            return {**parts, **numbers, **recorded}
        return [restored(part) for part in value] if _has_mappings(value) else value

    return restored(document)


class _Joined:
    """Concatenates arrays of one type; if no type is given, of the first array's type."""

    def __init__(self, dtype: type[np.generic] | None = None) -> None:
        self._parts = [] if dtype is None else [np.zeros(0, dtype)]
        self.size = 0

    def add(self, values: Sequence[float] | np.ndarray) -> list[int]:
        """Append the values; return their place, [start, end]."""
        start, part = self.size, np.asarray(values, self._parts[0].dtype if self._parts else None).reshape(-1)
        self._parts.append(part)
        self.size += part.size
        return [start, self.size]

    def tensor(self) -> torch.Tensor:
        joined = torch.from_numpy(np.concatenate(self._parts))
        # numpy's empty arrays have a stride of 0, which a tensor file rejects.
        return joined if self.size else torch.zeros(0, dtype=joined.dtype)


def _moved_response(
    value: Mapping[str, Any], tokens: _Joined, logprobs: _Joined, records: Mapping[str, _Joined]
) -> dict[str, Any]:
    rest = {name: part for name, part in value.items() if name not in _NUMBERS}
    span, span_of_logprobs = tokens.add(value["token_ids"]), logprobs.add(value["logprobs"])
    assert span == span_of_logprobs, f"{tokens.size} tokens, {logprobs.size} log-probs"
    for name, place in _RECORDS.items():
        if (record := value.get(name)) is not None:
            rest[place] = {"start": records[name].add(record)[0], "shape": list(record.shape)}
    return {**rest, _SPAN: span}


def _response(span: list[int], tokens: np.ndarray, logprobs: np.ndarray) -> dict[str, np.ndarray]:
    start, end = span
    if not 0 <= start <= end <= min(len(tokens), len(logprobs)):
        raise ValueError(
            f"collector state: a response has tokens [{start}, {end}), the tensors hold {len(tokens)} tokens and "
            f"{len(logprobs)} log-probs: document and tensors are not of one checkpoint"
        )
    # Copy, because a view would keep all responses in memory until the last one is freed.
    return {"token_ids": tokens[start:end].copy(), "logprobs": logprobs[start:end].copy()}


def _record(name: str, span: Mapping[str, Any], numbers: np.ndarray) -> np.ndarray:
    start, shape = span["start"], span["shape"]
    end = start + math.prod(shape)
    if not 0 <= start <= end <= len(numbers):
        raise ValueError(
            f"collector state: a response's {name} is [{start}, {end}), the tensor holds {len(numbers)} numbers: document and "
            "tensors are not of one checkpoint"
        )
    return numbers[start:end].reshape(shape).copy()


def _has_mappings(value: Any) -> bool:
    # Treat a list of numbers as one value: checking each number would cost as much as copying the list.
    return isinstance(value, (list, tuple)) and any(isinstance(part, (Mapping, list, tuple)) for part in value)
