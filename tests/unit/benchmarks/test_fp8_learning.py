"""The widened quickstart model is the same function, and FP8 can compute it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

from fp8_learning import FIGURES, QUICKSTART, table, widen

from megatron_dapo.checkpoints.architecture import ModelArchitecture
from megatron_dapo.precision import LinearSizes, misfits


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("wide") / "model"
    widen(QUICKSTART / "base_model", target)
    return target


def test_the_same_function(wide: Path) -> None:
    import transformers

    tokens = torch.randint(0, 451, (2, 40), generator=torch.Generator().manual_seed(0))
    logits = [
        transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)(tokens).logits
        for directory in (QUICKSTART / "base_model", wide)
    ]
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-4)


def test_fp8_can_multiply_it(wide: Path) -> None:
    found = []
    for directory in (QUICKSTART / "base_model", wide):
        a = ModelArchitecture.from_directory(directory)
        sizes = LinearSizes(
            a.hidden_size, a.num_attention_heads, a.num_key_value_heads, a.head_dim, a.intermediate_size
        )
        found.append(misfits("fp8_blockwise", sizes, 1))
    assert found[0] and not found[1]


def test_a_line_a_step_and_recipe() -> None:
    figures = {name: [0.5, 0.25] for name in FIGURES}
    lines = table({"fp32": figures, "fp8_blockwise": figures}).splitlines()
    assert len(lines) == 5 and lines[0].split()[:2] == ["step", "recipe"] and lines[-1].split()[1] == "fp8_blockwise"
