"""A run that goes on with fewer and then with more processes: the same steps, batches and learning rates, no response lost."""

from __future__ import annotations

import json
import math
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from interruptions import Finished, signaled
from whole_runs import lines_of

from megatron_dapo.checkpoints.formats.saved_model import MOMENTS, SavedModel
from megatron_dapo.watch.failure import EXIT_CODE
from tools.prove_resume import require_windows_once, write_recipe
from tools.resume_proof.compare_runs import checkpoint_steps, moved_differences
from tools.resume_proof.kill_points import ResumeProofSettings, RunProcess

GROUPS, GROUP_SIZE = 6, 4


def run_in_sizes(settings: ResumeProofSettings, directory: Path, *parts: str) -> list[int]:
    """Run in one layout after the other ("dp2", with overrides after it), all but the last stopped by a signal.

    Returns the train steps at which they ended.
    """
    ends: list[int] = []
    for layout, *overrides in map(str.split, parts):
        run, is_last = RunProcess(replace(settings, layout=layout), directory, overrides), len(ends) == len(parts) - 1
        code = run.wait() if is_last else signaled(run, signal.SIGTERM, (ends or [0])[-1] + 1)
        assert code == (0 if is_last else EXIT_CODE), run.exit_reason()
        ends.append(checkpoint_steps(directory / "checkpoints")[-1])
        assert run.log.read_text().count("resuming from") == len(ends) - 1
    return ends


def require_nothing_lost(checkpoint: Path) -> None:
    """Check that each prompt that was begun is trained, filtered, or kept for a later step."""
    state = json.loads((checkpoint / "collector.json").read_text())
    counters, kept = state["counters"], len(state["buffer"]["groups"]) + len(state["open_groups"])
    assert counters["num_started"] == counters["num_trained"] + counters["num_filtered"] + kept


def require_finite_moments(checkpoint: Path, model: str = "policy") -> None:
    with SavedModel(checkpoint, model) as saved:
        largest = {
            kind: max(float(saved.read_tensor(name, kind).abs().max()) for name in saved.specs) for kind in MOMENTS
        }
    assert all(0.0 < value < math.inf for value in largest.values()), largest


@pytest.mark.long
def test_two_processes_one_and_two_again(finished: Finished, tmp_path: Path) -> None:
    directory = tmp_path / "sizes"
    ends = run_in_sizes(finished.settings, directory, "dp2", "tp1", "dp2")
    assert 0 < ends[0] < ends[1] < ends[2] == 5
    # The other run had two tensor-parallel processes throughout: equal steps and learning rates.
    assert list(moved_differences(0, finished.directory, directory)) == []
    assert [row["rollout/groups_trained"] for row in lines_of(directory / "metrics.jsonl")] == [GROUPS] * 5
    samples = lines_of(directory / "samples.jsonl")
    assert len({record["sample_id"] for record in samples}) == len(samples) == 5 * GROUPS * GROUP_SIZE
    checkpoint = directory / "checkpoints" / "step_000005"
    require_nothing_lost(checkpoint)
    require_finite_moments(checkpoint)


@pytest.mark.long
def test_windows_are_trained_once_when_the_critic_gets_a_process_and_loses_it(tmp_path: Path) -> None:
    directory = tmp_path / "sizes"
    settings = ResumeProofSettings(write_recipe(tmp_path / "recipe", "tppo"), "tp1", tmp_path)
    ends = run_in_sizes(settings, directory, "dp2", "tp1 critic.parallel.num_processes=1", "tp1")
    assert 0 < ends[0] < ends[1] < ends[2] == 5
    assert require_windows_once(directory / "samples.jsonl") > 0
    assert [row["train_step"] for row in lines_of(directory / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    checkpoint = directory / "checkpoints" / "step_000005"
    for model in ("policy", "critic"):
        require_finite_moments(checkpoint, model)
