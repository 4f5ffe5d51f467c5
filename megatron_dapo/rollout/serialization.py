"""Groups and responses as JSON values, and a collector's state as a JSON document plus tensors; both exact.

Floats keep every bit in JSON: Python writes the shortest digits that read back the same. In a state, a response is a
mapping with `token_ids` and `logprobs`, of N numbers each. `split_state` moves them into two tensors and leaves
`token_span` = [start, start + N) in the document, the response's place in the tensors. At 8,192 responses of 12K tokens
the tensors are 0.8 GB, where JSON text is 4.3 GB (measured at an eighth of it).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from megatron_dapo.engines.base import completion_from_json, completion_to_json
from megatron_dapo.types import Group, Prompt, Score, ScoredSample, Window

_SPAN = "token_span"


def group_to_json(group: Group) -> dict[str, Any]:
    """Return `group` as JSON-serializable dictionaries and lists. Tokens are not copied: there may be millions."""
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
        window=Window(**value.get("window", {})),  # states written before there were windows
    )


def split_state(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return (document, tensors): token_ids int32 or int64, logprobs float32 where that keeps every bit, else float64."""
    tokens, logprobs = array("q"), array("d")

    def moved(value: Any) -> Any:
        if isinstance(value, Mapping):
            if "token_ids" in value and "logprobs" in value:
                return _moved_response(value, tokens, logprobs)
            return {name: moved(part) for name, part in value.items()}
        return [moved(part) for part in value] if _has_mappings(value) else value

    document = moved(state)
    return document, {"token_ids": _narrow_tokens(_tensor(tokens)), "logprobs": _narrow_floats(_tensor(logprobs))}


def join_state(document: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Invert `split_state`. Raises KeyError for a missing tensor, ValueError for one that is too short."""
    tokens, logprobs = tensors["token_ids"], tensors["logprobs"].double()

    def restored(value: Any) -> Any:
        if isinstance(value, Mapping):
            parts = {name: restored(part) for name, part in value.items() if name != _SPAN}
            return {**parts, **_response(value[_SPAN], tokens, logprobs)} if _SPAN in value else parts
        return [restored(part) for part in value] if _has_mappings(value) else value

    return restored(document)


def _moved_response(value: Mapping[str, Any], tokens: array[int], logprobs: array[float]) -> dict[str, Any]:
    start = len(tokens)
    tokens.extend(value["token_ids"])
    logprobs.extend(value["logprobs"])
    assert len(tokens) == len(logprobs), f"{len(tokens)} tokens, {len(logprobs)} log-probs"
    rest = {name: part for name, part in value.items() if name not in ("token_ids", "logprobs")}
    return {**rest, _SPAN: [start, len(tokens)]}


def _response(span: list[int], tokens: torch.Tensor, logprobs: torch.Tensor) -> dict[str, list[Any]]:
    start, end = span
    if not 0 <= start <= end <= min(tokens.numel(), logprobs.numel()):
        raise ValueError(
            f"collector state: a response has tokens [{start}, {end}), the tensors hold {tokens.numel()} tokens and "
            f"{logprobs.numel()} log-probs: document and tensors are not of one checkpoint"
        )
    return {"token_ids": tokens[start:end].tolist(), "logprobs": logprobs[start:end].tolist()}


def _has_mappings(value: Any) -> bool:
    # A list of numbers is one value: looking into each would cost as much as copying it.
    return isinstance(value, (list, tuple)) and any(isinstance(part, (Mapping, list, tuple)) for part in value)


def _tensor(values: array[int] | array[float]) -> torch.Tensor:
    dtype = {"q": torch.int64, "d": torch.float64}[values.typecode]
    # torch.frombuffer refuses an empty buffer.
    return torch.frombuffer(values, dtype=dtype) if values else torch.zeros(0, dtype=dtype)


def _narrow_tokens(tokens: torch.Tensor) -> torch.Tensor:
    fits = not tokens.numel() or int(tokens.max()) < 2**31
    return tokens.int() if fits else tokens.clone()  # torch.frombuffer shares the array's memory


def _narrow_floats(values: torch.Tensor) -> torch.Tensor:
    # Engines report float32, so narrowing usually keeps every bit.
    narrow = values.float()
    return narrow if torch.equal(narrow.double(), values) else values.clone()
