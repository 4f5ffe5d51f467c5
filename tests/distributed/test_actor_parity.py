from __future__ import annotations

import pytest
from launcher import run_distributed

MODELS = ("qwen2", "qwen2-tied", "qwen3", "llama3")
FOUR_RANKS = (
    {"tensor": 2, "pipeline": 2},
    {"tensor": 4},  # more tensor ranks than key-value heads
    {"pipeline": 2, "virtual_pipeline": 2},
    {"context": 2, "tensor": 2, "sequence_parallel": True},
)


def launch(num_processes: int, cases: list[dict]) -> list[tuple[dict, dict[str, float]]]:
    results = run_distributed("actor_checks:parity_of_layouts", num_processes, cases, timeout_s=240)
    return list(zip(cases, results, strict=True))


def assert_exact(case: dict, errors: dict[str, float]) -> None:
    assert errors["logprob"] < 1e-5, (case, errors)
    assert errors["gradient"] < 1e-5, (case, errors)
    assert errors["loss"] < 1e-5 and errors["norm"] < 1e-5, (case, errors)
    assert errors["targets"] == 0 and errors["not_applied"] == 0, (case, errors)


@pytest.mark.timeout(300)
def test_four_ranks_give_the_logprobs_and_gradients_of_transformers() -> None:
    cases = [{"model": model, "layout": layout} for layout in FOUR_RANKS for model in MODELS]
    cases += [
        {"model": "qwen3", "layout": {"pipeline": 4}, "distributed": False},
        {"model": "qwen2-tied", "layout": {}},
        {"model": "qwen2", "layout": {"context": 4}},
        {"model": "qwen3", "layout": {"tensor": 2, "pipeline": 2, "sequence_parallel": True}, "recompute": "full"},
    ]
    for case, errors in launch(4, cases):
        assert_exact(case, errors)
