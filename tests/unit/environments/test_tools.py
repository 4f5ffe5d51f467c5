from __future__ import annotations

import operator
import random
from fractions import Fraction

import pytest

from megatron_dapo.environments.tools import calculate, python


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("17 * 23", "391"),
        ("(1 + 2) * -3", "-9"),
        ("7 / 2", "3.5"),
        ("6 / 2", "3"),
        ("2 ^ 10", "1024"),
        ("3 × 4 ÷ 2", "6"),
        ("0.1 + 0.2", "0.3"),
        ("7 // 2 % 2", "1"),
        ("1e3", "1000"),
    ],
)
def test_arithmetic(expression, value):
    assert calculate(expression) == value


def test_random_expressions_against_fractions():
    rng = random.Random(0)
    operators = {"+": operator.add, "-": operator.sub, "*": operator.mul}

    def draw(depth: int) -> tuple[str, Fraction]:
        if not depth or rng.random() < 0.2:
            number = rng.randint(0, 99)
            return str(number), Fraction(number)
        sign = rng.choice(list(operators))
        (left, a), (right, b) = draw(depth - 1), draw(depth - 1)
        return f"({left} {sign} {right})", operators[sign](a, b)

    for _ in range(300):
        expression, value = draw(5)
        if len(expression) <= 500:
            assert calculate(expression) == str(value)


REFUSED = {
    "9 ** 9 ** 9": "too large",
    "10 ** 4000": "too large",
    "1 / 0": "division by zero",
    "(-2) ** 0.5": "no real number",
    "__import__('os')": "only numbers",
    "x": "only numbers",
    "True + 1": "only numbers",
    "'a' * 9": "only numbers",
    "[1][0]": "only numbers",
    "1 +": "no arithmetic expression",
    "": "no arithmetic expression",
    "(" * 300: "no arithmetic expression",
    "1" * 501: "501 characters",
}


@pytest.mark.parametrize("expression", REFUSED)
def test_everything_else_is_refused(expression):
    with pytest.raises((ValueError, ZeroDivisionError), match=REFUSED[expression]):
        calculate(expression)


def test_programs_run_in_the_sandbox():
    assert python("print(6 * 7)") == "42"
    assert "ZeroDivisionError" in python("1 / 0")
    assert python("x = 1") == "(the program printed nothing)"
    assert "Error" in python("import socket; socket.create_connection(('127.0.0.1', 1))")
    assert "Error" in python("print(x)")  # a variable of an earlier call
