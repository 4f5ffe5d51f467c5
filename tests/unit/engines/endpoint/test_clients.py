"""Published clients, unmodified, against the endpoint: each conversation is one stream of its episode."""

from __future__ import annotations

import json
import random
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_dapo.engines.endpoint import AGENTS
from megatron_dapo.environments.pool import WorkerPool, WorkerSettings
from megatron_dapo.rollout.episodes.engine import EpisodeEngine
from megatron_dapo.types import Completion
from tests.unit.engines.endpoint.client_programs import CLIENTS, TALKS
from tests.unit.rollout import episode_world as world
from tests.unit.rollout import test_episodes_real_engine as embedded

PACKAGES = Path(__file__).resolve().parents[4] / ".venv-agents"
PROGRAM = Path(__file__).with_name("client_programs.py")
BUSY_S = 120.0  # what a busy machine may take
SAID = (
    *(f'See.<tool_call>{{"name": "lookup", "arguments": {{"word": "w{number}"}}}}</tool_call>' for number in range(4)),
    "It is a word.",
)


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    if not PACKAGES.is_dir():
        pytest.skip("the clients are not installed; make .venv-agents installs them")
    settings = {
        "command": [sys.executable, str(PROGRAM), str(PACKAGES)],
        **{"temperature": 1.0, "top_p": 1.0, "other_sampling": "refuse", "max_branches": 1},
    }
    command = (sys.executable, "-m", AGENTS, json.dumps(settings))
    with WorkerPool(WorkerSettings("command", command=command, step_seconds=BUSY_S, reset_seconds=BUSY_S)) as pool:
        yield pool


def assert_one_stream(done: Completion, num_turns: int, contexts: list[tuple[int, ...]]) -> None:
    assert done.episode is not None and done.episode.end == "done", done.episode
    assert not done.num_segments and len(done.episode.turns) == num_turns
    assert done.prompt_ids is not None
    stream = (*done.prompt_ids, *done.token_ids.tolist())
    assert contexts == [stream[: len(done.prompt_ids) + turn.start] for turn in done.episode.turns]


def test_a_conversation_with_a_tool_is_one_stream(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    turns, places = world.template("qwen3", "keep"), defaultdict[int, list[int]](list)

    def turn_of(_: object, seed: int, position: int) -> list[int]:
        if position not in places[seed]:
            places[seed].append(position)
        return [*turns.template.encode(SAID[places[seed].index(position)]), turns.stop_token_ids[0]]

    monkeypatch.setattr(world, "turn_of", turn_of)
    inner = world.FakeTurnEngine(turns)
    limits = world.settings(on_cut="observe", retries=0, max_context_tokens=4000, max_turns=len(SAID) + 1)
    engine = EpisodeEngine(inner, pool, turns, limits)
    engine.submit([world.request(name, turns, seed, 2000, client=name) for seed, name in enumerate(CLIENTS)])
    finished = world.drain(engine)
    assert {one.request_id for one in finished} == set(CLIENTS)
    for done in finished:
        contexts = [one.prompt_ids for one in inner.requests if one.request_id.startswith(f"{done.request_id}@")]
        assert_one_stream(done, len(SAID), contexts)
        assert done.episode is not None and dict(done.episode.parts) == {SAID[-1]: 1.0}, "it read what was sampled"
        text = turns.template.tokenizer.decode(done.token_ids.tolist())
        assert text.count(" is a word\n</tool_response>") == len(SAID) - 1, "the policy read what the tool said"


def test_a_conversation_with_the_embedded_engine_is_one_stream(pool: WorkerPool) -> None:
    inner, contexts = embedded.make_engine(), defaultdict[str, list[tuple[int, ...]]](list)
    submit = inner.submit

    def noted(requests):
        for request in requests:
            contexts[request.request_id.partition("@")[0]].append(request.prompt_ids)
        submit(requests)

    inner.submit = noted  # type: ignore[method-assign]
    limits = world.settings(max_turn_tokens=9, on_cut="observe", max_context_tokens=800, retries=0)
    engine = EpisodeEngine(inner, pool, embedded.TURNS, limits)
    engine.submit(
        [world.request(name, embedded.TURNS, seed, 100, client=name, talks=True) for seed, name in enumerate(TALKS)]
    )
    finished = world.drain(engine)
    assert {one.request_id for one in finished} == set(TALKS)
    for done in finished:
        assert_one_stream(done, 3, contexts[done.request_id])
