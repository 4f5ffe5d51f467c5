"""Preset `dapo`: agrees with the published DAPO scorer on every response, its quirks included.

Source: arXiv 2503.14476, the reward of its released recipe, which normalizes answers as Minerva did
(arXiv 2206.14858, appendix D.1). Text in, outcome out; nothing else counts:

1. only the last 300 characters of the response count;
2. the last match of `(?i)Answer\\s*:\\s*([^\\n]+)` is the prediction, without one the response is unparsable;
3. prediction and gold are normalized alike;
4. equal strings are correct, everything else is wrong.

So `42.`, `042`, `**42**`, `\\(42\\)`, `\\dfrac` for `\\frac` and a bare `\\boxed{42}` are wrong, while `x=42`,
`42 degrees`, `1,234` and `Answer: \\boxed{42}` are right. The tests pin this table.
"""

from __future__ import annotations

import re

from megatron_dapo.rewards.result import VerifierResult

REVISION = "1"  # changes whenever any response could score differently
TAIL_CHARACTERS = 300

_ANSWER_LINE = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")

# Applied in this order: an earlier pair changes what a later one sees.
_REPLACEMENTS = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)

_REMOVED_WORDS = tuple(
    "square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits cents degrees cm gm "
    "pounds meters meals edges students childrentickets multiples".split(" ")
)
_REMOVED_TEX = (
    "\\text{s}",
    "\\text{.}",
    "\\text{\ns}",
    "\\text{}^2",
    "\\text{}^3",
    "\\text{\n}",
    "\\text{}",
    "\\mathrm{th}",
    "^\\circ",
    "^{\\circ}",
    "\\;",
    ",\\!",
    "{,}",
    '"',
    "\\dots",
)

# Unwrap math and text environments, then give \frac and \sqrt the braces TeX lets one leave out.
_REWRITES = (
    (re.compile(r".*?\$(.*?)\$.*"), r"$\1$"),
    (re.compile(r"\\text\{(.*?)\}"), r"\1"),
    (re.compile(r"\\textbf\{(.*?)\}"), r"\1"),
    (re.compile(r"\\overline\{(.*?)\}"), r"\1"),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)


def normalize(answer: str) -> str:
    """Return the canonical string of an answer, prediction or gold."""
    answer = answer.rpartition("=")[2]
    for before, after in _REPLACEMENTS:
        answer = answer.replace(before, after)
    for removed in _REMOVED_WORDS + _REMOVED_TEX:
        answer = answer.replace(removed, "")
    for pattern, replacement in _REWRITES:
        answer = pattern.sub(replacement, answer)
    answer = answer.replace("$", "")
    without_commas = answer.replace(",", "")
    return (without_commas if without_commas.isdigit() else answer).strip()


def score(response: str, answer: str) -> VerifierResult:
    """Score one response against its gold answer."""
    found = _ANSWER_LINE.findall(response[-TAIL_CHARACTERS:])
    if not found:
        return VerifierResult("unparsable")
    prediction = normalize(found[-1])
    return VerifierResult("correct" if prediction == normalize(answer) else "wrong", prediction)


def gold_problem(answer: str) -> str | None:
    """Return the reason why no response could ever be right for this gold answer, or None."""
    if not normalize(answer):
        return "nothing is left of it after normalization"
    if score(f"Answer: {answer}", answer).outcome != "correct":
        return f"even 'Answer: {answer}' does not match it (line breaks, or more than {TAIL_CHARACTERS} characters?)"
    return None
