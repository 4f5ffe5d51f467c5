"""A run on two sources with weights, evaluated on two files, and its checkpoint evaluated next to it; what is drawn in any layout."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from whole_runs import ROOT, lines_of, run_command

QUICKSTART = ROOT / "examples" / "quickstart"
RECIPE = """
[model]
path = "{model}"
[data]
eval_paths = ["first.jsonl", "second.jsonl"]
max_prompt_tokens = 256
[[data.sources]]
path = "often.jsonl"
weight = 3.0
[[data.sources]]
path = "seldom.json"
name = "rare"
columns = {{ prompt = "question", answer = "answer" }}
[rollout]
prompts_per_step = 4
group_size = 2
max_response_tokens = 32
filter_groups = false
[training]
mini_batch_prompts = 4
[evaluation]
num_samples = 2
at_start = false
[checkpoint]
interval = 1
keep = 4
[run]
total_steps = 2
"""


@pytest.mark.long
def test_sources_and_files_are_told_apart_in_training_and_evaluation(tmp_path: Path) -> None:
    rows = (QUICKSTART / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "often.jsonl").write_text("".join(rows[:40]))
    plain = [json.loads(line) for line in rows[40:60]]
    table = [{"question": row["prompt"][-1]["content"], "answer": row["reward_model"]["ground_truth"]} for row in plain]
    (tmp_path / "seldom.json").write_text(json.dumps(table))
    held_out = (QUICKSTART / "heldout.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "first.jsonl").write_text("".join(held_out[:8]))
    (tmp_path / "second.jsonl").write_text("".join(held_out[8:12]))
    recipe = tmp_path / "own.toml"
    recipe.write_text(RECIPE.format(model=QUICKSTART / "base_model"))
    run = tmp_path / "run"
    outcome = run_command("train", str(recipe), "--output-dir", str(run))
    assert outcome.code == 0, outcome.text
    samples = lines_of(run / "samples.jsonl")
    # Rows without a data_source have their source's name; three of four prompts are of the first source.
    assert Counter(sample["data_source"] for sample in samples) == {"quickstart_bookkeeping": 12, "rare": 4}
    for row in lines_of(run / "metrics.jsonl"):
        counts = [row[f"rollout/source/{name}/groups_generated"] for name in ("often", "rare")]
        assert counts == [3, 1]
    [evaluation] = lines_of(run / "evaluations.jsonl")
    parts = [evaluation[f"eval/{name}/avg_at_k"] for name in ("first", "second")]
    assert abs(evaluation["eval/avg_at_k"] - (8 * parts[0] + 4 * parts[1]) / 12) < 1e-9
    # The last checkpoint is the model that the run evaluated, and its file compares with it problem by problem.
    evaluated = run / "evaluations" / "step_000002.json"
    checkpoint = run / "checkpoints" / "step_000002"
    again = run_command("eval", str(recipe), "--checkpoint", str(checkpoint), "--against", str(evaluated))
    assert again.code == 0, again.text
    assert f"{checkpoint} minus" in again.text and "paired over 12 problems" in again.text
    difference = next(line for line in again.lines if line.startswith("  avg@2: ") and "+" in line)
    assert difference == "  avg@2: +0.0000  [+0.0000, +0.0000]"


TASKS = ROOT / ".venv-tasks"
FEW_FRESH = """
[[data.sources]]
path = "reasoning_gym:chain_sum"
size = 3
weight = 2.0
settings = { min_terms = 2, max_terms = 3 }
[reward]
verifier = "megatron_dapo.rewards.verifiers.reasoning_gym:reward"
"""
TWO_FILES = """
[[data.sources]]
path = "second.jsonl"
weight = 2.0
"""
DRAWN_RECIPE = """
[model]
path = "{model}"
[data]
max_prompt_tokens = 256
held_out_share = 0.0
[[data.sources]]
path = "first.jsonl"
{other}
[rollout]
prompts_per_step = 4
group_size = 2
max_response_tokens = 16
filter_groups = false
[training]
mini_batch_prompts = 4
[checkpoint]
interval = 1
"""


@pytest.mark.long
@pytest.mark.parametrize("other", [TWO_FILES, FEW_FRESH], ids=["files", "made for each epoch"])
def test_a_mixture_draws_the_same_prompts_in_any_layout_and_after_a_resume(other: str, tmp_path: Path) -> None:
    packages = [TASKS] if other == FEW_FRESH else []
    if packages and not TASKS.exists():
        pytest.skip("reasoning-gym is not installed; make .venv-tasks installs it")
    rows = (QUICKSTART / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "first.jsonl").write_text("".join(rows[:5]))
    (tmp_path / "second.jsonl").write_text("".join(rows[5:8]))
    recipe = tmp_path / "own.toml"
    recipe.write_text(DRAWN_RECIPE.format(model=QUICKSTART / "base_model", other=other))

    def train(name: str, layout: str, steps: int) -> list[dict]:
        run = tmp_path / name
        arguments = ("--layout", layout, "--output-dir", str(run), "--set", f"run.total_steps={steps}")
        outcome = run_command("train", str(recipe), *arguments, packages=packages)
        assert outcome.code == 0, outcome.text
        return lines_of(run / "samples.jsonl")

    def drawn(samples: list[dict]) -> list[list[str]]:
        steps = sorted({sample["train_step"] for sample in samples})
        return [sorted(sample["prompt_id"] for sample in samples if sample["train_step"] == step) for step in steps]

    whole = train("whole", "dp1", 4)
    train("resumed", "dp2", 2)
    assert drawn(whole) == drawn(train("resumed", "dp2", 4))
    assert [len(prompts) for prompts in drawn(whole)] == [8] * 4
    if packages:
        made = [sample for sample in whole if sample["data_source"] == "chain_sum"]
        ids = {sample["prompt_id"] for sample in made}
        assert {name.partition("/")[0] for name in ids if "@" in name} == {f"chain_sum@{epoch}" for epoch in (1, 2, 3)}
        assert len({sample["prompt"][-1]["content"] for sample in made}) == len(ids) >= 10, "no problem comes twice"
