"""The preset `lenient` and math-verify side by side, over the spellings of answers that public sets use.

    python benchmarks/answers.py [--json] [--tiny] [--rows 200] [--seed 0]

The spellings are generated from values, so that what is equal is known by construction and not by a grader: each family writes one
value in two ways (expected: correct) and a changed value in the second way (expected: wrong). Families follow the answers of MATH,
AMC and AIME, GSM8K and OlympiadBench. `reasoning_gym.*` are the answers of Reasoning Gym's own generators, if it is installed: each
against itself, against itself in a box with other spacing, and against another problem's answer.

A false positive is a changed value that was scored correct, a false negative an equal one that was not; per family and grader. math-verify is
called as its README shows: `verify(parse(gold), parse(response))` with the answer in a box.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import math_verify
import options

from megatron_dapo.rewards.verifiers import lenient

Pair = tuple[str, str, bool]  # gold answer, response's answer, whether they are equal
REASONING_GYM = (
    "complex_arithmetic",
    "count_bits",
    "decimal_arithmetic",
    "fraction_simplification",
    "intermediate_integration",
    "number_format",
    "polynomial_equations",
    "polynomial_multiplication",
    "power_function",
    "prime_factorization",
    "simple_equations",
    "simple_integration",
    "time_intervals",
)


def integers(rng: random.Random) -> Iterator[Pair]:
    value = rng.choice((1, -1)) * rng.randrange(1000, 10**7)
    for spelling in (_thousands(value, ","), _thousands(value, "{,}"), _thousands(value, ",\\!"), f"{value}.", f"{value:+d}", f"{value}.0"):
        yield str(value), spelling, True
    yield str(value), str(-value), False
    yield str(value), _thousands(value + 1, ","), False
    yield str(value), f"{value}0", False


def fractions(rng: random.Random) -> Iterator[Pair]:
    value = _fraction(rng)
    top, bottom = value.numerator, value.denominator
    sign = "-" if top < 0 else ""
    gold = f"{sign}\\frac{{{abs(top)}}}{{{bottom}}}"
    factor = rng.randrange(2, 6)
    for spelling in (
        f"{sign}\\dfrac{{{abs(top)}}}{{{bottom}}}",
        f"\\tfrac{{{top}}}{{{bottom}}}",
        f"{top}/{bottom}",
        f"\\frac{{{factor * top}}}{{{factor * bottom}}}",
        f"{sign}{abs(top)} / {bottom}",
        f"({top})/({bottom})",
        f"$\\frac{{{top}}}{{{bottom}}}$",
    ):
        yield gold, spelling, True
    yield gold, f"\\frac{{{bottom}}}{{{top}}}", False
    yield gold, f"{top + bottom}/{bottom}", False
    yield gold, f"\\frac{{{-top}}}{{{bottom}}}", False


def mixed_numbers(rng: random.Random) -> Iterator[Pair]:
    bottom = rng.randrange(2, 13)
    top, whole = rng.randrange(1, bottom), rng.randrange(1, 40)
    gold = f"{whole}\\frac{{{top}}}{{{bottom}}}"
    improper = f"\\frac{{{whole * bottom + top}}}{{{bottom}}}"
    yield gold, improper, True
    yield improper, f"{whole} {top}/{bottom}", True
    yield improper, f"{whole}\\tfrac{{{top}}}{{{bottom}}}", True
    yield improper, f"{whole} + {top}/{bottom}", True
    yield gold, f"\\frac{{{whole * top}}}{{{bottom}}}", whole * top == whole * bottom + top
    yield gold, f"{whole + 1} {top}/{bottom}", False


def decimals(rng: random.Random) -> Iterator[Pair]:
    hundredths = rng.randrange(101, 100000)
    while hundredths % 10 == 0:
        hundredths += 1
    gold = f"{hundredths / 100:.2f}"
    reduced = Fraction(hundredths, 100)
    for spelling in (f"{gold}0", f"\\frac{{{reduced.numerator}}}{{{reduced.denominator}}}", f"{hundredths / 100:.2e}" if hundredths < 1000 else gold):
        yield gold, spelling, True
    yield gold, gold.replace(".", "{,}"), True
    yield gold, f"{(hundredths + 1) / 100:.2f}", False
    yield gold, f"{hundredths / 1000:.3f}", False
    yield gold, gold.replace(".", ""), False


def radicals(rng: random.Random) -> Iterator[Pair]:
    factor, inner = rng.randrange(2, 12), rng.choice((2, 3, 5, 6, 7, 10, 11, 13))
    gold = f"{factor}\\sqrt{{{inner}}}"
    for spelling in (
        f"{factor} \\sqrt{{{inner}}}",
        f"{factor} \\cdot \\sqrt{{{inner}}}",
        f"\\sqrt{{{factor * factor * inner}}}",
        f"{factor}√{inner}",
        f"{factor}*sqrt({inner})",
        f"{factor}\\times\\sqrt{{{inner}}}",
        f"\\frac{{{factor * inner}}}{{\\sqrt{{{inner}}}}}",
    ):
        yield gold, spelling, True
    yield gold, f"{factor}\\sqrt{{{inner + 1}}}", False
    yield gold, f"\\sqrt{{{factor * inner}}}", False
    yield gold, f"{factor}\\sqrt[3]{{{inner}}}", False
    yield gold, f"{factor + inner}", False


def powers_and_pi(rng: random.Random) -> Iterator[Pair]:
    base, exponent, factor = rng.randrange(2, 9), rng.randrange(3, 30), rng.randrange(2, 60)
    yield f"{base}^{{{exponent}}}", f"{base}**{exponent}", True
    yield f"{base}^{{{exponent}}}", f"{base}^{{{exponent - 1}}} \\cdot {base}", True
    yield f"{base}^{{{exponent}}}", str(base**exponent), True
    yield f"{base}^{{{exponent}}}", f"{base}^{{{exponent + 1}}}", False
    yield f"{base}^{{{exponent}}}", str(base * exponent), base * exponent == base**exponent
    yield f"{factor}\\pi", f"{factor}π", True
    yield f"{factor}\\pi", f"\\pi \\cdot {factor}", True
    yield f"\\frac{{{factor}\\pi}}{{7}}", f"\\frac{{{factor}}}{{7}}\\pi", True
    yield f"{factor}\\pi", str(factor), False
    yield f"{factor}\\pi", f"{factor}\\pi^2", False
    yield f"e^{{{exponent}}}", f"exp({exponent})", True
    yield f"\\ln {base}", f"ln({base})", True
    yield f"\\log_{{{base}}} {factor}", f"\\frac{{\\ln {factor}}}{{\\ln {base}}}", True
    yield f"\\ln {base}", f"\\ln {base + 1}", False


def complex_numbers(rng: random.Random) -> Iterator[Pair]:
    real, imaginary = rng.randrange(1, 30), rng.randrange(2, 30)
    gold = f"{real} - {imaginary}i"
    for spelling in (f"{real}-{imaginary}i", f"-{imaginary}i+{real}", f"{real}.0 + -{imaginary}.0i", f"{real} - {imaginary} i"):
        yield gold, spelling, True
    yield gold, f"{real} + {imaginary}i", False
    yield gold, f"{imaginary} - {real}i", real == imaginary
    yield gold, f"{real} - {imaginary}", False


def intervals(rng: random.Random) -> Iterator[Pair]:
    low = rng.randrange(-50, 40)
    high = low + rng.randrange(1, 60)
    yield f"[{low},{high})", f"\\left[ {low}, {high} \\right)", True
    yield f"[{low},{high})", f"\\left[{low};{high}\\right)", True
    yield f"[{low},\\infty)", f"[{low},+\\infty)", True
    yield f"[{low},\\infty)", f"[{low}, ∞)", True
    yield f"(-\\infty,{high}]", f"\\left(-\\infty, {high}\\right]", True
    yield f"(-\\infty, {low}) \\cup ({high}, \\infty)", f"(-\\infty,{low})\\cup({high},+\\infty)", True
    yield f"(-\\infty, {low}) \\cup ({high}, \\infty)", f"({high},\\infty)\\cup(-\\infty,{low})", True
    yield f"[{low},{high})", f"[{low},{high}]", False
    yield f"[{low},{high})", f"({low},{high})", False
    yield f"[{low},\\infty)", f"[{low},-\\infty)", False
    yield f"[{low},\\infty)", f"({low},\\infty)", False
    yield f"(-\\infty, {low}) \\cup ({high}, \\infty)", f"(-\\infty,{low}]\\cup({high},\\infty)", False


def tuples_and_sets(rng: random.Random) -> Iterator[Pair]:
    first, second, third = rng.sample(range(-40, 40), 3)
    yield f"({first}, {second}, {third})", f"\\left({first},{second},{third}\\right)", True
    yield f"({first},{second})", f"({first}; {second})", True
    yield f"({first},{second})", f"({second},{first})", False
    yield f"({first},{second})", f"({first},{second},{third})", False
    yield f"\\{{{first}, {second}\\}}", f"\\{{{second},{first}\\}}", True
    yield f"\\{{{first}, {second}, {third}\\}}", f"\\left\\{{{third}, {first}, {second}\\right\\}}", True
    yield f"\\{{{first}, {second}\\}}", f"\\{{{first}\\}}", False
    yield f"{first}, {second}", f"{second}, {first}", True
    yield f"{first}, {second}", f"{first} and {second}", True
    yield f"{first}, {second}", f"x = {first} \\text{{ or }} x = {second}", True
    yield f"{first}, {second}", f"{first}, {third}", False
    yield f"{first}, {second}", f"{first}", False
    yield "\\emptyset", "\\varnothing", True
    yield "\\emptyset", "∅", True
    yield "\\emptyset", f"\\{{{first}\\}}", False


def plus_minus(rng: random.Random) -> Iterator[Pair]:
    value, shift = rng.randrange(1, 40), rng.randrange(1, 40)
    yield f"\\pm {value}", f"{value}, -{value}", True
    yield f"{shift} \\pm {value}", f"{shift + value}, {shift - value}", True
    yield f"{shift} \\pm \\sqrt{{{value}}}", f"{shift} - \\sqrt{{{value}}}, {shift} + \\sqrt{{{value}}}", True
    yield f"\\pm {value}", f"{value}", False
    yield f"\\pm {value}", f"±{value}", True
    yield f"{shift} \\pm {value}", f"{shift} \\pm {value + 1}", False


def matrices(rng: random.Random) -> Iterator[Pair]:
    rows, columns = rng.choice(((2, 2), (3, 1), (1, 3), (2, 3), (3, 3)))
    cells = rng.sample(range(-60, 60), rows * columns)
    matrix = [cells[row * columns : (row + 1) * columns] for row in range(rows)]
    gold = _matrix(matrix, "pmatrix", " & ", " \\\\ ")
    yield gold, _matrix(matrix, "pmatrix", "&", "\\\\"), True
    yield gold, _matrix(matrix, "bmatrix", " & ", " \\\\\n"), True
    yield gold, _matrix(matrix, "pmatrix", " & ", " \\\\[1ex] "), True
    yield gold, _matrix(matrix, "pmatrix", " & ", " \\\\ ", cell="{}.0"), True
    yield gold, f"\\left({_matrix(matrix, 'array', '&', chr(92) * 2, '{' + 'c' * columns + '}')}\\right)", True
    if rows > 1:
        yield gold, _matrix(matrix[::-1], "pmatrix", " & ", " \\\\ "), False
        yield gold, _matrix(matrix[:-1], "pmatrix", " & ", " \\\\ "), False
        yield gold, _matrix([[sum(column)] for column in zip(*matrix)], "pmatrix", " & ", " \\\\ "), False
        yield gold, _matrix([list(column) for column in zip(*matrix)], "pmatrix", " & ", " \\\\ "), [list(c) for c in zip(*matrix)] == matrix
    changed = [row[:] for row in matrix]
    changed[-1][-1] += 1
    yield gold, _matrix(changed, "pmatrix", "&", "\\\\"), False
    half = [[f"\\frac{{{cell}}}{{7}}" for cell in row] for row in matrix]
    yield _matrix(half, "pmatrix", " & ", " \\\\ "), _matrix([[f"{cell}/7" for cell in row] for row in matrix], "pmatrix", " & ", " \\\\ "), True


def expressions(rng: random.Random) -> Iterator[Pair]:
    a, b, c = rng.randrange(2, 20), rng.randrange(1, 20), rng.randrange(1, 20)
    gold = f"{a}x^2 + {b}x - {c}"
    yield gold, f"{b}x - {c} + {a}x^2", True
    yield gold, f"{a}x^{{2}}+{b}x-{c}", True
    yield gold, f"x({a}x+{b}) - {c}", True
    yield gold, f"{a}x^2 + {b}x + {c}", False
    yield gold, f"{a}x^2 - {c}", False
    yield gold, f"{a}y^2 + {b}y - {c}", False
    yield f"(x - {b})(x + {c})", f"(x+{c})(x-{b})", True
    yield f"(x - {b})(x + {c})", f"(x+{b})(x-{c})", b == c
    yield f"y = {a}x + {b}", f"y={b}+{a}x", True
    yield f"y = {a}x + {b}", f"{a}x + {b}", True
    yield f"y = {a}x + {b}", f"y={a}x-{b}", False
    yield f"\\frac{{x+{b}}}{{x-{c}}}", f"(x+{b})/(x-{c})", True
    yield f"\\frac{{x+{b}}}{{x-{c}}}", f"\\frac{{x-{c}}}{{x+{b}}}", False


def inequalities(rng: random.Random) -> Iterator[Pair]:
    low = rng.randrange(-20, 20)
    high = low + rng.randrange(1, 20)
    yield f"x > {low}", f"x>{low}", True
    yield f"x \\ge {low}", f"x \\geq {low}", True
    yield f"x \\ge {low}", f"x ≥ {low}", True
    yield f"{low} < x < {high}", f"{low}<x<{high}", True
    yield f"{low} \\le x < {high}", f"[{low},{high})", True
    yield f"x > {low}", f"x < {low}", False
    yield f"x > {low}", f"x \\ge {low}", False
    yield f"x > {low}", f"x > {low + 1}", False
    yield f"{low} < x < {high}", f"{low} \\le x < {high}", False


def units(rng: random.Random) -> Iterator[Pair]:
    value = rng.randrange(2, 1000)
    unit = rng.choice(("cm", "square units", "feet", "hours", "miles per hour", "inches", "minutes", "students", "km"))
    yield f"{value}", f"{value} \\text{{ {unit}}}", True
    yield f"{value} \\text{{ {unit}}}", f"{value}", True
    yield f"{value}", f"{value}\\mbox{{ {unit}}}", True
    yield f"{value}", f"{value}~\\mathrm{{{unit}}}", True
    yield f"{value}", f"{value} {unit}", True
    yield f"{value}", f"{value} \\text{{ cm}}^2", True
    yield f"{value}", f"{value + 1} \\text{{ {unit}}}", False
    yield f"{value}^\\circ", f"{value}", True
    yield f"{value}", f"{value}°", True
    yield f"{value}", f"{value}^{{\\circ}}", True
    yield f"{value}^\\circ", f"{value + 1}^\\circ", False


def money_and_percentages(rng: random.Random) -> Iterator[Pair]:
    whole, cents = rng.randrange(2, 9999), rng.randrange(10, 100)
    yield f"{whole}.{cents}", f"\\${whole}.{cents}", True
    yield f"\\${whole}.{cents}", f"{whole}.{cents}", True
    yield f"\\$ {whole}", f"${whole}$", True
    yield f"{whole}", f"\\${whole:,}", True
    yield f"{whole}", f"€{whole}", True
    yield f"{whole}", f"{whole} dollars", True
    yield f"\\${whole}.{cents}", f"\\${whole}", False
    yield f"{cents}\\%", f"{cents}%", True
    yield f"{cents}\\%", f"{cents}", True
    yield f"{cents}\\%", f"{cents} \\text{{ percent}}", True
    yield f"{cents}\\%", f"0.{cents}", True
    yield f"{cents}\\%", f"{cents + 1}\\%", False
    yield f"{cents}\\%", f"0.0{cents}", False


def multiple_choice(rng: random.Random) -> Iterator[Pair]:
    letter, other = rng.sample("ABCDE", 2)
    value = rng.randrange(2, 100)
    text = rng.choice(("a polygenic risk score", "the enzyme is inhibited", "both reactions stop", "it doubles"))
    for spelling in (
        f"({letter})",
        f"{letter}.",
        f"\\text{{{letter}}}",
        f"\\textbf{{({letter})}}",
        f"\\textbf{{({letter})}}\\ {value}",
        f"\\textbf{{({letter}) }} {value}",
        f"({letter}) {text}",
        f"{letter}: {text}",
        f"{letter}) {text}",
        f"{letter}. {text}",
        f"{letter} - {text}",
        f"Option {letter}",
        f"\\mathrm{{({letter})}} {value}",
    ):
        yield letter, spelling, True
    yield letter, f"{letter} or {other}", False
    yield letter, f"({other}) {text}", False
    yield letter, f"{other}: {text}", False
    yield letter, f"{letter}) {text} {other}) {text}", False
    yield letter, f"{letter} - {value}", False
    yield letter, f"({letter}) or ({other})", False
    yield letter, f"\\textbf{{({other})}}\\ {value}", False
    gold = f"\\textbf{{({letter})}}\\ {value}"
    yield gold, letter, True
    yield gold, str(value), True
    yield gold, f"({letter}) {value}", True
    yield gold, other, False
    yield gold, str(value + 1), False
    yield gold, f"({other}) {value}", False


def words_and_dates(rng: random.Random) -> Iterator[Pair]:
    day, other_day = rng.sample(("Monday", "Tuesday", "Wednesday", "Thursday", "Friday"), 2)
    hour, minute, date = rng.randrange(1, 12), rng.randrange(10, 60), rng.randrange(1, 29)
    yield f"\\text{{{day}}}", day, True
    yield f"\\text{{{day}}}", day.lower(), True
    yield f"\\text{{{day}}}", f"**{day}**", True
    yield f"\\text{{{day}}}", other_day, False
    yield f"\\text{{{hour}:{minute} p.m.}}", f"{hour}:{minute} p.m.", True
    yield f"{hour}:{minute} p.m.", f"{hour}:{minute} PM", True
    yield f"{hour}:{minute} p.m.", f"\\text{{{hour}:{minute} pm}}", True
    yield f"{hour}:{minute} p.m.", f"{hour}:{minute} a.m.", False
    yield f"{hour}:{minute}", f"{hour}{{:}}{minute}", True
    yield f"{hour}:{minute}", f"{hour}:{minute + 1 if minute < 59 else 10}", False
    yield f"{hour}:{minute}", f"{minute}:{hour}", False
    yield f"July {date}", f"\\text{{July }} {date}", True
    yield f"July {date}", f"June {date}", False
    yield f"July {date}", f"July {date + 1}", False


def ratios(rng: random.Random) -> Iterator[Pair]:
    first, second = rng.sample((2, 3, 5, 7, 11, 13), 2)
    yield f"{first}:{second}", f"{first} : {second}", True
    yield f"{first}:{second}", f"${first}:{second}$", True
    yield f"{first}:{second}", f"{second}:{first}", False
    yield f"{first}:{second}", f"{first}:{second + 1}", False
    yield f"{first}:{second}", f"{first * second}", False


def bases(rng: random.Random) -> Iterator[Pair]:
    base = rng.randrange(3, 9)
    digits = "".join(str(rng.randrange(1, base)) for _ in range(4))
    yield f"{digits}_{base}", f"{digits}_{{{base}}}", True
    yield f"{digits}_{base}", f"({digits})_{base}", True
    yield f"{digits}_{base}", f"{digits}₀".replace("₀", chr(0x2080 + base)), True
    yield f"{digits}_{base}", f"{digits}_{base + 1}", False
    yield f"{digits}_{base}", digits[::-1] + f"_{base}", digits == digits[::-1]


def trigonometry(rng: random.Random) -> Iterator[Pair]:
    function = rng.choice(("sin", "cos", "tan"))
    degrees = rng.choice((15, 20, 40, 50, 70, 80))
    yield f"\\{function} {degrees}^\\circ", f"\\{function}({degrees}°)", True
    yield f"\\{function} {degrees}^\\circ", f"\\{function}\\left(\\frac{{{degrees}\\pi}}{{180}}\\right)", True
    yield f"\\{function} {degrees}^\\circ", f"\\{function} {degrees}", False
    yield f"\\{function} {degrees}^\\circ", f"\\{function} {degrees + 5}^\\circ", False
    yield "\\frac{\\sqrt{3}}{2}", "\\sin 60^\\circ", True
    yield "\\frac{\\sqrt{3}}{2}", "\\cos 60^\\circ", False


def typography(rng: random.Random) -> Iterator[Pair]:
    value = rng.randrange(10, 10**6)
    wide = str(value).translate({ord("0") + digit: 0xFF10 + digit for digit in range(10)})
    for spelling in (wide, f"{value}。", f"{value}\u200b", f"\u00a0{value}", f"≈ {value}", f"\\approx {value}", f"= {value}", f"−{value}"):
        yield str(value) if not spelling.startswith("−") else f"-{value}", spelling, True
    yield "\\frac{3}{4}", "¾", True
    yield "\\frac{7}{4}", "1¾", True
    yield "\\frac{3}{4}", "¼", False
    yield "x^2", "x²", True
    yield "x^{12}", "x¹²", True
    yield "x^2", "x2", False
    yield str(value), f"{value}²", False


FAMILIES: tuple[Callable[[random.Random], Iterator[Pair]], ...] = (
    integers,
    fractions,
    mixed_numbers,
    decimals,
    radicals,
    powers_and_pi,
    complex_numbers,
    intervals,
    tuples_and_sets,
    plus_minus,
    matrices,
    expressions,
    inequalities,
    units,
    money_and_percentages,
    multiple_choice,
    words_and_dates,
    ratios,
    bases,
    trigonometry,
    typography,
)


def reasoning_gym_pairs(name: str, rows: int, seed: int) -> Iterator[Pair]:
    import reasoning_gym

    answers = [str(entry["answer"]) for entry in reasoning_gym.create_dataset(name, size=rows, seed=seed)]
    for answer, other in zip(answers, answers[1:] + answers[:1], strict=True):
        yield answer, answer, True
        yield answer, f" {answer} ", True
        if answer.replace(" ", "").lower() != other.replace(" ", "").lower():
            yield answer, other, False


def compare(pairs: Iterator[Pair], examples: list[dict[str, Any]], family: str) -> dict[str, int]:
    """Count both graders' errors and add each distinct kind of lenient's to `examples`."""
    counts = {"pairs": 0, "false_positives": 0, "false_negatives": 0, "math_verify_false_positives": 0, "math_verify_false_negatives": 0}
    for gold, answer, is_equal in pairs:
        counts["pairs"] += 1
        for prefix, is_correct in (("", _lenient(gold, answer)), ("math_verify_", _math_verify(gold, answer))):
            if is_correct == is_equal:
                continue
            kind = "false_positives" if is_correct else "false_negatives"
            counts[prefix + kind] += 1
            if not prefix:
                examples.append({"family": family, "kind": kind, "gold": gold, "answer": answer})
    return counts


def _lenient(gold: str, answer: str) -> bool:
    return lenient.score(f"So the answer is \\boxed{{{answer}}}.", gold).outcome == "correct"


def _math_verify(gold: str, answer: str) -> bool:
    try:
        return bool(math_verify.verify(math_verify.parse(f"${gold}$"), math_verify.parse(f"So the answer is $\\boxed{{{answer}}}$.")))
    except Exception:  # it raises on some spellings; such a response gets no reward
        return False


def _thousands(value: int, separator: str) -> str:
    return f"{value:,}".replace(",", separator)


def _fraction(rng: random.Random) -> Fraction:
    while True:
        value = Fraction(rng.choice((1, -1)) * rng.randrange(1, 90), rng.randrange(2, 90))
        if value.denominator > 1 and abs(value.numerator) != value.denominator and abs(value.numerator) > 1:
            return value


def _matrix(rows: list[list[Any]], kind: str, column: str, row: str, argument: str = "", cell: str = "{}") -> str:
    body = row.join(column.join(cell.format(value) for value in cells) for cells in rows)
    return f"\\begin{{{kind}}}{argument} {body} \\end{{{kind}}}"


def main() -> None:
    parser = options.parser(__doc__, "three values of each family")
    parser.add_argument("--rows", type=int, default=200, help="values of each family")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rows = 3 if arguments.tiny else arguments.rows
    errors: list[dict[str, Any]] = []
    families = {}
    for family in FAMILIES:
        rng = random.Random(f"{arguments.seed} {family.__name__}")
        pairs = (pair for _ in range(rows) for pair in family(rng))
        families[family.__name__] = compare(pairs, errors, family.__name__)
    if importlib.util.find_spec("reasoning_gym") is None:
        print("reasoning_gym is not installed: its sets are left out", file=sys.stderr)
    else:
        for name in REASONING_GYM:
            pairs = reasoning_gym_pairs(name, rows, arguments.seed)
            families[f"reasoning_gym.{name}"] = compare(pairs, errors, name)
    totals = {key: sum(counts[key] for counts in families.values()) for key in next(iter(families.values()))}
    options.show({**totals, "families": families, "errors": errors[:200]}, arguments)


if __name__ == "__main__":
    main()
