"""What is run on a borrowed GPU: commands that exist, figures held against what is expected, an end in time."""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture(scope="module")
def slot(repository: Path):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(repository / "benchmarks" / "gpu"))
        yield importlib.import_module("slot")


def test_commands_are_ones_that_the_programs_take(slot, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt option or case would cost minutes of a device."""
    for case in [case for cases in slot.SLOTS.values() for case in cases.values()]:
        program, *arguments = case.arguments
        if program == "-m":
            files = [one for one in arguments if one.startswith("tests/")]
            text = "".join((repository / file).read_text(encoding="utf-8") for file in files)
            words = arguments[arguments.index("-k") + 1].split("_or_") if "-k" in arguments else []
            assert [word for word in words if word not in text] == []
            continue
        module = importlib.import_module(Path(program).stem)
        monkeypatch.setattr(sys, "argv", [program, *arguments])
        parsed = module.parse()
        benchmark = module.benchmark_of(parsed) if program.endswith("step.py") else vars(module)[BENCHMARKS[program]]
        names = [name.split()[0] for name in benchmark.cases(parsed)]
        assert [one for one in parsed.only.split(",") if not any(name.startswith(one) for name in names)] == []
        assert {figure.split(".")[0] for figure in case.expected} <= set(names), case


BENCHMARKS = {
    f"benchmarks/gpu/{name}.py": constant
    for name, constant in (("head", "HEAD"), ("probes", "PROBE"), ("sync", "SYNC"))
}


@pytest.fixture
def measured(slot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Measure a case whose program prints what is given, with so many seconds left."""

    def measure(result: dict[str, Any], left: float = 60.0, **fields: Any) -> dict[str, Any]:
        (tmp_path / "program.py").write_text(f"print('''{json.dumps(result)}''')", encoding="utf-8")
        case = slot.Case((str(tmp_path / "program.py"),), **{"seconds": 5.0, **fields})
        arguments = SimpleNamespace(
            slot="a", engine_python=None, tiny=False, save=True, results=tmp_path, ends=time.monotonic() + left
        )
        return slot.measure("case", case, arguments)

    return measure


def test_figures_are_printed_with_what_is_expected_of_them(slot, measured, capsys) -> None:
    expected = {
        "one.ms": slot.Expected(1.0, 2.0, "the data sheet"),
        "one.alive": slot.Expected(True),
        "two.ms": slot.Expected(5.0, 6.0),
        "three.ms": slot.Expected(0.0, 1.0),
    }
    rows = {"one": {"ms": 1.5, "alive": True}, "two 8x8": {"ms": 7.0, "other": 3}}
    row = measured({"cases": rows, "failed": {}, "skipped": {"three": "not here"}}, expected=expected)
    assert row["one.ms"] == 1.5 and row["two.other"] == 3 and row["skipped"] == {"three": "not here"}
    assert row["unexpected"] == ["two.ms", "three.ms"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["one.ms", "1.5", "expected", "1", "to", "2", "(the", "data", "sheet)"]
    assert lines[3].split()[:3] == ["!", "two.ms", "7"] and lines[4].split()[:3] == ["!", "three.ms", "None"]


def test_a_case_that_cannot_run_is_not_a_result(slot, measured) -> None:
    with pytest.raises(slot.Missing, match="no Triton"):
        measured({"cases": {}, "failed": {}, "skipped": {"triton": "no Triton"}})
    with pytest.raises(RuntimeError, match="it broke"):
        measured({"cases": {}, "failed": {"triton": "it broke"}, "skipped": {}})
    with pytest.raises(slot.OutOfTime):
        measured({"cases": {"one": {"ms": 1.0}}}, left=4.0)


def test_tests_that_fail_are_counted_and_named(slot) -> None:
    output = "FAILED tests/a.py::b - AssertionError\n= 1 failed, 12 passed, 3 skipped in 3.2s ="
    row = slot.test_figures(output, 1)
    assert (row["passed"], row["failed"], row["skipped"]) == (12, 1, 3) and "tests/a.py::b" in row["failures"][0]
    with pytest.raises(ValueError, match="code 4"):
        slot.test_figures("ERROR: file not found\n", 4)
