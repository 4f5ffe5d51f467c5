"""A run whose models leave the device while they rest is, bit for bit, the run in which they stay."""

from __future__ import annotations

from pathlib import Path

import pytest
from interruptions import Finished, kill_and_resume
from whole_runs import lines_of, pretrain, train

from tools.prove_resume import write_recipe
from tools.resume_proof.compare_runs import run_differences

# tests/distributed/test_offload.py compares single steps.
pytestmark = pytest.mark.long

OFFLOADED = ('model.offload="all"', 'critic.offload="all"', "optimizer.on_host=true")


@pytest.fixture(scope="module")
def offloaded(finished_vapo: Finished, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The run offloaded, and what it said."""
    directory, settings = tmp_path_factory.mktemp("offloaded") / "run", finished_vapo.settings
    overrides = (*settings.overrides, "checkpoint.keep=10", *OFFLOADED)
    outcome = train(settings.recipe, directory, settings.layout, *overrides)
    assert outcome.code == 0, outcome.text
    return directory, outcome.text


def test_every_metric_checkpoint_and_weight_is_the_same(finished_vapo: Finished, offloaded: tuple[Path, str]) -> None:
    directories = (finished_vapo.directory, offloaded[0])
    assert next(run_differences(*directories), "") == ""
    exported = [directory / "huggingface" / "model.safetensors" for directory in directories]
    assert exported[0].read_bytes() == exported[1].read_bytes()


def test_moving_is_a_phase_and_its_bytes_are_said(finished_vapo: Finished, offloaded: tuple[Path, str]) -> None:
    directory, said = offloaded
    assert all(row["time/offload"] == 0 for row in lines_of(finished_vapo.directory / "metrics.jsonl"))
    assert all(row["time/offload"] > 0 for row in lines_of(directory / "metrics.jsonl"))
    lines = [line for line in said.splitlines() if "offload: since the last train step" in line]
    assert len(lines) == 3 and " 0.0 MiB left" not in lines[-1]


def test_a_killed_and_resumed_run_equals_the_uninterrupted_one(finished_vapo: Finished, tmp_path: Path) -> None:
    settings = ('model.offload="all"', 'critic.offload="optimizer"', "critic.optimizer.on_host=true")
    kill_and_resume(finished_vapo, tmp_path / "killed", *settings)


def test_pretraining_leaves_an_offloaded_policy_unchanged(tmp_path: Path) -> None:
    outcome = pretrain(write_recipe(tmp_path, "vapo"), tmp_path / "run", *OFFLOADED)
    assert outcome.code == 0, outcome.text
    assert (tmp_path / "run" / "critic" / "model.safetensors").is_file()
