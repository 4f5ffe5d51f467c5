"""A gated delta net under every way of cutting it gives transformers' outputs and gradients."""

from __future__ import annotations

from typing import Any

from launcher import run_distributed

SEQUENCE = {"tensor": 2, "sequence_parallel": True}
CASES: list[dict[str, Any]] = [
    {"layout": {}},
    {"layout": {"tensor": 2}, "recompute": True},
    {"layout": SEQUENCE},
    {"layout": {"context": 4}},
    {"layout": {"context": 2, "tensor": 2}},
    {"layout": {"context": 2, **SEQUENCE}, "recompute": True},
    {"layout": {"tensor": 4, "sequence_parallel": True}},
]


def test_every_layout_gives_the_outputs_and_gradients_of_transformers() -> None:
    results = run_distributed("delta_checks:delta_layouts", 4, {"cases": CASES})
    for case, errors in zip(CASES, results, strict=True):
        assert max(errors.values()) < 1e-5, (case, errors)
