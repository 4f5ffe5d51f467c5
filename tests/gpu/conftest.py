"""Shared cases of the unit tests on the path, the device, and a skip with its reason where an implementation cannot
run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_dapo.ops.head.choice import Place, choose

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit" / "ops"))


@pytest.fixture
def device() -> str:
    return "cuda"


@pytest.fixture
def available(device: str) -> Callable[[str, torch.dtype, int, int], str]:
    """Gives the implementation's name back, or skips with what is in its way."""

    def check(name: str, dtype: torch.dtype = torch.bfloat16, width: int = 128, rows: int = 128) -> str:
        try:
            choose(name, Place(torch.device(device), dtype, width, rows))
        except ValueError as error:
            pytest.skip(str(error))
        return name

    return check
