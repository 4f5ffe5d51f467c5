"""A critic on separate processes: both models update at the same time, every rank knows the same of it, and a run is
as exact as one that shares its processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from interruptions import finish, kill_and_resume
from launcher import run_distributed, target_in
from whole_runs import NO_EVALUATION, train

from tools.prove_resume import write_recipe

OWN = "critic.parallel.num_processes=1"  # the recipe's critic is not cut


@pytest.fixture(scope="module")
def vapo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("vapo"), "vapo")


@pytest.fixture(scope="module")
def ranks(vapo: Path) -> list[dict]:
    """Findings of three processes in two train steps, one optimizer step of each model a train step."""
    overrides = ["parallel.tp_size=2", OWN, "critic.epochs=1", "training.mini_batch_prompts=2"]
    arguments = {"recipe": str(vapo), "overrides": overrides}
    return run_distributed(target_in(str(Path(__file__).parent / "own_ranks_worker.py"), "run"), 3, arguments)


def test_both_update_at_the_same_time(ranks: list[dict]) -> None:
    assert [(one["rank"], one["layout"]) for one in ranks] == [
        (0, "TP2 PP1 CP1 DP1"), (1, "TP2 PP1 CP1 DP1"), (0, "TP1 PP1 CP1 DP1"),
    ]  # fmt: skip
    for step in zip(*(one["intervals"] for one in ranks), strict=True):
        starts, ends = zip(*step, strict=True)
        assert max(starts) < min(ends), f"intervals {step} do not overlap"


def test_every_rank_has_the_same_metrics_and_counters(ranks: list[dict]) -> None:
    for name in ("metrics", "policy", "critic"):
        assert all(json.dumps(one[name]) == json.dumps(ranks[0][name]) for one in ranks), name
    metrics = ranks[0]["metrics"][0]
    assert metrics["actor/grad_norm"] > 0 and metrics["critic/grad_norm"] > 0 and metrics["critic/loss"] > 0


def test_a_loss_that_is_not_finite_stops_the_critics_step_alone(ranks: list[dict]) -> None:
    counters = ranks[0]["policy"], ranks[0]["critic"]
    assert [(one["optimizer_steps"], one["skipped_steps"]) for one in counters] == [(2, 0), (1, 1)]


def test_a_rank_that_builds_a_model_cannot_join_as_nonmember(ranks: list[dict]) -> None:
    assert all("has to build the model" in one["groups_not_mine"] for one in ranks)


@pytest.mark.long
def test_killed_and_resumed_it_is_the_same_run(tmp_path: Path) -> None:
    finished = finish(write_recipe(tmp_path, "tppo"), "tp2", tmp_path, "run.total_steps=3", OWN)
    kill_and_resume(finished, tmp_path / "killed")


@pytest.mark.long
def test_the_run_ends_with_the_policys_stop_reason(vapo: Path, tmp_path: Path) -> None:
    """The reported failure is the policy's, not that of the critic's processes, which wait for it."""
    outcome = train(vapo, tmp_path / "run", "tp2", OWN, "mismatch.step0_max_mean_abs=1e-12", *NO_EVALUATION)
    assert outcome.code == 1 and "MismatchError" in outcome.last and "1e-12" in outcome.last, outcome.last
