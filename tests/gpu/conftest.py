"""Shared cases of the other tests on the path, the device, one process with NCCL, and skips with their reasons.

`--stand-in` runs what can run on a device that is none: see `stand_in.py`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_dapo.config.model_schema import PrecisionConfig
from megatron_dapo.megatron.precision import linear_backend
from megatron_dapo.ops.lm_head.select import HeadSpec, choose

ROOT = Path(__file__).resolve().parents[2]
for directory in ("tests/gpu", "tests/unit/ops", "tests/distributed", "benchmarks/gpu", "benchmarks/peers"):
    sys.path.insert(0, str(ROOT / directory))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--stand-in", action="store_true", help="stand in for CUDA and for Transformer Engine's kernels")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--stand-in", default=False):
        import stand_in

        stand_in.install()


@pytest.fixture
def device() -> str:
    return "cuda"


@pytest.fixture
def real_gpu() -> None:
    """Skip a test of what only a GPU and its driver do."""
    if not torch.cuda.is_available() or torch.empty(0, device="cuda").device.type != "cuda":
        pytest.skip("needs a GPU; the stand-in has neither its kernels nor its memory")


@pytest.fixture
def available(device: str) -> Callable[[str, torch.dtype, int, int], str]:
    """Return the implementation's name, or skip with the reason that it cannot run."""

    def check(name: str, dtype: torch.dtype = torch.bfloat16, width: int = 128, rows: int = 128) -> str:
        try:
            choose(name, HeadSpec(torch.empty(0, device=device).device, dtype, width, rows))  # the CPU for the stand-in
        except ValueError as error:
            pytest.skip(str(error))
        return name

    return check


@pytest.fixture
def recipe() -> Callable[[str], PrecisionConfig]:
    """Return the precision of that name, or skip with the reason that it cannot run."""

    def check(name: str) -> PrecisionConfig:
        try:
            linear_backend(PrecisionConfig(recipe=name), "bfloat16")
        except ValueError as error:
            pytest.skip(str(error))
        return PrecisionConfig(recipe=name)

    return check


@pytest.fixture
def transformer_engine() -> None:
    pytest.importorskip("transformer_engine.pytorch", reason="Transformer Engine is not installed")


@pytest.fixture(scope="module")
def single_process() -> Iterator[None]:
    """The process group of a model on one GPU."""
    if not torch.cuda.is_available():
        pytest.skip("needs an accelerator; torch sees none")
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def engine_python() -> Path:
    """Interpreter of an SGLang for this GPU."""
    python = Path(os.environ.get("MEGATRON_DAPO_ENGINE_PYTHON", ROOT / ".venv-sglang" / "bin" / "python"))
    if not python.is_file():
        pytest.skip(f"no SGLang at {python}: set MEGATRON_DAPO_ENGINE_PYTHON to the interpreter that has it")
    return python
