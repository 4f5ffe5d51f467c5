"""Checkpoints go to Megatron-LM and come from it: a plain GPTModel of megatron-core saves and loads them in other layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
from actor_checks import reference_model
from launcher import run_distributed
from typer.main import get_command

from megatron_dapo.cli.main import app


def convert(*arguments: str) -> int:
    """Run `megatron-dapo convert` in this process and return its exit code."""
    return get_command(app).main(["convert", *arguments], standalone_mode=False) or 0


# Model of `actor_checks`, layouts, and True for only megatron-core's modules, False for the trainer's GPTModel.
CASES: dict[str, tuple[str, tuple[dict[str, int], ...], bool]] = {
    "dense with biases": ("qwen2", ({"tensor": 2}, {"pipeline": 2}), True),
    "tied": ("llama3", ({"tensor": 2, "pipeline": 2}, {"pipeline": 2}), True),
    "norms of queries and keys": ("qwen3", ({"tensor": 2},), True),
    "experts in every layer": ("qwen3-moe", ({"expert": 2}, {"pipeline": 2}), True),
    "experts in some layers": ("qwen3-moe-mixed", ({"pipeline": 2}, {"expert": 2}), True),
    "own layers": ("qwen2", ({"tensor": 2, "pipeline": 2}, {"tensor": 2}), False),
    "own layers of Gemma 3": ("gemma3", ({"tensor": 2}, {"pipeline": 2}), False),
}


QUICK = ("tied", "experts in some layers", "own layers of Gemma 3")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.long) for case in CASES])
def test_models_go_to_megatron_core_and_come_back_bit_for_bit(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, layouts, is_plain = CASES[case]
    model, ours = tmp_path / "model", tmp_path / "ours"
    reference_model(name).float().save_pretrained(model)
    assert convert("hf-to-megatron", str(model), str(ours), "--format", "torch_dist") == 0, capsys.readouterr().err
    for number, layout in enumerate(layouts):
        ranks = layout.get("tensor", 1) * layout.get("pipeline", 1) * layout.get("expert", 1)
        common = {"model": str(model), "layout": layout, "is_plain": is_plain}
        load = {**common, "action": "load", "checkpoint": str(ours / "release")}
        assert run_distributed("torch_dist_checks:run", ranks, load) == []
        theirs, back = tmp_path / f"theirs{number}", tmp_path / f"back{number}"
        save = {**common, "action": "save", "checkpoint": str(theirs / "iter_0000012")}
        run_distributed("torch_dist_checks:run", ranks, save)
        (theirs / "latest_checkpointed_iteration.txt").write_text("12")
        arguments = [str(theirs), str(back), "--model", str(model)]
        assert convert("megatron-to-hf", *arguments) == 0, capsys.readouterr().err
        assert convert("verify", str(model), str(back)) == 0, capsys.readouterr().out
