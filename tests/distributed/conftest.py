"""Import path of the modules next to this file under pytest's importlib mode, and references that several tests share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def actor_references(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with the fp64 transformers reference of every small model of `actor_checks`."""
    from actor_checks import MODELS, write_reference

    directory = tmp_path_factory.mktemp("actor_references")
    for name in MODELS:
        write_reference(directory, name)
    return str(directory)
