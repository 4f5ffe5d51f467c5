"""Preset `lenient`: equal in value is right, whatever the notation. Built on math-verify, with its known holes closed.

The final answer is what the last marker of the response announces: an `Answer:` line, a `\\boxed{}` or `\\fbox{}`, or,
when there is neither, a bold span in the last line. The response is right when that answer and the gold one are equal, see
`rewards.verifiers.math_answers`.

Of 275 cases (gold, prediction, expected) in math-verify 0.9.0's own tests, 251 agree. The other 24 are choices:

- 11 texts announce no answer: they mention one number or several without a marker, or the marker no value ("Answer: Jane
  started growing Sphere 3 hours ago"). Such a number is usually an intermediate result: taking it would reward guesses.
- 3 have a decimal comma (`1,22`): here a comma separates two answers. `1{,}22` is read as 1.22.
- 3 use options of math-verify that loosen the comparison (2 decimals, other variable names allowed).
- 3 differ in notation: a line break inside `$ ... $` (2), text between boxes that is no list connector (1).
- 1 gives solutions of two unknowns as pairs (`(5,2),(7,2)` for `p=5,q=2;p=7,q=2`): names are not dropped in systems.
- 2 are malformed LaTeX, and 1 expects 1 - 1/e to equal 1 + 1/e.

Known remaining errors are pinned in the tests.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version

from megatron_dapo.rewards.result import VerifierResult
from megatron_dapo.rewards.verifiers.math_answers import (
    MATH_SPAN,
    MAX_PARTS,
    answers_equal,
    clean,
    is_readable,
    option_of,
    split_parts,
)

REVISION = f"3+math-verify-{version('math-verify')}+sympy-{version('sympy')}"
TAIL_CHARACTERS = None  # the whole response counts
MIN_SENTENCE_WORDS = 5  # fewer words are an answer, such as "regular hexagon"
MAX_EXTRACTED_CHARACTERS = 512  # limit for the records

_MARKER = re.compile(r"(?i)\banswer\b[ \t*_]*[:：][\s*_]*")
_BRACES = re.compile(r"\\{1,2}(?:boxed|fbox|framebox)\s*\{|\\.|\{|\}", re.DOTALL)
# MATH's solutions write `$\boxed 5$`. The box ends with its formula, or with the word when no formula is open.
_BARE_BOX = re.compile(r"(\\(?:boxed|fbox))[ \t]+(?!\{)(?:([^$\n{}]{1,40})(?=\$)|([^\s$\\{}]{0,40}[^\s$\\{}.,;]))")
_BOLD = re.compile(r"\*\*([^*\n]+)\*\*")
_DISPLAY_OPENERS = {"$$": "$$", "\\[": "\\]", "\\(": "\\)", "$": "$"}
# Between two boxes of one answer: a few words that end in a connector, or nothing but spacing and math delimiters.
_SPACING = r"(?:[\s$&.]|\\[\[\]()\\,;:! ]|\\q?quad(?![A-Za-z]))*"
_BOX_GAP = re.compile(
    rf"(?:\s*[^\n.]{{0,60}}(?:[,;]|(?<![A-Za-z])(?:and|or))\s*\}}?{_SPACING}(?:[A-Za-z](?:_\{{?\w+\}}?)?\s*=)?|{_SPACING}){_SPACING}"
)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z\[<(*])")
_HAS_VALUE = re.compile(r"[\d$\\]")
_VERB = re.compile(r"\b(?:is|are|equals)\b:?(?: (?:approximately|about|exactly|equal to))?\s*")
_QUOTES = re.compile(r"\\?[\"“”]")
_PROSE_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")


def score(response: str, answer: str) -> VerifierResult:
    """Score one response against its gold answer."""
    found = extract(response)
    if found is None:
        return VerifierResult("unparsable")
    outcome = "correct" if answers_equal(gold=answer, pred=found) else "wrong"
    return VerifierResult(outcome, found[:MAX_EXTRACTED_CHARACTERS])


def gold_problem(answer: str) -> str | None:
    """Return the reason why this gold answer cannot be compared, or None."""
    parts = split_parts(clean(answer))
    if not parts:
        return "it is empty"
    unreadable = [part for part in parts if not is_readable(part)]
    if unreadable:
        return f"math-verify cannot parse {unreadable[0]!r}"
    if score(f"\\boxed{{{answer}}}", answer).outcome != "correct":
        return (
            f"even \\boxed{{{answer}}} does not match it (unbalanced braces, too long, or more than {MAX_PARTS} parts?)"
        )
    return None


# ---- extraction


def extract(response: str) -> str | None:
    """Return the text that the last marker of the response announces, or None.

    A marker followed by a sentence announces what follows its one `is`, `are` or `equals`. A sentence without a value
    ("as shown above") announces nothing, and the boxes before it count.
    """
    response = _BARE_BOX.sub(lambda match: f"{match[1]}{{{match[2] or match[3]}}}", response)
    boxes = _boxes(response)
    marker = next(iter(deque(_MARKER.finditer(response), maxlen=1)), None)  # the last one
    announced = ""
    if marker is not None and (not boxes or boxes[-1].end <= marker.end()):
        announced = _announced(response[marker.end() :])
        value = _announced_value(announced)
        if value is not None:
            return value
    if boxes:
        return _joined_boxes(response, boxes)
    return announced or (_bold_of_last_line(response) if marker is None else None)


@dataclass(frozen=True)
class _Box:
    start: int  # start of the macro
    end: int  # position after the closing brace
    content: str


def _boxes(text: str) -> list[_Box]:
    """Every closed, outermost box, in one pass over the braces."""
    boxes: list[_Box] = []
    # One entry for each open brace: the match that opened a box, None for any other brace.
    stack: list[re.Match[str] | None] = []
    for token in _BRACES.finditer(text):
        symbol = token.group()
        if symbol == "{":
            stack.append(None)
        elif symbol == "}":
            opened = stack.pop() if stack else None
            if opened is not None:
                while boxes and boxes[-1].start > opened.start():
                    boxes.pop()
                content = text[opened.end() : token.start()]
                # A response that was escaped twice has two backslashes before every macro, the box included.
                is_escaped = opened.group().startswith("\\\\")
                boxes.append(
                    _Box(opened.start(), token.end(), content.replace("\\\\", "\\") if is_escaped else content)
                )
        elif symbol.endswith("{") and len(symbol) > 2:
            stack.append(token)
    return boxes


def _joined_boxes(text: str, boxes: Sequence[_Box]) -> str:
    """The last box, with those before it that a list connector (or nothing) separates from the next."""
    first = len(boxes) - 1
    while first and _BOX_GAP.fullmatch(text[boxes[first - 1].end : boxes[first].start]):
        first -= 1
    return ", ".join(dict.fromkeys(box.content.strip() for box in boxes[first:]))


def _announced_value(text: str) -> str | None:
    """The value in the text after a marker: all of it, or what a sentence says the answer is. None: no value."""
    option = option_of(clean(text))
    if option is not None and option.text:
        return text
    first, *others = _SENTENCE_END.split(text, maxsplit=1)
    text = first if others and _HAS_VALUE.search(first) else text
    clauses = _VERB.split(text)
    if len(clauses) == 2:
        return _QUOTES.sub("", clauses[1]).strip() or None
    num_words = len(_PROSE_WORD.findall(MATH_SPAN.sub(" ", text)))
    return text if text and num_words < MIN_SENTENCE_WORDS else None


def _announced(text: str) -> str:
    """The rest of the line after a marker; of a display formula opened there, its content."""
    for opener, closer in _DISPLAY_OPENERS.items():
        end = text.find(closer, len(opener))
        if text.startswith(opener) and end > 0 and "\n" in text[:end]:
            return text[len(opener) : end].strip()
    return text.partition("\n")[0].strip()


def _bold_of_last_line(response: str) -> str | None:
    spans = _BOLD.findall(response.rstrip().rpartition("\n")[2])
    return spans[-1].strip() if spans else None
