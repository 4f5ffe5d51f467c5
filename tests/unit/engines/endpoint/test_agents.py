"""Agent programs as episodes: real processes, in a real worker, over the pool that runs environments."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from megatron_dapo.data.tool_calls import ToolCall
from megatron_dapo.engines.endpoint import AGENTS
from megatron_dapo.engines.endpoint.agents import reward_of
from megatron_dapo.environments.pool import WorkerPool, WorkerSettings
from megatron_dapo.environments.protocol import Action, Reply, Task

AGENT = Path(__file__).with_name("agent.py")
BUSY_S = 60.0  # a busy machine may take this long


def make_pool(**more: object) -> WorkerPool:
    settings = {"command": [sys.executable, str(AGENT)], "temperature": 1.0, "top_p": 1.0, "other_sampling": "refuse", "max_branches": 3}
    command = (sys.executable, "-m", AGENTS, json.dumps({**settings, **more}))
    return WorkerPool(WorkerSettings("command", command=command, step_seconds=BUSY_S, reset_seconds=BUSY_S))


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with make_pool() as pool:
        yield pool
    assert not agents()


def next_reply(pool: WorkerPool) -> Reply:
    (reply,) = pool.poll(BUSY_S)
    return reply


def agents() -> list[str]:
    """Commands of programs that run, and of what they have started."""
    commands = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            commands += [" ".join(process.cmdline())] if process.status() != "zombie" else []
    return [command for command in commands if command.endswith("agent.py") or command.startswith("sleep")]


def test_a_message_without_a_place_in_the_template_is_refused_and_counted() -> None:
    """The program reads why, and goes on; nothing else comes to an end."""
    with make_pool(roles=["user"]) as pool:
        pool.start("e", Task({"kind": "result of a tool"}, seed=5))
        next_reply(pool)
        pool.act("e", Action("a call", (), "stop"))
        (said,) = next_reply(pool).messages
        assert said["content"] == "a message of the role tool cannot follow an answer of this model; use user"
        pool.act("e", Action("done", (), "stop"))
        last = next_reply(pool)
        assert last.done and last.is_correct and dict(last.figures) == {"requests_refused": 1}
        pool.end("e")


def test_a_program_plays_an_episode_and_says_its_reward(pool: WorkerPool) -> None:
    pool.start("e", Task({"kind": "plays"}, seed=5))
    first = next_reply(pool)
    assert first.messages == ({"role": "user", "content": "begin 5"},) and first.max_tokens == 7
    assert [tool["name"] for tool in first.tools] == ["add"]
    pool.act("e", Action("", (ToolCall("add", {"x": 1}),), "stop"))
    second = next_reply(pool)
    assert second.messages == ({"role": "tool", "content": "3"},) and second.max_tokens is None and not second.done
    pool.act("e", Action("done", (), "stop"))
    last = next_reply(pool)
    assert (last.done, last.reward, last.is_correct, dict(last.parts)) == (True, 0.25, True, {"done": 1.0})
    pool.end("e")


def test_a_call_that_cannot_be_read_is_text_for_the_program(pool: WorkerPool) -> None:
    pool.start("e", Task({"kind": "plays"}, seed=5))
    next_reply(pool)
    pool.act("e", Action("", (ToolCall("add", {"x": 1}),), "stop"))
    next_reply(pool)
    broken = ToolCall("").failed("unparsable", "not JSON")
    pool.act("e", Action("", (broken,), "stop", raw_text="<tool_call>{"))
    assert dict(next_reply(pool).parts) == {"<tool_call>{": 1.0}
    pool.end("e")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("fails", "exit status 1: ImportError: no module named tools"), ("silent", "ended without a request")],
)
def test_a_program_that_fails_is_lost(pool: WorkerPool, kind: str, reason: str) -> None:
    pool.start("e", Task({"kind": kind}, seed=1))
    reply = next_reply(pool)
    assert reason in reply.lost, reply


def test_another_history_is_another_conversation_and_the_first_one_goes_on(pool: WorkerPool) -> None:
    pool.start("e", Task({"kind": "branches"}, seed=1))
    next_reply(pool)
    pool.act("e", Action("", (ToolCall("add", {"x": 1}),), "stop"))
    edited = next_reply(pool)
    assert (edited.begins, edited.after) == ("the client changed message 1 of 3 (user)", None)
    assert [tool["name"] for tool in edited.tools] == ["add"]
    question, answer, result = edited.messages
    assert question["content"] == "another" and result == {"role": "tool", "content": "3"}
    assert answer["tool_calls"][0]["function"] == {"name": "add", "arguments": {"x": 1}}, "as templates render it"
    pool.act("e", Action("b", (), "stop"))
    first = next_reply(pool)
    assert (first.messages, first.after, first.begins) == (({"role": "tool", "content": "3"},), 0, "")
    pool.act("e", Action("c", (), "stop"))
    again = next_reply(pool)
    assert (again.messages, again.after, again.begins) == (({"role": "tool", "content": "3"},), 0, "")
    pool.act("e", Action("d", (), "stop"))
    last = next_reply(pool)
    assert (last.done, dict(last.parts)) == (True, {"bcd": 1.0}), last
    pool.end("e")


def test_requests_at_the_same_time_are_answered_one_after_another(pool: WorkerPool) -> None:
    pool.start("e", Task({"kind": "parallel"}, seed=1))
    asked = []
    for turn in range(3):
        asked.append(next_reply(pool))
        pool.act("e", Action(f"to {asked[-1].messages[0]['content']}", (), "stop"))
    assert sorted(one.messages[0]["content"] for one in asked) == ["0", "1", "2"]
    assert [one.begins for one in asked] == ["", "a new conversation", "a new conversation"]
    assert dict(next_reply(pool).parts) == {"to 0, to 1, to 2": 1.0}
    pool.end("e")


def test_a_program_that_begins_too_many_conversations_is_lost(pool: WorkerPool) -> None:
    pool.start("e", Task({"kind": "parallel", "calls": 4}, seed=1))
    replies = [next_reply(pool)]
    while not replies[-1].lost:
        pool.act("e", Action("said", (), "stop"))
        replies.append(next_reply(pool))
    assert replies[-1].lost.startswith("the client began more than 3 conversations in one episode"), replies
    assert not [command for command in agents() if command.endswith("agent.py")]


def test_many_programs_play_at_a_time_and_nothing_is_left(pool: WorkerPool) -> None:
    kinds = {f"e{index}": ("plays", "hangs", "leaves")[index % 3] for index in range(6)}
    for name, kind in kinds.items():
        pool.start(name, Task({"kind": kind}, seed=1))
    replies: list[Reply] = []
    while len(replies) < 6:
        replies += pool.poll(BUSY_S)
    assert {reply.episode_id for reply in replies} == set(kinds) and not any(reply.lost for reply in replies)
    assert agents(), "they wait for the policy"
    for name in kinds:
        pool.act(name, Action("said", (ToolCall("add", {}),), "stop"))
    done = [name for name, kind in kinds.items() if kind != "hangs"]
    replies = []
    while len(replies) < len(done):
        replies += pool.poll(BUSY_S)
    assert {reply.episode_id for reply in replies} == set(done)
    for name in kinds:
        pool.end(name)
    end = time.monotonic() + BUSY_S
    while left := agents():
        assert time.monotonic() < end, left
        time.sleep(0.02)
    assert all(os.path.exists(f"/proc/{pid}") for pid in pool.processes()), "the worker itself stays"


def test_a_command_that_does_not_exist_is_named() -> None:
    settings = {"command": ["no-such-agent"], "temperature": 1.0, "top_p": 1.0, "other_sampling": "refuse", "max_branches": 3}
    with WorkerPool(WorkerSettings("command", command=(sys.executable, "-m", AGENTS, json.dumps(settings)))) as pool:
        pool.start("e", Task({}, seed=1))
        assert next_reply(pool).lost == "environment.agent: no-such-agent: No such file or directory"


@pytest.mark.parametrize(
    ("output", "reward"),
    [
        ("log\n1.5\n", {"reward": 1.5, "is_correct": None, "parts": {}}),
        ("true", {"reward": 1.0, "is_correct": True, "parts": {}}),
        ('{"reward": 2, "parts": {"a": true}}', {"reward": 2.0, "is_correct": None, "parts": {"a": 1.0}}),
        ("finished", {}),
        ("", {}),
        ('{"score": 2}', {}),
    ],
)
def test_the_last_line_may_be_the_reward(output: str, reward: dict) -> None:
    assert reward_of(output) == reward


@pytest.mark.parametrize("output", ["NaN", '{"reward": "high"}', '{"reward": 1, "correct": 1}', '{"reward": 1, "parts": [1]}', '{"reward": 1, "parts": {"": 2}}'])
def test_a_reward_that_is_none_loses_the_episode_and_names_it(output: str) -> None:
    assert output in reward_of(output)["lost"]
