"""What reward functions receive and return, as plain data without torch, so that a worker starts in milliseconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

VERIFIER_OUTCOMES = ("correct", "wrong", "unparsable", "timeout", "error")


@dataclass(frozen=True)
class RewardSample:
    """A response, as passed to a reward function with one parameter."""

    messages: tuple[Mapping[str, str], ...]  # chat turns of the prompt: {"role": ..., "content": ...}
    response: str  # no special tokens
    answer: str  # gold answer; "" if data.columns names no column for it
    data_source: str
    extra_info: Mapping[str, Any]  # every other column of the row
    finish_reason: str  # "stop", or "length" for a response that was cut off
    group_index: int  # index among the responses to the same prompt
    requested_token_ids: tuple[int, ...] | None = None  # see `token_ids`

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of the response, including the stop token. ValueError if reward.token_ids does not request them."""
        if self.requested_token_ids is None:
            raise ValueError("sample.token_ids is not sent to reward functions by default: set reward.token_ids = true")
        return self.requested_token_ids


@dataclass(frozen=True)
class RewardResult:
    """The typed form of what a user's reward function may return."""

    score: float | None = None  # the reward; None: the sum of the parts, else reward.correct or reward.incorrect
    parts: Mapping[str, float] = field(default_factory=dict)  # name -> value, recorded in samples and metrics
    extracted: str | None = None  # the answer that was found in the response
    is_correct: bool | None = None  # None: score >= 0.5. Groups are filtered by it


@dataclass(frozen=True)
class VerifierResult:
    """Outcome of one response. Only `correct` has accuracy 1."""

    outcome: str  # one of VERIFIER_OUTCOMES
    extracted: str | None = None  # the answer found in the response
    reward: float | None = None  # the verifier's own scale; None: the pool's reward for correct or incorrect
    detail: Mapping[str, Any] = field(default_factory=dict)  # JSON-serializable; "parts" holds a reward's parts

    def __post_init__(self) -> None:
        if self.outcome not in VERIFIER_OUTCOMES:
            raise ValueError(
                f"unknown outcome {self.outcome!r}: a verifier returns one of {', '.join(VERIFIER_OUTCOMES)}"
            )
