"""LoRA through the command: a resumed run ends with the same bits, its checkpoints export what it exported, what it exported starts
another run, an adapter of another base is refused in one line, and runs that share their base weights are what they are apart."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from whole_runs import STEADY, lines_of, run_command, sets, train, trained_responses

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

    # Its reference policy is the policy as it starts, which engines serve.
    further, start = tmp_path / "further", f"model.lora.path={whole / 'adapter'}"
    for steps in (1, 2):  # the second one resumes
        outcome = train(recipe, further, "tp2", *LORA, start, "optimizer.learning_rate=1e-6", f"run.total_steps={steps}")
        assert outcome.code == 0, outcome.text
    assert lines_of(whole / "metrics.jsonl")[-1]["actor/kl_loss"] > 0.1  # from the model without adapters
    for row in lines_of(further / "metrics.jsonl"):
        assert abs(row["actor/kl_loss"]) < 1e-3 and row["mismatch/abs_logprob_diff_mean"] < 1e-4
    assert (further / adapter).read_bytes() != (whole / adapter).read_bytes()

    other = Path(shutil.copytree(BASE, tmp_path / "other"))
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] += 1
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    for outcome in (
        run_command("export", str(checkpoint), str(tmp_path / "wrong"), "--model", str(other)),
        train(recipe, parts, "dp2", *LORA, "run.total_steps=4", f"model.path={other}"),
        train(recipe, tmp_path / "started", "dp2", *LORA, start, f"model.path={other}"),
    ):
        assert outcome.code not in (0, None) and "its adapters belong to the weights of" in outcome.last, outcome.text
    assert not (tmp_path / "wrong").exists()


# Recipes of one base that differ in what a run may choose; two holds unfinished responses, and three evaluates after each step.
OWN_KEYS = {
    "one": "run.seed = 1\noptimizer.learning_rate = 1e-2\nalgorithm.kl_loss_coefficient = 0.01\nmodel.lora.rank = 4\n",
    "two": "run.seed = 2\nrollout.group_size = 6\n[model.lora]\nrank = 8\ntargets = ['q_proj', 'v_proj']\n",
    "three": "run.seed = 3\ndata.shuffle_seed = 7\nevaluation.interval = 1\nmodel.lora.rank = 2\n",
}
EXACT = ("actor/", "advantage/", "mismatch/", "reward/", "rollout/")


def write_recipes(recipe: Path, directory: Path) -> list[Path]:
    """Write the recipes of OWN_KEYS; each run writes to <directory>/<its name>."""
    paths = []
    for name, keys in OWN_KEYS.items():
        paths.append(recipe.with_name(f"{directory.name}_{name}.toml"))
        head = f"base = '{recipe.name}'\nrun.name = '{name}'\nrun.output_dir = '{directory / name}'\n"
        paths[-1].write_text(head + keys)
    return paths


def exact_numbers(directory: Path) -> list[dict[str, float]]:
    """Return what a run has measured, without times."""
    rows = [*lines_of(directory / "metrics.jsonl"), *lines_of(directory / "evaluations.jsonl")]
    return [{key: value for key, value in row.items() if key.startswith((*EXACT, "eval/avg"))} for row in rows]


@pytest.mark.long
@pytest.mark.parametrize("layout", ["dp2", "tp2"])
def test_three_runs_on_one_base_are_bit_for_bit_what_they_are_apart(recipe: Path, tmp_path: Path, layout: str) -> None:
    shared, apart = tmp_path / f"{layout}_shared", tmp_path / f"{layout}_apart"
    settings = ("--layout", layout, *sets(["optimizer.schedule=constant", "optimizer.warmup_steps=0"]))
    first, *others = map(str, write_recipes(recipe, shared))
    together = ("train", first, *(part for other in others for part in ("--with", other)), *settings)
    outcome = run_command(*together, "--with", first, "--set", "run.total_steps=2")
    assert outcome.code == 2 and 'run.name = "one" is the name of two runs' in outcome.text, outcome.text
    for steps in (2, 3):  # the second one resumes
        outcome = run_command(*together, "--set", f"run.total_steps={steps}")
        assert outcome.code == 0, outcome.text
    for path in write_recipes(recipe, apart):
        outcome = run_command("train", str(path), *settings, "--set", "run.total_steps=3")
        assert outcome.code == 0, outcome.text
    for name in OWN_KEYS:
        own, other = shared / name, apart / name
        states = [file.relative_to(other) for file in (other / "checkpoints").glob("step_*/policy_*.safetensors")]
        assert {file.parent.name for file in states} == {"step_000002", "step_000003"} and len(states) == 4
        for file in (*states, Path("adapter/adapter_model.safetensors"), Path("huggingface/model.safetensors")):
            tensors, wanted = load_file(own / file), load_file(other / file)
            assert tensors.keys() == wanted.keys()
            assert [key for key in wanted if not torch.equal(tensors[key], wanted[key])] == [], (name, file)
        assert trained_responses(own) == trained_responses(other)
        assert exact_numbers(own) == exact_numbers(other)
    adapters = [load_file(shared / name / "huggingface/model.safetensors") for name in OWN_KEYS]
    assert any(not torch.equal(tensor, adapters[1][key]) for key, tensor in adapters[0].items())
