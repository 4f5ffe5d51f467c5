"""Episodes whose turns a stock SGLang server samples: of an environment in a worker process, and of an agent's program over HTTP."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from sglang_runs import finish

from tools.prove_resume import write_recipe

AGENT = '''
import json, os, sys, urllib.request

task = json.load(sys.stdin)


def asked(messages):
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, key)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]


def said(text):
    return {"role": "user", "content": text}


first = asked(task["messages"])
conversation = [*task["messages"], first, said("Go on.")]
second = asked(conversation)
other = asked([*task["messages"], first, said("Again, in other words.")])  # branches off after the first answer
summary = asked([said("Which is shorter? " + second["content"] + " or " + other["content"])])
last = asked([*conversation, second, said("The end.")])  # comes back to the first stream
print(json.dumps({"reward": len(last["content"]) % 2 == 0}))
'''


@pytest.mark.long  # tests/e2e/test_episodes.py has the same engine of episodes over the embedded engine
@pytest.mark.parametrize("way", ["environment", "agent"])
def test_trainer_and_server_agree_on_every_stream(way: str, engine_python: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    settings = ["run.total_steps=2", "optimizer.warmup_steps=0", "checkpoint.interval=1", "checkpoint.export_huggingface=false"]
    settings += ["sglang.weight_sync_bucket_mb=1", "telemetry.samples_per_step=1000"]
    if way == "agent":
        (tmp_path / "agent.py").write_text(AGENT)
        program = json.dumps(["python", str(tmp_path / "agent.py")])
        settings += ['environment.path=""', f"environment.agent={program}"]
    finish(write_recipe(tmp_path, "episodes"), directory, engine_python, *settings)
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        assert row["mismatch/lag0_abs_logprob_diff_mean"] < 1e-5, "trainer and engine read the same streams"
        assert row["actor/grad_norm"] > 0 and row["episodes/retries"] == row["episodes/groups_lost"] == 0
        expected = (5, 2) if way == "agent" else (None, 0)  # turns, segments
        assert row["episodes/turns_mean"] == (expected[0] or pytest.approx(3, abs=1))
        assert row["episodes/segments_mean"] == expected[1]
    assert rows[0]["rollout/groups_unfinished"] > 0, "the checkpoint holds episodes"
    shutil.rmtree(directory / "checkpoints" / "step_000002")
    finish(write_recipe(tmp_path, "episodes"), directory, engine_python, *settings)
    again = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert again[0] == rows[0] and again[1] != rows[1], "the second step is made again"
    assert again[1]["rollout/responses_continued"] > 0 and again[1]["episodes/begun_anew"] == 0
