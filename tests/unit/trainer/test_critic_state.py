"""The optimizer's state beside a critic's folder: taken up where it fits, begun anew where it does not."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.trainer.critic_state import load_training_state, save_training_state


class FakeModel:
    def __init__(self, dtype: str = "float32", distributed: bool = True, moment: float = 0.0) -> None:
        self.description = {"distributed_optimizer": distributed, "parameters": {"w": {"shape": [2], "dtype": dtype}}}
        self.moment = torch.full((2,), moment)

    def state_shards(self):
        return {"exp_avg/w": self.moment}, self.description

    def load_state_shards(self, tensors, description) -> None:
        assert description == self.description, "a state of another kind is refused by the model"
        self.moment = tensors["exp_avg/w"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_training_state(tmp_path, FakeModel(moment=3.0), ParallelLayout(1), 0)
    return tmp_path


def test_it_goes_on_where_it_stopped(folder: Path) -> None:
    model = FakeModel()
    assert load_training_state(folder, model, ParallelLayout(1), 0) and model.moment.tolist() == [3.0, 3.0]


@pytest.mark.parametrize(
    ("model", "layout", "named"),
    [
        (FakeModel(dtype="bfloat16"), ParallelLayout(1), "parameters"),
        (FakeModel(distributed=False), ParallelLayout(1), "distributed_optimizer"),
        (FakeModel(), ParallelLayout(2), "world_size"),
    ],
)
def test_what_does_not_fit_begins_anew_and_is_said(
    model: FakeModel, layout: ParallelLayout, named: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert not load_training_state(folder, model, layout, 0)
    assert model.moment.tolist() == [0.0, 0.0] and named in caplog.text and "begins anew" in caplog.text


def test_a_folder_without_one_is_silent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not load_training_state(tmp_path, FakeModel(), ParallelLayout(1), 0) and caplog.text == ""
