"""Environments of other libraries against these libraries' own loops, in a foreign interpreter."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_dapo.data.tool_calls import Tool, ToolCall
from megatron_dapo.environments.adapters.global_random import GlobalRandom
from megatron_dapo.environments.pool import WorkerPool, WorkerSettings
from megatron_dapo.environments.protocol import Action, Task
from tests.unit.environments import user_games

ROOT = Path(__file__).parents[3]
GAMES = ROOT / ".venv-games"
NUM_EPISODES, MAX_TURNS = 32, 6

# The library's own loop, one episode after the other: [[observations], [rewards]] of each.
OWN_LOOP = {
    "textarena": """
def play(name, seed, actions):
    import textarena
    game = textarena.make(f"{name}-raw")
    game.reset(num_players=1, seed=seed)
    said = lambda: "\\n".join(text for sender, text, _ in game.get_observation()[1] if sender != 0)
    observations, rewards = [said()], []
    for action in actions:
        done, _ = game.step(action=action)
        if done:
            return observations, [float(game.close()[0][0])]
        observations.append(said())
    return observations, rewards
""",
    "gymnasium": """
def play(name, seed, actions):
    import gymnasium
    env = gymnasium.make(name, is_slippery=True)
    observation, _ = env.reset(seed=seed)
    observations, rewards = [f"Cross the lake.\\n{observation}"], []
    for action in actions:
        observation, reward, terminated, truncated, _ = env.step(int(action))
        rewards.append(float(reward))
        if terminated or truncated:
            break
        observations.append(str(observation))
    return observations, rewards
""",
    "gem": """
def play(name, seed, actions):
    import gem
    env = gem.make(name)
    text = lambda observation, info: observation + ("\\n" + info["suffix"] if "suffix" in info else "")
    observations, rewards = [text(*env.reset(seed=seed))], []
    for action in actions:
        observation, reward, terminated, truncated, info = env.step(action)
        rewards.append(float(reward))
        if terminated or truncated:
            break
        observations.append(text(observation, info))
    return observations, rewards
""",
    "skyrl_gym": """
def play(name, seed, actions):
    import skyrl_gym
    env = skyrl_gym.make(name, extras={"reward_spec": {"ground_truth": str(seed % 4)}, "max_turns": 3})
    observations, rewards = [env.init([{"role": "user", "content": "Which number?"}])[0][0]["content"]], []
    for action in actions:
        output = env.step(action)
        rewards.append(float(output["reward"]))
        if output["done"]:
            break
        observations.append(output["observations"][0]["content"])
    return observations, rewards
""",
    "openenv": """
import types, sys
for name in ("fastmcp", "fastmcp.client", "fastmcp.client.client"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["fastmcp"].Client = sys.modules["fastmcp.client.client"].CallToolResult = object

def play(url, seed, actions):
    from openenv.core.generic_client import GenericEnvClient
    with GenericEnvClient(base_url=url).sync() as env:
        observations, rewards = [f"{env.reset(seed=seed).observation['left']} left"], []
        for action in actions:
            result = env.step({"take": int(action)})
            rewards.append(float(result.reward))
            if result.done:
                break
            observations.append(f"{result.observation['left']} left")
    return observations, rewards
""",
}
MAIN = "\nimport json, sys\nprint(json.dumps([play(*one) for one in json.load(sys.stdin)]))"
CASES = {
    "Game2048": ("textarena", "2048-v0", ["[up]", "[down]", "[left]", "[right]"]),
    "GuessTheNumber": ("textarena", "GuessTheNumber-v0", [f"[{number}]" for number in range(1, 21)]),
    "FrozenLake": ("gymnasium", "FrozenLake-v1", ["0", "1", "2", "3"]),
    "Mastermind": ("gem", "game:Mastermind-v0-easy", [f"\\boxed{{{one} {two}}}" for one in range(1, 5) for two in range(1, 7)]),
    "Sums": ("skyrl_gym", "gsm8k_multi_turn", [f"#### {number}" for number in range(4)] + ["none"]),
    "Countdown": ("openenv", "", ["1", "2", "3", "4"]),
}


@pytest.fixture(scope="module")
def foreign_python(tmp_path_factory) -> str:
    """An interpreter with nothing but the libraries."""
    if not (GAMES / ".installed").exists():
        pytest.skip("the libraries of environments are not installed; make .venv-games installs them")
    script = tmp_path_factory.mktemp("foreign") / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={GAMES} exec {sys.executable} -S "$@"\n')
    script.chmod(0o700)
    return str(script)


@pytest.fixture
def openenv_url(foreign_python, monkeypatch) -> Iterator[str]:
    """An OpenEnv server, which environments find by the variable OPENENV_URL."""
    command = [foreign_python, str(Path(__file__).with_name("openenv_server.py"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        monkeypatch.setenv("OPENENV_URL", url)
        yield url
        server.terminate()


def _settings(name: str, python: str, **limits: Any) -> WorkerSettings:
    place = f"{user_games.__file__}:{name}"
    variables = ("OPENENV_URL", "MCP_SERVER", "PYTHONPATH")
    return WorkerSettings("environment", place, python=python, episodes_per_process=8, variables=variables, **limits)


@pytest.mark.parametrize("case", CASES)
def test_interleaved_episodes_equal_the_library_s_own_loop(foreign_python, case, request):
    library, name, moves = CASES[case]
    if library == "openenv":
        name = request.getfixturevalue("openenv_url")
    scripts = [
        [name, seed, [random.Random(seed).choice(moves) for _ in range(MAX_TURNS)]] for seed in range(NUM_EPISODES)
    ]
    command = [foreign_python, "-c", OWN_LOOP[library] + MAIN]
    done = subprocess.run(command, input=json.dumps(scripts), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = [tuple(one) for one in json.loads(done.stdout)]

    played = [([], []) for _ in scripts]
    with WorkerPool(_settings(case, foreign_python)) as pool:
        for index in range(NUM_EPISODES):
            messages = [{"role": "user", "content": "Which number?"}]
            pool.start(str(index), Task({"messages": messages, "answer": str(index % 4)}, index))
        num_open = NUM_EPISODES
        while num_open:
            for reply in pool.poll(60.0):
                assert not reply.lost
                index = int(reply.episode_id)
                observations, rewards = played[index]
                observations += [message["content"] for message in reply.messages]
                rewards += [] if reply.reward is None else [reply.reward]
                if reply.done or len(observations) > MAX_TURNS:
                    pool.end(reply.episode_id)
                    num_open -= 1
                else:
                    pool.act(reply.episode_id, Action(scripts[index][2][len(observations) - 1], (), "stop"))
    assert played == expected


def test_tools_of_an_mcp_server(foreign_python, monkeypatch):
    monkeypatch.setenv("MCP_SERVER", "yes")
    turns = {
        "0": [("add", {"number": 3}, "the total is 3"), ("add", {"number": 2, "times": 4}, "the total is 11")],
        "1": [("add", {"number": 1}, "the total is 1"), ("refuse", {"reason": "not today"}, "not today")],
        "2": [("add", {"number": 5}, "the total is 5"), ("leave", {}, "ended while it ran leave")],
    }
    texts: dict[str, list[str]] = {name: [] for name in turns}
    schemas, lost, rewards = [], [], {}
    with WorkerPool(_settings("Counter", foreign_python)) as pool:
        for name in turns:
            pool.start(name, Task({"messages": [{"role": "user", "content": "Count."}]}, 0))
        num_open = len(turns)
        while num_open:
            for reply in pool.poll(120.0):
                name = reply.episode_id
                schemas += [reply.tools] if reply.tools else []
                texts[name] += [message["content"] for message in reply.messages]
                if reply.lost or reply.done:
                    lost += [reply.lost] if reply.lost else []
                    rewards[name] = reply.reward
                    pool.end(name)
                    num_open -= 1
                elif len(texts[name]) <= len(turns[name]):
                    tool, arguments, _ = turns[name][len(texts[name]) - 1]
                    pool.act(name, Action("", (ToolCall(tool, arguments),), "stop"))
                else:
                    pool.act(name, Action("0.5", (), "stop"))
    # Each episode has its own total. What a tool refuses the model reads; a server that ends is no fault of the model.
    for name, expected in turns.items():
        for text, (*_, what) in zip(texts[name][1:], expected, strict=False):
            assert what in text
    assert rewards == {"0": 0.5, "1": 0.5, "2": None}
    assert [reason.split(":")[0] for reason in lost] == ["the MCP server ended while it ran leave"]
    names = [tool["name"] for tool in schemas[0]]
    assert names == ["add", "refuse", "leave"]
    assert schemas[0][0]["parameters"]["required"] == ["number"]
    assert Tool(schemas[0][0]).validate({"number": "3"}) == {"number": 3}


def test_episodes_of_one_process_do_not_share_random_numbers():
    sequences: dict[int, list[float]] = {seed: [] for seed in range(4)}
    outside = random.getstate()

    def draw(seed: int) -> None:
        own = GlobalRandom(seed)
        for _ in range(200):
            with own():
                sequences[seed].append(random.random())

    threads = [threading.Thread(target=draw, args=(seed,)) for seed in sequences]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, drawn in sequences.items():
        generator = random.Random(seed)
        assert drawn == [generator.random() for _ in drawn]
    assert random.getstate() == outside
