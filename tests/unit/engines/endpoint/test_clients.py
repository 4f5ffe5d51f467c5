"""Published clients, unmodified, against the endpoint: each conversation is one stream of its episode."""

from __future__ import annotations

import json
import random
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from megatron_dapo.engines.endpoint import AGENTS
from megatron_dapo.environments.pool import WorkerPool, WorkerSettings
from megatron_dapo.rollout.episodes.engine import EpisodeAccounting, EpisodeEngine
from megatron_dapo.types import Completion
from tests.unit.engines.endpoint.client_programs import CLIENTS, TALKS
from tests.unit.environments.test_pool import nothing_left  # noqa: F401
from tests.unit.rollout import episode_world as world
from tests.unit.rollout import test_episodes_real_engine as embedded

PACKAGES = Path(__file__).resolve().parents[4] / ".venv-agents"
PROGRAM = Path(__file__).with_name("client_programs.py")
BUSY_S = 120.0  # a busy machine may take this long
SAID = (
    *(f'See.<tool_call>{{"name": "lookup", "arguments": {{"word": "w{number}"}}}}</tool_call>' for number in range(4)),
    "It is a word.",
)


SHELL = (
    "mkdir work && echo 'totl = 2 + 2' > work/sum.py",
    "sed -i s/totl/total/ work/sum.py && cat work/sum.py",
    "cat work/missing.py",
    "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat work/sum.py",
)


def make_pool(template: Path) -> WorkerPool:
    settings = {
        "command": [sys.executable, str(PROGRAM), str(PACKAGES)],
        **{"temperature": 1.0, "top_p": 1.0, "other_sampling": "refuse", "max_branches": 1},
        "template": {"path": str(template), "trust_remote_code": False, "name": "chat", "options": {}, "history": "keep"},
    }
    command = (sys.executable, "-m", AGENTS, json.dumps(settings))
    return WorkerPool(WorkerSettings("command", command=command, step_seconds=BUSY_S, reset_seconds=BUSY_S))


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a model with the tokenizer that the world has."""
    if not PACKAGES.is_dir():
        pytest.skip("the clients are not installed; make .venv-agents installs them")
    turns, path = world.template("qwen3", "keep"), tmp_path_factory.mktemp("model")
    turns.template.tokenizer.save_pretrained(path)  # type: ignore[attr-defined]
    (path / "config.json").write_text(json.dumps({"model_type": "phi3", "eos_token_id": turns.stop_token_ids[0]}))
    return path


@pytest.fixture(scope="module")
def pool(template: Path) -> Iterator[WorkerPool]:
    with make_pool(template) as pool:
        yield pool


def make_engine(monkeypatch: pytest.MonkeyPatch, said: Sequence[str]) -> world.FakeTurnEngine:
    """An engine whose turns are those of a script."""
    turns, places = world.template("qwen3", "keep"), defaultdict[int, list[int]](list)

    def turn_of(_: object, seed: int, position: int) -> list[int]:
        if position not in places[seed]:
            places[seed].append(position)
        return [*turns.template.encode(said[places[seed].index(position)]), turns.stop_token_ids[0]]

    monkeypatch.setattr(world, "turn_of", turn_of)
    return world.FakeTurnEngine(turns)


def assert_one_stream(done: Completion, num_turns: int, contexts: list[tuple[int, ...]]) -> None:
    assert done.episode is not None and done.episode.end == "done", done.episode
    assert not done.num_segments and len(done.episode.turns) == num_turns
    assert done.prompt_ids is not None
    stream = (*done.prompt_ids, *done.token_ids.tolist())
    assert contexts == [stream[: len(done.prompt_ids) + turn.start] for turn in done.episode.turns]


def test_a_conversation_with_a_tool_is_one_stream(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = make_engine(monkeypatch, SAID)
    turns = inner.turns
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


def test_mini_swe_agent_works_in_a_shell(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command runs in the episode's directory; what it printed is the answer to its turn."""
    calls = [json.dumps({"name": "bash", "arguments": {"command": command}}) for command in SHELL]
    inner = make_engine(monkeypatch, [f"Next.<tool_call>{call}</tool_call>" for call in calls])
    limits = world.settings(retries=0, max_prompt_tokens=9000, max_context_tokens=12000, max_turns=len(SHELL) + 1)
    engine = EpisodeEngine(inner, pool, inner.turns, limits)
    engine.submit([world.request("e", inner.turns, 1, 2000, client="mini-swe-agent", question="Mend sum.py.")])
    (done,) = world.drain(engine)
    assert_one_stream(done, len(SHELL), [one.prompt_ids for one in inner.requests])
    assert done.episode is not None and dict(done.episode.parts) == {"total = 2 + 2\n": 1.0}, done.episode
    text = inner.turns.template.tokenizer.decode(done.token_ids.tolist())
    assert text.count("<tool_response>") == len(SHELL) - 1 and "No such file or directory" in text


@pytest.mark.parametrize(
    "seeds",
    [range(6), *(pytest.param(range(first, first + 100), marks=pytest.mark.long) for first in (0, 100))],
)
def test_sessions_whose_programs_die_are_not_lost(
    template: Path,
    nothing_left: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    seeds: range,
) -> None:
    """Each 20th program is killed in its session, at another turn each; what was sampled for it is not sampled again."""
    inner, died = make_engine(monkeypatch, SAID), tmp_path_factory.mktemp("died")
    dying = {seed: (seed // 20 + 2) % len(SAID) for seed in seeds if seed % 20 == 3}
    limits = world.settings(max_context_tokens=4000, max_turns=len(SAID) + 1, max_environments=4, order="arrival")
    with make_pool(template) as pool:
        engine = EpisodeEngine(inner, pool, inner.turns, limits)
        for seed in seeds:
            task = {"client": "dies", "died": str(died / str(seed)), "turn": dying[seed]} if seed in dying else {"client": "openai"}
            engine.submit([world.request(f"e{seed:03}", inner.turns, seed, 2000, **task)])
        finished = world.drain(engine)
    for done in finished:
        assert done.episode is not None and (done.episode.end, len(done.episode.turns)) == ("done", len(SAID))
        assert dict(done.episode.parts) == {SAID[-1]: 1.0} and not done.num_segments
        assert done.episode.num_retries == (int(done.request_id[1:]) in dying), done.episode
    counts = engine.accounting()
    assert counts == EpisodeAccounting(len(seeds), {"done": len(seeds)}, 0, 0, {}, retried=len(dying))
    assert set(inner.sampled.values()) == {1}
    assert len(inner.sampled) == sum(done.num_sampled for done in finished)


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
