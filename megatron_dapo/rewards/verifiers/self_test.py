"""Start-up test that the verifier can read the answer format the prompts ask for.

A prompt that asks for `\\boxed{}` with a verifier that reads `Answer:` lines scores every right answer as wrong, without
an error. So before the first step, synthetic responses in the instructed format are scored for rendered prompts of the
data set (chat template included: its system prompt may ask for another format):

    the gold answer        must be correct
    the same, truncated    must not be
    another answer         must be wrong
    no answer              must not be correct
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from megatron_dapo.rewards.pool.pool import Scorer, ScoreRequest
from megatron_dapo.types import Score

FORMATS: Mapping[str, str] = {
    "answer_line": "Answer: {answer}",
    "answer_line_boxed": "Answer: \\boxed{{{answer}}}",
    "boxed": "\\boxed{{{answer}}}",
}
_INSTRUCTIONS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("answer_line_boxed", re.compile(r"(?i)answer\s*:\s*\$?\s*\\boxed")),
    ("answer_line", re.compile(r"(?i)answer\s*:")),
    ("boxed", re.compile(r"\\boxed")),
)
WRONG_ANSWERS = ("123456789", "987654321")
MAX_EXAMPLES = 3


def check_contract(
    prompts: Sequence[tuple[str, str]],
    scorer: Scorer,
    verifier: str,
    answer_format: str = "auto",
) -> tuple[str, ...]:
    """Return the names of the formats that the prompts ask for. Raises ValueError if prompts and verifier disagree.

    Args:
        prompts: (rendered prompt text, gold answer), as the engine will see them.
        scorer: the pool that will score the run.
        verifier: its name, for the message.
        answer_format: "auto" reads it from the prompts; a key of FORMATS; or a template of your own with `{answer}`.

    The error names the formats found, counts, and examples with the answer that the verifier extracted.
    """
    if not prompts:
        raise ValueError("self-test: there are no prompts")
    templates = instructed_formats([text for text, _ in prompts], answer_format)
    failures: list[str] = []
    for name, template in templates.items():
        requests = _synthetic_requests([answer for _, answer in prompts], template)
        scores = scorer.score_many(requests.values())
        failures += [
            _describe(name, label, request, scores[request.key])
            for (_, label), request in requests.items()
            if scores[request.key].accuracy != float(label == "correct")
        ]
    if failures:
        raise ValueError(_refusal(failures, verifier, tuple(templates), len(prompts)))
    return tuple(templates)


def instructed_formats(texts: Sequence[str], answer_format: str = "auto") -> dict[str, str]:
    """Return name -> template of every answer format that at least half of the rendered prompts ask for."""
    if answer_format in FORMATS:
        return {answer_format: FORMATS[answer_format]}
    if answer_format != "auto":
        return {"custom": _checked_template(answer_format)}
    counts = Counter(name for text in texts for name in _formats_of(text))
    found = {name: FORMATS[name] for name in FORMATS if 2 * counts[name] >= len(texts) and counts[name]}
    if not found:
        raise ValueError(
            f"self-test: the prompts do not say how to give the answer (neither 'Answer:' nor \\boxed in most of "
            f"{len(texts)} prompts). Say so in the prompts, or set answer_format to one of {sorted(FORMATS)} or to a "
            f"template with {{answer}}. The first prompt: {texts[0][-400:]!r}"
        )
    return found


def _formats_of(text: str) -> tuple[str, ...]:
    combined, separate = _INSTRUCTIONS[0], _INSTRUCTIONS[1:]
    if combined[1].search(text):
        return (combined[0],)
    return tuple(name for name, pattern in separate if pattern.search(text))


def _checked_template(template: str) -> str:
    try:
        has_answer = template.format(answer="\0") != template.format(answer="\1")
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(f"answer_format {template!r} is no template: {error!r}; double literal braces") from error
    if not has_answer:
        raise ValueError(
            f"answer_format {template!r} is neither auto, nor one of {sorted(FORMATS)}, nor has {{answer}}"
        )
    return template


def _synthetic_requests(answers: Sequence[str], template: str) -> dict[tuple[int, str], ScoreRequest]:
    """Return four responses to each answer, keyed by (index of the answer, kind of response)."""
    requests: dict[tuple[int, str], ScoreRequest] = {}
    for index, answer in enumerate(answers):
        # The synthetic wrong answer must not be the gold one by chance.
        wrong = WRONG_ANSWERS[answer == WRONG_ANSWERS[0]]
        right = f"Step by step.\n\n{template.format(answer=answer)}"
        for label, response in (
            ("correct", right),
            ("truncated", right),
            ("incorrect", f"Step by step.\n\n{template.format(answer=wrong)}"),
            ("no answer", "Step by step, and no conclusion."),
        ):
            key = index, label
            requests[key] = ScoreRequest(key, response, answer, label == "truncated")
    return requests


def _describe(format_name: str, label: str, request: ScoreRequest, score: Score) -> str:
    detail = f" ({score.detail['error']})" if "error" in score.detail else ""
    return (
        f"[{format_name}, {label}] {request.response[-80:]!r} with gold {request.answer!r} is {score.outcome!r}{detail}, "
        f"extracted {score.extracted!r}"
    )


def _refusal(failures: Sequence[str], verifier: str, formats: Sequence[str], num_prompts: int) -> str:
    examples = "\n  ".join(failures[:MAX_EXAMPLES])
    return (
        f"self-test: verifier {verifier!r} disagrees with the format the prompts ask for ({', '.join(formats)}): "
        f"{len(failures)} of {4 * num_prompts * len(formats)} synthetic responses to {num_prompts} prompts scored "
        f"wrongly, such as\n  {examples}\n"
        "Fix: change the instruction in the prompts (or the chat template's system prompt), or the verifier: "
        "`dapo` reads 'Answer: ...', `dapo_boxed` and `lenient` also \\boxed{...}."
    )
