"""A worker process: several episodes, each in a thread, with JSON lines over pipes. Standard library only.

    owner -> worker   {"kind": "environment" | "function" | "either" | "command", "place": ..., limits}    once
    worker -> owner   {"ready": name, "tools": [names], "result_role": ...} or {"failed": message}                  once
    owner -> worker   {"op": "start", "episode": n, "task": {...}, "seed": n, "directory": path}
                      {"op": "act", "episode": n, "text": ..., "calls": [...], "finish_reason": ..., "reasoning": ...,
                       "raw_text": ..., "num_tokens": n, "num_prompt_tokens": n}
                      {"op": "end", "episode": n}
    worker -> owner   {"episode": n, "messages": [...], "tools": [...], "done": bool, "reward": ..., "is_correct": ...,
                       "parts": {...}, "figures": {...}, "calls": [...], "seconds": s,
                       "max_tokens": n, "state": ...}                     one for each start and act
                      {..., "after": turn}: the messages follow an earlier turn, by its number from 0
                      {..., "begins": reason, "tools": [...]}: they are another conversation of the episode
                      {"episode": n, "lost": reason}                      instead of it
                      {"episode": n, "ended": true, "stuck": bool, "memory_mb": n}
                                                                          one for each end, after everything is closed

An external program (`command`) speaks the same lines without the first, which is for this file. Whatever a user's Python
code prints goes to /dev/null.
"""

from __future__ import annotations

import asyncio
import inspect
import io
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from typing import Any, BinaryIO

from megatron_dapo.environments.remote.api import (
    AsyncClient,
    Client,
    Environment,
    EpisodeEnded,
    EpisodeTask,
    Lost,
    ModelCall,
    ModelTurn,
    Step,
    ToolEnvironment,
    awaited,
    checked_messages,
)
from megatron_dapo.hooks import load_hook
from megatron_dapo.untrusted import one_line
from megatron_dapo.workers.pipes import claim_pipes, limit_resources, send
from megatron_dapo.workers.supervisor import resident_pages, start_supervised

MAX_REPLY_BYTES = 2**19  # longest line
OUT_OF_MEMORY = 71  # exit code of a worker that met its limit: any of its episodes may have caused it
_MAX_REASON = 500  # characters
_STACK_BYTES = 2**21  # a thread's stack; the default of 8 MiB counts against the memory limit


def main() -> None:
    """Serve episodes until the owner closes the pipe."""
    # Slurm signals every process of a job. A handler, not SIG_IGN, which programs that a user starts would inherit.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    settings = json.loads(io.FileIO(0, "rb", closefd=False).readline())  # Unbuffered: the rest may be a command's.
    if settings["kind"] == "command":
        _become(settings)
        return
    requests, replies = claim_pipes()
    start_supervised(settings["max_processes"], settings["max_resident_mb"])
    limit_resources(settings["memory_limit_mb"], 0)
    threading.stack_size(_STACK_BYTES)
    try:
        play = load(settings)
    except BaseException as error:
        send(replies, {"failed": one_line(error, _MAX_REASON)})
        return
    send(replies, {"ready": settings["place"], **play.hello})
    _Worker(play, replies).serve(io.BufferedReader(requests))
    os._exit(0)  # threads that never end


def _become(settings: Mapping[str, Any]) -> None:
    """Run the user's program in place of this one, with its pipes."""
    start_supervised(settings["max_processes"], settings["max_resident_mb"])
    limit_resources(settings["memory_limit_mb"], 0)
    try:
        os.execvp(settings["command"][0], settings["command"])
    except OSError as error:
        with os.fdopen(1, "wb") as replies:
            send(replies, {"failed": f"environment.command: {settings['command'][0]}: {error.strerror}"})


# ---- what is played


class Play:
    """How to play an episode: an environment's class or a function."""

    def __init__(self, subject: Any, is_function: bool, with_state: bool = False, max_branches: int = 1) -> None:
        self._subject, self._is_function = subject, is_function
        self._with_state, self._max_branches = with_state, max_branches
        self.hello: dict[str, Any] = {"tools": []}
        if not is_function and issubclass(subject, ToolEnvironment):
            self.hello = {"tools": list(subject.all_tools()), "result_role": subject.result_role}

    async def __call__(self, task: EpisodeTask, episode: _Episode) -> None:
        if self._is_function:
            await self._function(task, episode)
        else:
            await self._environment(task, episode)

    async def _function(self, task: EpisodeTask, episode: _Episode) -> None:
        client = Client(episode.exchange, self._max_branches)
        is_async = inspect.iscoroutinefunction(self._subject)
        result = await awaited(self._subject(task, AsyncClient(client) if is_async else client))
        episode.exchange(_reply_of(client.final(result)))

    async def _environment(self, task: EpisodeTask, episode: _Episode) -> None:
        environment: Environment = self._subject()
        environment.task = task
        try:
            begin = {"messages": await self._begin(environment, task, episode.state), "tools": environment.tool_schemas()}
            turn = episode.exchange({**begin, **self._state_of(environment, task)})
            while True:
                step = await awaited(environment.step(turn))
                if not isinstance(step, Step):
                    raise ValueError(f"step returned {type(step).__name__}, not a Step")
                state = {} if step.done else self._state_of(environment, task)
                turn = episode.exchange({**_reply_of(step), **state})
        finally:
            episode.is_stuck = getattr(environment, "is_stuck", False)
            await awaited(environment.close())

    async def _begin(self, environment: Environment, task: EpisodeTask, state: Any) -> list[dict[str, Any]]:
        """Return the begin of the conversation, or nothing if it continues from a state."""
        if state is not None:
            task.random_state = state["random"]
            await awaited(environment.set_state(state["environment"]))
            return []
        messages = checked_messages(await awaited(environment.reset(task, task.seed)))
        if not messages:
            raise ValueError("reset returned no message")
        return messages

    def _state_of(self, environment: Environment, task: EpisodeTask) -> dict[str, Any]:
        if not self._with_state:
            return {}
        return {"state": {"environment": environment.get_state(), "random": task.random_state}}


def load(settings: Mapping[str, Any]) -> Play:
    """Import the user's class or function. ValueError in one line if there is none."""
    field = {"function": "environment.function", "environment": "environment.path"}.get(settings["kind"], "environment")
    place = settings["place"]
    subject = load_hook(place, field)
    is_function = settings["kind"] == "function" or (settings["kind"] == "either" and not inspect.isclass(subject))
    what = f"{field} = {place!r}"
    if is_function:
        _check_function(subject, what)
        return Play(subject, True, max_branches=settings["max_branches"])
    if not inspect.isclass(subject) or not issubclass(subject, Environment):
        raise ValueError(f"{what} is no class derived from megatron_dapo.environments.Environment")
    try:
        subject().tool_schemas()
    except TypeError as error:
        raise ValueError(f"{what}: it is created without arguments ({error})") from error
    if issubclass(subject, ToolEnvironment):
        subject.on_timeout, subject.timeout_s = settings["on_step_timeout"], settings["step_seconds"]
    if settings["with_state"] and (
        subject.get_state is Environment.get_state or subject.set_state is Environment.set_state
    ):
        raise ValueError(f'{what} has no get_state(self) and set_state(self, state), which environment.resume = "state" needs')
    return Play(subject, False, settings["with_state"])


def _check_function(subject: Any, what: str) -> None:
    if not callable(subject) or inspect.isclass(subject):
        raise ValueError(f"{what} is no function (task, client)")
    try:
        inspect.signature(subject).bind(None, None)
    except TypeError:
        raise ValueError(f"{what}: it takes {inspect.signature(subject)}; write it as (task, client)") from None


def _reply_of(step: Step) -> dict[str, Any]:
    messages = checked_messages(step.messages)
    if not step.done and not messages:
        raise ValueError("step returned neither messages nor done=True")
    return {
        "messages": messages,
        "done": bool(step.done),
        "reward": None if step.reward is None else float(step.reward),
        "is_correct": None if step.correct is None else bool(step.correct),
        "parts": {str(name): float(value) for name, value in step.parts.items()},
        "calls": [vars(call) for call in step.calls],
    }


# ---- episodes


class _Worker:
    """The episodes of this process."""

    def __init__(self, play: Play, replies: BinaryIO) -> None:
        self.play = play
        self._replies, self._lock, self._process = replies, threading.Lock(), os.getpid()
        self._episodes: dict[int, _Episode] = {}

    def serve(self, requests: BinaryIO) -> None:
        for line in requests:
            message = json.loads(line)
            number = message["episode"]
            if message["op"] == "start":
                self._episodes[number] = episode = _Episode(self, message)
                episode.start()
            elif number in self._episodes:
                self._episodes[number].inbox.put(message)

    def reply(self, message: Mapping[str, Any]) -> None:
        """Send a line. ValueError if the message is not JSON or is too long."""
        if os.getpid() != self._process:
            os._exit(0)  # a fork of the user's code came back here: only the process itself may reply
        try:
            text = json.dumps(message, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"a reply is not JSON: {error}") from error
        if len(text) > MAX_REPLY_BYTES:
            raise ValueError(f"a reply has {len(text):,} bytes, more than {MAX_REPLY_BYTES:,}")
        with self._lock:
            send(self._replies, message)

    def forget(self, number: int) -> None:
        self._episodes.pop(number, None)


class _Episode(threading.Thread):
    """An episode's thread. It plays until the end of the episode, then says that everything is closed."""

    def __init__(self, worker: _Worker, start: Mapping[str, Any]) -> None:
        super().__init__(daemon=True)
        self.inbox: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
        self.is_stuck = False
        self._worker, self._number = worker, start["episode"]
        self._task = EpisodeTask(start["task"], start["seed"], start["directory"])
        self.state = start.get("state")
        self._since = time.monotonic()
        self._is_open = True  # the owner expects more of it

    def run(self) -> None:
        try:
            self._play()
        except MemoryError:
            os._exit(OUT_OF_MEMORY)

    def _play(self) -> None:
        try:
            asyncio.run(self._worker.play(self._task, self))
        except EpisodeEnded:
            pass
        except MemoryError:
            raise
        except BaseException as error:  # SystemExit too: it must not pass for an answer
            self._say({"lost": describe_failure(error)})
        while self._is_open:
            self._is_open = self.inbox.get()["op"] != "end"
        self._worker.forget(self._number)
        memory_mb = resident_pages(os.getpid()) * os.sysconf("SC_PAGE_SIZE") // 2**20
        self._say({"ended": True, "stuck": self.is_stuck, "memory_mb": memory_mb})

    def exchange(self, reply: Mapping[str, Any]) -> ModelTurn:
        """Send a reply and wait for the model's next turn. Raises EpisodeEnded when the episode is over."""
        if not self._is_open:  # another thread of the user's code has been told
            raise EpisodeEnded
        self._say({**reply, "figures": self._task.figures, "seconds": time.monotonic() - self._since})
        message = self.inbox.get()
        if message["op"] == "end":
            self._is_open = False
            raise EpisodeEnded
        self._since = time.monotonic()
        return ModelTurn(
            message["text"], tuple(ModelCall(**call) for call in message["calls"]), message["finish_reason"]
        )

    def _say(self, message: Mapping[str, Any]) -> None:
        self._worker.reply({"episode": self._number, **message})


def describe_failure(error: BaseException) -> str:
    """Return an exception of a user's code in one line, with the place in the user's file."""
    if isinstance(error, Lost):
        return one_line(error, _MAX_REASON)
    frames = traceback.extract_tb(error.__traceback__)
    own = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    users = [frame for frame in frames if not frame.filename.startswith((own, sys.base_prefix))]
    place = f" ({os.path.basename(users[-1].filename)}, line {users[-1].lineno})" if users else ""
    text = error.args[0] if isinstance(error, KeyError) and error.args else error  # str() of a KeyError is a repr
    return one_line(f"{type(error).__name__}: {text}{place}", _MAX_REASON)
