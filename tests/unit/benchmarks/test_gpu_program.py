"""Runner of the GPU benchmarks: a case that fails, dies or hangs does not cost the others their figures."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

# Cases of which one raises, one ends its process, one never ends and one has too little time; `noted` counts what was measured.
PROGRAM = """
import os, pathlib, sys, time
sys.path.insert(0, {directory!r})
import program

NOTES = pathlib.Path(__file__).with_name("noted")

def measure(case):
    with NOTES.open("a") as file:
        file.write(case + "\\n")
    if case == "absent":
        raise program.Missing("not here")
    if case == "raises":
        raise RuntimeError("it broke")
    if case == "dies":
        os._exit(9)
    if case == "hangs":
        time.sleep(600)
    if case == "late":
        raise program.OutOfTime
    return {{"value": len(case)}}

CASES = ("one", "absent", "raises", "dies", "hangs", "late", "three", "three_more")
MINE = program.Benchmark("mine", __file__, ("torch",), lambda arguments: CASES, lambda arguments: program.always(measure))

if __name__ == "__main__":
    parser = program.parser("")
    parser.add_argument("--size", type=int, default=1)
    program.run(MINE, parser.parse_args())
"""


@pytest.fixture
def mine(repository: Path, tmp_path: Path, monkeypatch):
    """Runs the program in this process (workers are others), as if there were a device, and gives its result."""
    directory = repository / "benchmarks" / "gpu"
    monkeypatch.syspath_prepend(str(directory))
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mine.py").write_text(PROGRAM.format(directory=str(directory)), encoding="utf-8")
    module, program = importlib.import_module("mine"), importlib.import_module("program")
    monkeypatch.setattr(program.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(program, "GRACE_S", 1.0)

    def run(*arguments: str) -> dict:
        monkeypatch.setattr(sys, "argv", ["mine.py", *arguments])
        parser = program.parser("")
        parser.add_argument("--size", type=int, default=1)
        return program.Run(module.MINE, parser.parse_args()).result()

    yield run
    del sys.modules["mine"]


def noted(directory: Path) -> list[str]:
    return (directory / "noted").read_text(encoding="utf-8").split()


@pytest.mark.long  # eight processes that import torch; the tests below are of the same runner
def test_what_breaks_dies_or_hangs_leaves_the_others_their_figures(mine, tmp_path) -> None:
    kept = ("--save", "--results", str(tmp_path), "--case-s", "1.5")
    found = mine(*kept)
    assert found["cases"] == {"one": {"value": 3}, "three": {"value": 5}, "three_more": {"value": 10}}
    assert found["skipped"] == {"absent": "not here"}
    assert found["failed"] == {
        "raises": "RuntimeError: it broke",
        "dies": "the worker ended with code 9",
        "hangs": "it took more than 1.5 s",
    }
    assert found["not_run"] == ["late"]
    [file] = tmp_path.glob("mine_*.json")
    assert json.loads(file.read_text(encoding="utf-8"))["cases"] == found["cases"]
    assert noted(tmp_path) == ["one", "absent", "raises", "dies", "hangs", "late", "three", "three_more"]
    # Started again it runs what it has no figures of; all of it under other settings.
    again = mine(*kept, "--only", "one,raises,thr")
    assert again["cases"] == found["cases"] and list(again["failed"]) == ["raises"]
    assert noted(tmp_path)[8:] == ["raises"]
    mine(*kept, "--only", "one,raises,three", "--size", "2")
    assert noted(tmp_path)[9:] == ["one", "raises", "three"]  # a name in full is that case only


def test_a_case_that_does_not_exist_is_an_error(mine) -> None:
    with pytest.raises(SystemExit, match="no case begins with 'four'; there are one, absent"):
        mine("--only", "four")
