"""The published scorer's quirks are the specification: each line of this table is one response and its result."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.rewards.verifiers.dapo import TAIL_CHARACTERS, gold_problem, normalize, score

ACCEPTED = [
    ("Answer: 42", "42"),
    ("answer :42", "42"),
    ("ANSWER:\n42", "42"),  # the space after the colon may be a line break
    ("Answer: x=42", "42"),
    ("Answer: 42 degrees", "42"),
    ("Answer: 1,234", "1234"),
    ("Answer: 1234", "1,234"),
    ("Answer: \\boxed{42}", "42"),
    ("Answer: $42$", "42"),
    ("Answer: $\\boxed{42}$", "42"),
    ("Answer: 42.$", "42"),
    ("Answer: the value $42.$", "42"),
    ("Answer: \\$42", "42"),
    ("Answer: 42^\\circ", "42"),
    ("Answer: 42\\text{ cm}", "42"),
    ("Answer: \\text{42}", "42"),
    ("Answer: \\textbf{42}", "42"),
    ("Answer: \\overline{AB}", "AB"),
    ("Answer: \\frac12", "\\frac{1}{2}"),
    ("Answer: \\sqrt2", "\\sqrt{2}"),
    ("Answer: a circle", "circle"),
    ("Answer: 3, \\text{and} 4", "3,4"),
    ("Answer: 42 ", "42"),
    ("Answer: 1\nAnswer: 42", "42"),  # the last one counts
    ("Answer: 42\nthat is all", "42"),
    ("Answer: 10{,}000", "10000"),
]
REJECTED = [
    ("Answer: 42.", "42"),
    ("Answer: 042", "42"),
    ("Answer: **42**", "42"),
    ("**Answer:** 42", "42"),
    ("Answer: \\(42\\)", "42"),
    ("Answer: \\dfrac{1}{2}", "\\frac{1}{2}"),
    ("Answer: 1/2", "\\frac{1}{2}"),
    ("Answer: 42 Answer: 43", "43"),  # one line is one answer
    ("Answer: 42\nAnswer: 1", "42"),
    ("Answer: -42", "42"),
    ("Answer: 42.0", "42"),
]
UNPARSABLE = ["\\boxed{42}", "The result is 42", "", "Answer 42", "Answer:", "Answer: 42" + " " * TAIL_CHARACTERS + "."]


@pytest.mark.parametrize(("response", "gold"), ACCEPTED)
def test_accepts(response, gold):
    assert score("Some steps.\n" + response, gold).outcome == "correct"


@pytest.mark.parametrize(("response", "gold"), REJECTED)
def test_rejects(response, gold):
    result = score("Some steps.\n" + response, gold)
    assert result.outcome == "wrong"
    assert result.extracted != normalize(gold)


@pytest.mark.parametrize("response", UNPARSABLE)
def test_finds_no_answer(response):
    assert score(response, "42").outcome == "unparsable"


def test_only_the_last_300_characters_count():
    answer = "Answer: 42\n"
    assert score(answer + "x" * (TAIL_CHARACTERS - len(answer)), "42").outcome == "correct"
    assert score(answer + "x" * (TAIL_CHARACTERS - len(answer) + 1), "42").outcome == "unparsable"


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("x = y = 7", "7"),
        ("\\mbox{seven}", "seven"),
        ("an apple", "apple"),
        ("5 square feet", "5"),
        ("12 childrentickets", "12"),
        ("5\\text{m}", "5"),
        ("5\\text{s}", "5"),
        ("7^{\\circ}", "7"),
        ("1,\\!000", "1000"),
        ("1,2,3", "123"),  # thousands commas and lists look alike
        ("(1,2)", "(1,2)"),
        ("\\frac{a}{b}", "\\frac{a}{b}"),
        ("\\fracab", "\\frac{a}{b}"),
        ("\\sqrtab", "\\sqrt{a}b"),
        ('"yes"', "yes"),
        ("(1,\\ldots,5)", "(1,,5)"),
        ("we get $x$ and $y$", "x"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
    ],
)
def test_normalization(raw, expected):
    assert normalize(raw) == expected


@given(st.integers(min_value=0, max_value=10**30))
def test_every_integer_is_found_with_and_without_commas(value):
    assert score(f"Answer: {value:,}", str(value)).outcome == "correct"
    assert score(f"Answer: {value + 1}", str(value)).outcome == "wrong"


@pytest.mark.parametrize("gold", ["", "  ", "$$", "degrees", "1\n2", "7" * 400])
def test_gold_answers_that_no_response_could_match_are_refused(gold):
    assert gold_problem(gold) is not None


@pytest.mark.parametrize("gold", ["42", "-3", "\\frac{1}{2}", "x+1", "1,234", "(1, 2)", "\\text{east}"])
def test_usual_gold_answers_are_fine(gold):
    assert gold_problem(gold) is None
