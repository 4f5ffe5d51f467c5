"""The smoke run of one GPU without the GPU: its recipe with FP8 emulated and the engine inside the trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
from whole_runs import ROOT, run_command, sets, train

from tools import check_smoke, make_smoke_model

SMALL = (
    "rollout.engine=embedded",
    "rollout.max_response_tokens=32",
    "reward.overlong_punishment.max_length=32",
    "reward.overlong_punishment.cache_length=28",
    "evaluation.num_samples=1",
)


@pytest.mark.slow
@pytest.mark.long
def test_two_steps_a_resume_and_an_evaluation_in_emulated_fp8(tmp_path: Path, capsys) -> None:
    make_smoke_model.write(tmp_path / "model", "tiny")
    recipe, run = ROOT / "examples" / "gpu" / "smoke.toml", tmp_path / "run"
    held_out = (ROOT / "examples" / "quickstart" / "heldout.jsonl").read_text(encoding="utf-8").splitlines()[:8]
    (tmp_path / "heldout.jsonl").write_text("\n".join(held_out), encoding="utf-8")
    overrides = (*SMALL, f'data.eval_paths=["{tmp_path / "heldout.jsonl"}"]', f"model.path={tmp_path / 'model'}")
    first = train(recipe, run, "", *overrides, "run.total_steps=2")
    assert first.code == 0, first.text
    resumed = sets([*overrides, "checkpoint.resume=must"])
    second = run_command("train", str(recipe), "--output-dir", str(run), "--verbose", *resumed)
    assert second.code == 0, second.text
    assert check_smoke.main([str(run)]) == 0, capsys.readouterr().err
    assert "precision: fp8_blockwise, 1 of 2 layers, linear products by emulation in fp32" in second.text
