"""What is run on a borrowed GPU: commands that exist, figures held against what is expected, an end in time."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

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
    for name, constant in (
        ("agents", "AGENTS"),
        ("head", "HEAD"),
        ("probes", "PROBE"),
        ("speculation", "SPECULATION"),
        ("streamed", "STREAMED"),
        ("sync", "SYNC"),
    )
}
