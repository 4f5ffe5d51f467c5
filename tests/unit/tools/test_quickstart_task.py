"""The bookkeeping task: problems are right and unique, and the corpus has exactly the stated rate of flaws."""

from __future__ import annotations

import random
import re

import pytest

from tools.quickstart_task import (
    LARGEST_TOTAL,
    Flaws,
    Problem,
    Step,
    draw_problems,
    write_corpus,
    write_response,
)

FLAWLESS = Flaws(easy_slip=0, hard_slip=0, skipped_line=0, unformatted_answer=0, no_answer=0, recheck=0)
EXAMPLE = Problem(
    "Mia", "stickers", 37, (Step("March", "+", 8, "gets"), Step("April", "-", 15, "loses"), Step("May", "*", 2, ""))
)
LINE = re.compile(r"In \w+ .+, (\d+)([-+*])(\d+)=(\d+)")


def calculate(left: int, operator: str, right: int) -> int:
    return {"+": left + right, "-": left - right, "*": left * right}[operator]


def test_the_documented_example() -> None:
    assert EXAMPLE.text() == (
        "Mia has 37 stickers. In March Mia gets 8. In April Mia loses 15. In May the stickers double. "
        "How many stickers does Mia have at the end?"
    )
    assert write_response(random.Random(0), EXAMPLE, FLAWLESS) == (
        "In March Mia gets 8, 37+8=45\nIn April Mia loses 15, 45-15=30\nIn May the stickers double, 30*2=60\nAnswer: 60"
    )


@pytest.mark.parametrize(
    ("operator", "amount", "total", "hard"),
    [("+", 8, 37, True), ("+", 2, 37, False), ("-", 8, 37, True), ("-", 17, 37, False), ("*", 2, 11, True)],
)
def test_a_step_is_hard_when_it_crosses_a_column(operator: str, amount: int, total: int, hard: bool) -> None:
    assert Step("May", operator, amount, "").is_hard(total) is hard


def test_totals_stay_in_two_digits() -> None:
    for problem in draw_problems(3, 500):
        total = problem.start
        for step in problem.steps:
            total = step.apply(total)
            assert 0 <= total <= LARGEST_TOTAL


def test_problems_are_unique_and_a_longer_draw_extends_a_shorter_one() -> None:
    problems = draw_problems(5, 2000)
    assert len({problem.key for problem in problems}) == 2000
    assert draw_problems(5, 300) == problems[:300]
    assert draw_problems(6, 300) != problems[:300]


def test_flawless_responses_hold_line_by_line() -> None:
    problems = draw_problems(7, 200)
    for problem, (_, response) in zip(problems, write_corpus(1, problems, FLAWLESS)):
        total = problem.start
        *lines, last = response.split("\n")
        assert len(lines) == len(problem.steps)
        for line in lines:
            left, operator, right, result = LINE.fullmatch(line).groups()
            assert int(left) == total
            total = calculate(int(left), operator, int(right))
            assert int(result) == total
        assert last == f"Answer: {problem.answer}"


def test_slips_come_at_the_requested_rate_and_the_right_result_stays_the_mode() -> None:
    flaws = Flaws(easy_slip=0.1, hard_slip=0.3, skipped_line=0, unformatted_answer=0, no_answer=0, recheck=0)
    wrong, seen = {False: 0, True: 0}, {False: 0, True: 0}
    problems = draw_problems(9, 3000)
    for _, response in write_corpus(2, problems, flaws):
        for left, operator, right, result in LINE.findall(response):
            expected = max(0, calculate(int(left), operator, int(right)))
            hard = Step("", operator, int(right), "").is_hard(int(left))
            seen[hard] += 1
            wrong[hard] += int(result) != expected
    # One slip in a hundred lands on the right result by chance.
    assert wrong[False] / seen[False] == pytest.approx(0.1 * 0.99, abs=0.015)
    assert wrong[True] / seen[True] == pytest.approx(0.3 * 0.99, abs=0.02)


def test_rechecked_responses_write_the_chain_again() -> None:
    flaws = Flaws(easy_slip=0, hard_slip=0, skipped_line=0, unformatted_answer=0, no_answer=0, recheck=0.5)
    repeats = [response.count("Let me check") for _, response in write_corpus(3, [EXAMPLE] * 2000, flaws)]
    assert sum(repeats) / 2000 == pytest.approx(1.0, abs=0.12)  # geometric, mean q / (1 - q)
