"""The simulated twin of the collectors, which plans are compared with."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest


@pytest.fixture(scope="module")
def twin(repository: Path) -> SimpleNamespace:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(repository / "benchmarks")
        names: dict[str, ModuleType] = {name: importlib.import_module(f"twin.{name}") for name in ("ours", "simulation")}
        return SimpleNamespace(**names)
