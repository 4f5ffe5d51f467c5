"""The bookkeeping task: problems are right and unique, and the corpus has exactly the stated rate of flaws."""

from __future__ import annotations

import re

import pytest

from tools.quickstart_task import Flaws, Step, draw_problems, write_corpus

FLAWLESS = Flaws(easy_slip=0, hard_slip=0, skipped_line=0, unformatted_answer=0, no_answer=0, recheck=0)
LINE = re.compile(r"In \w+ .+, (\d+)([-+*])(\d+)=(\d+)")


def calculate(left: int, operator: str, right: int) -> int:
    return {"+": left + right, "-": left - right, "*": left * right}[operator]


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
