from __future__ import annotations

from typing import Any

import pytest
from launcher import run_distributed

OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 4096}
RESUMED: list[dict[str, Any]] = [
    {"model": "qwen2", "layout": {}, "distributed": True},
    {"model": "llama3", "layout": {"tensor": 2, "sequence_parallel": True}, "distributed": True, "dtype": "bfloat16"},
    {"model": "qwen2-tied", "layout": {"pipeline": 2}, "distributed": False, "dtype": "bfloat16"},
    {"model": "qwen3-moe-mixed", "layout": {"expert": 2}, "distributed": False, "dtype": "bfloat16"},
    {  # weights that are gathered by the forward pass after a step
        "model": "qwen2-tied",
        "layout": {},
        "distributed": True,
        "dtype": "bfloat16",
        "megatron": {**OVERLAP, "overlap_param_gather": True},
    },
]
MORE: list[dict[str, Any]] = [
    {"model": "qwen3", "layout": {"tensor": 2}, "distributed": False},
    {"model": "qwen3", "layout": {}, "distributed": True, "dtype": "bfloat16", "megatron": OVERLAP},
]


@pytest.mark.parametrize("cases", [RESUMED, pytest.param(MORE, marks=pytest.mark.long)], ids=["each path", "more"])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(cases: list[dict[str, Any]], actor_references: str) -> None:
    arguments = {"references": actor_references, "cases": cases}
    for case, result in zip(cases, run_distributed("actor_checks:resume", 2, arguments), strict=True):
        assert result["continued"] == result["history"], case
        for rank in result["ranks"]:
            assert rank["loaded"] == [] and rank["difference"] == [], case
            assert rank["steps"] == [5.0], case  # a step tensor shared by all parameters would have run ahead
        assert ("master" in result["kinds"]) == (case.get("dtype") == "bfloat16"), case


def test_no_rank_steps_when_one_gradient_is_not_finite(actor_references: str) -> None:
    arguments = {"references": actor_references, "layouts": [{}, {"tensor": 2}, {"pipeline": 2}]}
    results = run_distributed("actor_checks:guard", 2, arguments)
    assert len(results) == 6
    for name, (applied, num_changed, recovered) in results.items():
        assert not applied, name
        assert num_changed == 0, name
        assert recovered, name


def test_interleaved_schedule_and_shared_groups(actor_references: str) -> None:
    result = run_distributed("actor_checks:cross_checks", 2, {"references": actor_references})
    assert "there are 3" in result["refused"] and "multiple of 2" in result["refused"]
    assert result["groups_shared"]
    assert result["many"] < 1e-5
    uneven = result["uneven"]
    assert uneven.pop("refused"), "gloo gathers parts of different lengths by itself; drop uneven_collectives"
    assert uneven == {"[3, 5]": True, "[2, 0]": True, "[0, 0]": True}
