"""A loss that is NaN on one rank: no rank steps, it is counted, training continues; several in a row end the run."""

from __future__ import annotations

from pathlib import Path

from launcher import run_distributed, target_in
from whole_runs import NO_EVALUATION

from tools.prove_resume import write_recipe

CRITIC_WORKER = target_in(str(Path(__file__).with_name("critic_not_finite_worker.py")), "run")
WORKER = target_in(str(Path(__file__).with_name("not_finite_worker.py")), "run")


def test_one_rank_s_nan_holds_every_rank_back(recipe: Path) -> None:
    arguments = {"recipe": str(recipe), "overrides": list(NO_EVALUATION)}  # two data-parallel ranks
    for rank, seen in enumerate(run_distributed(WORKER, 2, arguments)):
        clean, nan_on_1, nan_on_0, clean_again = seen["changed"]
        assert clean > 0 and clean_again > 0, rank
        assert nan_on_1 == nan_on_0 == 0, rank
        assert seen["after_recovery"] == {"optimizer_steps": 2, "skipped_steps": 2, "consecutive_skips": 0}, rank
        assert "3 optimizer steps in a row" in seen["error"], rank
        assert seen["at_the_end"] == {"optimizer_steps": 2, "skipped_steps": 5, "consecutive_skips": 3}, rank
        assert seen["changed_at_the_end"] == 0, rank


def test_nan_in_the_critic_skips_its_step_alone_and_several_in_a_row_end_the_run(tmp_path: Path) -> None:
    arguments = {"recipe": str(write_recipe(tmp_path, "vapo")), "overrides": list(NO_EVALUATION)}
    for rank, seen in enumerate(run_distributed(CRITIC_WORKER, 2, arguments)):
        assert all(seen["changed"]["policy"]), f"rank {rank}: the policy trains in every step"
        clean, nan_on_1, nan_on_0, clean_again = seen["changed"]["critic"]
        assert clean > 0 and clean_again > 0 and nan_on_1 == nan_on_0 == 0, rank
        assert seen["critic"] == [2, 2] and seen["policy"] == [4, 0], rank
        assert "critic: 3 optimizer steps in a row" in seen["error"], rank
