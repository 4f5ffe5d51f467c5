"""A run on a stranger's data with a stranger's reward: ten lines of TOML, a CSV file and a function."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from whole_runs import ROOT, lines_of, run_command

REWARD = """
import asyncio
from megatron_dapo.rewards.result import RewardResult

async def reward(sample):
    await asyncio.sleep(0.1)
    digits = sum(letter.isdigit() for letter in sample.response)
    assert sample.extra_info["level"] == "easy" and sample.messages[0]["role"] == "system"
    return RewardResult(parts={"digits": digits / 10, "short": -len(sample.response) / 1000})
"""
RECIPE = """
[model]
path = "{model}"
[data]
train_paths = ["own.csv"]
max_prompt_tokens = 256
columns = {{ prompt = "question", answer = "" }}
system_prompt = "Think in small steps."
prompt_template = "{{prompt}} Be quick."
[reward]
verifier = "{reward}:reward"
[rollout]
prompts_per_step = 4
group_size = 4
max_response_tokens = 32
filter_groups = false
[training]
mini_batch_prompts = 4
[run]
total_steps = 2
"""


@pytest.mark.long  # The script in test_python.py trains on its rows with its reward.
def test_ten_lines_train_on_own_data_with_an_own_reward(tmp_path: Path) -> None:
    rows = lines_of(ROOT / "examples" / "quickstart" / "train.jsonl")[:32]
    with (tmp_path / "own.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["question", "level"])
        writer.writerows([row["prompt"][0]["content"], "easy"] for row in rows)
    (tmp_path / "own_reward.py").write_text(REWARD)
    model = ROOT / "examples" / "quickstart" / "base_model"
    recipe = tmp_path / "own.toml"
    recipe.write_text(RECIPE.format(model=model, reward=tmp_path / "own_reward.py"))
    arguments = ["train", str(recipe), "--output-dir", str(tmp_path / "run")]
    outcome = run_command(*arguments)
    assert outcome.code == 0, outcome.text
    before = outcome.text.partition("before and after:")[0].splitlines()
    assert len(before) <= 12 and not any("Warning" in line for line in before), outcome.text
    samples = lines_of(tmp_path / "run" / "samples.jsonl")
    assert len(samples) == 2 * 16
    for sample in samples:
        digits = sum(letter.isdigit() for letter in sample["response"])
        assert sample["reward_parts"]["digits"] == digits / 10 and sample["prompt"][-1]["content"].endswith(
            " Be quick."
        )
        assert abs(sample["reward"] - (digits / 10 - len(sample["response"]) / 1000)) < 1e-6
    last = lines_of(tmp_path / "run" / "metrics.jsonl")[-1]
    mean = sum(sample["reward_parts"]["digits"] for sample in samples[16:]) / 16
    assert abs(last["reward/part/digits"] - mean) < 1e-6
    # A function that the rows do not fit is found before anything starts.
    (tmp_path / "own_reward.py").write_text(REWARD.replace('"easy"', '"hard"'))
    refused = run_command(*arguments[:2], "--output-dir", str(tmp_path / "other"), "--dry-run")
    assert refused.code == 2 and "self-test" in refused.text and "AssertionError" in refused.text
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["train_steps"] == 2
