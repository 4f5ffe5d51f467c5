"""Counters in a checkpoint, and the optimizer state next to an exported critic: what loads and what does not."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_dapo.checkpoints.formats.saved_model import OtherModelError
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.trainer.checkpointing import (
    Checkpoints,
    RunProgress,
    RunState,
    load_training_state,
    merged_nodes,
    replica_of,
    save_training_state,
)
from megatron_dapo.trainer.critic_learner import CriticCounters
from megatron_dapo.trainer.updater import StepCounters

LAYOUT = ParallelLayout(1)


def restored(critic: dict[str, Any]) -> CriticCounters:
    """The critic's counters after restoring a checkpoint whose run.json has these for it."""
    counters = CriticCounters()
    state = RunState(RunProgress(), None, {}, {"progress": RunProgress(), "learner": StepCounters(), "critic": counters}, {})
    others = {name: asdict(part) for name, part in state.counters.items()}
    checkpoint = SimpleNamespace(
        directory="checkpoint",
        checksums={},
        copies={},
        load_json=lambda name: {**others, "critic": critic},
    )
    Checkpoints(SimpleNamespace(), state).restore_policy(checkpoint)
    return counters


def test_counters_are_restored() -> None:
    saved = CriticCounters(4, 1, 0, [[0.5, 0.1]])
    assert restored(asdict(saved)) == saved


@pytest.mark.parametrize("change", [{"passes": 3}, {"history": None}])
def test_fields_of_another_version_are_refused_with_what_to_do(change: dict[str, Any]) -> None:
    saved = {name: value for name, value in {**asdict(CriticCounters()), **change}.items() if value is not None}
    with pytest.raises(ValueError, match=r"CriticCounters has the fields .*'history'.*resume with that version"):
        restored(saved)


class FakeState:
    """A state of one tensor that loads if the saved type is its own."""

    rank = 0

    def __init__(self, dtype: str = "float32", moment: float = 0.0) -> None:
        self.dtype, self.moment = dtype, torch.full((2,), moment)

    def tensors(self):
        return {"exp_avg/w[0:2]": self.moment}

    def index(self, name):
        return {"dtype": self.dtype}

    def load(self, directory, name, checksums=None, find_copy=None) -> None:
        saved = json.loads((directory / f"{name}.json").read_text())
        if saved["dtype"] != self.dtype:
            raise OtherModelError(f"w: saved {saved['dtype']}, here {self.dtype}")
        self.moment = load_file(directory / f"{name}_00000.safetensors")["exp_avg/w[0:2]"]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save_training_state(tmp_path, FakeState(moment=3.0))
    return tmp_path


def test_a_critic_resumes_with_its_optimizer_state(directory: Path) -> None:
    state = FakeState()
    assert load_training_state(directory, state) and state.moment.tolist() == [3.0, 3.0]


def test_state_of_another_type_is_left_out_with_a_warning(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = FakeState(dtype="bfloat16")
    with caplog.at_level(logging.WARNING):
        assert not load_training_state(directory, state)
    assert state.moment.tolist() == [0.0, 0.0]
    assert "saved float32, here bfloat16" in caplog.text and "starts with moments of 0" in caplog.text


def test_state_in_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "training_state").mkdir()
    (tmp_path / "training_state" / "layout.json").write_text("{}")
    with pytest.raises(ValueError, match=r"has no critic.json: another version wrote it; remove the directory"):
        load_training_state(tmp_path, FakeState())


def test_a_directory_without_state_is_silent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not load_training_state(tmp_path, FakeState()) and caplog.text == ""


def test_nodes_are_told_of_by_all_their_ranks_in_any_order() -> None:
    """The coordination merges level by level: a merge of merges is the merge of all."""
    ranks = [(0, "b", "x:1", 0), (1, "b", "", 0), (2, "a", "", 0), (3, "a", "y:2", 1), (4, "c", "", 1), (5, "c", "", 2)]

    def told() -> list[dict[str, dict[str, Any]]]:
        return [
            {name: {"rank": rank, "address": address, "replicas": [f"policy {replica}"]}}
            for rank, name, address, replica in ranks
        ]

    expected = {
        "b": {"rank": 0, "address": "x:1", "replicas": ["policy 0"]},
        "a": {"rank": 2, "address": "y:2", "replicas": ["policy 0", "policy 1"]},
        "c": {"rank": 4, "address": "", "replicas": ["policy 1", "policy 2"]},
    }
    assert merged_nodes(told()) == expected
    assert merged_nodes([merged_nodes(told()[4:]), merged_nodes(told()[:3]), merged_nodes(told()[3:4])]) == expected


def test_replicas_are_those_of_the_model_that_a_rank_holds() -> None:
    topology = SimpleNamespace(
        policy=SimpleNamespace(num_ranks=4),
        policy_layout=ParallelLayout(4, tensor=2),
        critic_layout=ParallelLayout(2, pipeline=2),
    )
    replicas = []
    for rank in range(6):
        topology.rank = rank
        replicas.append(replica_of(topology))
    assert replicas == ["policy 0", "policy 0", "policy 1", "policy 1", "critic 0", "critic 0"]
