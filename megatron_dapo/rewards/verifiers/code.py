"""Preset `code`: unit tests of the program in the last fenced block of a response, in a sandbox (`rewards.sandbox.sandbox`).

A row's tests, as JSON text or nested values, in the gold answer or in the column `reward.code.tests`:

    {"inputs": ["1 2\\n", ...], "outputs": ["3\\n", ...]}                     standard input and output
    {"inputs": [[1, 2], ...], "outputs": [3, ...], "fn_name": "add"}          calls of a function, or of Solution().add
    [{"input": "1 2", "output": "3"}, ...]                                    as the first form
    ["assert add(1, 2) == 3", ...]  or {"test_list": [...]}                   asserts that follow the program

These are the columns of verl, prime-rl, APPS and TACO (inputs, outputs, fn_name), LiveCodeBench (input, output) and
MBPP (test_list). Expected outputs never enter the sandbox: a program's output is compared here, ignoring spaces at line
ends, with numbers that have a decimal point compared to 1e-6. Asserts run in the program's own process, so a program
that attacks them instead of the problem can pass.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_dapo.rewards.result import RewardSample, VerifierResult
from megatron_dapo.rewards.sandbox.sandbox import Sandbox, SandboxLimits
from megatron_dapo.rewards.verifiers.verifier import Verifier

REVISION = "1"
_FENCE = re.compile(r"( *)(`{3,}|~{3,}) *([\w+.-]*)")
_LANGUAGES = ("", "python", "py", "python3")
_MARGIN_S = 1.0  # left of an answer's deadline for the sandbox to end
_TOLERANCE = 1e-6
MAX_DETAIL_CHARACTERS = 500


@dataclass(frozen=True)
class ProgramTest:
    """One test: how the sandbox runs the program, and what has to come out; None of asserts, which say it themselves."""

    run: Mapping[str, Any]
    expected: Any = None


def load(own: Mapping[str, Any], pool: Mapping[str, Any]) -> Verifier:
    """Return the verifier. ValueError if the kernel allows no isolation and reward.code.allow_weak_sandbox is off."""
    limits = SandboxLimits(own["seconds_per_test"], own["memory_limit_mb"], own["max_processes"])
    sandbox = Sandbox(limits)
    isolation, missing = sandbox.isolation, sandbox.missing
    if isolation == "none" and not own["allow_weak_sandbox"]:
        raise ValueError(
            f"verifier 'code': this kernel or site allows no {', no '.join(missing)}, so programs of the model could read and write "
            "what your account can; allow user namespaces, or set reward.code.allow_weak_sandbox = true"
        )
    column, is_share = own["tests"], own["score"] == "share"
    budget_s = max(0.5, pool["timeout_s"] - _MARGIN_S)

    def score(sample: RewardSample) -> VerifierResult:
        program = program_of(sample.response)
        if program is None:
            return VerifierResult("unparsable", reward=0.0 if is_share else None)
        tests = parse_tests(row_tests(sample, column))[: own["max_tests"] or None]
        outcomes = sandbox.run(program, [test.run for test in tests], budget_s)
        failures = [_failure(test, outcome) for test, outcome in zip(tests, outcomes)]
        failures += ["the tests before took all the time"] * (len(tests) - len(outcomes))
        share = failures.count("") / len(tests)
        detail: dict[str, Any] = {"tests": len(tests), "passed": failures.count("")}
        if share < 1:
            number, why = next((number, why) for number, why in enumerate(failures) if why)
            detail["failure"] = f"test {number}: {why}"[:MAX_DETAIL_CHARACTERS]
        return VerifierResult("correct" if share == 1 else "wrong", None, share if is_share else None, detail)

    def gold_problem(answer: str) -> str | None:
        if column:
            return None
        try:
            parse_tests(answer)
        except ValueError as error:
            return str(error)
        return None

    return Verifier("code", f"code-{REVISION} ({isolation})", score, gold_problem, takes_sample=True)


def program_of(response: str) -> str | None:
    """Return the last closed fenced block that names Python or no language; None without one."""
    program: str | None = None
    opened: re.Match[str] | None = None
    body: list[str] = []
    for line in response.splitlines(keepends=True):  # one pass: an expression over the whole text takes its square
        fence = _FENCE.match(line)
        if opened is None:
            opened, body = fence, []
        elif fence and fence[2].startswith(opened[2]) and line.strip() == fence[2]:
            if opened[3].lower() in _LANGUAGES:
                program = "".join(body)
            opened = None
        else:
            # In a list, the program is indented like its block.
            body.append(line.removeprefix(opened[1]))
    return program


def row_tests(sample: RewardSample, column: str) -> Any:
    """Return a row's tests: the gold answer, or the column with the dotted name. ValueError if there are none."""
    value: Any = sample.answer
    for name in column.split(".") if column else ():
        value = sample.extra_info if value is sample.answer else value
        if not isinstance(value, Mapping) or name not in value:
            raise ValueError(f"the row has no column {column!r} of tests (reward.code.tests)")
        value = value[name]
    return value


def parse_tests(value: Any) -> list[ProgramTest]:
    """Return the tests that a row holds, see the module. ValueError for any other form, and for no test."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            if not re.search(r"^\s*assert\b", value, re.MULTILINE):
                raise ValueError(f"tests are neither JSON nor asserts: {value[:80]!r}") from None
            return [ProgramTest({"asserts": value})]  # The asserts share what they define, so they are one test.
    if isinstance(value, Mapping) and "test_list" in value:
        value = value["test_list"]
    if isinstance(value, Mapping):
        value = _pairs(value)
    if not isinstance(value, Sequence) or not value or isinstance(value, str):
        raise ValueError(f"tests are a list, or inputs and outputs, at least one; got {str(value)[:80]!r}")
    return [_test_of(one) for one in value]


def _pairs(value: Mapping[str, Any]) -> list[Any]:
    """Return one mapping an input of {"inputs", "outputs"}."""
    inputs, outputs = value.get("inputs"), value.get("outputs")
    if not isinstance(inputs, Sequence) or not isinstance(outputs, Sequence) or len(inputs) != len(outputs):
        counts = [len(one) if isinstance(one, Sequence) else "no" for one in (inputs, outputs)]
        raise ValueError(f"tests need as many outputs as inputs: {counts[0]} inputs, {counts[1]} outputs")
    name = value.get("fn_name")
    return [{"input": one, "output": two, "fn_name": name} for one, two in zip(inputs, outputs)]


def _test_of(value: Any) -> ProgramTest:
    if isinstance(value, str):
        if "assert" not in value:
            raise ValueError(f"a test that is a text has an assert; got {value[:80]!r}")
        return ProgramTest({"asserts": value})
    if not isinstance(value, Mapping) or "input" not in value or "output" not in value:
        raise ValueError(f"a test is a text with an assert or has input and output; got {str(value)[:80]!r}")
    given, expected = value["input"], value["output"]
    if not value.get("fn_name"):
        return ProgramTest({"stdin": _as_text(given)}, _as_text(expected))
    if isinstance(given, str):  # a JSON value a line, as LiveCodeBench has them
        given = [json.loads(line) for line in given.splitlines() if line.strip()]
        expected = json.loads(expected) if isinstance(expected, str) else expected
    arguments = list(given) if isinstance(given, Sequence) else [given]
    return ProgramTest({"call": {"name": value["fn_name"], "arguments": arguments}}, expected)


def _as_text(value: Any) -> str:
    if isinstance(value, (list, tuple)):  # lines
        return "\n".join(map(str, value)) + "\n"
    return str(value)


def _failure(test: ProgramTest, outcome: Mapping[str, Any]) -> str:
    """Return the reason why a test has failed; "" for one that has passed."""
    kinds = {"time": "no end in time", "memory": "too much memory", "output": "too much output"}
    if outcome["status"] in kinds:
        has_passed = False
    elif "asserts" in test.run:
        has_passed = outcome["result"] == "passed"
    elif "call" in test.run:
        has_passed = _same_value(outcome["result"], test.expected)
    else:
        has_passed = outcome["code"] == 0 and same_output(outcome["stdout"], test.expected)
    if has_passed:
        return ""
    ended = kinds.get(outcome["status"], f"exit code {outcome['code']}")
    last_line = (outcome["stderr"].strip().splitlines() or [ended])[-1] if outcome["status"] == "ended" else ended
    wrote = outcome["result"] if "call" in test.run else outcome["stdout"]
    return f"{last_line[:200]}, wrote {wrote[:120]!r}"


def same_output(output: str, expected: str) -> bool:
    """Return True if two texts have the same lines, up to spaces at their ends and to rounding of decimal numbers."""
    lines, wanted = ([line.rstrip() for line in text.strip().splitlines()] for text in (output, expected))
    return len(lines) == len(wanted) and all(map(_same_line, lines, wanted))


def _same_line(line: str, expected: str) -> bool:
    if line == expected:
        return True
    tokens, wanted = line.split(), expected.split()
    return len(tokens) == len(wanted) and all(map(_same_token, tokens, wanted))


def _same_token(token: str, expected: str) -> bool:
    if token == expected:
        return True
    if "." not in expected or len(token) > 40:  # an integer is exact
        return False
    try:
        return math.isclose(float(token), float(expected), rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    except ValueError:
        return False


def _same_value(found: str, expected: Any) -> bool:
    """Return True if the JSON text `found` is the expected value, or the only element of the expected list (APPS)."""
    try:
        value = json.loads(found)
        return _equal(value, expected) or (
            isinstance(expected, list) and len(expected) == 1 and _equal(value, expected[0])
        )
    except (ValueError, RecursionError):
        return False


def _equal(value: Any, expected: Any) -> bool:
    if isinstance(value, float) or isinstance(expected, float):
        numbers = isinstance(value, (int, float)) and isinstance(expected, (int, float))
        return numbers and math.isclose(value, expected, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    if isinstance(value, list) and isinstance(expected, (list, tuple)):
        return len(value) == len(expected) and all(map(_equal, value, expected))
    return bool(value == expected) and isinstance(value, bool) == isinstance(expected, bool)
