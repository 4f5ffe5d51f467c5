"""A run whose models leave the device while they rest is, bit for bit, the run in which they stay."""

from __future__ import annotations

from pathlib import Path

import pytest
from whole_runs import lines_of, run_command, sets, train

from megatron_dapo.proof.compare_runs import run_differences
from tools.prove_resume import write_recipe

pytestmark = pytest.mark.timeout(400)

OFFLOADED = ('model.offload="all"', 'critic.offload="all"')
# A reference policy besides the two.
STEPS = ("run.total_steps=3", "algorithm.kl_reward_coefficient=0.05", "checkpoint.keep=10")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """A run, the same run offloaded, and what the latter said."""
    folder = tmp_path_factory.mktemp("offload")
    recipe = write_recipe(folder, "vapo")
    said = ""
    for name, overrides in (("plain", ()), ("offloaded", OFFLOADED)):
        outcome = train(recipe, folder / name, "dp2", *STEPS, *overrides)
        assert outcome.code == 0, outcome.text
        said = outcome.text
    return folder / "plain", folder / "offloaded", said


def test_every_metric_checkpoint_and_weight_is_the_same(runs: tuple[Path, Path, str]) -> None:
    plain, offloaded, _ = runs
    assert next(run_differences(plain, offloaded), "") == ""
    exported = [folder / "huggingface" / "model.safetensors" for folder in (plain, offloaded)]
    assert exported[0].read_bytes() == exported[1].read_bytes()


def test_moving_is_a_phase_and_its_bytes_are_said(runs: tuple[Path, Path, str]) -> None:
    plain, offloaded, said = runs
    assert all(row["time/offload"] == 0 for row in lines_of(plain / "metrics.jsonl"))
    assert all(row["time/offload"] > 0 for row in lines_of(offloaded / "metrics.jsonl"))
    lines = [line for line in said.splitlines() if "offload: since the last train step" in line]
    assert len(lines) == 3 and " 0.0 MiB left" not in lines[-1]


def test_pretraining_leaves_an_offloaded_policy_unchanged(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, "vapo")
    steps = ("value_pretraining.min_steps=2", "value_pretraining.max_steps=3", *OFFLOADED)
    overrides = sets([*steps, "evaluation.interval=0", "evaluation.at_start=false", "evaluation.at_end=false"])
    outcome = run_command(
        "pretrain-value", str(recipe), "--layout", "tp2", "--run-folder", str(tmp_path / "run"), *overrides
    )
    assert outcome.code == 0, outcome.text
    assert (tmp_path / "run" / "critic" / "model.safetensors").is_file()
