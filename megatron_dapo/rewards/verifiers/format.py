"""Preset `format`: 1 if a response has the form of [reward.format] (markers, a pattern or both), and 0 otherwise."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_dapo.rewards.result import RewardSample, VerifierResult
from megatron_dapo.rewards.verifiers.verifier import Verifier

REVISION = "1"


def load(own: Mapping[str, Any], pool: Mapping[str, Any]) -> Verifier:
    """Return the verifier. ValueError if [reward.format] describes no form."""
    markers, pattern = own["markers"], own["pattern"]
    if not markers and not pattern:
        raise ValueError("verifier 'format': set reward.format.markers or reward.format.pattern")

    def score(sample: RewardSample) -> VerifierResult:
        is_formed = sample.finish_reason == "stop" and has_form(sample.response, markers, pattern)
        return VerifierResult("correct" if is_formed else "wrong", reward=float(is_formed))

    return Verifier("format", f"format-{REVISION}", score, lambda answer: None, takes_sample=True)


def has_form(text: str, markers: Sequence[str], pattern: str) -> bool:
    """Return True if every marker occurs once in `text`, in order, and `pattern` matches all of `text`."""
    place = 0
    for marker in markers:
        found = text.find(marker, place)
        if found < 0 or text.count(marker) != 1:
            return False
        place = found + len(marker)
    return not pattern or re.fullmatch(pattern, text.strip(), re.DOTALL) is not None
