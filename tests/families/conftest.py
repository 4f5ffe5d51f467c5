"""The workers of tests/distributed, and the fp64 references of one family."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))


@pytest.fixture(scope="session")
def references_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return a function from a model of `actor_checks.MODELS` to a directory with its references, as policy and critic."""
    from actor_checks import write_reference
    from critic_checks import write_critic

    @cache
    def write(model: str) -> str:
        directory = tmp_path_factory.mktemp(model)
        write_reference(directory, model)
        (directory / "critics").mkdir()
        write_critic(directory / "critics", model)
        return str(directory)

    return write
