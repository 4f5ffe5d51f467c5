"""Tries an environment before a run: plays tasks twice with a scripted policy and looks at all that a run relies on."""

from __future__ import annotations

import json
import random
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_dapo.data.tool_calls import Tool, ToolCall
from megatron_dapo.environments.pool import WorkerPool, WorkerSettings
from megatron_dapo.environments.protocol import Action, Reply, Task
from megatron_dapo.untrusted import one_line
from megatron_dapo.workers.supervisor import descendants

_WAIT_S = 1.0
_SHOWN = 120  # characters of an observation in a problem
_WORDS = ("yes", "no", "Answer: 1", "I do not know.", "higher", "")


@dataclass(frozen=True)
class CheckRow:
    """A line of the table. A run would refuse, or lose episodes, if it is not ok."""

    name: str
    is_ok: bool
    text: str


@dataclass
class PlayedEpisode:
    """An episode as it was played: replies without their seconds, which may differ."""

    replies: list[Reply] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def lost(self) -> str:
        return self.replies[-1].lost if self.replies else ""

    def add(self, reply: Reply) -> None:
        self.seconds.append(reply.seconds)
        calls = tuple(replace(call, seconds=0.0) for call in reply.calls)
        self.replies.append(replace(reply, episode_id="", seconds=0.0, calls=calls))


def check_environment(settings: WorkerSettings, tasks: Sequence[Mapping[str, Any]], max_turns: int) -> list[CheckRow]:
    """Return the table. Each task is played twice with the same seed and the same actions, as many at a time as in a run.

    ValueError in one line if the environment cannot be loaded or a task is not JSON.
    """
    with WorkerPool(settings) as pool:
        first, peak = play_all(pool, tasks, max_turns, settings)
        second, peak_again = play_all(pool, tasks, max_turns, settings)
    plays = [*first, *second]
    return [
        _loaded(settings, first),
        _lost(plays),
        _repeatable(first, second),
        _seconds("reset", [play.seconds[0] for play in plays if not play.replies[0].lost], settings.reset_seconds),
        _seconds(
            "step",
            [seconds for play in plays for seconds in play.seconds[1 : -1 if play.lost else None]],
            settings.step_seconds,
        ),
        _memory(max(peak, peak_again), settings),
        _turns(first, max_turns),
        _rewards(first),
        _calls(first),
    ]


def play_all(
    pool: WorkerPool, tasks: Sequence[Mapping[str, Any]], max_turns: int, settings: WorkerSettings
) -> tuple[list[PlayedEpisode], int]:
    """Play every task with a scripted policy. Return the episodes and the most memory of a worker, in bytes."""
    plays = [PlayedEpisode() for _ in tasks]
    policies = [random.Random(index) for index in range(len(tasks))]
    waiting, peak = list(range(len(tasks)))[::-1], 0
    open_episodes: set[int] = set()
    num_open = settings.num_processes * settings.episodes_per_process
    while waiting or open_episodes:
        while waiting and len(open_episodes) < num_open:
            index = waiting.pop()
            open_episodes.add(index)
            pool.start(str(index), Task(tasks[index], seed=index))
        for reply in pool.poll(_WAIT_S):
            index, play = int(reply.episode_id), plays[int(reply.episode_id)]
            play.add(reply)
            if reply.done or reply.lost or reply.timed_out or len(play.replies) > max_turns:
                pool.end(reply.episode_id)
                open_episodes.remove(index)
            else:
                pool.act(reply.episode_id, scripted_action(policies[index], play.replies))
        peak = max([peak, *map(memory_of, pool.processes())])
    return plays, peak


# ---- the scripted policy


def scripted_action(rng: random.Random, replies: Sequence[Reply]) -> Action:
    """Return a turn: calls of tools with arguments of their types, calls that failed, or words and numbers of the last message."""
    if replies[0].tools and rng.random() < 0.7:
        tool = Tool(rng.choice(replies[0].tools))
        if rng.random() < 0.2:
            return Action("", (ToolCall(tool.name).failed("bad_arguments", "they are made up"),), "stop")
        arguments = {name: _argument(rng, tool.schema["parameters"]["properties"][name]) for name in tool.required}
        return Action("", (ToolCall(tool.name, arguments),), "stop")
    words = re.findall(r"\w+", str(replies[-1].messages[-1]["content"])) if replies[-1].messages else []
    return Action(rng.choice([*_WORDS, str(rng.randint(0, 100)), *words[-8:]]), (), "stop")


def _argument(rng: random.Random, schema: Mapping[str, Any]) -> Any:
    kind = schema.get("type")
    values: dict[str, Any] = {
        "integer": rng.randint(-2, 100),
        "number": rng.uniform(-1.0, 1.0),
        "boolean": rng.random() < 0.5,
        "array": [],
        "object": {},
    }
    text = rng.choice(["1 + 1", "2 * (3 + 4)", "1 / 0", "word", ""])
    return rng.choice(schema["enum"]) if "enum" in schema else values.get(kind if isinstance(kind, str) else "", text)


# ---- rows of the table


def _loaded(settings: WorkerSettings, plays: Sequence[PlayedEpisode]) -> CheckRow:
    tools = next((play.replies[0].tools for play in plays if play.replies[0].tools), ())
    text = f"tools: {', '.join(str(tool['name']) for tool in tools)}" if tools else "no tools"
    return CheckRow("environment", True, f"{settings.name}; {text}")


def _lost(plays: Sequence[PlayedEpisode]) -> CheckRow:
    reasons = Counter(play.lost for play in plays if play.lost)
    if not reasons:
        return CheckRow("lost", True, f"none of {len(plays)} episodes")
    reason, count = reasons.most_common(1)[0]
    return CheckRow("lost", False, f"{sum(reasons.values())} of {len(plays)} episodes; {count} times: {reason}")


def _repeatable(first: Sequence[PlayedEpisode], second: Sequence[PlayedEpisode]) -> CheckRow:
    for index, (one, other) in enumerate(zip(first, second, strict=True)):
        if one.lost or other.lost:
            continue
        for turn, (reply, again) in enumerate(zip(one.replies, other.replies, strict=False)):
            if reply != again:
                return CheckRow(
                    "repeatable",
                    False,
                    f"task {index} with the same seed and actions, reply {turn}: {_told(reply)} and then {_told(again)}; "
                    "draw random numbers from task.random, not from `random`",
                )
    return CheckRow("repeatable", True, f"{len(first)} tasks, each played twice with one seed")


def _told(reply: Reply) -> str:
    content = {
        "messages": [message["content"] for message in reply.messages],
        "done": reply.done,
        "reward": reply.reward,
    }
    return one_line(json.dumps(content, ensure_ascii=False), _SHOWN)


def _seconds(name: str, seconds: Sequence[float], limit: float) -> CheckRow:
    if not seconds:
        return CheckRow(name, True, "never")
    most = max(seconds)
    text = f"{len(seconds)} times, median {statistics.median(seconds):.4f} s, longest {most:.3f} s"
    if most > limit / 2:
        return CheckRow(name, False, f"{text}: more than half of environment.{name}_seconds = {limit:g}; raise it")
    return CheckRow(name, True, f"{text}; environment.{name}_seconds = {limit:g}")


def _memory(peak: int, settings: WorkerSettings) -> CheckRow:
    limit = settings.memory_limit_mb
    text = f"{peak / 2**20:,.0f} MiB of address space in a worker; environment.memory_limit_mb = {limit:,}"
    return CheckRow("memory", peak < 0.8 * limit * 2**20, text)


def _turns(plays: Sequence[PlayedEpisode], max_turns: int) -> CheckRow:
    turns = [len(play.replies) - 1 for play in plays if not play.lost]
    done = sum(play.replies[-1].done for play in plays)
    length = [
        len(str(message["content"])) for play in plays for reply in play.replies[1:] for message in reply.messages
    ]
    text = f"{done} of {len(plays)} episodes ended by themselves within {max_turns} turns of a random policy"
    if turns:
        text += f"; turns: mean {statistics.mean(turns):.1f}"
    if length:
        text += f"; characters of an answer: median {statistics.median(length):g}, longest {max(length):,}"
    return CheckRow("turns", True, text)


def _rewards(plays: Sequence[PlayedEpisode]) -> CheckRow:
    rewards = [sum(reply.reward or 0.0 for reply in play.replies) for play in plays if play.replies[-1].done]
    given = any(reply.reward is not None for play in plays for reply in play.replies)
    if not given:
        return CheckRow("reward", True, "the environment gave none: reward.verifier decides")
    return CheckRow(
        "reward", True, f"of a random policy: {min(rewards, default=0.0):g} to {max(rewards, default=0.0):g}"
    )


def _calls(plays: Sequence[PlayedEpisode]) -> CheckRow:
    statuses = Counter(call.status for play in plays for reply in play.replies for call in reply.calls)
    text = ", ".join(f"{count} {status}" for status, count in statuses.most_common())
    return CheckRow("calls", True, text or "none")


def memory_of(pid: int) -> int:
    """Return the largest address space that a process below this one has had, in bytes."""
    peak = 0
    for process in descendants(pid):
        try:
            status = Path(f"/proc/{process}/status").read_text(encoding="ascii")
        except OSError:  # it has ended
            continue
        peak = max([peak, *(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmPeak"))])
    return peak
