"""LoRA through the command: a resumed run ends with the same bits, its checkpoints export what it exported, and an adapter of another
base is refused in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from whole_runs import STEADY, run_command, train

LORA = (*STEADY, "model.lora.rank=4", "optimizer.learning_rate=1e-2", "algorithm.kl_loss_coefficient=0.01", "checkpoint.interval=1")
BASE = Path(__file__).resolve().parents[2] / "examples" / "quickstart" / "base_model"


@pytest.mark.long
def test_resume_and_exports_are_exact_and_another_base_is_refused(recipe: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for directory, steps in ((whole, 3), (parts, 2), (parts, 3)):
        outcome = train(recipe, directory, "dp2", *LORA, f"run.total_steps={steps}")
        assert outcome.code == 0, outcome.text
    adapter, merged = Path("adapter/adapter_model.safetensors"), Path("huggingface/model.safetensors")
    for file in (adapter, merged):
        assert (whole / file).read_bytes() == (parts / file).read_bytes(), file
    assert any(not torch.equal(tensor, load_file(BASE / "model.safetensors")[name]) for name, tensor in load_file(whole / merged).items())

    checkpoint = whole / "checkpoints" / "step_000003"
    saved = sum(file.stat().st_size for file in checkpoint.glob("policy_*.safetensors"))
    assert saved < 4 * (whole / adapter).stat().st_size  # parameters and two moments
    for form, file in (("peft", adapter), ("huggingface", merged)):
        outcome = run_command("export", str(checkpoint), str(tmp_path / form), "--format", form)
        assert outcome.code == 0, outcome.text
        assert (tmp_path / form / file.name).read_bytes() == (whole / file).read_bytes(), file
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (config["r"], config["peft_type"]) == (4, "LORA")

    other = Path(shutil.copytree(BASE, tmp_path / "other"))
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] += 1
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    for outcome in (
        run_command("export", str(checkpoint), str(tmp_path / "wrong"), "--model", str(other)),
        train(recipe, parts, "dp2", *LORA, "run.total_steps=4", f"model.path={other}"),
    ):
        assert outcome.code not in (0, None) and "its adapters belong to the weights of" in outcome.last, outcome.text
    assert not (tmp_path / "wrong").exists()
