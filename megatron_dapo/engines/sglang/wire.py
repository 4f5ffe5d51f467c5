"""Bodies for SGLang's /generate and checks of its answers, as pure functions.

Token ids in, token ids and log-probs out; text is never read. SGLang draws from softmax(logits / temperature) and
reports log softmax(logits / temperature)[token] over the whole vocabulary, before top-p and top-k; a greedy request
(temperature 0) reports log-probs at temperature 1. The embedded engine reports the same. The environment variable
SGLANG_RETURN_ORIGINAL_LOGPROB would change that to temperature 1 always, so it must not be set in a server of ours.

Seeds: under --enable-deterministic-inference SGLang draws by a hash of (seed, position of the last input token,
vocabulary entry). The position is absolute, so a response that continues its prefix with the same seed draws the
numbers it would have drawn, none twice. Without that option SGLang ignores the seed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_dapo.engines.base import context_of, max_new_tokens_of
from megatron_dapo.types import FinishReason, GenerationRequest, SamplingParams

# log(softmax) in float32 may end a rounding error above 0.
MAX_LOGPROB = 1e-4
# SGLang keeps seeds in a signed 64-bit tensor and hashes both halves.
_SEED_MASK = (1 << 63) - 1


class AnswerError(ValueError):
    """A server's answer does not fit the request."""


@dataclass(frozen=True)
class Generation:
    """One answer of /generate, validated."""

    token_ids: tuple[int, ...]  # N new tokens, the stop token included
    logprobs: tuple[float, ...]  # N, at the sampled temperature
    finish_reason: FinishReason
    weight_version: str  # the server's own label of its weights when it answered, "" where it gave none
    num_cached: int = 0  # tokens it read whose keys and values were in its prefix cache


def generate_body(request: GenerationRequest, rid: str) -> dict[str, Any]:
    """The JSON body of /generate for one request under the server-side name `rid`."""
    return {
        "rid": rid,
        "input_ids": context_of(request),
        "sampling_params": sampling_body(request.sampling, max_new_tokens_of(request), request.seed),
        "return_logprob": True,
        "logprob_start_len": -1,  # output tokens only
        "stream": False,
    }


def sampling_body(sampling: SamplingParams, max_new_tokens: int, seed: int) -> dict[str, Any]:
    """SGLang's sampling parameters. Everything that shapes the distribution is named, so no default of the server can.

    The response ends at the request's stop ids and at the model's own end-of-sequence ids, which SGLang always adds;
    a request without stop ids ignores those too.
    """
    return {
        "max_new_tokens": max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "n": 1,
        "stop_token_ids": sorted(set(sampling.stop_token_ids)),
        "ignore_eos": not sampling.stop_token_ids,
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "sampling_seed": seed & _SEED_MASK,
    }


def parse_generation(answer: Any, request: GenerationRequest, *, vocab_size: int) -> Generation:
    """The answer to `request`, or AnswerError saying what is wrong with it."""
    meta = _mapping(_mapping(answer, "the answer").get("meta_info"), "meta_info")
    token_ids = _token_ids(answer.get("output_ids"), vocab_size)
    logprobs = _logprobs(meta.get("output_token_logprobs"), token_ids)
    num_read = len(context_of(request))
    _check_count(meta.get("prompt_tokens"), num_read, "prompt tokens read")
    _check_count(meta.get("completion_tokens"), len(token_ids), "completion tokens counted")
    reason = _finish_reason(meta.get("finish_reason"), token_ids, request)
    num_cached = _num_cached(meta.get("cached_tokens"), num_read)
    return Generation(token_ids, logprobs, reason, str(meta.get("weight_version") or ""), num_cached)


def parse_prompt_logprobs(answer: Any, token_ids: Sequence[int]) -> list[float]:
    """log p(token_ids[t] | token_ids[:t]) for t = 1 .. N-1 from the answer to a request for prompt log-probs."""
    meta = _mapping(_mapping(answer, "the answer").get("meta_info"), "meta_info")
    entries = meta.get("input_token_logprobs")
    if not isinstance(entries, list) or len(entries) != len(token_ids):
        raise AnswerError(f"{_length(entries)} prompt log-probs for {len(token_ids)} prompt tokens")
    return list(_logprobs(_shown_as_they_are(entries[1:], token_ids[1:]), token_ids[1:]))


def _shown_as_they_are(entries: list[Any], token_ids: Sequence[int]) -> list[Any]:
    """Prompt entries with their token ids. SGLang (0.5.17) shows the highest id of the vocabulary, which stands for
    images in other models, as 0; the log-prob is that of the token itself."""
    highest = max(token_ids)
    return [
        [entry[0], token, *entry[2:]] if isinstance(entry, list) and entry[1:2] == [0] and token == highest else entry
        for entry, token in zip(entries, token_ids, strict=True)
    ]


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise AnswerError(f"{what} is no JSON object but {type(value).__name__}")
    return value


def _length(value: Any) -> str:
    return str(len(value)) if isinstance(value, list) else "no"


def _token_ids(value: Any, vocab_size: int) -> tuple[int, ...]:
    if not isinstance(value, list) or any(type(token) is not int for token in value):
        raise AnswerError("output_ids is no list of integers")
    if value and not (0 <= min(value) and max(value) < vocab_size):
        raise AnswerError(
            f"output ids span {min(value)}..{max(value)}, but the model's vocabulary is 0..{vocab_size - 1}: "
            "the server serves another model"
        )
    return tuple(value)


def _logprobs(entries: Any, token_ids: Sequence[int]) -> tuple[float, ...]:
    """Log-probs from SGLang's [log-prob, token id, text] triples, which must belong to `token_ids`."""
    if not isinstance(entries, list) or len(entries) != len(token_ids):
        raise AnswerError(f"{_length(entries)} log-probs for {len(token_ids)} tokens")
    for index, (entry, token) in enumerate(zip(entries, token_ids, strict=True)):
        if not isinstance(entry, list) or len(entry) < 2 or entry[1] != token:
            raise AnswerError(f"log-prob {index} is {str(entry)[:60]}, not one of token {token}")
        value = entry[0]
        if not isinstance(value, (int, float)) or not math.isfinite(value) or value > MAX_LOGPROB:
            raise AnswerError(f"log-prob {index} (token {token}) is {value}: the served policy has diverged")
    return tuple(float(entry[0]) for entry in entries)


def _check_count(value: Any, expected: int, what: str) -> None:
    """SGLang leaves counts out for requests it never started."""
    if value is not None and value != expected:
        raise AnswerError(f"{value} {what}, expected {expected}")


def _num_cached(value: Any, num_read: int) -> int:
    """Return how many tokens the server found in its prefix cache; 0 for requests it never started."""
    if value is None:
        return 0
    if type(value) is not int or not 0 <= value <= num_read:
        raise AnswerError(f"cached_tokens is {str(value)[:60]} of {num_read} tokens read")
    return value


def _finish_reason(value: Any, token_ids: tuple[int, ...], request: GenerationRequest) -> FinishReason:
    reason = _mapping(value, "finish_reason")
    kind = reason.get("type")
    if kind not in ("stop", "length", "abort"):
        raise AnswerError(f"unknown finish reason {kind!r}; there are stop, length, abort")
    stops = set(request.sampling.stop_token_ids)
    num_left = max_new_tokens_of(request)
    if len(token_ids) > num_left:
        raise AnswerError(f"{len(token_ids)} tokens, at most {num_left} were requested")
    if behind := stops.intersection(token_ids[:-1]):
        raise AnswerError(f"the response continues behind the stop ids {sorted(behind)}")
    # SGLang reports not-a-number logits as a stop by text, which no request wants.
    if kind == "stop" and (not token_ids or reason.get("matched") != token_ids[-1]):
        raise AnswerError(f"stopped at {reason.get('matched')!r}, which is not the last token")
    if kind == "length" and len(token_ids) != num_left:
        raise AnswerError(
            f"stopped for its length at {len(token_ids)} tokens, {num_left} were requested: "
            "raise the server's context_length or max_total_tokens"
        )
    # SGLang tests the length before the stop ids, and an abort before either.
    if token_ids and token_ids[-1] in stops:
        return "stop"
    return "length" if kind == "abort" and len(token_ids) == num_left else kind
