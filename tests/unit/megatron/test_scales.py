"""Passes that train nothing leave the state of delayed scaling as it was. The modules stand for Transformer Engine's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_dapo.megatron.precision import keeping_scales, load_scales, scales


class Fp8Module(torch.nn.Module):
    """Has its state from the first pass on, and writes the maximum of every pass into it, as Transformer Engine does."""

    def __init__(self, delayed: bool = True) -> None:
        super().__init__()
        self.fp8_meta: dict[str, Any] = {"recipe": "delayed"}
        self.delayed = delayed

    def init_fp8_meta_tensors(self, recipe: Any = None) -> None:
        if not self.delayed:
            self.fp8_meta["scaling_fwd"] = SimpleNamespace(recipe="blocks")
            return
        for direction in ("scaling_fwd", "scaling_bwd"):
            count = 3 * self.fp8_meta["num_gemms"]  # known from the first pass on
            state = SimpleNamespace(scale=torch.ones(count), amax_history=torch.zeros(4, count))
            self.fp8_meta.setdefault(direction, state)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.fp8_meta["num_gemms"] = 1
        self.init_fp8_meta_tensors()
        if self.delayed:
            state = self.fp8_meta["scaling_fwd"]
            state.amax_history[0] = torch.maximum(state.amax_history[0], values.abs().max())
            state.scale.copy_(448 / state.amax_history[0])
        return values


@pytest.fixture
def chunk() -> torch.nn.Module:
    return torch.nn.Sequential(Fp8Module(), torch.nn.Linear(2, 2), torch.nn.Sequential(Fp8Module()))


def test_a_pass_leaves_no_trace(chunk: torch.nn.Module) -> None:
    chunk(torch.ones(2, 2))
    before = {name: tensor.clone() for name, tensor in scales([chunk]).items()}
    with keeping_scales([chunk]):
        chunk(100 * torch.ones(2, 2))
        assert any(not torch.equal(tensor, before[name]) for name, tensor in scales([chunk]).items())
    assert len(before) == 8 and "0.2.0.scaling_bwd.amax_history" in before
    assert all(torch.equal(tensor, before[name]) for name, tensor in scales([chunk]).items())


def test_state_that_a_pass_made_is_as_new(chunk: torch.nn.Module) -> None:
    with keeping_scales([chunk]):
        chunk(torch.ones(2, 2))
    found = scales([chunk])
    assert len(found) == 8
    assert all(bool((tensor == (1 if name.endswith("scale") else 0)).all()) for name, tensor in found.items())


def test_a_failing_pass_leaves_no_trace_either(chunk: torch.nn.Module) -> None:
    chunk(torch.ones(2, 2))
    with pytest.raises(RuntimeError), keeping_scales([chunk]):
        chunk(100 * torch.ones(2, 2))
        raise RuntimeError
    assert float(scales([chunk])["0.0.scaling_fwd.amax_history"].max()) == 1.0


def test_blocks_have_no_state() -> None:
    chunk = Fp8Module(delayed=False)
    with keeping_scales([chunk]):
        chunk(torch.ones(2, 2))
    assert scales([chunk]) == {}


def test_state_goes_through_a_checkpoint_into_modules_that_never_ran(chunk: torch.nn.Module) -> None:
    chunk(7 * torch.ones(2, 2))
    saved = {name: tensor.clone() for name, tensor in scales([chunk]).items()}
    fresh = torch.nn.Sequential(Fp8Module(), torch.nn.Linear(2, 2), torch.nn.Sequential(Fp8Module()))
    load_scales([fresh], saved, "delayed")
    assert all(torch.equal(tensor, saved[name]) for name, tensor in scales([fresh]).items())
    with pytest.raises(ValueError, match="differ from the saved ones, first at '0.2.0.scaling_bwd"):
        load_scales([torch.nn.Sequential(Fp8Module())], saved, "delayed")
