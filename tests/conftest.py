"""What holds for every test: one thread a process, no network, files in one piece, and the gpu marker skips with its
reason."""

from __future__ import annotations

import os
from pathlib import Path

# Before torch is imported anywhere: tests run beside each other, and tiny matrices lose by being split.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _keep_files_together(items)
    _skip_without_accelerator(items)


def _keep_files_together(items: list[pytest.Item]) -> None:
    """With `--dist loadgroup` one process runs all tests of a file, and of files that share what is slow to make."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(f"{item.path.parent.name}/{item.path.stem}"))


def _skip_without_accelerator(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an accelerator; torch sees none"))


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root of the checkout."""
    return Path(__file__).resolve().parents[1]
