"""Preset `lenient`: equal in value is right, whatever the notation. Built on math-verify, with its known holes closed.

The final answer is what the last marker of the response announces: an `Answer:` line, a `\\boxed{}` or `\\fbox{}`, or,
when there is neither, a bold span in the last line. It is split into its required parts (`1, 2`, `x=1 or x=2`); the
response is right when every part of the gold answer has an equal in the response and the other way round.
Parts are compared

- as exact integers when both are integers, of any size;
- as text when one of them is words (math-verify multiplies the letters of "east" and finds them equal to "seat");
- with math-verify otherwise, the WHOLE part parsed as LaTeX (its fallback takes any number it can find), gold first
  because its `verify` is not symmetric, and a `yes` confirmed at relative precision because it compares at an absolute
  one (1/2004! and 1/2006! are both "zero").

math-verify's own timeouts need the main thread and do not stop C code: they are off, the pool kills the process.
Known remaining errors are pinned in the tests.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from importlib.metadata import version
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify
from sympy import Float, UnevaluatedExpr

from megatron_dapo.rewards.result import VerifierResult

REVISION = f"1+math-verify-{version('math-verify')}+sympy-{version('sympy')}"
TAIL_CHARACTERS = None  # the whole response counts
MAX_PARTS = 32  # a longer list of answers is no answer
MAX_ANSWER_CHARACTERS = 2000  # nor is a longer text
MAX_EXTRACTED_CHARACTERS = 512  # what is kept for the records

# math-verify warns through its loggers that its timeouts are off; here that is the design.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_MARKER = re.compile(r"(?i)\banswer\b[ \t*_]*:[\s*_]*")
_BRACES = re.compile(r"\\(?:boxed|fbox|framebox)\s*\{|\\.|\{|\}", re.DOTALL)
_BOLD = re.compile(r"\*\*([^*\n]+)\*\*")
_DISPLAY_OPENERS = {"$$": "$$", "\\[": "\\]", "\\(": "\\)"}
_MATH_SPAN = re.compile(r"\$([^$]+)\$")


def score(response: str, answer: str) -> VerifierResult:
    """Score one response against its gold answer."""
    found = extract(response)
    if found is None:
        return VerifierResult("unparsable")
    outcome = "correct" if answers_equal(gold=answer, pred=found) else "wrong"
    return VerifierResult(outcome, found[:MAX_EXTRACTED_CHARACTERS])


def gold_problem(answer: str) -> str | None:
    """Why this gold answer cannot be compared with anything, or None."""
    parts = _split(_clean(answer))
    if not parts:
        return "it is empty"
    unreadable = [part for part in parts if not (_integer(part) or _is_words(part) or _parsed(part))]
    if unreadable:
        return f"math-verify cannot parse {unreadable[0]!r}"
    if score(f"\\boxed{{{answer}}}", answer).outcome != "correct":
        return (
            f"even \\boxed{{{answer}}} does not match it (unbalanced braces, too long, or more than {MAX_PARTS} parts?)"
        )
    return None


# ---- extraction


def extract(response: str) -> str | None:
    """The text the last marker of the response announces, or None."""
    boxes = _boxes(response)
    marker = _last(_MARKER.finditer(response))
    if boxes and (marker is None or boxes[-1][1] > marker.end()):
        return _boxes_of_last_line(response, boxes)
    if marker is not None:
        return _announced(response[marker.end() :]) or None
    return _bold_of_last_line(response)


def _last(matches: Iterable[re.Match[str]]) -> re.Match[str] | None:
    last = None
    for match in matches:
        last = match
    return last


def _boxes(text: str) -> list[tuple[int, int, str]]:
    """(start, end, content) of every closed, outermost box, in one pass over the braces."""
    boxes: list[tuple[int, int, str]] = []
    stack: list[tuple[int, int] | None] = []  # one entry an open brace: (start, content start) of a box, None otherwise
    for token in _BRACES.finditer(text):
        symbol = token.group()
        if symbol == "{":
            stack.append(None)
        elif symbol == "}":
            opened = stack.pop() if stack else None
            if opened is not None:
                while boxes and boxes[-1][0] > opened[0]:
                    boxes.pop()
                boxes.append((opened[0], token.end(), text[opened[1] : token.start()]))
        elif symbol.endswith("{") and len(symbol) > 2:
            stack.append((token.start(), token.end()))
    return boxes


def _boxes_of_last_line(response: str, boxes: Sequence[tuple[int, int, str]]) -> str:
    line_start = response.rfind("\n", 0, boxes[-1][0]) + 1
    contents = [content.strip() for start, _, content in boxes if start >= line_start]
    return ", ".join(dict.fromkeys(contents))


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


# ---- notation

_TEXT_WRAPPER = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|boxed|fbox)\s*\{([^{}]*)\}")
_NUMBER_WITH_COMMAS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_INTEGER = re.compile(r"([+-]?)0*(\d+)")
_WORDS = re.compile(r"[A-Za-z][A-Za-z'\- ]*[A-Za-z]")
_ASSIGNMENT = re.compile(r"\s*([A-Za-z](?:_\{?\w\}?)?)\s*=(?!=)\s*([^=<>]+)$")
_NAMES_WITH_VALUE = frozenset("sqrt infinity infty alpha beta gamma theta lambda sigma".split())

_NOTATION = (
    (re.compile(r"\\(?:displaystyle|limits|left|right|bigl?|bigr?)(?![A-Za-z])"), ""),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\{,\}|(?<=\d)(?:,\\!|\\,|\\!|\\ )(?=\d{3})"), ","),
    (re.compile(r"\\[,;:! ]|~"), " "),
    (re.compile(r"°|\^\s*\{?\\circ\}?"), ""),
    (re.compile(r"−|–"), "-"),
    (re.compile(r"(?<![A-Za-z])(\\?)sqrt\s*\(([^()]*)\)"), r"\\sqrt{\2}"),
    (re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])|π"), r"\\pi "),
    (re.compile(r"(?<![\\A-Za-z])infinity(?![A-Za-z])|∞"), r"\\infty "),
    (re.compile(r"±|(?<!\\)\+/-"), r"\\pm "),
    (re.compile(r"(?<=\d)[eE]([+-]?\d+)(?![\dA-Za-z])"), r" \\cdot 10^{\1}"),
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"\^\(([^()]*)\)"), r"^{\1}"),
    (re.compile(r"\\(?:mathrm|text)\s*\{e\}"), "e"),
    (re.compile(r"(?<![\d/.])(\d+) +(\d+)/(\d+)(?![\d/.])"), r"\1\\frac{\2}{\3}"),
    (re.compile(r"\s+"), " "),
)


def _clean(text: str) -> str:
    """An answer without decoration: math delimiters, bold, final full stop, spacing and alternative spellings."""
    text = _inner_math(_unbold(text))
    for pattern, replacement in _NOTATION:
        text = pattern.sub(replacement, text)
    text = _NUMBER_WITH_COMMAS.sub(lambda match: match.group().replace(",", ""), text)
    return text.strip().rstrip(".,;:").strip()


def _unbold(text: str) -> str:
    text = re.sub(r"(?<![\w)}])\*\*([^*\n]+)\*\*(?![\w({])", r"\1", text.strip())
    return text.strip("*_").strip()


def _inner_math(text: str) -> str:
    text = re.sub(r"\\[()\[\]]|\$\$", "$", re.sub(r"\\\$", "", text))
    spans = _MATH_SPAN.findall(text)
    outside = _MATH_SPAN.sub(" ", text)
    # "The value is $42$": prose around a single formula is not part of the answer.
    if len(spans) == 1 and re.search(r"[A-Za-z]{2}.*\s*$", outside) and not re.search(r"\d|\b(?:and|or)\b", outside):
        return spans[0]
    return text.replace("$", " ")


def _split(text: str) -> tuple[str, ...]:
    """The required parts of an answer: split at commas, semicolons, `and`, `or` outside of all brackets."""
    text = _TEXT_WRAPPER.sub(
        lambda m: f" {m.group(1)} " if m.group(1).strip() in ("and", "or", ",") else m.group(), text
    )
    parts, depth, start = [], 0, 0
    for token in re.finditer(r"[({\[]|[)}\]]|[,;]|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])", text):
        symbol = token.group()
        if symbol in "({[":
            depth += 1
        elif symbol in ")}]":
            depth = max(0, depth - 1)
        elif depth == 0:
            parts.append(text[start : token.start()])
            start = token.end()
    parts.append(text[start:])
    unwrapped = (_unwrap(raw) for raw in parts)
    return tuple(signed for part in unwrapped if part for signed in _both_signs(part))


def _both_signs(part: str) -> tuple[str, ...]:
    """`1 \\pm x` stands for two answers; several signs may go together, so they stay one."""
    if part.count("\\pm") != 1:
        return (part,)
    return tuple(part.replace("\\pm", sign).lstrip("+ ") for sign in "+-")


def _unwrap(part: str) -> str:
    part = part.strip().rstrip(".").strip()
    match = _TEXT_WRAPPER.fullmatch(part)
    return match.group(1).strip() if match else part


def _integer(part: str) -> str | None:
    """The canonical digits of an integer; text, so that no size is too large."""
    match = _INTEGER.fullmatch(part.replace(" ", ""))
    if match is None:
        return None
    return ("-" if match.group(1) == "-" and match.group(2) != "0" else "") + match.group(2)


def _is_words(part: str) -> bool:
    words = part.split()
    return (
        _WORDS.fullmatch(part) is not None
        and any(len(word) >= 4 for word in words)
        and not any(word.lower() in _NAMES_WITH_VALUE for word in words)
    )


# ---- comparison


def answers_equal(*, gold: str, pred: str) -> bool:
    """Whether `pred` gives every answer `gold` requires, and no other."""
    if max(len(gold), len(pred)) > MAX_ANSWER_CHARACTERS:
        return False
    gold_parts, pred_parts = _split(_clean(gold)), _split(_clean(pred))
    if not gold_parts or not pred_parts or max(len(gold_parts), len(pred_parts)) > MAX_PARTS:
        return False
    gold_names, gold_values = _assignments(gold_parts)
    pred_names, pred_values = _assignments(pred_parts)
    if len(gold_names) > 1 or len(pred_names) > 1:
        return _systems_equal(gold_parts, gold_names, pred_parts, pred_names)
    if gold_names and pred_names and _fold(gold_names) != _fold(pred_names):
        return False
    return _same_set(gold_values, pred_values) or _same_set(gold_parts, pred_parts)


def _fold(names: Iterable[str]) -> set[str]:
    return {name.lower() for name in names}


def _assignments(parts: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The distinct names assigned to, and the parts without them: `x=1`, `2` -> (x,), (1, 2)."""
    matches = [_ASSIGNMENT.fullmatch(part) for part in parts]
    names = tuple(dict.fromkeys(match.group(1) for match in matches if match))
    values = tuple(match.group(2).strip() if match else part for match, part in zip(matches, parts, strict=True))
    return names, values


def _systems_equal(
    gold: Sequence[str], gold_names: Sequence[str], pred: Sequence[str], pred_names: Sequence[str]
) -> bool:
    """Several unknowns: compared by name when both sides name them, in order when only one does."""
    if bool(gold_names) == bool(pred_names):
        return _same_set(gold, pred)
    gold_values, pred_values = _assignments(gold)[1], _assignments(pred)[1]
    if len(gold_values) != len(pred_values):
        return False
    return all(_part_equal(gold=g, pred=p) for g, p in zip(gold_values, pred_values, strict=True))


def _same_set(gold: Sequence[str], pred: Sequence[str]) -> bool:
    if len(gold) == len(pred) == 1:
        return _part_equal(gold=gold[0], pred=pred[0])
    gold_elements, pred_elements = _elements(gold), _elements(pred)
    covered = all(any(_part_equal(gold=g, pred=p) for p in pred_elements) for g in gold_elements)
    return covered and all(any(_part_equal(gold=g, pred=p) for g in gold_elements) for p in pred_elements)


def _elements(parts: Sequence[str]) -> tuple[str, ...]:
    """A single set `\\{1, 2\\}` opposite a list counts as the list of its elements."""
    match = re.fullmatch(r"\\\{(.*)\\\}", parts[0]) if len(parts) == 1 else None
    return _split(match.group(1)) if match else tuple(parts)


@lru_cache(maxsize=256)
def _part_equal(*, gold: str, pred: str) -> bool:
    gold_integer, pred_integer = _integer(gold), _integer(pred)
    if gold_integer is not None and pred_integer is not None:
        return gold_integer == pred_integer
    if gold.replace(" ", "") == pred.replace(" ", ""):
        return True
    if _is_words(gold) or _is_words(pred):
        return " ".join(gold.lower().split()) == " ".join(pred.lower().split())
    return any(_expressions_equal(gold=g, pred=p) for g in _parsed(gold) for p in _parsed(pred))


@lru_cache(maxsize=256)
def _parsed(part: str) -> tuple[Any, ...]:
    try:
        found = parse(
            f"${part}$",
            [LatexExtractionConfig()],
            fallback_mode="no_fallback",
            parsing_timeout=None,  # type: ignore[arg-type]
            raise_on_error=True,
        )
    except MemoryError:
        raise
    except Exception:  # a parser that trips over model output means: no answer
        return ()
    return tuple(found)


def _expressions_equal(*, gold: Any, pred: Any) -> bool:
    try:
        is_equal = verify(gold=gold, target=pred, strict=True, timeout_seconds=None, raise_on_error=True)
        return is_equal and _numerically_close(gold, pred)
    except MemoryError:
        raise
    except Exception:  # sympy raises many types on expressions it cannot compare: they are not shown to be equal
        return False


def _numerically_close(gold: Any, pred: Any) -> bool:
    """Confirm an equality of two numbers at relative precision; anything that is not a plain number passes."""
    if not all(getattr(value, "is_number", False) and not _has_percent(value) for value in (gold, pred)):
        return True
    gold_value, pred_value = gold.evalf(30), pred.evalf(30)
    difference, scale = abs(gold_value - pred_value), max(abs(gold_value), abs(pred_value))
    tolerance = 1e-3 if _has_decimal(gold) or _has_decimal(pred) else 1e-12
    return bool(difference <= tolerance * scale) or _is_rounding_noise(gold_value, pred_value)


def _has_percent(value: Any) -> bool:
    return bool(value.has(UnevaluatedExpr))


def _has_decimal(value: Any) -> bool:
    """Whether a decimal was written: math-verify reads 0.5 as 1/2, so its precision is judged as an exact number's."""
    return bool(value.has(Float))


def _is_rounding_noise(*values: Any) -> bool:
    """sympy marks the leftovers of a cancellation (sqrt(2) - sqrt(2)) by a precision of one bit."""
    return any(getattr(value, "_prec", 2) == 1 for value in values)
