"""A run on a stranger's data with a stranger's reward: ten lines of TOML, a CSV file and a function."""

from __future__ import annotations

import csv
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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


MIXTURE = """
[model]
path = "{model}"
[data]
train_paths = ["programs.jsonl"]
max_prompt_tokens = 256
columns = {{ prompt = "question", answer = "answer" }}
[reward]
verifier = "mix"
timeout_seconds = 60.0
format = {{ pattern = "[0-9].*" }}
judge = {{ url = "{url}", score_pattern = "score ([0-9.]+)", max_score = 1.0, key_variable = "OWN_JUDGE_KEY" }}
code = {{ tests = "tests", score = "share", seconds_per_test = 20.0 }}
[[reward.mix]]
verifier = "judge"
weight = 2.0
decides = true
[[reward.mix]]
verifier = "code"
[[reward.mix]]
verifier = "format"
weight = 0.5
[rollout]
prompts_per_step = 4
group_size = 4
max_response_tokens = 32
filter_groups = false
[training]
mini_batch_prompts = 4
[run]
total_steps = 1
"""


class Judge(BaseHTTPRequestHandler):
    """Grades a response by its letters, fails every fifth time, and knows its key."""

    num_requests = 0

    def do_POST(self) -> None:
        Judge.num_requests += 1
        text = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][-1]["content"]
        is_known = self.headers["Authorization"] == "Bearer own-key"
        self.send_response((500 if Judge.num_requests % 5 == 0 else 200) if is_known else 401)
        response = text.partition("[Response]\n")[2].partition("\n\nSay briefly")[0]
        content = f"I say: score {grade(response)}"
        body = json.dumps({"choices": [{"message": {"content": content}}]}).encode()
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def grade(response: str) -> float:
    return len(response) % 4 / 4


@pytest.fixture
def judge_url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


@pytest.mark.long  # tests/unit/rewards has the mixture, the judge and the tests; test_python.py a run with own rewards
def test_a_mixture_of_a_judge_and_unit_tests_trains(
    tmp_path: Path, judge_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OWN_JUDGE_KEY", "own-key")
    rows = [
        {"question": f"Double {n}.", "answer": str(2 * n), "tests": [f"assert double({n}) == {2 * n}"]}
        for n in range(32)
    ]
    (tmp_path / "programs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = tmp_path / "mixture.toml"
    recipe.write_text(MIXTURE.format(model=ROOT / "examples" / "quickstart" / "base_model", url=judge_url))
    outcome = run_command("train", str(recipe), "--output-dir", str(tmp_path / "run"))
    assert outcome.code == 0, outcome.text
    assert "code-1 (namespaces" in outcome.text or "code-1 (landlock" in outcome.text, outcome.text
    samples = lines_of(tmp_path / "run" / "samples.jsonl")
    assert len(samples) == 16
    for sample in samples:
        parts = sample["reward_parts"]
        score = grade(sample["response"])
        assert (parts["judge"], parts["code"]) == (2 * score, 0.0)
        assert sample["accuracy"] == float(score >= 0.5 and sample["finish_reason"] == "stop")
        assert abs(sample["reward"] - parts["judge"] - parts["code"] - parts["format"]) < 1e-6
    last = lines_of(tmp_path / "run" / "metrics.jsonl")[-1]
    for name in ("judge", "code", "format"):
        assert abs(last[f"reward/part/{name}"] - sum(sample["reward_parts"][name] for sample in samples) / 16) < 1e-6
    assert last["reward/failed_share"] == 0.0  # every failure of the judge's server was tried again
