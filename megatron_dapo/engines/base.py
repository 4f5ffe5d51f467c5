"""The engine protocol of collectors, evaluation and trainer, and the checks every engine makes on a request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from typing import Any, Protocol, TypeVar

import numpy as np

from megatron_dapo.config.rollout_schema import MAX_SUPPORT
from megatron_dapo.token_support import followed_by, num_supports
from megatron_dapo.types import (
    Completion,
    Episode,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    Segment,
    Turn,
    TurnCall,
    VersionRange,
)

Result = TypeVar("Result")


@dataclass(frozen=True)
class PrefixReuse:
    """Tokens of the contexts (prompt and response so far) of continued responses, and how many of them were cached; new tokens
    that an abort lost; what drafts saved."""

    num_tokens: int = 0
    num_cached: int = 0  # tokens whose keys and values were not computed again
    num_unrouted: int = 0  # new tokens of aborted answers that did not say their experts or supports, generated again
    num_verified: int = 0  # tokens of decoding steps that verified drafts
    num_verifications: int = 0  # these steps, summed over responses

    def __add__(self, other: PrefixReuse) -> PrefixReuse:
        return PrefixReuse(*(ours + theirs for ours, theirs in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: PrefixReuse) -> PrefixReuse:
        return PrefixReuse(*(ours - theirs for ours, theirs in zip(astuple(self), astuple(other), strict=True)))

    @property
    def cached_share(self) -> float:
        """Share of cached tokens; 0 if there are none."""
        return self.num_cached / max(1, self.num_tokens)


class RolloutEngine(Protocol):
    """Generates responses for the rank that drives the rollout.

    Completions come back in an order that depends only on what was submitted and when, so two equal runs see equal
    streams.
    """

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests. ValueError for one that could never be served. One whose prefix is complete already (a stop
        id at its end, or max_new_tokens long) comes back as what it is.
        """

    def poll(self) -> list[Completion]:
        """Advance (or wait for) the generation a little and return what finished since the last call, possibly nothing."""

    def abort(self) -> list[Completion]:
        """Stop everything and return one completion for each unfinished request. It has finish_reason "abort" and the tokens so
        far, those of the request's prefix included; a request that an engine of other processes finished in the
        meantime comes back as finished.
        """

    @property
    def num_unfinished(self) -> int:
        """Requests submitted but not yet returned by `poll` or `abort`."""

    @property
    def policy_version(self) -> int:
        """Version of the weights being served, -1 before the first synchronization."""

    @property
    def prefix_reuse(self) -> PrefixReuse:
        """Totals over all requests with a prefix since the engine began."""


class CollectiveEngine(RolloutEngine, Protocol):
    """A rollout engine that rank 0 calls while the other ranks take part."""

    def run_on_rank0(self, body: Callable[[], Result]) -> Result | None:
        """Run `body` on rank 0 while the other ranks serve its commands; return its result there and None on the others.

        Collective. An exception on rank 0 raises RuntimeError on every other rank.
        """


def check_request_ids(requests: Sequence[GenerationRequest], in_use: Collection[str]) -> None:
    """Raise ValueError if a request id occurs twice or is in use."""
    names = [request.request_id for request in requests]
    clashes = {name for name, count in Counter(names).items() if count > 1 or name in in_use}
    if clashes:
        raise ValueError(
            f"request ids {sorted(clashes)[:4]} ({len(clashes)} in all) are already in use; give each its own"
        )


def check_request(request: GenerationRequest, *, max_length: int, vocab_size: int) -> None:
    """Raise ValueError if `request` cannot be served by an engine with `max_length` positions a sequence."""
    name, prompt_ids, sampling = request.request_id, request.prompt_ids, request.sampling
    if not prompt_ids:
        raise ValueError(f"request {name!r}: the prompt has no tokens; give at least one")
    if sampling.max_new_tokens < 1:
        raise ValueError(f"request {name!r}: max_new_tokens = {sampling.max_new_tokens}, must be at least 1")
    if len(prompt_ids) + sampling.max_new_tokens > max_length:
        raise ValueError(
            f"request {name!r}: {len(prompt_ids)} prompt tokens + {sampling.max_new_tokens} new tokens = "
            f"{len(prompt_ids) + sampling.max_new_tokens}, more than the engine's max_length {max_length}; "
            "shorten the prompt or the response, or raise the engine's max_length"
        )
    if min(prompt_ids) < 0 or max(prompt_ids) >= vocab_size:
        raise ValueError(
            f"request {name!r}: prompt ids span {min(prompt_ids)}..{max(prompt_ids)}, "
            f"but the model's vocabulary is 0..{vocab_size - 1}; "
            "the tokenizer does not belong to this model"
        )
    if sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
        raise ValueError(
            f"request {name!r}: temperature {sampling.temperature}, top_p {sampling.top_p}, top_k {sampling.top_k}: "
            "needs temperature >= 0, 0 < top_p <= 1, top_k >= 0"
        )
    if sampling.with_support and not (1 < sampling.top_k <= MAX_SUPPORT and sampling.temperature > 0):
        raise ValueError(
            f"request {name!r}: temperature {sampling.temperature}, top_k {sampling.top_k}: recording what tokens are drawn "
            f"from needs temperature > 0, 1 < top_k <= {MAX_SUPPORT}"
        )
    if request.prefix is not None:
        _check_prefix(request, request.prefix, vocab_size)


def _check_prefix(request: GenerationRequest, prefix: Completion, vocab_size: int) -> None:
    name, token_ids, num_tokens = request.request_id, prefix.token_ids, len(prefix.token_ids)
    if prefix.request_id != name:
        raise ValueError(f"request {name!r}: its prefix is a completion of {prefix.request_id!r}; give its own")
    if num_tokens > request.sampling.max_new_tokens:
        raise ValueError(
            f"request {name!r}: a prefix of {num_tokens} tokens, but max_new_tokens = "
            f"{request.sampling.max_new_tokens} bounds the whole response; raise it or start without the prefix"
        )
    if len(prefix.logprobs) != num_tokens:
        raise ValueError(f"request {name!r}: the prefix has {len(prefix.logprobs)} log-probs for {num_tokens} tokens")
    if prefix.support is not None and num_supports(prefix.support) != num_tokens:
        raise ValueError(
            f"request {name!r}: the prefix has the supports of {num_supports(prefix.support)} tokens, not of {num_tokens}"
        )
    ends = [0, *(entry.end for entry in prefix.versions)]
    if [entry.start for entry in prefix.versions] != ends[:-1] or ends[-1] != num_tokens:
        raise ValueError(
            f"request {name!r}: the prefix's versions {prefix.versions} do not cover its {num_tokens} tokens"
        )
    if num_tokens and not (0 <= token_ids.min() and token_ids.max() < vocab_size):
        raise ValueError(
            f"request {name!r}: prefix ids span {token_ids.min()}..{token_ids.max()}, "
            f"but the model's vocabulary is 0..{vocab_size - 1}"
        )
    if early_stops := stops_before_the_end(request.sampling, token_ids):
        raise ValueError(f"request {name!r}: the prefix continues after the stop ids {early_stops}")


def stops_before_the_end(sampling: SamplingParams, token_ids: np.ndarray) -> list[int]:
    """Return the stop ids among a response's tokens other than the last, in ascending order."""
    return [stop for stop in sorted(set(sampling.stop_token_ids)) if (token_ids[:-1] == stop).any()]


def finish_reason_of(sampling: SamplingParams, token_ids: np.ndarray) -> FinishReason:
    """Return how a response with these tokens ends by the request's own rules; "abort" if it does not end."""
    if len(token_ids) and token_ids[-1] in sampling.stop_token_ids:
        return "stop"
    return "length" if len(token_ids) >= sampling.max_new_tokens else "abort"


def context_of(request: GenerationRequest) -> tuple[int, ...]:
    """Return the tokens that the first new one depends on: the prompt and, for a continued response, the tokens so far."""
    return request.prompt_ids + (tuple(request.prefix.token_ids.tolist()) if request.prefix else ())


def context_length(request: GenerationRequest) -> int:
    """Return the number of tokens of `context_of`."""
    return len(request.prompt_ids) + (request.prefix.num_tokens if request.prefix else 0)


def max_new_tokens_of(request: GenerationRequest) -> int:
    """Return the number of tokens that the response may still grow by."""
    return request.sampling.max_new_tokens - (request.prefix.num_tokens if request.prefix else 0)


def aborted(request: GenerationRequest) -> Completion:
    """The completion of a request that was stopped before it got any token beyond its prefix."""
    if request.prefix is None:
        return Completion(request.request_id, np.zeros(0, np.int32), np.zeros(0, np.float32), "abort", ())
    return replace(request.prefix, finish_reason=finish_reason_of(request.sampling, request.prefix.token_ids))


def is_complete(request: GenerationRequest) -> bool:
    """Return True if the request's prefix is a whole response already."""
    return aborted(request).finish_reason != "abort"


def behind_prefix(request: GenerationRequest, rest: Completion) -> Completion:
    """The whole response: the request's prefix, then `rest`, which was generated after it."""
    prefix = request.prefix
    if prefix is None:
        return replace(rest, versions=merge_versions(rest.versions))
    shift = len(prefix.token_ids)
    shifted = [replace(entry, start=entry.start + shift, end=entry.end + shift) for entry in rest.versions]
    return replace(
        rest,
        token_ids=np.concatenate((prefix.token_ids, rest.token_ids)),
        logprobs=np.concatenate((prefix.logprobs, rest.logprobs)),
        versions=merge_versions([*prefix.versions, *shifted]),
        routing=prefix.routing if rest.routing is None else rest.routing,
        support=followed_by(prefix.support, shift, rest.support, len(rest.token_ids)),
    )


def merge_versions(versions: Sequence[VersionRange]) -> tuple[VersionRange, ...]:
    """Merge neighboring ranges of one version and leave out empty ones."""
    merged: list[VersionRange] = []
    for entry in versions:
        if merged and merged[-1].version == entry.version:
            merged[-1] = replace(merged[-1], end=entry.end)
        elif entry.end > entry.start:
            merged.append(entry)
    return tuple(merged)


def completion_to_json(completion: Completion) -> dict[str, Any]:
    """Return `completion` as JSON values, except that its numbers for each token stay arrays: there may be millions."""
    values = _present_fields(completion)
    if completion.episode is not None:
        segments = tuple(_stream_to_json(segment) for segment in completion.episode.segments)
        values["episode"] = {**_stream_to_json(completion.episode), "segments": segments}
    return {**values, "versions": tuple(asdict(version) for version in completion.versions)}


def _present_fields(value: Completion | Segment | Episode) -> dict[str, Any]:
    parts = {entry.name: getattr(value, entry.name) for entry in fields(value)}
    return {name: part for name, part in parts.items() if part is not None}


def _stream_to_json(stream: Segment | Episode) -> dict[str, Any]:
    values = _present_fields(stream)
    for name in {"turns", "versions"} & set(values):
        values[name] = tuple(asdict(row) for row in values[name])
    return values


def completion_from_json(value: Mapping[str, Any]) -> Completion:
    """Invert `completion_to_json`, with arrays or with lists of numbers."""
    return Completion(
        request_id=value["request_id"],
        token_ids=value["token_ids"],
        logprobs=value["logprobs"],
        finish_reason=value["finish_reason"],
        versions=tuple(VersionRange(**version) for version in value["versions"]),
        routing=value.get("routing"),
        support=value.get("support"),
        prompt_ids=None if value.get("prompt_ids") is None else tuple(value["prompt_ids"]),
        episode=None if value.get("episode") is None else _episode(value["episode"]),
    )


def _episode(value: Mapping[str, Any]) -> Episode:
    segments = tuple(
        Segment(
            **{
                **segment,
                "prompt_ids": tuple(segment["prompt_ids"]),
                "versions": tuple(VersionRange(**version) for version in segment["versions"]),
                "turns": _turns(segment["turns"]),
            }
        )
        for segment in value["segments"]
    )
    return Episode(**{**value, "turns": _turns(value["turns"]), "segments": segments})


def _turns(rows: Sequence[Mapping[str, Any]]) -> tuple[Turn, ...]:
    return tuple(Turn(**{**row, "calls": tuple(TurnCall(**call) for call in row["calls"])}) for row in rows)
