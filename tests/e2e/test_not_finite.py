"""A loss that is NaN on one rank: no rank steps, it is counted, training continues; several in a row end the run."""

from __future__ import annotations

from pathlib import Path

import pytest
from launcher import run_distributed, target_in
from whole_runs import NO_EVALUATION

from tools.prove_resume import write_recipe

WORKER = target_in(str(Path(__file__).with_name("not_finite_worker.py")), "run")
OVERRIDES = [*NO_EVALUATION, "parallel.num_processes=2", "training.max_consecutive_skips=3"]  # two data-parallel ranks


@pytest.mark.parametrize("spoilt", ["policy", "critic"])
def test_one_rank_s_nan_holds_every_rank_of_that_model_back(spoilt: str, tmp_path: Path) -> None:
    algorithm = {"policy": (), "critic": ("vapo",)}[spoilt]
    overrides = [*OVERRIDES, *(["critic.epochs=1"] if algorithm else [])]
    arguments = {"recipe": str(write_recipe(tmp_path, *algorithm)), "overrides": overrides, "spoilt": spoilt}
    for rank, seen in enumerate(run_distributed(WORKER, 2, arguments)):
        clean, nan_on_1, nan_on_0, clean_again = (changed[spoilt] for changed in seen["changed"])
        assert clean > 0 and clean_again > 0 and nan_on_1 == nan_on_0 == 0, rank
        skips = {name: (one["optimizer_steps"], one["skipped_steps"]) for name, one in seen["counters"].items()}
        # A NaN in the critic skips only the critic's step: the policy trains in every step.
        assert skips == ({"policy": (2, 2)} if spoilt == "policy" else {"policy": (4, 0), "critic": (2, 2)}), rank
        assert seen["counters"][spoilt]["consecutive_skips"] == 0, rank
        assert f"{spoilt}: 3 optimizer steps in a row" in seen["error"], rank
        last = seen["counters_at_the_end"]
        assert (last["optimizer_steps"], last["skipped_steps"], last["consecutive_skips"]) == (2, 5, 3), rank
