"""The last responses of a run are fewer than its data-parallel ranks: every rank takes part, nothing is another number."""

from __future__ import annotations

from pathlib import Path

import pytest
from launcher import run_distributed, target_in

from tools.prove_resume import write_recipe

WORKER = target_in(str(Path(__file__).with_name("few_responses_worker.py")), "run")
SAME = ("actor/loss", "actor/grad_norm", "actor/entropy", "critic/loss", "critic/grad_norm", "critic/value_mean")


def test_a_step_on_two_responses_is_the_same_over_three_ranks(tmp_path: Path) -> None:
    """One of the two is finished: two of three ranks have nothing for the critic, one has nothing at all."""
    overrides = ["parallel.tp_size=1", "critic.parallel.tp_size=1", "critic.epochs=1"]
    arguments = {"recipe": str(write_recipe(tmp_path, "vapo")), "overrides": overrides}
    alone = run_distributed(WORKER, 1, arguments)
    shared = run_distributed(WORKER, 3, arguments)
    assert {name: shared[name] for name in SAME} == {name: pytest.approx(alone[name], rel=1e-5) for name in SAME}
    assert shared["critic/trained_tokens"] == alone["critic/trained_tokens"] > 0
    assert shared["actor/trained_tokens"] > shared["critic/trained_tokens"]
