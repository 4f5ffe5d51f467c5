"""What the collector asks of an engine, and the checks every engine makes on a request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Protocol

from megatron_dapo.types import Completion, GenerationRequest


class RolloutEngine(Protocol):
    """Generates responses for the rank that drives the rollout.

    Completions come back in an order that depends only on what was submitted and when, so two equal runs see equal
    streams.
    """

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests. ValueError for one that could never be served."""

    def poll(self) -> list[Completion]:
        """Advance (or wait for) the generation a little; what finished since the last call, possibly nothing."""

    def abort(self) -> list[Completion]:
        """Stop everything: one completion with finish_reason "abort" for each unfinished request, with the tokens it
        has so far.
        """

    @property
    def num_unfinished(self) -> int:
        """Requests submitted but not yet returned by `poll` or `abort`."""

    @property
    def policy_version(self) -> int:
        """Version of the weights being served, -1 before the first synchronisation."""


def check_request_ids(requests: Sequence[GenerationRequest], in_use: Collection[str]) -> None:
    """Raise ValueError where a request id occurs twice or is in use."""
    names = [request.request_id for request in requests]
    clashes = {name for name, count in Counter(names).items() if count > 1 or name in in_use}
    if clashes:
        raise ValueError(
            f"request ids {sorted(clashes)[:4]} ({len(clashes)} in all) are already in use; give each its own"
        )


def check_request(request: GenerationRequest, *, max_length: int, vocab_size: int) -> None:
    """Raise ValueError where `request` cannot be served by an engine with `max_length` positions a sequence."""
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
