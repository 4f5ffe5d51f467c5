"""A worker process with episodes, and the lines that it and its owner exchange (see `remote.worker`)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from megatron_dapo.environments.protocol import Action, Reply, Task
from megatron_dapo.types import CallStatus, TurnCall
from megatron_dapo.workers.process import WorkerProcess

_ROLES = ("system", "user", "assistant", "tool")
_STATUSES = get_args(CallStatus)


@dataclass(eq=False)
class OpenEpisode:
    """An episode as its owner sees it."""

    number: int  # id on the wire; an `episode_id` may begin again
    episode_id: str
    task: Task
    directory: Path
    state: Literal["pending", "acting", "idle", "timed_out", "ending"] = "pending"
    deadline: float = math.inf  # end of the open reset, step or close
    seconds: float = 0.0  # time that its environment has taken
    has_begun: bool = False  # its reset has been answered
    lost: str = ""  # reason its worker has gone, until the next `act` learns of it
    is_cause: bool = True  # False: another episode took its worker down


@dataclass(eq=False)
class EnvironmentProcess(WorkerProcess):
    """A worker process that plays several episodes."""

    episodes: dict[int, OpenEpisode] = field(default_factory=dict)  # episodes that it has and that have not ended
    directories: list[Path] = field(default_factory=list)  # removed once it has ended
    num_begun: int = 0
    is_leaving: bool = False  # it gets no new episodes

    def send(self, message: Mapping[str, Any]) -> None:
        """Queue a line for writing."""
        self.unsent += json.dumps(message).encode() + b"\n"


def start_line(episode: OpenEpisode) -> dict[str, Any]:
    line = {
        "op": "start",
        "episode": episode.number,
        "task": dict(episode.task.fields),
        "seed": episode.task.seed,
        "directory": str(episode.directory),
    }
    return line if episode.task.state is None else {**line, "state": episode.task.state}


def act_line(episode: OpenEpisode, action: Action) -> dict[str, Any]:
    return {
        "op": "act",
        "episode": episode.number,
        "text": action.text,
        "calls": [vars(call) | {"arguments": dict(call.arguments)} for call in action.calls],
        "finish_reason": action.finish_reason,
        "reasoning": action.reasoning,
        "raw_text": action.raw_text,
        "num_tokens": action.num_tokens,
        "num_prompt_tokens": action.num_prompt_tokens,
    }


def reply_of(message: Mapping[str, Any], episode: OpenEpisode) -> Reply:
    """Return a worker's line as a reply. ValueError in one line if it is none."""
    if "lost" in message:
        return Reply(episode.episode_id, lost=str(message["lost"]) or "no reason given")
    messages, tools, calls = (_list_of_objects(message, name) for name in ("messages", "tools", "calls"))
    for one in messages:
        if one.get("role") not in _ROLES or not isinstance(one.get("content"), str):
            raise ValueError(f'a message is {{"role": {" | ".join(_ROLES)}, "content": text}}')
    done, is_correct = message.get("done", False), message.get("is_correct")
    if not isinstance(done, bool) or not isinstance(is_correct, (bool, type(None))):
        raise ValueError("done and is_correct are truth values")
    is_restored = episode.task.state is not None and not episode.has_begun
    if not messages and not done and not is_restored:
        raise ValueError("it has no messages and is not done")
    after, begins = message.get("after"), message.get("begins", "")
    if not isinstance(after, (int, type(None))) or not isinstance(begins, str):
        raise ValueError("after is the number of a turn, and begins is a reason")
    return Reply(
        episode.episode_id,
        messages=tuple(messages),
        tools=() if episode.has_begun and not begins else tuple(tools),
        done=done,
        reward=None if message.get("reward") is None else _number(message["reward"], "reward"),
        is_correct=is_correct,
        parts=_numbers(message, "parts"),
        figures=_numbers(message, "figures"),
        calls=tuple(_call(call) for call in calls),
        max_tokens=None if message.get("max_tokens") is None else max(1, int(_number(message["max_tokens"], "max_tokens"))),
        after=after,
        begins=begins,
        seconds=_number(message.get("seconds", 0.0), "seconds"),
        state=message.get("state"),
    )


def _list_of_objects(message: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    value = message.get(name, [])
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise ValueError(f"{name} is no list of objects")
    return value


def _numbers(message: Mapping[str, Any], name: str) -> dict[str, float]:
    values = message.get(name, {})
    if not isinstance(values, dict):
        raise ValueError(f"{name} is an object of numbers")
    return {str(key): _number(value, f"{name}.{key}") for key, value in values.items()}


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{name} is no finite number")
    return float(value)


def _call(call: Mapping[str, Any]) -> TurnCall:
    if call.get("status") not in _STATUSES or not isinstance(call.get("name"), str):
        raise ValueError(f"a call has a name and a status: {', '.join(_STATUSES)}")
    return TurnCall(call["name"], call["status"], _number(call.get("seconds", 0.0), "seconds"))
