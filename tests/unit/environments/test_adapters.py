"""Environments of other libraries against these libraries' own loops, in a foreign interpreter."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest

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
}
MAIN = "\nimport json, sys\nprint(json.dumps([play(*one) for one in json.load(sys.stdin)]))"
CASES = {
    "Game2048": ("textarena", "2048-v0", ["[up]", "[down]", "[left]", "[right]"]),
    "GuessTheNumber": ("textarena", "GuessTheNumber-v0", [f"[{number}]" for number in range(1, 21)]),
    "FrozenLake": ("gymnasium", "FrozenLake-v1", ["0", "1", "2", "3"]),
}


@pytest.fixture(scope="module")
def foreign_python(tmp_path_factory) -> str:
    """An interpreter with nothing but the libraries."""
    if not (GAMES / ".installed").exists():
        pytest.skip("textarena and gymnasium are not installed; make .venv-games installs them")
    script = tmp_path_factory.mktemp("foreign") / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={GAMES} exec {sys.executable} -S "$@"\n')
    script.chmod(0o700)
    return str(script)


@pytest.mark.parametrize("case", CASES)
def test_interleaved_episodes_equal_the_library_s_own_loop(foreign_python, case):
    library, name, moves = CASES[case]
    scripts = [
        [name, seed, [random.Random(seed).choice(moves) for _ in range(MAX_TURNS)]] for seed in range(NUM_EPISODES)
    ]
    command = [foreign_python, "-c", OWN_LOOP[library] + MAIN]
    done = subprocess.run(command, input=json.dumps(scripts), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = [tuple(one) for one in json.loads(done.stdout)]

    played = [([], []) for _ in scripts]
    place = f"{user_games.__file__}:{case}"
    with WorkerPool(WorkerSettings("environment", place, python=foreign_python, episodes_per_process=8)) as pool:
        for index in range(NUM_EPISODES):
            pool.start(str(index), Task({}, index))
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
