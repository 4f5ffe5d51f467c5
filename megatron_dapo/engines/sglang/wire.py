"""Bodies for SGLang's /generate and checks of its answers, as pure functions.

Token ids in, token ids and log-probs out; text is never read. SGLang draws from softmax(logits / temperature) and
reports log softmax(logits / temperature)[token] over the whole vocabulary, before top-p and top-k; a greedy request
(temperature 0) reports log-probs at temperature 1. If supports are requested, an answer also has the ids that each
token was drawn from and its log-prob renormalized over them, which is then the one that counts. The embedded engine reports the
same. The environment variable
SGLANG_RETURN_ORIGINAL_LOGPROB would change that to temperature 1 always, so it must not be set in a server of ours.

Seeds: under --enable-deterministic-inference SGLang draws by a hash of (seed, position of the last input token,
vocabulary entry). The position is absolute, so a response that continues its prefix with the same seed draws the
numbers it would have drawn, none twice. Without that option SGLang ignores the seed.
"""

from __future__ import annotations

import binascii
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pybase64
import simdjson

from megatron_dapo.engines.base import context_length, context_of, max_new_tokens_of, stops_before_the_end
from megatron_dapo.token_support import join_supports
from megatron_dapo.types import FinishReason, GenerationRequest, RoutingShape, SamplingParams

# log(softmax) in float32 may end a rounding error above 0.
MAX_LOGPROB = 1e-4
# SGLang keeps seeds in a signed 64-bit tensor and hashes both halves.
_SEED_MASK = (1 << 63) - 1


class AnswerError(ValueError):
    """A server's answer does not fit the request."""


@dataclass(frozen=True)
class LabeledTokens:
    """New tokens from the end of the range before to `end` were sampled by weights with this label."""

    end: int
    label: str


@dataclass(frozen=True, eq=False)
class Generation:
    """One answer of /generate, validated."""

    token_ids: np.ndarray  # [N] int32, the new tokens, the stop token included
    logprobs: np.ndarray  # [N] float32, at the sampled temperature
    finish_reason: FinishReason
    weight_version: str  # the server's own label of its weights when it answered; "" if it gave none
    num_cached: int = 0  # tokens it read whose keys and values were in its prefix cache
    routing: np.ndarray | None = None  # whole sequence, see Completion
    support: np.ndarray | None = None  # new tokens only; the form is that of Completion.support
    num_unrouted: int = 0  # tokens left out, as an aborted answer did not say their experts or supports
    num_verifications: int = 0  # decoding steps that verified drafts for it
    labels: tuple[LabeledTokens, ...] = ()  # one for every run of tokens, in order; empty from servers that label only whole answers


def generate_body(request: GenerationRequest, rid: str, cache_key: str = "") -> dict[str, Any]:
    """The JSON body of /generate for one request under the server-side name `rid`; see `SglangClient.generate`."""
    return {
        "rid": rid,
        "input_ids": context_of(request),
        "sampling_params": sampling_body(request.sampling, max_new_tokens_of(request), request.seed),
        "return_logprob": True,
        "logprob_start_len": -1,  # output tokens only
        "stream": False,
        **({"extra_key": cache_key} if cache_key else {}),
        **(
            {"return_routed_experts": True, "routed_experts_start_len": len(_known_routing(request))}
            if request.with_routing
            else {}
        ),
        **({"return_sampling_mask": True} if request.sampling.with_support else {}),
    }


def _known_routing(request: GenerationRequest) -> np.ndarray | tuple[()]:
    """Return the experts that a continued response brings along: of all tokens that the engine reads again but the last."""
    prefix = request.prefix
    return () if prefix is None or prefix.routing is None else prefix.routing


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


def parse_generation(
    body: bytes, request: GenerationRequest, *, vocab_size: int, routing: RoutingShape | None = None
) -> Generation:
    """Return the answer to `request` in the bytes of its JSON, or raise AnswerError saying what is wrong with it.

    The numbers go from the parser's buffers into arrays: no Python object is made of any token.
    """
    text, experts = _without_experts(body)
    try:
        num_entries = _flatten_entries(text)
        # A new parser for each answer: values of one refer to it for as long as they live.
        answer = _object(simdjson.Parser().parse(text), "the answer")
        if answer.get("success") is False:
            raise AnswerError(f"success: false: {str(answer.get('message'))[:600]}; see the server's log")
        meta = _object(answer.get("meta_info"), "meta_info")
        token_ids = _token_ids(answer.get("output_ids"), text, vocab_size)
        logprobs = _logprobs(meta.get("output_token_logprobs"), num_entries, token_ids)
        num_read = context_length(request)
        _check_count(meta.get("prompt_tokens"), num_read, "prompt tokens read")
        _check_count(meta.get("completion_tokens"), len(token_ids), "completion tokens counted")
        reason = _finish_reason(meta.get("finish_reason"), token_ids, request)
        num_cached = _num_cached(meta.get("cached_tokens"), num_read)
        version = meta.get("weight_version", "")
        if not isinstance(version, str):
            raise AnswerError(f"weight_version is no text but {type(version).__name__}")
        labels = _labels(meta.get("weight_versions"), len(token_ids))
        routed, support = None, None
        lacks_record = (request.with_routing and experts is None) or (
            request.sampling.with_support and meta.get(_SUPPORTS) is None
        )
        # A request that was retracted and is aborted while it waits comes back with its tokens, but without their records.
        if lacks_record and len(token_ids) and _object(meta["finish_reason"], "finish_reason").get("type") == "abort":
            nothing = np.zeros(0, np.int32), np.zeros(0, np.float32)
            return Generation(*nothing, "abort", version, num_cached, num_unrouted=len(token_ids))
        if request.sampling.with_support and len(token_ids):
            support, logprobs = _supports(meta, token_ids, vocab_size)
        if request.with_routing and len(token_ids):  # requests that were never started have no routing
            assert routing is not None, "a request for the routing of a model without experts"
            known = _known_routing(request)
            routed = _routing(experts, num_read + len(token_ids) - 1 - len(known), routing)
            if len(known):
                routed = np.concatenate((known, routed))
        steps = _num_verifications(meta.get("spec_verify_ct"), len(token_ids))
        return Generation(
            token_ids, logprobs, reason, version, num_cached, routed, support, num_verifications=steps, labels=labels
        )
    except AnswerError:
        raise
    except (ValueError, TypeError, RuntimeError) as error:  # the parser's own
        raise AnswerError(f"it is no JSON of this form ({error}): {_quoted(body, 0)}") from None


_FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort")
_SUPPORTS = "output_token_sampling_mask"
_OUTPUT_IDS = b'"output_ids":['
_LOGPROBS = b'"output_token_logprobs":['
_ENTRY_END, _LAST_END = b",null],[", b",null]]"
# Number in the place of null: neither a log-prob (they are at most MAX_LOGPROB) nor a token id (they are whole).
_FILL = 0.5
_FILLED_END, _LAST_FILLED = b",0.5   ,", b",0.5  ]"


def _flatten_entries(text: bytearray) -> int:
    """Turn [[log-prob, token id, null], ...] of SGLang's compact JSON into one list of numbers; return the count of entries.

    The parser only puts lists of numbers into a buffer. This function checks that as many lists end in null and that
    there is no other list among them. If then every third number of the buffer is the one put in, every list had
    length three.
    """
    start = text.find(_LOGPROBS) + len(_LOGPROBS) - 1
    if start < len(_LOGPROBS) or text[start + 1 : start + 2] == b"]":
        return 0  # none, or an empty list
    characters = np.frombuffer(text, np.uint8)
    words = np.ndarray((max(0, len(text) - 7),), "<u8", text, strides=(1,))  # overlapping 8-byte words
    nulls = start + np.flatnonzero(characters[start:] == ord("n"))
    nulls = nulls[: np.searchsorted(nulls, len(words))]
    # Not `take`, which would copy all words first.
    is_end = words[nulls - 1] == int.from_bytes(_ENTRY_END, "little")
    num_entries = int(is_end.argmin()) + 1 if is_end.size else 0
    last = int(nulls[num_entries - 1]) - 1 if num_entries else 0
    if text[last : last + len(_LAST_END)] != _LAST_END:
        problem = _quoted(text, int(nulls[num_entries - 2]) + 6 if num_entries > 1 else start)
        raise AnswerError(
            f"log-prob {max(0, num_entries - 1)} is no [log-prob, token id, null] in compact JSON: {problem}; "
            "if the log-prob is null, the served policy has diverged"
        )
    if np.count_nonzero(characters[start:last] == ord("[")) != num_entries + 1 or text[start + 1] != ord("["):
        raise AnswerError(f"log-probs are no list of {num_entries} [log-prob, token id, null]: {_quoted(text, start)}")
    words[nulls[: num_entries - 1] - 1] = int.from_bytes(_FILLED_END, "little")
    text[last : last + len(_LAST_END)] = _LAST_FILLED
    text[start + 1] = ord(" ")
    return num_entries


def _quoted(text: bytes | bytearray, start: int) -> str:
    return repr(bytes(text[start : start + 60]))[1:]


def parse_prompt_logprobs(answer: Any, token_ids: Sequence[int]) -> list[float]:
    """log p(token_ids[t] | token_ids[:t]) for t = 1 .. N-1 from the answer to a request for prompt log-probs."""
    entries = _prompt_entries(answer, len(token_ids))
    # SGLang (0.5.17) shows the highest id of the vocabulary, which stands for images in other models, as 0; the log-prob is
    # that of the token itself.
    highest = max(token_ids)
    for index, (entry, token) in enumerate(zip(entries[1:], token_ids[1:], strict=True)):
        if not isinstance(entry, list) or len(entry) < 2 or (entry[1] != token and (entry[1], token) != (0, highest)):
            raise AnswerError(f"log-prob {index} is {str(entry)[:60]}, not one of token {token}")
        value = entry[0]
        if not isinstance(value, (int, float)) or not math.isfinite(value) or value > MAX_LOGPROB:
            raise AnswerError(f"log-prob {index} (token {token}) is {value}: the served policy has diverged")
    return [float(entry[0]) for entry in entries[1:]]


def parse_token_texts(answer: Any, num_tokens: int) -> list[str]:
    """Return the texts of the prompt's tokens from the answer to a request for prompt log-probs with texts."""
    entries = _prompt_entries(answer, num_tokens)
    for index, entry in enumerate(entries):
        if not isinstance(entry, list) or len(entry) < 3 or not isinstance(entry[2], str):
            raise AnswerError(f"prompt token {index} is {str(entry)[:60]}, which has no text")
    return [entry[2] for entry in entries]


def _prompt_entries(answer: Any, num_tokens: int) -> list[Any]:
    meta = answer.get("meta_info") if isinstance(answer, Mapping) else None
    entries = meta.get("input_token_logprobs") if isinstance(meta, Mapping) else None
    if not isinstance(entries, list) or len(entries) != num_tokens:
        found = len(entries) if isinstance(entries, list) else "no"
        raise AnswerError(f"{found} prompt log-probs for {num_tokens} prompt tokens")
    return entries


def _object(value: Any, what: str) -> simdjson.Object:
    if not isinstance(value, simdjson.Object):
        raise AnswerError(f"{what} is no JSON object but {type(value).__name__}")
    return value


def _numbers(value: Any, of_type: Literal["i", "d"], what: str) -> np.ndarray:
    """Return the numbers of a parsed list as int64 or float64. Lists in it whose entries are as many as they are pass."""
    if not isinstance(value, simdjson.Array):
        raise AnswerError(f"{what} is no list but {type(value).__name__}")
    if not len(value):
        return np.zeros(0, of_type)
    try:
        numbers = np.frombuffer(value.as_buffer(of_type=of_type), {"i": np.int64, "d": np.float64}[of_type])
    except (ValueError, TypeError, RuntimeError) as error:
        raise AnswerError(f"{what} is no list of {'integers' if of_type == 'i' else 'numbers'} ({error})") from None
    if len(numbers) != len(value):
        raise AnswerError(f"{what} has lists among its {len(value)} entries")
    return numbers


def _token_ids(value: Any, text: bytearray, vocab_size: int) -> np.ndarray:
    token_ids = _numbers(value, "i", "output_ids")
    # The parser flattens lists of lists.
    start = text.find(_OUTPUT_IDS) + len(_OUTPUT_IDS)
    if start < len(_OUTPUT_IDS) or text.find(b"[", start, text.find(b"]", start)) >= 0:
        raise AnswerError(f"output_ids is no list of integers in compact JSON: {_quoted(text, max(0, start))}")
    if len(token_ids) and not (0 <= token_ids.min() and token_ids.max() < vocab_size):
        raise AnswerError(
            f"output ids span {token_ids.min()}..{token_ids.max()}, but the model's vocabulary is 0..{vocab_size - 1}: "
            "the server serves another model"
        )
    return token_ids.astype(np.int32)


def _logprobs(value: Any, num_entries: int, token_ids: np.ndarray) -> np.ndarray:
    """Return the log-probs of SGLang's triples after `_flatten_entries`, which must belong to `token_ids`."""
    numbers = _numbers(value, "d", "output_token_logprobs")
    if num_entries != len(token_ids):
        raise AnswerError(f"{num_entries} log-probs for {len(token_ids)} tokens")
    if len(numbers) != 3 * num_entries or (numbers[2::3] != _FILL).any():
        raise AnswerError(f"log-probs are no list of {num_entries} [log-prob, token id, null]")
    if (strange := numbers[1::3] != token_ids).any():
        index = int(strange.argmax())
        raise AnswerError(f"log-prob {index} is of token {numbers[3 * index + 1]:g}, not of token {token_ids[index]}")
    return _finite(numbers[0::3], token_ids)


def _finite(numbers: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
    """Return the tokens' log-probs as float32. AnswerError if one is none."""
    with np.errstate(over="ignore"):
        logprobs = numbers.astype(np.float32)
    if (bad := ~(np.isfinite(logprobs) & (numbers <= MAX_LOGPROB))).any():
        index = int(bad.argmax())
        raise AnswerError(f"log-prob {index} (token {token_ids[index]}) is {numbers[index]}: the served policy has diverged")
    return logprobs


def _supports(meta: simdjson.Object, token_ids: np.ndarray, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the flat supports of the tokens, one list of ids each, and their log-probs renormalized over them."""
    rows = meta.get(_SUPPORTS)
    if not isinstance(rows, simdjson.Array):
        raise AnswerError(f"no {_SUPPORTS}: SGLang says since 0.5.21 what tokens are drawn from; without it set top_p = 1, top_k = 0")
    sizes = np.array([len(row) if isinstance(row, simdjson.Array) else 0 for row in rows], np.int64)
    if len(sizes) != len(token_ids) or not sizes.all():
        raise AnswerError(f"{_SUPPORTS} has {np.count_nonzero(sizes)} lists of ids for {len(token_ids)} tokens")
    # The parser flattens lists of lists.
    ids = np.frombuffer(rows.as_buffer(of_type="i"), np.int64)
    if len(ids) != sizes.sum() or not (0 <= ids.min() and ids.max() < vocab_size):
        raise AnswerError(f"{_SUPPORTS} is no list of lists of ids below {vocab_size}")
    owner = np.repeat(np.arange(len(sizes)), sizes)
    if (strange := np.bincount(owner, ids == token_ids[owner], len(sizes)) != 1).any():
        index = int(strange.argmax())
        raise AnswerError(f"token {token_ids[index]} (index {index}) is not among the {sizes[index]} ids it was drawn from")
    numbers = _numbers(meta.get("output_token_sampling_logprobs"), "d", "output_token_sampling_logprobs")
    if len(numbers) != len(token_ids):
        raise AnswerError(f"{len(numbers)} renormalized log-probs for {len(token_ids)} tokens")
    return join_supports(sizes, ids), _finite(numbers, token_ids)


_EXPERTS = b'"routed_experts":"'


def _without_experts(body: bytes) -> tuple[bytearray, memoryview | None]:
    """Cut the experts' base64 out of an answer, None if it has none.

    They are most of it, 2 KB a token with 48 layers of 8, and the parser would copy them twice. The key with its quotation
    marks cannot stand inside a string of JSON.
    """
    start = body.find(_EXPERTS) + len(_EXPERTS)
    if start < len(_EXPERTS) or (end := body.find(b'"', start)) < 0:
        return bytearray(body), None
    view = memoryview(body)
    text = bytearray(view[:start])
    text += view[end:]
    return text, view[start:end]


def _routing(encoded: memoryview | None, num_tokens: int, shape: RoutingShape) -> np.ndarray:
    """Return SGLang's base64 of int32 [tokens, layers, experts a token] in the smallest type."""
    if encoded is None:
        raise AnswerError("no routed_experts: start the server with --enable-return-routed-experts")
    try:
        numbers = np.frombuffer(pybase64.b64decode_as_bytearray(encoded, validate=True), np.int32)
    except (binascii.Error, ValueError) as error:
        raise AnswerError(f"routed_experts is no base64 of int32 ({error})") from None
    expected = num_tokens, shape.num_layers, shape.experts_per_token
    if numbers.size != math.prod(expected):
        raise AnswerError(
            f"routed_experts has {numbers.size} numbers, not {math.prod(expected)}: tokens, layers and experts a token of "
            f"this model are {expected}"
        )
    if numbers.size and not (0 <= numbers.min() and numbers.max() < shape.num_experts):
        raise AnswerError(f"experts span {numbers.min()}..{numbers.max()}, the model has {shape.num_experts}")
    return numbers.reshape(expected).astype(shape.dtype)


def _labels(value: Any, num_tokens: int) -> tuple[LabeledTokens, ...]:
    """Return SGLang's [{version, start, end}, ...], which must cover all tokens; () if the answer has none."""
    if value is None:
        return ()
    rows = [_object(row, "an entry of weight_versions").as_dict() for row in value]
    ends = [end for row in rows if isinstance(end := row.get("end"), int)]
    if [row.get("start") for row in rows] + [num_tokens] != [0, *ends] or ends != sorted(ends):
        raise AnswerError(f"weight_versions {str(rows)[:200]} do not cover its {num_tokens} tokens one after the other")
    return tuple(LabeledTokens(end, str(row.get("version"))) for end, row in zip(ends, rows, strict=True))


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


def _num_verifications(value: Any, num_tokens: int) -> int:
    """Return the decoding steps that verified drafts; 0 from servers that draft nothing. Each gives a token or more."""
    if value is None:
        return 0
    # The first token comes from the prompt; the last step may end beyond a stop token.
    if type(value) is not int or not 0 <= value <= num_tokens + 1:
        raise AnswerError(f"spec_verify_ct is {str(value)[:60]} of {num_tokens} tokens")
    return value


def _finish_reason(value: Any, token_ids: np.ndarray, request: GenerationRequest) -> FinishReason:
    reason = _object(value, "finish_reason")
    kind = next((each for each in _FINISH_REASONS if each == reason.get("type")), None)
    if kind is None:
        raise AnswerError(f"unknown finish reason {reason.get('type')!r}; there are {', '.join(_FINISH_REASONS)}")
    num_left = max_new_tokens_of(request)
    if len(token_ids) > num_left:
        raise AnswerError(f"{len(token_ids)} tokens, at most {num_left} were requested")
    if early_stops := stops_before_the_end(request.sampling, token_ids):
        raise AnswerError(f"the response continues after the stop ids {early_stops}")
    # SGLang reports not-a-number logits as a stop by text, which no request wants.
    matched = reason.get("matched")
    if kind == "stop" and (not len(token_ids) or type(matched) is not int or matched != token_ids[-1]):
        raise AnswerError(f"stopped at {matched!r}, which is not the last token")
    if kind == "length" and len(token_ids) != num_left:
        raise AnswerError(
            f"stopped for its length at {len(token_ids)} tokens, {num_left} were requested: "
            "raise the server's context_length or max_total_tokens"
        )
    # SGLang tests the length before the stop ids, and an abort before either.
    if len(token_ids) and token_ids[-1] in request.sampling.stop_token_ids:
        return "stop"
    return "length" if kind == "abort" and len(token_ids) == num_left else kind
