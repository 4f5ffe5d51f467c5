"""One gloo process for the tests that build a model, and the helpers that the multi-process tests use too."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "distributed"))


@pytest.fixture(scope="module")
def single_process() -> Iterator[None]:
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with the fp64 transformers reference of every small model of `actor_checks`."""
    from actor_checks import MODELS, write_reference

    directory = tmp_path_factory.mktemp("references")
    for name in MODELS:
        write_reference(directory, name)
    return str(directory)
