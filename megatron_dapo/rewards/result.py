"""Result of a verifier on one response, in plain data: no torch, so that a worker starts in milliseconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

VERIFIER_OUTCOMES = ("correct", "wrong", "unparsable", "error")


@dataclass(frozen=True)
class VerifierResult:
    """Outcome of one response. Only `correct` has accuracy 1."""

    outcome: str  # one of VERIFIER_OUTCOMES
    extracted: str | None = None  # the answer found in the response
    reward: float | None = None  # the verifier's own scale; None: the pool's reward for correct or incorrect
    detail: Mapping[str, Any] = field(default_factory=dict)  # JSON-serializable

    def __post_init__(self) -> None:
        if self.outcome not in VERIFIER_OUTCOMES:
            raise ValueError(
                f"unknown outcome {self.outcome!r}: a verifier returns one of {', '.join(VERIFIER_OUTCOMES)}"
            )
