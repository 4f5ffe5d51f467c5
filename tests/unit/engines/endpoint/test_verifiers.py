"""Play an environment of verifiers on the endpoint; compare rewards with verifiers' evaluation of the same completions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from megatron_dapo.engines.endpoint import AGENTS
from megatron_dapo.engines.endpoint.format import assistant
from megatron_dapo.environments.pool import WorkerPool, WorkerSettings
from megatron_dapo.rollout.episodes.engine import EpisodeEngine
from tests.unit.engines.endpoint.test_clients import BUSY_S
from tests.unit.rollout import episode_world as world

ROOT = Path(__file__).resolve().parents[4]
PACKAGES = [ROOT / ".venv-agents-verifiers", ROOT / ".venv-agents"]
PROGRAM = Path(__file__).with_name("verifiers_program.py")
# The policy's turns in each episode: what it says, and the words that it looks up.
SCRIPTS: dict[str, list[tuple[str, list[str]]]] = {
    "twice": [("See.", ["cat"]), ("And.", ["dog"]), ("It is a word.", [])],
    "at once": [("It is a word.", [])],
    "a failure": [("See.", ["", "cat"]), ("No.", [])],
    "never": [("See.", [f"w{turn}"]) for turn in range(4)],
}


def spelled(content: str, words: list[str]) -> str:
    calls = [json.dumps({"name": "lookup", "arguments": {"word": word}}) for word in words]
    return content + "".join(f"<tool_call>{call}</tool_call>" for call in calls)


def own_evaluation(packages: str) -> dict[str, dict[str, Any]]:
    scripts = []
    for question, turns in SCRIPTS.items():
        calls = [[(f"c{turn}{index}", "lookup", json.dumps({"word": word})) for index, word in enumerate(words)] for turn, (_, words) in enumerate(turns)]
        scripts.append([question, [assistant(content, "", called) for (content, _), called in zip(turns, calls, strict=True)]])
    command = [sys.executable, str(PROGRAM), packages, "--own"]
    done = subprocess.run(command, input=json.dumps(scripts), capture_output=True, text=True, timeout=BUSY_S)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(SCRIPTS, json.loads(done.stdout.splitlines()[-1]), strict=True))


def test_rewards_are_those_of_verifiers_own_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    if missing := [path.name for path in PACKAGES if not path.is_dir()]:
        pytest.skip(f"verifiers is not installed; make {' '.join(missing)} installs it")
    packages, names = os.pathsep.join(map(str, PACKAGES)), list(SCRIPTS)
    turns, places = world.template("qwen3", "keep"), defaultdict[int, list[int]](list)

    def turn_of(_: object, seed: int, position: int) -> list[int]:
        if position not in places[seed]:
            places[seed].append(position)
        text = spelled(*SCRIPTS[names[seed]][places[seed].index(position)])
        return [*turns.template.encode(text), turns.stop_token_ids[0]]

    monkeypatch.setattr(world, "turn_of", turn_of)
    settings = {
        "command": [sys.executable, str(PROGRAM), packages],
        **{"temperature": 1.0, "top_p": 1.0, "other_sampling": "refuse", "max_branches": 1},
    }
    command = (sys.executable, "-m", AGENTS, json.dumps(settings))
    limits = world.settings(retries=0, max_context_tokens=4000, max_environments=2, order="arrival")
    with WorkerPool(WorkerSettings("command", command=command, step_seconds=BUSY_S, reset_seconds=BUSY_S)) as pool:
        engine = EpisodeEngine(world.FakeTurnEngine(turns), pool, turns, limits)
        requests = [world.request(name, turns, seed, 2000) for seed, name in enumerate(names)]
        engine.submit([world.replace(one, task={"question": one.request_id}) for one in requests])
        finished = {done.request_id: done.episode for done in world.drain(engine)}
    for name, own in own_evaluation(packages).items():
        episode = finished[name]
        assert episode is not None and (episode.end, len(episode.turns)) == ("done", len(SCRIPTS[name])), episode
        assert (episode.reward, dict(episode.parts)) == (own["reward"], own["parts"])
    assert len({one.reward for one in finished.values() if one is not None}) == len(SCRIPTS), "they differ"
