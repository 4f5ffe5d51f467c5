"""What a user writes: an `Environment`, a `ToolEnvironment` with tools, or a function that plays with a `Client`.

It runs in a worker process, never in a process of the trainer; see docs/environments.md.
"""

from __future__ import annotations

import asyncio
import copy
import ctypes
import inspect
import math
import numbers
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar, Union

from megatron_dapo.environments.remote.schema import schema_of
from megatron_dapo.untrusted import one_line

Message = Mapping[str, Any]  # {"role": ..., "content": ...}
Messages = Union[str, Sequence[Message]]  # a text is one message of the user  # noqa: UP007

_ROLES = ("system", "user", "assistant", "tool")
_MAX_REASON = 300  # characters of an error that the model is shown
_NEW = "a new conversation"
_STOP_S = 0.2  # time that a late tool gets to notice


class Lost(Exception):
    """Raised by an environment or a tool: the machine failed, not the policy. The episode is played again, never scored."""


class EpisodeEnded(BaseException):
    """Raised in a user's function that waits for an answer when its episode is ended from outside."""


def user(text: str) -> dict[str, str]:
    """Return a message of the user."""
    return {"role": "user", "content": text}


class EpisodeTask(Mapping[str, Any]):
    """The data row's columns except for the prompt's, its `answer`, and what an episode may use."""

    def __init__(self, fields: Mapping[str, Any], seed: int, directory: str) -> None:
        self.seed = seed  # the episode's
        self.random = random.Random(seed)
        self.directory = Path(directory)  # the episode's own; removed at its end
        self.figures: dict[str, float] = {}  # see `record`
        self._fields = dict(fields)

    def record(self, **figures: float) -> None:
        """Note figures of the episode, such as searches=3, for samples, metrics and the report; a name's last value counts.

        ValueError for anything but finite numbers and truth values.
        """
        for name, value in figures.items():
            if not isinstance(value, numbers.Real) or not math.isfinite(value):
                raise ValueError(f"task.record: {name} = {one_line(repr(value), 80)} is no finite number")
        self.figures = {**self.figures, **{name: float(value) for name, value in figures.items()}}

    @property
    def random_state(self) -> Any:
        """The state of `random` as JSON; None: that of the seed, as it is before the first draw."""
        state = self.random.getstate()
        return None if state == random.Random(self.seed).getstate() else state

    @random_state.setter
    def random_state(self, state: Any) -> None:
        if state is not None:
            version, numbers, gauss = state
            self.random.setstate((version, tuple(numbers), gauss))

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The data row's prompt."""
        return [dict(message) for message in self["messages"]]

    @property
    def prompt(self) -> str:
        """Text of the prompt's last message."""
        return str(self["messages"][-1]["content"])

    def __getitem__(self, name: str) -> Any:
        if name not in self._fields:
            raise KeyError(f"{name!r}: the task has {', '.join(self._fields) or 'no fields'}")
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


@dataclass(frozen=True)
class ModelCall:
    """A tool call in the model's turn. Only one with status "ok" may be run; `message` says why another is not."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    status: str = "ok"  # ok, unparsable, unknown_tool, bad_arguments or refused
    message: str = ""


@dataclass(frozen=True)
class ModelTurn:
    """What the model said."""

    text: str
    calls: tuple[ModelCall, ...] = ()
    finish_reason: str = "stop"  # "length": it was cut, and no calls were read

    @property
    def message(self) -> dict[str, Any]:
        """This turn in a conversation."""
        return {"role": "assistant", "content": self.text}


@dataclass(frozen=True)
class CallResult:
    """How a tool call ended."""

    name: str
    status: str  # ok, error, timeout, or why it was not run
    seconds: float = 0.0


@dataclass(frozen=True)
class Step:
    """An environment's answer to a turn of the model."""

    messages: Messages = ()  # appended to the conversation
    done: bool = False
    reward: float | None = None  # the turn's; an episode's reward is their sum. None: no statement
    correct: bool | None = None
    parts: Mapping[str, float] = field(default_factory=dict)  # reward parts, for metrics
    calls: Sequence[CallResult] = ()


@dataclass(frozen=True)
class Reward:
    """The reward at the end of an episode."""

    value: float
    correct: bool | None = None
    parts: Mapping[str, float] = field(default_factory=dict)


class Environment:
    """Base of environments. One object is one episode; each method may be `async`.

    Any exception of `reset` or `step` makes the episode lost: it is played again with the same seed, never scored.
    """

    task: EpisodeTask  # set before `reset`

    def reset(self, task: EpisodeTask, seed: int) -> Messages | Awaitable[Messages]:
        """Return the begin of the conversation. The default is the data row's prompt."""
        return task.messages

    def step(self, turn: ModelTurn) -> Step | Awaitable[Step]:
        """Answer the model's turn."""
        raise NotImplementedError(f"{type(self).__name__} has no method step(self, turn)")

    def close(self) -> None | Awaitable[None]:
        """Clean up. Called once, however the episode ends, unless its process is killed."""
        return None

    def get_state(self) -> Any:
        """Return the state after `reset` or a `step` as JSON, for environment.resume = "state"; `task.random` is saved with it."""
        raise NotImplementedError(f"{type(self).__name__} has no method get_state(self)")

    def set_state(self, state: Any) -> None | Awaitable[None]:
        """Continue from a state of `get_state`, in a new object whose `reset` is not called."""
        raise NotImplementedError(f"{type(self).__name__} has no method set_state(self, state)")

    def tool_schemas(self) -> list[dict[str, Any]]:
        """Return JSON schemas of the tools that the model is shown."""
        return []


# ---- tools

_Tool = TypeVar("_Tool", bound=Callable[..., Any])


def tool(function: _Tool) -> _Tool:
    """Mark a function or a method of a `ToolEnvironment` as a tool. ValueError if it has no types or no docstring."""
    function.__tool_schema__ = schema_of(function)  # type: ignore[attr-defined]
    return function


class ToolEnvironment(Environment):
    """Tools that the model may call, as many turns as it likes; its first turn without a call is its answer.

    A subclass has methods with `@tool`, or `tools`, and `finish`, which gives the reward. The calls are validated against
    the tools' schemas before they come here. Whatever goes wrong with one has a text that the model sees.
    """

    tools: ClassVar[Sequence[Callable[..., Any]]] = ()  # functions with @tool, besides the methods
    result_role: ClassVar[str] = "tool"  # role of the messages with results; "user" for a template without tools
    result_format: ClassVar[str] = "{result}"  # text of the messages
    on_timeout: ClassVar[str] = "observe"  # set by the worker: environment.on_step_timeout
    timeout_s: ClassVar[float] = 30.0  # limit of a turn's calls together; set by the worker: environment.step_seconds
    is_stuck = False  # a tool that was too late still runs: the process should end soon

    def finish(self, turn: ModelTurn) -> Reward | float | None | Awaitable[Reward | float | None]:
        """Return the reward for the model's answer. None: reward.verifier decides."""
        return None

    @classmethod
    def all_tools(cls) -> dict[str, Callable[..., Any]]:
        """Return the tools by name, in order of definition."""
        named = {name: getattr(cls, name) for kind in reversed(cls.__mro__) for name in vars(kind)}
        methods = {name: method for name, method in named.items() if hasattr(method, "__tool_schema__")}
        return {**methods, **{function.__name__: function for function in cls.tools}}

    def tool_schemas(self) -> list[dict[str, Any]]:
        return [
            getattr(function, "__tool_schema__", None) or schema_of(function) for function in self.all_tools().values()
        ]

    async def step(self, turn: ModelTurn) -> Step:
        if turn.finish_reason != "stop":
            return Step("Your answer was cut, it is too long. Answer in fewer words.")
        if not turn.calls:
            return final_step(await awaited(self.finish(turn)))
        end, messages, results = time.monotonic() + self.timeout_s, [], []
        for call in turn.calls:
            text, result = await self._called(call, end)
            messages.append({"role": self.result_role, "content": self.result_format.format(result=text)})
            results.append(result)
            if result.status == "timeout" and self.on_timeout == "lost":
                raise Lost(text)
            if result.status == "timeout" and self.on_timeout == "end":
                return Step(messages, done=True, reward=0.0, correct=False, calls=results)
        return Step(messages, calls=results)

    async def _called(self, call: ModelCall, end: float) -> tuple[str, CallResult]:
        """Run a call. Return the text for the model and how it ended."""
        if call.status != "ok":
            return call.message, CallResult(call.name, call.status)
        start = time.monotonic()
        function = self.all_tools().get(call.name)
        try:
            if function is None:
                raise LookupError(f"there is no tool {call.name!r}")
            bound = getattr(self, call.name, function) if function not in self.tools else function
            text, status = str(await self._within(bound, call.arguments, end - start)), "ok"
        except (TimeoutError, asyncio.TimeoutError):
            text, status = call_failure(call.name, "timeout", f"its limit is {self.timeout_s:g} s"), "timeout"
        except (Lost, MemoryError):
            raise
        except Exception as error:
            text, status = call_failure(call.name, "error", f"{type(error).__name__}: {error}"), "error"
        return text, CallResult(call.name, status, time.monotonic() - start)

    async def _within(self, function: Callable[..., Any], arguments: Mapping[str, Any], seconds: float) -> Any:
        if inspect.iscoroutinefunction(function):
            return await asyncio.wait_for(function(**arguments), seconds)
        call = _ThreadCall(function, arguments)
        call.start()
        call.join(max(seconds, 0.0))
        if call.is_alive():
            self.is_stuck |= not call.interrupt()
            raise TimeoutError
        if call.error is not None:
            raise call.error
        return call.result


def call_failure(name: str, status: str, reason: str) -> str:
    """Return what the model is told about a call that failed while it ran; other failures: `data.tool_calls`."""
    what = "was stopped, it took too long" if status == "timeout" else "failed"
    return f"Error: {name} {what}: {one_line(reason, _MAX_REASON)}."


class _ThreadCall(threading.Thread):
    """A call in a thread, so that its caller can stop waiting for it."""

    def __init__(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        super().__init__(daemon=True)
        self.result: Any = None
        self.error: BaseException | None = None
        self._call = lambda: function(**arguments)

    def run(self) -> None:
        try:
            self.result = self._call()
        except BaseException as error:
            self.error = error

    def interrupt(self) -> bool:
        """Raise an exception in the thread. Return False if it does not end, because it waits outside of Python."""
        assert self.ident is not None
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident), ctypes.py_object(SystemExit))
        self.join(_STOP_S)
        return not self.is_alive()


# ---- a function


class _Conversations:
    """What all conversations of an episode share: their turns are sampled one after another."""

    def __init__(self, exchange: Callable[[Mapping[str, Any]], ModelTurn], max_branches: int) -> None:
        self.exchange, self.max_branches = exchange, max_branches
        self.is_sampling = threading.Lock()  # held while a turn is sampled
        self.num_turns = 0
        self.num_streams = 0
        self.continued: set[int] = set()  # turns that another one follows
        self.reward: float | None = None  # the reward that the next message will carry, for the last turn

    def begin_stream(self) -> None:
        if self.num_streams == self.max_branches:
            raise ValueError(
                f"client.chat began more than {self.max_branches} conversations in one episode; "
                "raise environment.max_branches if it is meant to"
            )
        self.num_streams += 1


class Client:
    """A conversation with the model, for `def rollout(task, client)`. An episode may have several: see `fork` and `fresh`."""

    def __init__(self, exchange: Callable[[Mapping[str, Any]], ModelTurn], max_branches: int = 16) -> None:
        self._all = _Conversations(exchange, max_branches)
        self._conversation: list[dict[str, Any]] = []
        self._tools: list[dict[str, Any]] | None = None
        self._last: int | None = None  # number of its last turn among the episode's, from 0
        self._reason = _NEW

    def fork(self) -> Client:
        """Return another conversation, which begins with this one; both may go on."""
        return copy.copy(self)

    def fresh(self, reason: str = _NEW) -> Client:
        """Return an empty conversation, such as a sub-agent's, which may have other tools. `reason`: what people are shown."""
        fresh = Client(self._all.exchange)
        fresh._all, fresh._reason = self._all, reason
        return fresh

    def chat(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> ModelTurn:
        """Return the model's turn after `messages`: the whole conversation, which continues that of the call before.

        `tools` are functions with `@tool` or JSON schemas; they are those of the conversation's first call. ValueError
        for another history.
        """
        if not self._all.is_sampling.acquire(blocking=False):
            raise ValueError(
                "client.chat is called while another call waits; use async def and asyncio.gather, which keep an order"
            )
        try:
            conversation = checked_messages(messages)
            reply = self._reply(conversation, [getattr(one, "__tool_schema__", one) for one in tools])
            turn = self._all.exchange(reply)
            self._last, self._all.num_turns = self._all.num_turns, self._all.num_turns + 1
            self._conversation = [*conversation, turn.message]
            return turn
        finally:
            self._all.is_sampling.release()

    def _reply(self, conversation: list[dict[str, Any]], schemas: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the line that asks for the next turn, see `remote.worker`."""
        known = [_compared(message) for message in self._conversation]
        for number, message in enumerate(known):
            if number >= len(conversation) or _compared(conversation[number]) != message:
                raise ValueError(
                    f"client.chat was given another history: message {number} is not the one that the model has seen; "
                    "append to the conversation (turn.message is the model's), or begin another one with client.fresh()"
                )
        if len(conversation) == len(known):
            raise ValueError("client.chat was given no new message")
        if self._tools is not None and schemas and schemas != self._tools:
            raise ValueError("client.chat was given other tools than at first; client.fresh() may have others")
        if self._last is None or self._last in self._all.continued:
            self._all.begin_stream()
        reply: dict[str, Any] = {"messages": conversation[len(known) :], "reward": self._all.reward}
        if self._last is not None:
            self._all.continued.add(self._last)
            reply["after"] = self._last
        else:
            self._tools = reply["tools"] = schemas
            if self._all.num_turns:
                reply["begins"] = self._reason or _NEW
        self._all.reward = None
        return reply

    def reward(self, value: float) -> None:
        """Reward the model's last turn. An episode's reward is the sum of these and of what the function returns.

        ValueError if another conversation of the episode has had a turn since.
        """
        if self._last is None or self._last != self._all.num_turns - 1 or self._all.is_sampling.locked():
            raise ValueError("client.reward comes after a turn of its conversation, before the next one of any conversation")
        self._all.reward = (self._all.reward or 0.0) + float(value)

    def final(self, result: Any) -> Step:
        """Return the end of the episode, from what the function returned."""
        if not self._all.is_sampling.acquire(blocking=False):
            self._all.is_sampling.acquire()  # wait for the turn: the protocol accepts no message before it
            self._all.is_sampling.release()
            raise ValueError("the function returned while a call of client.chat waited for its turn; await every call")
        step, reward = final_step(result), self._all.reward
        if reward is not None:
            step = Step(done=True, reward=reward + (step.reward or 0.0), correct=step.correct, parts=step.parts)
        return step


class AsyncClient:
    """A conversation with the model, for `async def rollout(task, client)`: a `Client` whose `chat` is awaited.

    Calls of several conversations at the same time are answered one after another, in the order in which they came.
    """

    def __init__(self, client: Client, queue: asyncio.Lock | None = None) -> None:
        self._client = client
        self._queue = queue or asyncio.Lock()  # first come, first served
        self._is_waiting = False
        self.reward = client.reward

    def fork(self) -> AsyncClient:
        """See `Client.fork`."""
        return AsyncClient(self._client.fork(), self._queue)

    def fresh(self, reason: str = _NEW) -> AsyncClient:
        """See `Client.fresh`."""
        return AsyncClient(self._client.fresh(reason), self._queue)

    async def chat(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> ModelTurn:
        """See `Client.chat`."""
        if self._is_waiting:
            raise ValueError("client.chat is called while another call of the same conversation waits; call client.fork() first")
        self._is_waiting = True
        try:
            async with self._queue:
                return await asyncio.get_running_loop().run_in_executor(None, self._client.chat, messages, tools)
        finally:
            self._is_waiting = False


def _compared(message: Mapping[str, Any]) -> tuple[Any, Any]:
    return message["role"], message["content"]


# ---- values that users return


async def awaited(value: Any) -> Any:
    """Return a value, or what it becomes."""
    return await value if inspect.isawaitable(value) else value


def checked_messages(messages: Messages) -> list[dict[str, Any]]:
    """Return messages as dictionaries. ValueError in one line for anything else."""
    if isinstance(messages, str):
        return [user(messages)]
    if not isinstance(messages, (list, tuple)):
        raise ValueError(f"messages are a text or a list, not of type {type(messages).__name__}")
    for message in messages:
        fits = isinstance(message, Mapping) and isinstance(message.get("content"), str)
        if not fits or message.get("role") not in _ROLES:
            raise ValueError(
                f'a message is {{"role": {" | ".join(_ROLES)}, "content": text}}, not {one_line(repr(message), 80)}'
            )
    return [dict(message) for message in messages]


def final_step(result: Any) -> Step:
    """Return the end of an episode from a `Reward`, a number, a truth value or None. ValueError for anything else."""
    if isinstance(result, Reward):
        return Step(done=True, reward=float(result.value), correct=result.correct, parts=result.parts)
    if result is None:
        return Step(done=True)
    if isinstance(result, bool):
        return Step(done=True, reward=float(result), correct=result)
    if isinstance(result, (int, float)):
        return Step(done=True, reward=float(result))
    raise ValueError(f"a reward is a number, a truth value, a Reward or None, not of type {type(result).__name__}")
