"""Preset `dapo_boxed`: the scorer of DAPO as verl has had it since 14 August 2026 (commit bf48903).

A response with an `Answer:` line is scored as by the preset `dapo`, the published scorer. Without one, the last
`\\boxed{...}` whose command is within the last 100 characters is the prediction. It has to equal the gold answer
character by character: neither is normalized, so `\\boxed{1,234}` is right for `1,234` and wrong for `1234`.
"""

from __future__ import annotations

from megatron_dapo.rewards.result import VerifierResult
from megatron_dapo.rewards.verifiers import dapo

REVISION = f"1+dapo-{dapo.REVISION}"  # changes whenever any response could score differently
TAIL_CHARACTERS = dapo.TAIL_CHARACTERS
BOX_CHARACTERS = 100  # a box begins within this end of the response

_BOX = "\\boxed{"
_NO_ANSWER = "[INVALID]"  # verl's prediction for a response without an answer line; one that says so has none either


def last_box(text: str) -> str | None:
    """Return the contents of the last box of `text`; None without one, or if its braces do not balance."""
    _, box, rest = text.rpartition(_BOX)
    depth = 1
    for place, character in enumerate(rest if box else ""):
        depth += (character == "{") - (character == "}")
        if not depth:
            return rest[:place]
    return None


def score(response: str, answer: str) -> VerifierResult:
    """Score one response against its gold answer."""
    result = dapo.score(response, answer)
    if result.outcome != "unparsable" and result.extracted != _NO_ANSWER:
        return result
    prediction = last_box(response[-BOX_CHARACTERS:])
    if prediction is None:
        return result
    return VerifierResult("correct" if prediction == answer else "wrong", prediction)


def gold_problem(answer: str) -> str | None:
    """Return the reason why no response could ever be right for this gold answer, or None."""
    if score(f"{_BOX}{answer}}}", answer).outcome == "correct":
        return None
    return dapo.gold_problem(answer)
