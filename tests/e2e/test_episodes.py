"""A run whose prompts begin episodes: trained, evaluated, saved and resumed like any other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from whole_runs import NO_EVALUATION, ROOT, run_command

QUICKSTART = ROOT / "examples" / "quickstart"
GAME = '''
from megatron_dapo.environments import Environment, Step


class Letters(Environment):
    """Three turns; an even number of letters in all is right."""

    def reset(self, task, seed):
        self.num_letters, self.num_turns = 0, 0
        return task["messages"]

    def step(self, turn):
        self.num_letters += len(turn.text)
        self.num_turns += 1
        if self.num_turns == 3:
            return Step(done=True, reward=float(self.num_letters % 2 == 0), parts={"letters": self.num_letters})
        return Step(f"You wrote {len(turn.text)} letters, {self.task.random.randint(1, 9)} points.")
'''
AGENT = '''
import json, os, random, sys, urllib.request

task = json.load(sys.stdin)
points, messages, num_letters = random.Random(task["seed"]), task["messages"], 0
for turn in range(3):
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, key)
    answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    num_letters += len(answer["content"])
    said = f"You wrote {len(answer['content'])} letters, {points.randint(1, 9) if turn < 2 else 0} points."
    messages = messages + [answer, {"role": "user", "content": said}]
print(json.dumps({"reward": num_letters % 2 == 0, "parts": {"letters": num_letters}}))
'''
FORKS = '''
import asyncio

from megatron_dapo.environments import user


async def rollout(task, client):
    """Two opinions at the same time, which a fresh conversation judges; an even number of letters in all is right."""
    messages = task.messages
    messages += [(await client.chat(messages)).message]

    async def opinion(fork, points):
        return (await fork.chat([*messages, user(f"{points} points.")])).text

    opinions = await asyncio.gather(*(opinion(client.fork(), task.random.randint(1, 9)) for _ in range(2)))
    judged = await client.fresh().chat([user("Judge: " + " ".join(opinions))])
    task.record(letters=sum(map(len, opinions)))
    return (len(judged.text) + sum(map(len, opinions))) % 2 == 0
'''
FORKING_AGENT = '''
import json, os, random, sys, urllib.request

task = json.load(sys.stdin)
points = random.Random(task["seed"])


def chat(*messages):
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, key)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]


user = lambda text: {"role": "user", "content": text}
said = [*task["messages"], chat(*task["messages"])]
opinions = [chat(*said, user(f"{points.randint(1, 9)} points."))["content"] for _ in range(2)]
judged = chat(user("Judge: " + " ".join(opinions)))["content"]
print(json.dumps((len(judged) + sum(map(len, opinions))) % 2 == 0))
'''
RECIPE = """
[run]
total_steps = 2

[model]
path = "{model}"

[data]
train_paths = ["train.jsonl"]
eval_paths = ["heldout.jsonl"]
template = "plain"
max_prompt_tokens = 200

[environment]
path = "game.py:Letters"
processes = 1
max_turn_tokens = 12
max_context_tokens = 400

[turns]
on_cut = "observe"

[reward]
verifier = "environment"

[rollout]
prompts_per_step = 4
group_size = 4
max_response_tokens = 60
oversample = 2.0
max_staleness = 1
partial_rollout = true

[algorithm.off_policy]
correction = "tis"

[training]
mini_batch_prompts = 4
micro_batch_tokens = 1024

[optimizer]
learning_rate = 1e-3
warmup_steps = 0

[checkpoint]
interval = 1
export_huggingface = false

[evaluation]
interval = 2
num_samples = 1
top_p = 1.0
at_start = false

[telemetry]
samples_per_step = 1000
progress = false
report = false
"""

# On policy: windows train the policy that samples them.
WITH_CRITIC = ("rollout.max_staleness=0", "rollout.partial_rollout=false", "rollout.oversample=1.0", "rollout.filter_groups=false", *NO_EVALUATION)


def write_game(directory: Path) -> Path:
    """Write the game with its rows; return the recipe."""
    (directory / "game.py").write_text(GAME)
    (directory / "recipe.toml").write_text(RECIPE.format(model=QUICKSTART / "base_model"))
    for name, count in (("train.jsonl", 16), ("heldout.jsonl", 4)):
        lines = (QUICKSTART / name).read_text(encoding="utf-8").splitlines(keepends=True)
        (directory / name).write_text("".join(lines[:count]), encoding="utf-8")
    return directory / "recipe.toml"


def rows_of(run: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def train_with_critic(directory: Path, algorithm: str, *settings: str) -> Path:
    """Run two steps of the game with a critic; return the run's directory."""
    run = directory / algorithm
    words = [f"run.output_dir={run}", f"algorithm.name={algorithm}", *WITH_CRITIC, *settings]
    ended = run_command("train", str(directory / "recipe.toml"), *[word for setting in words for word in ("--set", setting)])
    assert ended.code == 0, ended.text
    return run


def test_windows_of_episodes_are_trained_once_and_a_resumed_run_is_the_same(tmp_path: Path) -> None:
    """T-PPO: a window ends inside a turn or with an answer; the next one continues there, also in another process."""
    write_game(tmp_path)
    settings = ("window.tokens=20", "window.ignored_tail_tokens=2", "advantage_estimation.lambda_rule=window")
    run = train_with_critic(tmp_path, "tppo", *settings)
    samples, metrics = rows_of(run, "samples.jsonl"), rows_of(run, "metrics.jsonl")
    assert metrics[0]["window/finished_share"] < 1
    assert metrics[1]["window/continued_share"] > 0 and metrics[1]["window/per_finished"] > 1
    assert sum(row["critic/trained_tokens"] for row in metrics) > 0
    before = [sample for sample in samples if sample["train_step"] == 1]
    assert all(row["mismatch/lag0_abs_logprob_diff_mean"] < 1e-5 for row in metrics)
    starts = {sample["sample_id"]: sample["window"]["start"] for sample in samples if sample["train_step"] == 2}
    assert sum(starts[sample["sample_id"]] > 0 for sample in before if not sample["window"]["is_finished"]) > 0
    shutil.rmtree(run / "checkpoints" / "step_000002")
    train_with_critic(tmp_path, "tppo", *settings)
    assert rows_of(run, "samples.jsonl") == samples


@pytest.mark.long  # T-PPO trains a critic on episodes above
def test_vapo_trains_episodes(tmp_path: Path) -> None:
    write_game(tmp_path)
    run = train_with_critic(tmp_path, "vapo", "run.total_steps=1", "advantage_estimation.lambda_rule=length_adaptive")
    (row,) = rows_of(run, "metrics.jsonl")
    num_sampled = row["rollout/response_tokens_mean"] * 16
    assert row["critic/trained_tokens"] == row["actor/trained_tokens"] == num_sampled and row["critic/optimizer_steps"] > 0
    assert row["episodes/observed_tokens_mean"] > 0


@pytest.mark.long  # Tests next to it train windows and forks of the same game and resume them.
@pytest.mark.parametrize("resumed_by", ["environment", "agent"])
def test_episodes_are_trained_and_a_resumed_run_is_the_same(resumed_by: str, tmp_path: Path) -> None:
    """Episodes that a checkpoint holds unfinished are played again by the process that resumes, without a new token.

    An agent's program that plays the same game over HTTP continues to the same samples.
    """
    recipe = write_game(tmp_path)
    run = tmp_path / "run"

    def trained(*settings: str) -> tuple[list[str], list[str]]:
        overrides = [word for setting in (f"run.output_dir={run}", *settings) for word in ("--set", setting)]
        ended = run_command("train", str(recipe), *overrides)
        assert ended.code == 0, ended.text
        return [(run / name).read_text().splitlines() for name in ("samples.jsonl", "metrics.jsonl")]

    samples, metrics = trained()
    rows = [json.loads(line) for line in metrics]
    for row in rows:
        assert row["episodes/turns_mean"] == 3 and row["episodes/end_done_share"] == 1
        assert row["mismatch/lag0_abs_logprob_diff_mean"] < 1e-5, "trainer and engine read the same streams"
    assert rows[0]["rollout/groups_unfinished"] > 0, "the checkpoint holds episodes"
    proof = json.loads((run / "provenance.json").read_text())["turns"]
    assert (proof["history"], proof["roles"]) == ("refuse", ["user", "tool"])
    assert "You wrote" in json.loads(samples[0])["response"]
    shutil.rmtree(run / "checkpoints" / "step_000002")
    (tmp_path / "agent.py").write_text(AGENT)
    command = json.dumps(["python", str(tmp_path / "agent.py")])
    again, _ = trained(*(['environment.path=""', f"environment.agent={command}"] if resumed_by == "agent" else []))
    assert again == samples


@pytest.mark.parametrize("resumed_by", ["agent", pytest.param("function", marks=pytest.mark.long)])
def test_forks_of_a_function_are_an_agent_s_branches_and_a_resumed_run_is_the_same(resumed_by: str, tmp_path: Path) -> None:
    """On two data-parallel ranks. The checkpoint holds unfinished episodes with several streams."""
    recipe = write_game(tmp_path)
    (tmp_path / "forks.py").write_text(FORKS)
    (tmp_path / "agent.py").write_text(FORKING_AGENT)
    limits = ("parallel.num_processes=2", "environment.max_turns=5", "environment.step_seconds=120", *NO_EVALUATION)

    run = tmp_path / "run"
    players = {
        "function": f"environment.function={tmp_path / 'forks.py'}:rollout",
        "agent": f"environment.agent={json.dumps(['python', str(tmp_path / 'agent.py')])}",
    }

    def trained(player: str) -> list[dict[str, Any]]:
        words = [f"run.output_dir={run}", *limits, 'environment.path=""', players[player]]
        ended = run_command("train", str(recipe), *[word for setting in words for word in ("--set", setting)])
        assert ended.code == 0, ended.text
        return rows_of(run, "samples.jsonl")

    samples = trained("function")
    metrics = rows_of(run, "metrics.jsonl")
    for step, row in enumerate(metrics, 1):
        assert (row["episodes/turns_mean"], row["episodes/segments_mean"], row["episodes/end_done_share"]) == (4, 2, 1)
        assert row["mismatch/lag0_abs_logprob_diff_mean"] < 1e-5 and row["episodes/begun_anew"] == 0
        figures = [one["episode"]["figures"]["letters"] for one in samples if one["train_step"] == step]
        assert abs(row["episodes/recorded/letters"] - sum(figures) / len(figures)) < 1e-6
    assert metrics[0]["rollout/groups_unfinished"] > 0, "the checkpoint holds episodes"
    shutil.rmtree(run / "checkpoints" / "step_000002")
    again = trained(resumed_by)
    if resumed_by == "agent":  # it records no figures
        for sample in (*samples, *again):
            sample["episode"].pop("figures", None)
    assert again == samples
