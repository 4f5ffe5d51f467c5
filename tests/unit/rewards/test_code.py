"""Preset `code`: test columns of other projects, comparison of outputs, and whole responses in the sandbox."""

from __future__ import annotations

import json

import pytest

from megatron_dapo.config.reward_schema import RewardConfig
from megatron_dapo.rewards.pool.pool import VerifierPool
from megatron_dapo.rewards.verifiers.code import parse_tests, program_of, same_output

FIELDS = {
    "messages": [{"role": "user", "content": "Double it."}],
    "data_source": "",
    "extra_info": {"checks": {"public": ["assert double(2) == 4", "assert double(3) == 6"]}},
    "finish_reason": "stop",
    "group_index": 0,
}
STDIN = json.dumps({"inputs": ["1\n", "21\n"], "outputs": ["2\n", "42\n"]})
RIGHT = "Here it is:\n```python\nprint(2 * int(input()))\n```\nDone."
HALF = "```python\nprint(2)\n```"


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("```\nx = 1\n```\nNo:\n```py\nx = 2\n```", "x = 2\n"),
        ("~~~python\nx = 1\n~~~", "x = 1\n"),
        ("```python\nx = 1\n```\nOutput:\n```json\n{}\n```", "x = 1\n"),
        ('````python\nx = """\n```\n"""\n````', 'x = """\n```\n"""\n'),
        ("1. first\n   ```python\n   x = 1\n   ```", "x = 1\n"),
        ("```python\nx = 1\n", None),  # not closed: cut off
        ("x = 1", None),
        ("", None),
    ],
)
def test_the_program_is_the_last_closed_block(response: str, program: str | None) -> None:
    assert program_of(response) == program


def test_finding_the_program_is_fast_on_any_text() -> None:
    for text in ("```python\n" * 20_000, "`" * 200_000, "```\n" + " " * 200_000, "~~~\n```\n" * 20_000):
        program_of(text)


@pytest.mark.parametrize(
    ("value", "runs", "expected"),
    [
        (STDIN, [{"stdin": "1\n"}, {"stdin": "21\n"}], ["2\n", "42\n"]),
        ({"inputs": [["1", "2"]], "outputs": [["3"]]}, [{"stdin": "1\n2\n"}], ["3\n"]),  # lists of lines (APPS)
        ([{"input": "1", "output": "2", "testtype": "stdin"}], [{"stdin": "1"}], ["2"]),
        (
            {"inputs": [[1, [2]]], "outputs": [3], "fn_name": "f"},
            [{"call": {"name": "f", "arguments": [1, [2]]}}],
            [3],
        ),
        (
            {"inputs": ["1\n[2]"], "outputs": ["3"], "fn_name": "f"},
            [{"call": {"name": "f", "arguments": [1, [2]]}}],
            [3],
        ),
        ({"test_list": ["assert f(1)"]}, [{"asserts": "assert f(1)"}], [None]),
        ("import math\nassert f(1) == math.pi", [{"asserts": "import math\nassert f(1) == math.pi"}], [None]),
    ],
)
def test_columns_of_other_projects(value: object, runs: list, expected: list) -> None:
    tests = parse_tests(value)
    assert [test.run for test in tests] == runs and [test.expected for test in tests] == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("42", "tests are a list"),
        ("no tests", "neither JSON nor asserts"),
        ("[]", "at least one"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs, 0 outputs"),
        ({"tests": 3}, "no inputs, no outputs"),
        (["print(1)"], "has an assert"),
        ([{"input": "1"}], "input and output"),
    ],
)
def test_other_columns_are_refused(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_tests(value)


@pytest.mark.parametrize(
    ("found", "expected", "is_same"),
    [
        ("1 2 \n\n", "1 2", True),
        ("1\n2", "1 2", False),
        ("0.30000000000000004", "0.3", True),
        ("0.31", "0.3", False),
        ("100000001", "100000002", False),
        ("1.0", "1", False),
        ("1", "1.0", True),
        ("nan", "1.0", False),
        ("yes", "YES", False),
        ("", "1", False),
    ],
)
def test_outputs_are_compared_by_lines(found: str, expected: str, is_same: bool) -> None:
    assert same_output(found, expected) is is_same


def test_responses_run_against_their_tests() -> None:
    function = "```python\nclass Solution:\n    def double(self, x):\n        return 2 * x\n```"
    calls = json.dumps({"inputs": [[1], [2.5]], "outputs": [[2], 5.0], "fn_name": "double"})
    responses = {
        "right": (RIGHT, STDIN),
        "half": (HALF, STDIN),
        "no block": ("print(2)", STDIN),
        "calls": (function, calls),
        "broken": ("```python\nprint(\n```", STDIN),
        "exits early": ("```python\nimport sys\nsys.exit(0)\n```", '["assert double(1) == 2"]'),
        "exit code": ("```python\nprint(2 * int(input()))\nraise SystemExit(1)\n```", STDIN),
    }
    items = [(name, response, tests, False, FIELDS) for name, (response, tests) in responses.items()]
    with VerifierPool("code", RewardConfig(timeout_seconds=60.0, code={"seconds_per_test": 20.0})) as pool:
        assert "seccomp" in pool.version
        scores = pool.score_many(items)
        assert pool.validate_answers([STDIN, "42"]).keys() == {"42"}
    assert {name: (score.outcome, score.reward) for name, score in scores.items()} == {
        "right": ("correct", 1.0),
        "half": ("wrong", -1.0),
        "no block": ("unparsable", -1.0),
        "calls": ("correct", 1.0),
        "broken": ("wrong", -1.0),
        "exits early": ("wrong", -1.0),
        "exit code": ("wrong", -1.0),
    }
    assert scores["half"].detail == {"tests": 2, "passed": 1, "failure": "test 1: exit code 0, wrote '2\\n'"}
    assert "SyntaxError" in scores["broken"].detail["failure"]


def test_the_share_of_tests_from_a_column() -> None:
    own = {"tests": "checks.public", "score": "share", "seconds_per_test": 20.0}
    with VerifierPool("code", RewardConfig(timeout_seconds=60.0, code=own)) as pool:
        half = "```python\ndef double(x):\n    return 4\n```"
        scores = pool.score_many([("half", half, "", False, FIELDS), ("none", "?", "", False, FIELDS)])
        without = pool.score_many([("a", half, "", False, {**FIELDS, "extra_info": {}})])["a"]
    assert (scores["half"].reward, scores["half"].accuracy, scores["none"].reward) == (0.5, 0.0, 0.0)
    assert without.outcome == "error" and "no column 'checks.public' of tests" in without.detail["error"]
