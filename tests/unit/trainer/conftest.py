from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in ("rollout", "algorithms", "trainer")]


@pytest.fixture
def make_world() -> Callable:
    """The world of the collector's tests: prompts, a fake engine, a fake verifier."""
    import rollout_world

    return rollout_world.make_world
