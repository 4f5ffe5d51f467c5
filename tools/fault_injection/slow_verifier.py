"""The rule-based verifier, slowed down, so that scoring takes long enough to be hit by a fault."""

from __future__ import annotations

import time

from megatron_dapo.rewards.verifiers.dapo import score as score_by_rule

SECONDS = 0.08


def score(response: str, answer: str) -> bool:
    """Return the rule's verdict after `SECONDS`."""
    time.sleep(SECONDS)
    return score_by_rule(response, answer).outcome == "correct"
