"""A model that moves to host memory between phases, or whose optimizer is there, equals bit for bit one that never left the device."""

from __future__ import annotations

from typing import Any

import pytest
from launcher import run_distributed

CASES: list[dict[str, Any]] = [
    {"model": "qwen2", "layout": {"tensor": 2}},
    {"model": "qwen3", "layout": {"tensor": 2, "sequence_parallel": True}, "dtype": "bfloat16"},
    {"model": "qwen2", "layout": {}},
    {"model": "qwen3", "layout": {}, "dtype": "bfloat16"},
    {"model": "qwen3", "layout": {}, "distributed": False},
    {"model": "llama3", "layout": {"pipeline": 2}, "dtype": "bfloat16", "distributed": False},
    {"model": "llama3", "layout": {"pipeline": 2, "virtual_pipeline": 2}},
    {"model": "qwen3-moe", "layout": {"expert": 2}},
]
ON_HOST: list[dict[str, Any]] = [
    {"model": "qwen2", "layout": {}},  # fp32: only moments are on the host
    {"model": "llama3", "layout": {"pipeline": 2}, "dtype": "bfloat16", "distributed": False},
    {"model": "qwen3-moe", "layout": {"expert": 2}, "dtype": "bfloat16"},
    {"model": "qwen3", "layout": {}, "dtype": "bfloat16", "offload": "all"},
]


@pytest.fixture(scope="module", params=["on host", pytest.param("between phases", marks=pytest.mark.long)])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Findings of two ranks for each case and each kind of tensors that can be offloaded."""
    from critic_checks import write_critic

    directory = tmp_path_factory.mktemp("critics")
    cases = [{**case, "offload": offload} for case in CASES for offload in ("optimizer", "all")]
    # tests/e2e/test_offload.py holds a whole run against one that offloads nothing: not every pytest run needs these.
    if request.param == "on host":
        cases = [{"offload": "none", **case, "on_host": True} for case in ON_HOST]
    for name in {case["model"] for case in cases}:
        write_critic(directory, name)
    arguments = {"cases": cases, "references": str(directory)}
    return list(zip(cases, run_distributed("offload_checks:offload", 2, arguments), strict=True))


def test_three_steps_are_the_same_bits(found: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for case, result in found:
        assert result["history"] and result["values"] and result["differing"] == 0, (case, result)


def test_nothing_is_left_on_the_device_while_offloaded(found: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for case, result in found:
        left = {"none": ["gradients", "weights"], "optimizer": ["weights"], "all": []}[case["offload"]]
        assert result["left"] == left, (case, result)
        assert result["moved"] > 0
        if case.get("on_host"):
            assert 0 < result["at_once"] <= result["allowed"], (case, result)


def test_an_offloaded_model_is_saved_and_continues(found: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for case, result in found:
        assert result["saved"] == 0 and result["still_away"] and result["resumed"] == 0, (case, result)
