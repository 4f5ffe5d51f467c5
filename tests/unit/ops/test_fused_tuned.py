"""The choice of the head's blocks by measuring them: what is measured, what is kept on disk. No device: times are made up."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("measures nothing in the interpreter", allow_module_level=True)

from triton.runtime.errors import OutOfResources

from megatron_dapo.ops.lm_head import fused, fused_tuned
from megatron_dapo.ops.lm_head.fused_tuned import CANDIDATES, fastest_blocks

HOPPER, AMPERE = (9, 0), (8, 0)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """describe(capability, times by candidate) -> the candidates that are measured from then on."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(fused_tuned, "_work", lambda *problem: None)

    def describe(capability: tuple[int, int], times: dict[fused.Blocks, float], name: str = "a device") -> list:
        measured: list[fused.Blocks] = []
        fused_tuned._fastest.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)

        def milliseconds(work, blocks: fused.Blocks) -> float:
            measured.append(blocks)
            return times.get(blocks, 9.0)

        monkeypatch.setattr(fused_tuned, "_milliseconds", milliseconds)
        return measured

    yield describe
    fused_tuned._fastest.cache_clear()


def factors(width: int = 64, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(4, width, dtype=dtype), torch.zeros(256, width, dtype=dtype)


def test_the_fastest_is_measured_once_for_each_use_shape_and_device(machine) -> None:
    measured = machine(HOPPER, {CANDIDATES[0]: math.inf, CANDIDATES[5]: 1.0})
    assert fastest_blocks("sums", *factors()) == CANDIDATES[5] and measured == list(CANDIDATES)
    fastest_blocks("sums", *factors())
    assert len(measured) == len(CANDIDATES)
    for use, width in (("gradients", 64), ("kept", 64), ("sums", 128)):
        measured = machine(HOPPER, {CANDIDATES[2]: 1.0})
        assert fastest_blocks(use, *factors(width)) == CANDIDATES[2] and len(measured) == len(CANDIDATES)
    # Another process: the choice is read from disk.
    measured = machine(HOPPER, {CANDIDATES[0]: 1.0})
    assert fastest_blocks("sums", *factors()) == CANDIDATES[5] and not measured
    measured = machine(HOPPER, {CANDIDATES[0]: 1.0}, "another device")
    assert fastest_blocks("sums", *factors()) == CANDIDATES[0] and measured


def test_only_hopper_and_rows_of_16_bytes_are_copied_by_its_accelerator(machine) -> None:
    with_tma = {blocks: 1.0 for blocks in CANDIDATES if blocks.has_tma}
    measured = machine(AMPERE, with_tma)
    assert not fastest_blocks("sums", *factors()).has_tma and len(measured) == len(CANDIDATES) - len(with_tma)
    machine(HOPPER, with_tma)
    assert fastest_blocks("sums", *factors()).has_tma
    assert not fastest_blocks("sums", *factors(width=100)).has_tma  # 200 bytes
    unaligned = torch.zeros(1 + 256 * 64, dtype=torch.bfloat16)[1:].view(256, 64)
    assert not fastest_blocks("sums", factors()[0], unaligned).has_tma


def test_fp32_factors_take_the_fixed_blocks(machine) -> None:
    measured = machine(HOPPER, {})
    hidden, weight = factors(dtype=torch.float32)
    assert fastest_blocks("sums", hidden, weight) == fused.fixed_blocks("sums", hidden, weight) and not measured


def test_what_cannot_be_had_is_never_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(work, return_mode: str) -> float:
        raise OutOfResources(300_000, 232_448, "shared memory")

    monkeypatch.setattr(fused_tuned.triton.testing, "do_bench", fail)
    assert fused_tuned._milliseconds(lambda blocks: None, CANDIDATES[0]) == math.inf
    monkeypatch.setattr(fused_tuned.triton.testing, "do_bench", lambda work, return_mode: 2.5)
    assert fused_tuned._milliseconds(lambda blocks: None, CANDIDATES[0]) == 2.5


def test_what_fused_runs_is_among_the_candidates() -> None:
    for is_hopper in (True, False):
        assert fused._BLOCKS[2, is_hopper] in CANDIDATES
