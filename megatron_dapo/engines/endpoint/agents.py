"""A worker whose episodes are programs that play against the chat endpoint: `python -m megatron_dapo.engines.endpoint.agents`.

    owner -- JSON lines --> this process -- task --> program          one for each episode, with a session's API key
                               ^    |                   |
                               |    +---- answers ------+
                               +--------- requests -----+             HTTP on loopback

It speaks the lines of `environments.remote.worker`. The program has the task as JSON on its standard input, the session in
OPENAI_BASE_URL and OPENAI_API_KEY, or ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY, and an empty directory. Its last line of output may be its reward: a number, a truth
value, or {"reward": number, "correct": bool, "parts": {name: number}}. A program that fails is a lost episode.

Requests of a program at the same time are answered one after another, in the order in which they came.
"""

from __future__ import annotations

import asyncio
import io
import json
import math
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from aiohttp import web

from megatron_dapo.data.template import Messages
from megatron_dapo.data.turns import ROLES, TurnTemplate
from megatron_dapo.engines.endpoint.context import num_context_tokens, read_turn_template
from megatron_dapo.engines.endpoint.format import ChatAnswer
from megatron_dapo.engines.endpoint.server import ChatEndpoint, EpisodeOver
from megatron_dapo.engines.endpoint.tree import ServedTurn, arguments_of
from megatron_dapo.types import SamplingParams
from megatron_dapo.untrusted import one_line
from megatron_dapo.workers.pipes import claim_pipes, send

_KEPT_BYTES = 2**16  # size of the end of a program's output that is kept
_KEY = "OPENAI_API_KEY"


def main() -> None:
    """Serve episodes until the owner closes the pipe. The settings are JSON, the only argument."""
    settings = json.loads(sys.argv[1])
    requests, replies = claim_pipes()
    asyncio.run(_AgentWorker(settings, replies).serve(requests))


class _AgentWorker:
    """The programs of this process and the server that they ask: a `TurnSource`."""

    def __init__(self, settings: Mapping[str, Any], replies: BinaryIO) -> None:
        self._command: list[str] = settings["command"]
        self._endpoint = ChatEndpoint(
            self,
            SamplingParams(temperature=settings["temperature"], top_p=settings["top_p"]),
            on_other_sampling=settings["other_sampling"],
            max_branches=settings["max_branches"],
            roles=tuple(settings.get("roles", ROLES)),
        )
        self._settings = settings
        self._turns: asyncio.Future[TurnTemplate] | None = None  # read for the first program that counts tokens
        self._replies = replies
        self._agents: dict[str, _Agent] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._url = ""

    async def serve(self, requests: io.FileIO) -> None:
        runner = web.AppRunner(self._endpoint.application(), handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self._url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        loop = asyncio.get_running_loop()
        lines = asyncio.StreamReader(limit=2**26)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), requests)
        self.reply({"ready": self._command[0], "tools": []})
        async for line in lines:
            self._take(json.loads(line))
        for agent in self._agents.values():
            agent.kill()
        os._exit(0)

    def _take(self, message: Mapping[str, Any]) -> None:
        name = str(message["episode"])
        if message["op"] == "start":
            agent = self._agents[name] = _Agent(self, message, self._endpoint.open(name))
            self._spawn(agent.play(self._command, self._url))
        elif message["op"] == "act":
            self._agents[name].take(message)
        else:
            self._spawn(self._end(self._agents.pop(name)))

    async def _end(self, agent: _Agent) -> None:
        await self._endpoint.end(agent.key)
        agent.kill()
        await agent.ended.wait()
        self.reply({"episode": agent.number, "ended": True, "stuck": False})

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def reply(self, message: Mapping[str, Any]) -> None:
        send(self._replies, message)

    async def sample(self, session: str, turn: ServedTurn, max_tokens: int | None) -> ChatAnswer:
        """See `TurnSource`."""
        agent = self._agents.get(session)
        if agent is None:
            raise EpisodeOver("the episode has ended")
        return await agent.sample(turn, max_tokens)

    async def count(
        self, messages: Messages, tools: Sequence[Mapping[str, Any]], after: ChatAnswer | None, begins_episode: bool
    ) -> int:
        """See `TurnSource`."""
        if self._turns is None:
            self._turns = asyncio.ensure_future(asyncio.to_thread(read_turn_template, self._settings["template"]))
        turns = await asyncio.shield(self._turns)
        return num_context_tokens(turns, [_with_arguments(one) for one in messages], tools, after, begins_episode)

    def num_refused(self, key: str) -> int:
        return self._endpoint.num_refused(key)

    def lose(self, session: str, reason: str) -> None:
        """See `TurnSource`."""
        if session in self._agents:
            self._agents[session].lose(reason)


class _Agent:
    """A program that plays an episode."""

    def __init__(self, worker: _AgentWorker, start: Mapping[str, Any], key: str) -> None:
        self.number, self.key = start["episode"], key
        self.ended = asyncio.Event()
        self._worker = worker
        self._task = {**start["task"], "seed": start["seed"]}
        self._directory = Path(start["directory"])
        self._process: asyncio.subprocess.Process | None = None
        self._is_killed = False
        self._is_over = False  # its last reply is said, or next
        self._lost = ""  # reason the endpoint ended it
        self._one_at_a_time = asyncio.Lock()
        self._may_reply = asyncio.Semaphore(1)  # each start and each turn has one reply
        self._answers: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue()
        self._since = time.monotonic()
        self._lines = TurnLines()

    async def play(self, command: list[str], url: str) -> None:
        """Run the program and report its end."""
        try:
            result = await self._run(command, url)
        except OSError as error:
            result = {"lost": f"environment.agent: {command[0]}: {error.strerror}"}
        self._kill_descendants()
        self.ended.set()
        if not self._is_killed and (num_refused := self._worker.num_refused(self.key)):
            result["figures"] = {"requests_refused": num_refused}
        if not self._is_killed:
            await self._say({"lost": self._lost} if self._lost else result, is_last=True)

    async def _run(self, command: list[str], url: str) -> dict[str, Any]:
        inherited = dict(os.environ)
        if command[0] != sys.executable:
            inherited.pop("PYTHONPATH", None)  # packages of this interpreter
        process = self._process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=self._directory,
            env={
                **inherited,
                "OPENAI_BASE_URL": f"{url}/v1",
                _KEY: self.key,
                "ANTHROPIC_BASE_URL": url,
                "ANTHROPIC_API_KEY": self.key,
            },
            start_new_session=True,
        )
        if self._is_killed or self._lost:  # It may have been ended while it was started.
            self._stop()
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        with suppress(ConnectionError):  # a program need not read its task
            process.stdin.write(json.dumps(self._task).encode())
            await process.stdin.drain()
        process.stdin.close()
        output, errors = await asyncio.gather(_end_of(process.stdout), _end_of(process.stderr))
        status = await process.wait()
        if status != 0:
            reason = (errors.strip().splitlines() or ["it says nothing"])[-1]
            return {"lost": one_line(f"{command[0]} ended with exit status {status}: {reason}", 500)}
        if not self._lines.num_turns:
            return {"lost": f"{command[0]} ended without a request to OPENAI_BASE_URL"}
        reward = reward_of(output)
        return reward if "lost" in reward else {"done": True, **reward}

    async def sample(self, turn: ServedTurn, max_tokens: int | None) -> ChatAnswer:
        async with self._one_at_a_time:
            await self._say(self._lines.line(turn, max_tokens))
            return answer_of(await self._answers.get())

    def take(self, message: Mapping[str, Any]) -> None:
        """Take the policy's turn."""
        self._since = time.monotonic()
        self._may_reply.release()
        self._answers.put_nowait(message)

    async def _say(self, message: Mapping[str, Any], is_last: bool = False) -> None:
        """Reply once the owner expects it."""
        self._is_over |= is_last
        await self._may_reply.acquire()
        if self._is_over and not is_last:
            self._may_reply.release()
            raise EpisodeOver("the episode has ended")
        seconds = time.monotonic() - self._since
        self._worker.reply({"episode": self.number, **message} | ({} if "lost" in message else {"seconds": seconds}))

    def lose(self, reason: str) -> None:
        """End the episode without a result."""
        self._lost = self._lost or reason
        self._stop()

    def kill(self) -> None:
        """Kill the program and what it has started; nothing is said any more."""
        self._is_killed = True
        self._stop()

    def _stop(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._kill_descendants()

    def _kill_descendants(self) -> None:
        """Kill processes that left the program's group: the session's key is in the environment of each."""
        mark = f"{_KEY}={self.key}".encode()
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if mark in path.read_bytes().split(b"\0"):
                    os.kill(int(path.parent.name), signal.SIGKILL)


async def _end_of(stream: asyncio.StreamReader) -> str:
    """Return the end of a program's output, all of which is read."""
    kept = b""
    while block := await stream.read(_KEPT_BYTES):
        kept = (kept + block)[-_KEPT_BYTES:]
    return kept.decode(errors="replace")


def reward_of(output: str) -> dict[str, Any]:
    """Return the reward that the last line of a program's output states, {} if it states none, or what is wrong with it."""
    line = (output.strip().splitlines() or [""])[-1]
    try:
        said = json.loads(line)
    except ValueError:
        return {}
    if isinstance(said, bool):
        said = {"reward": said, "correct": said}
    elif isinstance(said, (int, float)):
        said = {"reward": said}
    if not isinstance(said, dict) or "reward" not in said:
        return {}
    try:
        reward = float(said["reward"])
        parts = {name: float(value) for name, value in dict(said.get("parts", {})).items()}
    except (TypeError, ValueError):
        reward, parts = math.nan, {}
    correct = said.get("correct")
    is_finite = all(map(math.isfinite, (reward, *parts.values())))
    if not is_finite or "" in parts or not isinstance(correct, (bool, type(None))):
        return {"lost": f'the reward is {{"reward": number, "correct": bool, "parts": {{name: number}}}}, not {one_line(line, 200)}'}
    return {"reward": reward, "is_correct": correct, "parts": parts}


class TurnLines:
    """Turns of an episode as lines for the owner, who numbers them in the order in which they are sampled."""

    def __init__(self) -> None:
        self._numbers: dict[ServedTurn, int] = {}

    @property
    def num_turns(self) -> int:
        return len(self._numbers)

    def line(self, turn: ServedTurn, max_tokens: int | None) -> dict[str, Any]:
        """Return the line that asks for the next turn; it says which earlier turn the messages follow."""
        line: dict[str, Any] = {"messages": [_with_arguments(one) for one in turn.messages], "max_tokens": max_tokens}
        if turn.parent is not None:
            line["after"] = self._numbers[turn.parent]
        else:
            line["tools"] = [dict(tool) for tool in turn.tools]
            if self._numbers:
                line["begins"] = turn.reason
        self._numbers[turn] = len(self._numbers)
        return line


def _with_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose calls have their arguments as objects, which chat templates render, and not as JSON text."""
    calls = [
        {**call, "function": {**call["function"], "arguments": arguments_of(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else dict(message)


def answer_of(message: Mapping[str, Any]) -> ChatAnswer:
    """Return the policy's turn for the client, which runs its own tools: a call that is no call stays text."""
    calls = message["calls"]
    is_readable = all(call["status"] != "unparsable" for call in calls)
    return ChatAnswer(
        message["text"] if is_readable else message["raw_text"],
        message["finish_reason"],
        message["reasoning"],
        tuple((call["name"], json.dumps(call["arguments"])) for call in calls) if is_readable else (),
        message["num_prompt_tokens"],
        message["num_tokens"],
    )


if __name__ == "__main__":
    main()
