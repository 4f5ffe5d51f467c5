"""Counters in a checkpoint, and the optimizer state beside an exported critic: what loads and what does not."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.trainer.checkpointing import (
    Checkpoints,
    CriticState,
    RunProgress,
    RunState,
    load_training_state,
    save_training_state,
)
from megatron_dapo.trainer.critic_learner import CriticCounters
from megatron_dapo.trainer.updater import StepCounters

LAYOUT = ParallelLayout(1)


def restored(critic: dict[str, Any]) -> CriticCounters:
    """The critic's counters after restoring a checkpoint whose run.json has these for it."""
    counters = CriticCounters()
    state = RunState(None, RunProgress(), StepCounters(), None, LAYOUT, 0, CriticState(None, counters, LAYOUT, 0))
    checkpoint = SimpleNamespace(
        directory="checkpoint",
        metadata=state.layouts(),
        load_json=lambda name: {"progress": {}, "learner": {}, "critic": critic},
    )
    Checkpoints(SimpleNamespace(), state).restore_policy(checkpoint)
    return counters


def test_fields_that_an_older_checkpoint_lacks_keep_their_defaults() -> None:
    saved = {"optimizer_steps": 4, "skipped_steps": 1, "history": [[0.5, 0.1]]}
    assert restored(saved) == CriticCounters(4, 1, 0, [[0.5, 0.1]])


def test_fields_of_another_version_are_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"CriticCounters has no fields \['passes'\].*resume with that version"):
        restored({"passes": 3})


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
def directory(tmp_path: Path) -> Path:
    save_training_state(tmp_path, FakeModel(moment=3.0), ParallelLayout(1), 0)
    return tmp_path


def test_a_critic_resumes_with_its_optimizer_state(directory: Path) -> None:
    model = FakeModel()
    assert load_training_state(directory, model, ParallelLayout(1), 0) and model.moment.tolist() == [3.0, 3.0]


@pytest.mark.parametrize(
    ("model", "layout", "named"),
    [
        (FakeModel(dtype="bfloat16"), ParallelLayout(1), "parameters"),
        (FakeModel(distributed=False), ParallelLayout(1), "distributed_optimizer"),
        (FakeModel(), ParallelLayout(2), "world_size"),
    ],
)
def test_state_of_another_layout_or_type_is_left_out_with_a_warning(
    model: FakeModel, layout: ParallelLayout, named: str, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert not load_training_state(directory, model, layout, 0)
    assert model.moment.tolist() == [0.0, 0.0] and named in caplog.text and "starts with moments of 0" in caplog.text


def test_a_directory_without_state_is_silent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not load_training_state(tmp_path, FakeModel(), ParallelLayout(1), 0) and caplog.text == ""
