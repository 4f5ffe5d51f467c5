"""Worker processes: real ones, with faults."""

from __future__ import annotations

import ctypes
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from megatron_dapo.data.tool_calls import ToolCall
from megatron_dapo.environments import pool as pool_module
from megatron_dapo.environments.pool import WorkerPool, WorkerSettings
from megatron_dapo.environments.protocol import Action, Reply, Task
from megatron_dapo.types import TurnCall
from tests.examples import examples
from tests.unit.environments import user_environments
from tests.unit.environments.user_environments import FAULTS

FILE = Path(user_environments.__file__)
BUSY_S = 60.0  # a busy machine may take this long


def settings(name: str, kind: str = "environment", **limits) -> WorkerSettings:
    return WorkerSettings(kind, f"{FILE}:{name}", **limits)


def say(text: str, *calls: ToolCall) -> Action:
    return Action(text, calls, "stop")


def next_reply(pool: WorkerPool) -> Reply:
    (reply,) = pool.poll(BUSY_S)
    return reply


def play(pool: WorkerPool, task: Task, *actions: Action) -> list[Reply]:
    pool.start("episode", task)
    replies = [next_reply(pool)]
    for action in actions:
        pool.act("episode", action)
        replies.append(next_reply(pool))
    pool.end("episode")
    return replies


@pytest.fixture
def nothing_left(tmp_path, monkeypatch):
    """Fail if a process, a file descriptor or a directory is left; orphans become children of this process."""
    prctl = ctypes.CDLL(None).prctl
    prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before, descriptors = set(psutil.Process().children(recursive=True)), os.listdir("/proc/self/fd")
    yield tmp_path
    prctl(36, 0, 0, 0, 0)
    assert set(psutil.Process().children(recursive=True)) <= before
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)
    assert list(tmp_path.iterdir()) == []


# A foreign interpreter has none of our libraries: no numpy, no site-packages at all.
@pytest.mark.parametrize("python", ["", "foreign"])
def test_an_environment_plays_in_a_worker(nothing_left, tmp_path_factory, python):
    if python:
        script = tmp_path_factory.mktemp("foreign") / "python"
        script.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
        script.chmod(0o700)
        python = str(script)
    number = random.Random(5).randint(1, 31)
    with WorkerPool(settings("Guess", python=python)) as pool:
        first, wrong, right = play(pool, Task({}, 5), say("0"), say(str(number)))
        again = play(pool, Task({}, 5), say("many"))
    assert first.messages == ({"role": "user", "content": "Guess a number of 1 to 31."},) and not first.done
    assert wrong.messages == ({"role": "user", "content": "higher"},) and wrong.reward == -0.02
    assert right == Reply(
        "episode", done=True, reward=1.0, is_correct=True, parts={"found": 1.0}, seconds=right.seconds
    )
    assert again[0].messages == first.messages
    assert again[1].lost.startswith("ValueError: invalid literal") and FILE.name in again[1].lost


def test_tools_and_functions_play_in_workers(nothing_left):
    calls = (ToolCall("calculate", {"expression": "2+2"}), ToolCall("calculate", {"expression": "1/0"}))
    task = Task({"messages": [{"role": "user", "content": "2+2?"}], "answer": "4", "question": "q"}, 1)
    with WorkerPool(settings("Calculator")) as pool:
        first, results, end = play(pool, task, say("", *calls), say("4"))
    assert first.messages == ({"role": "user", "content": "2+2?"},)
    assert [schema["name"] for schema in first.tools] == ["calculate", "wait"]
    assert [message["content"][:25] for message in results.messages] == ["4", "Error: calculate failed: "]
    assert [(call.name, call.status) for call in results.calls] == [("calculate", "ok"), ("calculate", "error")]
    assert all(isinstance(call, TurnCall) for call in results.calls) and not results.tools
    assert (end.done, end.reward, end.is_correct) == (True, 1.0, True)
    with WorkerPool(settings("chat_twice", "function")) as pool:
        first, second, end = play(pool, task, say("a"), say("4"))
    assert second.messages == ({"role": "user", "content": "You said a."},) and second.reward == 0.25
    assert (end.done, end.reward, end.is_correct) == (True, 1.0, True)
    with WorkerPool(settings("delegate", "function")) as pool:
        _, *branches, end = play(pool, task, *map(say, ("a b", "c", "c", "d")))
        assert [(one.after, one.begins, one.figures) for one in branches] == [
            *[(0, "", {"words": 2.0})] * 2,
            (None, "a search", {"words": 2.0}),
        ]
        assert end.figures == {"words": 2.0, "agreed": 1.0} and end.reward == 1.0
        play(pool, task, say("a"), say("c"))  # two calls wait: nothing is said after the end, which would end the worker
        assert play(pool, task, say("a"))[0].messages and not pool.counts["crashed"]
    with WorkerPool(settings("rewrite_history", "function")) as pool:
        assert "another history: message 0" in play(pool, task, say("a"))[1].lost


PROGRAM = """
import json, sys
say = lambda **message: print(json.dumps(message), flush=True)
say(ready="echo")
for line in sys.stdin:
    request = json.loads(line)
    number, op = request["episode"], request["op"]
    if op == "end":
        say(episode=number, ended=True)
    elif op == "start":
        say(episode=number, messages=[{"role": "user", "content": request["task"]["question"]}])
    elif request["text"] == "break":
        say(episode=number, messages="text")
    else:
        say(episode=number, done=True, reward=0.5)
"""


def test_a_program_speaks_the_lines_itself(nothing_left):
    with WorkerPool(WorkerSettings("command", command=(sys.executable, "-c", PROGRAM))) as pool:
        first, end = play(pool, Task({"question": "q"}, 1), say("anything"))
        broken = play(pool, Task({"question": "q"}, 1), say("break"))[-1]
    assert first.messages == ({"role": "user", "content": "q"},) and (end.done, end.reward) == (True, 0.5)
    assert "messages is no list of objects" in broken.lost


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (settings("nothing"), "has no 'nothing'; it has .*Guess"),
        (settings("NO_CLASS"), "is no class derived from megatron_dapo.environments.Environment"),
        (settings("Guess", "function"), r"is no function \(task, client\)"),
        (settings("FAULTS", "function"), r"is no function \(task, client\)"),
        (WorkerSettings("environment", "no_file.py:X"), "cannot import 'no_file.py'"),
        (settings("Guess", python="/no/python"), "environment.python = '/no/python' cannot be run"),
        (
            WorkerSettings("command", command=("echo", "Welcome")),
            r"echo Welcome: .*wrote 'Welcome', not {\"ready\": ...}",
        ),
        (WorkerSettings("command", command=("sh", "-c", "\n")), "sh -c: its worker ended with exit status 0"),
        (WorkerSettings("command", command=("no-program",)), "environment.command: no-program: No such file"),
    ],
    ids=lambda value: "" if isinstance(value, str) else value.name.rpartition(":")[2],
)
def test_what_cannot_be_loaded_is_refused_in_one_line(nothing_left, wrong, reason):
    with pytest.raises(ValueError, match=reason) as error:
        WorkerPool(wrong)
    assert "\n" not in str(error.value)


def test_a_tool_without_types_is_refused_in_one_line(nothing_left, tmp_path_factory):
    file = tmp_path_factory.mktemp("untyped") / "untyped.py"
    file.write_text(
        "from megatron_dapo.environments import ToolEnvironment, tool\n"
        "class Untyped(ToolEnvironment):\n"
        "    @tool\n"
        "    def look(self, word):\n"
        '        """Look a word up."""\n'
    )
    with pytest.raises(ValueError, match="tool 'look': parameter 'word' has no type") as error:
        WorkerPool(WorkerSettings("environment", f"{file}:Untyped"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("fault", "reason"), [
    ("raise", r"RuntimeError: on purpose \(user_environments.py, line \d+\)"),
    ("lost", "the data base is down"),
    ("hang", "reset took longer than environment.reset_seconds = 2"),
])  # fmt: skip
def test_an_environment_that_fails_in_reset_is_lost_in_one_line(nothing_left, monkeypatch, fault, reason):
    monkeypatch.setattr(pool_module, "_LATE_S", 0.1)
    # Long enough for the next reset, in a new worker of a busy machine.
    with WorkerPool(settings("Misbehaving", reset_seconds=2.0)) as pool:
        (reply,) = play(pool, Task({"fault": fault, "at": 0}, 1))
        (again,) = play(pool, Task({}, 1))  # the id may begin again
    assert re.fullmatch(reason, reply.lost) and reply == Reply("episode", lost=reply.lost)
    assert again.messages and not again.lost


def test_a_late_episode_ends_its_worker_and_all_that_it_started(nothing_left, monkeypatch):
    """Each hangs or ends in another way."""
    monkeypatch.setattr(pool_module, "_LATE_S", 0.1)
    faults = ["hang", "daemon", "stop", "fill", "close", "kill", "memory", "exit", "garbage"]
    limits = {"num_processes": len(faults), "episodes_per_process": 1, "step_seconds": 4.0}
    with WorkerPool(settings("Misbehaving", **limits)) as pool:
        for fault in faults:
            pool.start(fault, Task({"fault": fault, "at": 1}, 1))
        begun = []
        while len(begun) < len(faults):
            begun += pool.poll(BUSY_S)
        for fault in faults:
            pool.act(fault, say("go"))
        lost = {}
        while len(lost) < len(faults):
            lost |= {reply.episode_id: reply.lost for reply in pool.poll(BUSY_S)}
    late = "step took longer than environment.step_seconds = 4"
    assert {fault: lost[fault] for fault in ("hang", "daemon", "stop", "fill")} == dict.fromkeys(
        ("hang", "daemon", "stop", "fill"), late
    )
    assert lost["kill"] == "its worker was killed by signal 9" and "exit status 3" in lost["exit"]
    assert "environment.memory_limit_mb = 2048" in lost["memory"] and "wrote 'garbage'" in lost["garbage"]
    assert lost["close"]


def test_siblings_of_a_late_episode_are_lost_at_their_next_turn(nothing_left, monkeypatch):
    monkeypatch.setattr(pool_module, "_LATE_S", 0.1)
    with WorkerPool(settings("Misbehaving", step_seconds=0.3)) as pool:
        pool.start("late", Task({"fault": "hang", "at": 1}, 1))
        pool.start("sibling", Task({}, 1))
        replies = pool.poll(BUSY_S)
        replies += pool.poll(BUSY_S) if len(replies) < 2 else []
        pool.act("late", say("go"))
        assert next_reply(pool).lost.startswith("step took longer")
        assert pool.poll(0.0) == []  # nothing was sent to the sibling that has no answer
        pool.act("sibling", say("go"))
        reply = next_reply(pool)
        assert reply.lost.startswith("its worker was killed, because another episode's step took longer")
        assert not reply.is_cause
        assert pool.counts == {"started": 2, "killed": 1} or pool.counts == {"started": 1, "killed": 1}


def test_an_episode_without_time_is_told_so_and_takes_no_other_down(nothing_left, monkeypatch):
    """episode_seconds is a limit of the episode: its worker goes on, and what it says later is dropped."""
    monkeypatch.setattr(pool_module, "_LATE_S", 0.1)
    with WorkerPool(settings("Misbehaving", episode_seconds=1.0)) as pool:
        pool.start("late", Task({"fault": "slow", "at": 1}, 1))
        pool.start("sibling", Task({}, 1))
        replies = pool.poll(BUSY_S)
        replies += pool.poll(BUSY_S) if len(replies) < 2 else []
        pool.act("late", say("go"))
        late = next_reply(pool)
        assert (late.timed_out, late.lost, late.done, late.messages) == (True, "", False, ())
        assert pool.poll(1.5) == []  # its step ends meanwhile
        pool.end("late")
        pool.act("sibling", say("go"))
        assert next_reply(pool).messages and not pool.counts["killed"]


def test_an_environment_goes_on_from_a_state(nothing_left):
    """Also random numbers do; `reset` is not called again."""
    with WorkerPool(settings("Restorable", with_state=True)) as pool:
        first, second, third, last = play(pool, Task({}, 3), say("a"), say("b"), say("c"))
        assert last.done and last.state is None and first.state["environment"] == {"num_steps": 0}
        for state, expected in ((first.state, [second, third]), (second.state, [third])):
            begun, *again = play(pool, Task({}, 3, state), *[say("a"), say("b")][-len(expected) :])
            assert begun.messages == () and [reply.messages for reply in again] == [reply.messages for reply in expected]
    assert settings("Misbehaving").with_state is False
    with pytest.raises(ValueError, match=r"Misbehaving' has no get_state\(self\) and set_state\(self, state\), which environment.resume"):
        WorkerPool(settings("Misbehaving", with_state=True))


def test_processes_are_replaced_and_directories_removed(nothing_left):
    with WorkerPool(settings("Misbehaving", max_episodes_per_process=2)) as pool:
        first = [play(pool, Task({}, 3), say("a"))[1].messages for _ in range(5)]
        assert len({str(messages) for messages in first}) == 1  # the same seed, the same environment
        assert pool.counts["replaced"] == 2
        end = time.monotonic() + BUSY_S
        (scratch,) = nothing_left.iterdir()
        while list(scratch.iterdir()) and time.monotonic() < end:
            time.sleep(0.01)
        assert not list(scratch.iterdir())


def test_a_worker_that_grows_is_replaced_or_ended_with_its_memory_named(nothing_left, caplog):
    """Below the limit, once its episodes have ended; above it, with the processes that it has started, at once."""
    with WorkerPool(settings("Misbehaving", memory_limit_mb=500, num_processes=1, episodes_per_process=1)) as pool:
        end = time.monotonic() + BUSY_S
        while not pool.counts["replaced"] and time.monotonic() < end:
            play(pool, Task({"fault": "grow", "at": 1}, 1), say("a"))
        lost = play(pool, Task({"fault": "children", "at": 1}, 1), say("a"))[1].lost
    assert re.search(r"environment .*:Misbehaving: a process holds \d+ MiB after \d episodes, .*memory_limit_mb = 500", caplog.text)
    assert re.fullmatch(
        r".*:Misbehaving: its worker and the processes that it had started held more than 500 MiB of memory \(environment.memory_.*", lost
    )


def test_directories_of_a_killed_pool_are_removed_by_the_next(nothing_left):
    old = nothing_left / f"{pool_module._SCRATCH}old"
    (old / "1").mkdir(parents=True)
    (old / "1").chmod(0o500)
    with WorkerPool(settings("Misbehaving")):
        assert not old.exists()


def test_an_end_that_crosses_a_reply_is_final(nothing_left):
    with WorkerPool(settings("Misbehaving")) as pool:
        for seed in range(20):
            pool.start("episode", Task({}, seed))
            if seed % 2:
                time.sleep(0.002 * (seed % 5))
            pool.end("episode")
        pool.end("never begun")
        assert play(pool, Task({}, 7), say("a"))[1].messages[0]["content"].startswith("a 1 ")
        with pytest.raises(ValueError, match="task of episode x is not JSON"):
            pool.start("x", Task({"set": {1}}, 0))


def test_every_request_has_one_reply_under_faults(nothing_left, monkeypatch):
    """Episodes of which a fifth meets a fault in its first attempt, each kind at least once; lost ones begin again with their
    seed."""
    monkeypatch.setattr(pool_module, "_LATE_S", 0.1)
    count = examples(200)
    kinds = ["raise", "lost", "exit", "kill", "hang", "garbage", "memory", "leave"]
    rng = random.Random(0)
    faults = {f"e{index}": {"fault": kinds[index % len(kinds)], "at": rng.randrange(4)} for index in range(0, count, 5)}
    waiting: dict[str, int] = {}  # open requests by episode
    attempts, steps, ends, lost = Counter(), {}, Counter(), Counter()
    observations: dict[str, set[str]] = {}

    def begin(episode: str) -> None:
        fault = faults.get(episode, {}) if not attempts[episode] else {}
        attempts[episode] += 1
        steps[episode], waiting[episode] = 0, 1
        pool.start(episode, Task(fault, int(episode[1:])))

    limits = {"num_processes": 3, "episodes_per_process": 8, "step_seconds": 0.5, "reset_seconds": 0.5}
    with WorkerPool(settings("Misbehaving", **limits, max_episodes_per_process=count // 5)) as pool:
        queue = [f"e{index}" for index in range(count)]
        while queue or waiting:
            while queue and len(waiting) < 24:
                begin(queue.pop())
            for reply in pool.poll(BUSY_S):
                episode = reply.episode_id
                assert waiting.pop(episode) == 1
                if reply.lost:
                    lost[episode] += 1
                    queue.append(episode)
                elif reply.done:
                    ends[episode] += 1
                else:
                    observations.setdefault(f"{episode} {steps[episode]}", set()).add(reply.messages[0]["content"])
                    steps[episode] += 1
                    waiting[episode] = 1
                    pool.act(episode, say("a"))
        assert pool.poll(0.2) == []
    assert ends == Counter({f"e{index}": 1 for index in range(count)})  # each once
    injected = {episode for episode, fault in faults.items() if fault["fault"] != "leave"}
    assert injected <= set(lost)
    assert all(attempts[episode] == lost[episode] + 1 for episode in attempts)
    assert all(len(texts) == 1 for texts in observations.values())  # the same seed, the same environment


def test_all_faults_are_used():
    text = Path(__file__).read_text(encoding="utf-8")
    assert all(f'"{fault}"' in text for fault in FAULTS)
