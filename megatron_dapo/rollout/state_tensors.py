"""A collector's state in two parts: a JSON document, and the tokens and log-probs of its responses as tensors.

In the state a response is a mapping with `token_ids` and `logprobs`, of N numbers each. In the document it has
`token_span` = [start, start + N) instead, its place in the two tensors. Everything else stays as it is. At 8,192
responses of 12K tokens the tensors are 0.8 GB, where JSON text is 4.3 GB (measured at an eighth of it).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

import torch

_SPAN = "token_span"


def split_state(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """(document, tensors): token_ids int32 or int64, logprobs float32 where that keeps every bit, else float64."""
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
    """The state `split_state` was given. KeyError where tensors are missing, ValueError where they are too short."""
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
    """Lists of numbers are passed over whole."""
    return isinstance(value, (list, tuple)) and any(isinstance(part, (Mapping, list, tuple)) for part in value)


def _tensor(values: array[int] | array[float]) -> torch.Tensor:
    dtype = {"q": torch.int64, "d": torch.float64}[values.typecode]
    return torch.frombuffer(values, dtype=dtype) if values else torch.zeros(0, dtype=dtype)


def _narrow_tokens(tokens: torch.Tensor) -> torch.Tensor:
    fits = not tokens.numel() or int(tokens.max()) < 2**31
    return tokens.int() if fits else tokens.clone()


def _narrow_floats(values: torch.Tensor) -> torch.Tensor:
    """Engines work in float32, so that nothing is lost."""
    narrow = values.float()
    return narrow if torch.equal(narrow.double(), values) else values.clone()
