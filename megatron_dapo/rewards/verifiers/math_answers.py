"""Whether two mathematical answers are equal in value, whatever the notation. Built on math-verify, with its known holes closed.

An answer is split into its required parts (`1, 2`, `x=1 or x=2`); two answers are equal when every part of the gold answer
has an equal in the prediction and the other way round. Parts are compared

- as exact integers when both are integers, of any size;
- digit by digit when one is written in another base (`204_5`): math-verify drops the base;
- element by element when both are tuples, intervals or sets in the same brackets, and cell by cell when both are
  matrices, arrays or cases;
- by its letter when the gold answer is an option: `E`, `(E) 12`, `E: a text` and `\\textbf{(E)}\\ 12` name the same one, and
  if both sides give its text, the texts must be equal too;
- as text when one of them is words (math-verify multiplies the letters of "east" and finds them equal to "seat");
- with math-verify otherwise: each WHOLE part is parsed as LaTeX (its fallback takes any number it can find), the gold
  answer goes first because `verify` is not symmetric, and equality is confirmed at relative precision because
  math-verify compares at an absolute one (1/2004! and 1/2006! are both "zero").

A comma is a thousands separator outside of brackets only, and only before groups of three digits without a space:
`12,102` is one number, `(12,102)` and `\\gcd(12,102)` have two elements. TeX's tight commas (`{,}`, `,\\!`) join digits
anywhere.

math-verify's own timeouts need the main thread and do not stop C code: they are off, the pool kills the process.
"""

from __future__ import annotations

import logging
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify
from sympy import Float, UnevaluatedExpr

MAX_PARTS = 32  # a longer list of answers is no answer
MAX_ANSWER_CHARACTERS = 2000  # nor is a longer text
MATH_SPAN = re.compile(r"\$([^$]+)\$")

# math-verify warns through its loggers that its timeouts are off; here that is the design.
logging.getLogger("math_verify").setLevel(logging.ERROR)


@dataclass(frozen=True)
class Option:
    """The option of a multiple-choice problem that an answer names."""

    letter: str
    text: str  # empty without one


# ---- notation

_TEXT_WRAPPER = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|boxed|fbox)\s*\{([^{}]*)\}")
# Separators that TeX sets without the space of a list; these separate thousands everywhere.
_TIGHT_NUMBER = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:\s?\{\s?,\s?\}|,\\!|\\[,! ])\s?\d{3})+(?!\d)")
# A plain comma separates thousands outside of brackets only: `(3,100)`, `[3,100]`, `\gcd(12,180)` have two elements.
_BRACKET_OR_NUMBER = re.compile(
    r"(?P<open>\\\{|[(\[])|(?P<close>\\\}|[)\]])|(?P<number>(?<![\d.,])\d{1,3}(?:,\d{3})+(?!\d|,\d))"
)
_MATRIX = re.compile(
    r"\\begin ?\{(?P<kind>[pbBvV]?matrix|smallmatrix|array|cases|aligned)\*?\} ?(?:\{[lcr| ]*\})?"
    r"(?P<cells>.*?)\\end ?\{[^{}]*\}"
)
# An option with its label, and its text if it has one. A dash is a delimiter only before a word: `E - 1` is an expression.
_OPTION = re.compile(
    r"(?:[Oo]ption |[Cc]hoice )?(?:"
    r"(?P<wrapped>\\(?:text|textbf|textrm|mathbf|mathrm|mathsf) ?\{ ?\(?[A-J]\)?[.:]? ?\})|(?P<bracketed>\([A-J]\))"
    r"|(?P<bare>[A-J])(?= ?[:.)]| - ?(?:an? )?[A-Za-z]{2}[A-Za-z ]|$)"
    r") ?[:.)]? ?(?:- ?(?=[A-Za-z]))?(?P<text>.*)"
)
# Another option in the text of one: `B)`, `(B)`, `B:` or `or B`.
_OTHER_OPTION = re.compile(
    r"(?<![A-Za-z\\])[A-J](?= ?[):]|\.(?!\d))|\([A-J]\)"
    r"|(?:\b(?:and|or)\b|[,;/&]) ?[A-J](?![A-Za-z])|^[A-J](?![A-Za-z]| [a-z])"
)
_CLOCK = re.compile(r"\d{1,2}:\d\d (?P<half>[ap]m)")
_NUMBER_IN_BASE = re.compile(r"\d\)?_")
_INTEGER = re.compile(r"([+-]?)0*(\d+)")
_WORDS = re.compile(r"[A-Za-z][A-Za-z'\- ]*[A-Za-z]")
_ASSIGNMENT = re.compile(r"\s*([A-Za-z](?:_\{?\w\}?)?)\s*=(?!=)\s*([^=<>]+)$")
_NAMES_WITH_VALUE = frozenset("sqrt infinity infty alpha beta gamma theta lambda sigma".split())

_ENVIRONMENT = re.compile(r"\\begin\s*\{[^{}]*\}.*?\\end\s*\{[^{}]*\}", re.DOTALL)
_ROW_BREAK_MACRO = re.compile(r"\\\\(?:\s*\[\s*-?[\d.]+\s*(?:pt|ex|em|mm|cm|in|mu)\s*\])?|\\cr(?![A-Za-z])")
_ROW_BREAK = "\ue000"  # stands for `\\` while the spaces of TeX, such as `\ `, are replaced
_DIGITS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻₀₁₂₃₄₅₆₇₈₉", "0123456789+-0123456789")
_FRACTION_SLASH = "\u2044"

# TeX for single Unicode characters. It comes first: NFKC takes the meaning of superscripts, subscripts and fractions.
_UNICODE = (
    (re.compile(r"[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+"), lambda match: f"^{{{match[0].translate(_DIGITS)}}}"),
    (re.compile(r"[₀-₉]+"), lambda match: f"_{{{match[0].translate(_DIGITS)}}}"),
    (re.compile(r"[¼-¾⅐-⅞]"), lambda match: _vulgar_fraction(match[0])),
    (re.compile(r"√\s*(?:\(([^()]*)\)|(\d+(?:\.\d+)?|[A-Za-z]))"), lambda match: f"\\sqrt{{{match[1] or match[2]}}}"),
    (re.compile(r"[。．]"), "."),
    (re.compile(r"[，、]"), ","),
    (re.compile(r"ℝ"), r"\\mathbb{R}"),
    (re.compile(r"∅|\\varnothing(?![A-Za-z])"), r"\\emptyset "),
    (re.compile(r"∪"), r"\\cup "),
    (re.compile(r"∩"), r"\\cap "),
    (re.compile(r"×"), r"\\times "),
    (re.compile(r"·|⋅"), r"\\cdot "),
    (re.compile(r"÷"), "/"),
    (re.compile(r"≤"), r"\\le "),
    (re.compile(r"≥"), r"\\ge "),
    (re.compile(r"≠"), r"\\ne "),
    (re.compile(r"≈"), r"\\approx "),
)
_TRIGONOMETRIC = r"(?:arc)?(?:sin|cos|tan)|cot|sec|csc"

_NOTATION = (
    (re.compile(r"\\(?:displaystyle|limits|left|right|bigl?|bigr?)(?![A-Za-z])"), ""),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (_TIGHT_NUMBER, lambda match: re.sub(r"\D", "", match.group())),
    (re.compile(r"(?<=\d),\\[, ](?=\d{3})"), ","),
    (re.compile(r"(?<=\d)\{,\}(?=\d)"), "."),  # not thousands: a decimal comma
    (re.compile(r"\\[,;:! ]|~|\\q?quad(?![A-Za-z])"), " "),
    # An angle in degrees is one only under a function; elsewhere the degree is a unit.
    (
        re.compile(rf"\\?({_TRIGONOMETRIC})\s*[({{]?\s*(\d+(?:\.\d+)?)\s*(?:°|\^\s*\{{?\\circ\}}?)\s*[)}}]?"),
        r"\\\1(\\frac{\2\\pi}{180})",
    ),
    (re.compile(r"°|\^\s*\{?\\circ\}?"), ""),
    (re.compile(r"−|–"), "-"),
    (re.compile(r"[€£¥]|(?<=\d)\s*(?:dollars?|euros?|pounds|yen|cents?|[a-z]+ per [a-z]+|(?:square|cubic) [a-z]+)$"), ""),
    (re.compile(r"\{([:;])\}"), r"\1"),
    (re.compile(r"(?i)(?<=:\d\d)\s*([ap])\.?\s?m\b\.?"), lambda match: f" {match[1].lower()}m"),
    (re.compile(r"(?<![A-Za-z])(\\?)sqrt\s*\(([^()]*)\)"), r"\\sqrt{\2}"),
    (re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])|π"), r"\\pi "),
    (re.compile(r"(?<![\\A-Za-z])infinity(?![A-Za-z])|∞"), r"\\infty "),
    (re.compile(r"±|(?<!\\)\+/-"), r"\\pm "),
    (re.compile(r"(?<=\d)[eE]([+-]?\d+)(?![\dA-Za-z])"), r" \\cdot 10^{\1}"),
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"\^\(([^()]*)\)"), r"^{\1}"),
    (re.compile(rf"(?<![\\A-Za-z])({_TRIGONOMETRIC}|ln|log)(?=\s*[({{\d])"), r"\\\1"),
    (re.compile(r"(?<![\\A-Za-z])exp\s*\(([^()]*)\)"), r"e^{\1}"),
    (re.compile(r"\+\s*-\s*(?=[\d.])"), "-"),
    (re.compile(r"(?<![\d.])(\d+)\.0+(?![\d.])"), r"\1"),
    (re.compile(r"(?<![\d.])1 ?i(?![A-Za-z])"), "i"),
    (re.compile(r"^\s*([A-Za-z]?\s*)(?:\\approx|\\simeq)(?![A-Za-z])"), r"\1="),
    (re.compile(r"\\(?:mathrm|text)\s*\{e\}"), "e"),
    (re.compile(r"(?<![\d/.])(\d+) +(\d+)/(\d+)(?![\d/.])"), r"\1\\frac{\2}{\3}"),
    (re.compile(r"\s+"), " "),
)


def clean(text: str) -> str:
    """An answer without decoration: math delimiters, bold, final full stop, spacing and alternative spellings."""
    for pattern, replacement in _UNICODE:
        text = pattern.sub(replacement, text)
    text = "".join(symbol for symbol in unicodedata.normalize("NFKC", text) if unicodedata.category(symbol) != "Cf")
    text = _ENVIRONMENT.sub(lambda match: _ROW_BREAK_MACRO.sub(_ROW_BREAK, match[0]), text)
    text = _inner_math(_unbold(text))
    for pattern, replacement in _NOTATION:
        text = pattern.sub(replacement, text)
    text = _join_thousands(text).replace(_ROW_BREAK, r"\\")
    return text.strip().lstrip("=").rstrip(".,;:").strip()


def _vulgar_fraction(symbol: str) -> str:
    numerator, _, denominator = unicodedata.normalize("NFKC", symbol).partition(_FRACTION_SLASH)
    return f"\\frac{{{numerator}}}{{{denominator}}}"


def _join_thousands(text: str) -> str:
    """Remove thousands commas of the numbers that stand in no bracket."""
    depth = 0

    def replace(match: re.Match[str]) -> str:
        nonlocal depth
        if match["open"]:
            depth += 1
        elif match["close"]:
            depth = max(0, depth - 1)
        elif depth == 0:
            return match.group().replace(",", "")
        return match.group()

    return _BRACKET_OR_NUMBER.sub(replace, text)


def _unbrace(text: str) -> str:
    """Remove braces around the whole text: `{2, 3}` is a list, as TeX shows it."""
    while text.startswith("{") and _closing(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    return text


def _closing(text: str, start: int) -> int:
    """Index of the bracket that closes the one at `start`, whatever the kinds; -1 without one."""
    depth = 0
    for token in re.finditer(r"[({\[]|[)}\]]", text[start:]):
        depth += 1 if token.group() in "({[" else -1
        if depth == 0:
            return start + token.start()
    return -1


def _unbold(text: str) -> str:
    text = re.sub(r"(?<![\w)}])\*\*([^*\n]+)\*\*(?![\w({])", r"\1", text.strip())
    return text.strip("*_").strip()


def _inner_math(text: str) -> str:
    text = re.sub(r"\\[()\[\]]|\$\$", "$", re.sub(r"\\\$", "", text))
    spans = MATH_SPAN.findall(text)
    outside = MATH_SPAN.sub(" ", text)
    # "The value is $42$": prose around a single formula is not part of the answer.
    if len(spans) == 1 and re.search(r"[A-Za-z]{2}.*\s*$", outside) and not re.search(r"\d|\b(?:and|or)\b", outside):
        return spans[0]
    return text.replace("$", " ")


def split_parts(text: str) -> tuple[str, ...]:
    """The required parts of an answer: `1 \\pm x` stands for two."""
    return tuple(signed for part in _listed(text) for signed in _both_signs(part))


def _listed(text: str) -> tuple[str, ...]:
    """Split at commas, semicolons, `and`, `or` outside of all brackets; empty parts are left out."""
    text = _TEXT_WRAPPER.sub(
        lambda m: f" {m.group(1)} " if m.group(1).strip() in ("and", "or", ",") else m.group(), text
    )
    parts, depth, start = [], 0, 0
    for token in re.finditer(
        r"[({\[]|[)}\]]|\\(?:begin|end)(?=\s*\{)|[,;]|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])", text
    ):
        symbol = token.group()
        if symbol in ("(", "{", "[", "\\begin"):
            depth += 1
        elif symbol in (")", "}", "]", "\\end"):
            depth = max(0, depth - 1)
        elif depth == 0:
            parts.append(text[start : token.start()])
            start = token.end()
    parts.append(text[start:])
    return tuple(part for part in map(_unwrap, parts) if part)


def _both_signs(part: str) -> tuple[str, ...]:
    """`1 \\pm x` stands for two answers; several signs may go together, so they stay one."""
    if part.count("\\pm") != 1:
        return (part,)
    return tuple(part.replace("\\pm", sign).lstrip("+ ") for sign in "+-")


def _unwrap(part: str) -> str:
    part = part.strip().rstrip(".").strip()
    match = _TEXT_WRAPPER.fullmatch(part)
    return match.group(1).strip().rstrip(".") if match else part


def _as_shown(part: str) -> str:
    """What the reader sees of a text: no spacing, no fonts."""
    return _TEXT_WRAPPER.sub(r"\1", part).replace(" ", "")


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


def is_readable(part: str) -> bool:
    """Return True if a part can be compared: an integer, words, or what math-verify parses."""
    return bool(_integer(part) or _is_words(part) or _parsed(part))


# ---- comparison


def answers_equal(*, gold: str, pred: str) -> bool:
    """Return True if `pred` gives every answer that `gold` requires, and no other."""
    if max(len(gold), len(pred)) > MAX_ANSWER_CHARACTERS:
        return False
    gold, pred = clean(gold), clean(pred)
    gold_option, pred_option = option_of(gold), option_of(pred)
    if gold_option is not None and (pred_option is not None or gold_option.text):
        return _options_equal(gold_option, pred_option, pred)
    if _cleaned_equal(gold, pred):
        return True
    # `{1, 3}` is a list, but math-verify also takes it for the pair (1, 3): either reading counts.
    bare_gold, bare_pred = _unbrace(gold), _unbrace(pred)
    return (bare_gold, bare_pred) != (gold, pred) and _cleaned_equal(bare_gold, bare_pred)


def _cleaned_equal(gold: str, pred: str) -> bool:
    gold_parts, pred_parts = split_parts(gold), split_parts(pred)
    if not gold_parts or not pred_parts or max(len(gold_parts), len(pred_parts)) > MAX_PARTS:
        return False
    gold_names, gold_values = _assignments(gold_parts)
    pred_names, pred_values = _assignments(pred_parts)
    if len(gold_names) > 1 or len(pred_names) > 1:
        return _systems_equal(gold_parts, gold_names, pred_parts, pred_names)
    if gold_names and pred_names and _fold(gold_names) != _fold(pred_names):
        return False
    return _same_set(gold_values, pred_values) or _same_set(gold_parts, pred_parts)


def _options_equal(gold: Option, pred: Option | None, pred_text: str) -> bool:
    """An option by its letter or, when the gold answer has a text, by that text. Both letter and text must not disagree."""
    if pred is None:
        return bool(gold.text) and _cleaned_equal(gold.text, pred_text)
    if gold.letter != pred.letter:
        return False
    return not (gold.text and pred.text) or gold.text == pred.text or _cleaned_equal(gold.text, pred.text)


def option_of(text: str) -> Option | None:
    """The option that a whole cleaned answer names, or None: an answer that names two is no option."""
    match = _OPTION.fullmatch(text)
    if match is None or _OTHER_OPTION.search(match["text"]):
        return None
    label = match["wrapped"] or match["bracketed"] or match["bare"]
    letter = re.search(r"[A-J](?=\W*$)", label)
    return Option(letter[0], match["text"].strip()) if letter else None


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
    return split_parts(match.group(1)) if match else tuple(parts)


@lru_cache(maxsize=256)  # `_same_set` needs every pair in both directions
def _part_equal(*, gold: str, pred: str) -> bool:
    gold_integer, pred_integer = _integer(gold), _integer(pred)
    if gold_integer is not None and pred_integer is not None:
        return gold_integer == pred_integer
    if _as_shown(gold) == _as_shown(pred):
        return True
    if _NUMBER_IN_BASE.search(gold) or _NUMBER_IN_BASE.search(pred):
        return _without_grouping(gold) == _without_grouping(pred)  # math-verify drops the base
    gold_time, pred_time = _CLOCK.fullmatch(gold), _CLOCK.fullmatch(pred)
    if gold_time is not None and pred_time is not None:  # math-verify drops the half of the day as a unit
        return gold_time[0] == pred_time[0]
    gold_matrix, pred_matrix = _MATRIX.fullmatch(gold), _MATRIX.fullmatch(pred)
    if gold_matrix is not None and pred_matrix is not None:
        return _matrices_equal(gold_matrix, pred_matrix)
    gold_elements, pred_elements = _bracketed(gold), _bracketed(pred)
    if gold_elements and pred_elements and gold_elements[0] == pred_elements[0]:
        (brackets, golds), (_, preds) = gold_elements, pred_elements
        if brackets == "\\{\\}":  # a set has no order
            return _same_set(golds, preds)
        return len(golds) == len(preds) and all(_part_equal(gold=g, pred=p) for g, p in zip(golds, preds))
    if _is_words(gold) or _is_words(pred):
        return " ".join(gold.lower().split()) == " ".join(pred.lower().split())
    return any(_expressions_equal(gold=g, pred=p) for g in _parsed(gold) for p in _parsed(pred))


def _matrices_equal(gold: re.Match[str], pred: re.Match[str]) -> bool:
    """Cell by cell. The brackets are a matter of taste, but a determinant (`vmatrix`) or cases are no matrix."""
    special = ("vmatrix", "Vmatrix", "cases")
    if gold["kind"] != pred["kind"] and (gold["kind"] in special or pred["kind"] in special):
        return False
    gold_rows, pred_rows = _rows(gold["cells"]), _rows(pred["cells"])
    if [len(row) for row in gold_rows] != [len(row) for row in pred_rows]:
        return False
    cells = zip(sum(gold_rows, []), sum(pred_rows, []), strict=True)
    return all(_part_equal(gold=gold_cell, pred=pred_cell) for gold_cell, pred_cell in cells)


def _rows(cells: str) -> list[list[str]]:
    rows = [[cell.strip(" ,.;") for cell in row.split("&")] for row in cells.replace("\\hline", " ").split("\\\\")]
    return [row for row in rows if any(row)]


def _without_grouping(part: str) -> str:
    return re.sub(r"[\s{}()]|_\{?10\}?$", "", part)


def _bracketed(part: str) -> tuple[str, tuple[str, ...]] | None:
    """(both brackets, two or more elements) of a tuple, an interval or a set; None for anything else."""
    brackets = re.fullmatch(r"(\\\{|[(\[])(.*?)(\\\}|[)\]])", part)
    if brackets is None or _closing(part, brackets.end(1) - 1) != len(part) - 1:
        return None
    elements = _listed(brackets[2])
    return (brackets[1] + brackets[3], elements) if len(elements) > 1 else None


@lru_cache(maxsize=256)
def _parsed(part: str) -> tuple[Any, ...]:
    try:
        found = parse(
            f"${part}$",
            [LatexExtractionConfig()],
            fallback_mode="no_fallback",
            parsing_timeout=None,
            raise_on_error=True,
        )
    except MemoryError:  # ends this process, which is replaced
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
    # A percentage passes as well: math-verify holds 5% as 5 * UnevaluatedExpr(1/100).
    if not all(getattr(value, "is_number", False) and not value.has(UnevaluatedExpr) for value in (gold, pred)):
        return True
    gold_value, pred_value = gold.evalf(30), pred.evalf(30)
    if gold_value.is_infinite or pred_value.is_infinite:  # their difference is not a number
        return bool(gold_value == pred_value)
    difference, scale = abs(gold_value - pred_value), max(abs(gold_value), abs(pred_value))
    # math-verify reads short decimals such as 0.5 as exact fractions: only longer, rounded ones are Floats here.
    tolerance = 1e-3 if gold.has(Float) or pred.has(Float) else 1e-12
    # sympy marks the leftovers of a cancellation (sqrt(2) - sqrt(2)) by a precision of one bit.
    is_noise = any(getattr(value, "_prec", 2) == 1 for value in (gold_value, pred_value))
    return bool(difference <= tolerance * scale) or is_noise
