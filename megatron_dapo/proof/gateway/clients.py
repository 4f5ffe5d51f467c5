"""A client that does what agents do: it edits, forgets, summarizes, delegates, repeats, and loses its connection."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]

TOOL = {"name": "add", "description": "", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}
_BEHAVIOR = {  # weights of a client's actions
    "append": 10.0,
    "parallel": 1.0,
    "sub-agent": 1.0,
    "compact": 1.0,
    "edit": 1.0,
    "drop": 0.5,
    "back": 1.0,
    "repeat": 1.0,
    "other tools": 0.5,
    "retry": 3.0,
    "by id": 2.0,
}


@dataclass(frozen=True)
class Asked:
    """A request as the client sends it."""

    kind: str
    messages: tuple[Message, ...]
    tools: tuple[Message, ...] = ()
    is_retry: bool = False  # its header says so
    max_tokens: int | None = None
    after: int | None = None  # the messages follow the answer with this number

    @property
    def body(self) -> dict[str, Any]:
        tools = [{"type": "function", "function": dict(tool)} for tool in self.tools]
        body: dict[str, Any] = {"model": "policy", "messages": list(self.messages), "tools": tools}
        return body if self.max_tokens is None else {**body, "max_tokens": self.max_tokens}


class RandomClient:
    """It knows only what it was told."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        system = ({"role": "system", "content": "Be brief."},) if draw.random() < 0.5 else ()
        tools = (TOOL,) if draw.random() < 0.5 else ()
        self._told: list[Asked] = [Asked("", (*system, self._said("user")), tools)]  # conversations it may continue
        self._told_ids: list[tuple[int, tuple[Message, ...]]] = []  # answers by their number, with the tools
        self._asked: list[Asked] = []
        self.unread: list[Asked] = []  # requests whose answers it has not read

    def requests(self) -> Iterator[Asked]:
        """Yield what it asks next; several at a time are parallel."""
        kind = self._draw.choices(list(_BEHAVIOR), list(_BEHAVIOR.values()))[0]
        for _ in range(self._draw.randint(2, 3) if kind == "parallel" else 1):
            asked = self._request(kind)
            self._asked.append(asked)
            yield asked

    def read(self, asked: Asked, number: int, answer: Message) -> None:
        """Take an answer."""
        self._told_ids.append((number, asked.tools))
        if asked.after is None:
            self._told.append(Asked("", (*asked.messages, self._echo(answer)), asked.tools))

    def _request(self, kind: str) -> Asked:
        draw = self._draw
        if kind == "retry" and self.unread:
            lost = self.unread.pop(draw.randrange(len(self.unread)))
            return Asked("retry", lost.messages, lost.tools, draw.random() < 0.5, lost.max_tokens, lost.after)
        if kind == "by id" and self._told_ids:
            after, tools = draw.choice([self._told_ids[-1], draw.choice(self._told_ids)])
            return Asked(kind, (self._said(draw.choice(["user", "tool"])),), tools, after=after)
        if kind == "repeat" and self._asked:
            return draw.choice(self._asked)
        base = self._told[-1] if draw.random() < 0.8 else draw.choice(self._told)
        messages, tools = list(base.messages), base.tools
        if kind == "edit":
            index = draw.randrange(len(messages))
            messages[index] = {"role": messages[index]["role"], "content": f"edited {draw.randrange(2)}"}
        elif kind == "drop":
            del messages[draw.randrange(len(messages))]
        elif kind == "back":
            messages = messages[: draw.randrange(len(messages)) + 1]
        elif kind == "compact":
            messages = [{"role": "user", "content": f"summary {draw.randrange(2)}"}]
        elif kind == "sub-agent":
            messages, tools = [{"role": "system", "content": "sub-agent"}, self._said("user")], ()
        elif kind == "other tools":
            tools = () if tools else (TOOL,)
        if not messages or messages[-1]["role"] == "assistant":
            messages.append(self._said(draw.choice(["user", "tool"])))
        return Asked(kind, tuple(messages), tools, False, draw.choice([None, None, None, 2]))

    def _said(self, role: str) -> Message:
        return {"role": role, "content": f"say {self._draw.randrange(3)}"}

    def _echo(self, answer: Message) -> Message:
        """Return an answer as a client keeps it: without reasoning, in parts, with empty fields, spelled otherwise."""
        draw, echo = self._draw, dict(answer)
        if draw.random() < 0.5:
            echo.pop("reasoning_content", None)
        if draw.random() < 0.2 and echo["content"]:
            echo["content"] = [{"type": "text", "text": f"{echo['content']} \n"}]
        if draw.random() < 0.2:
            echo.setdefault("tool_calls", [])
        if calls := echo.get("tool_calls"):
            indent, functions = draw.choice([None, 1]), [call["function"] for call in calls]
            echo["tool_calls"] = [
                {
                    "id": "own",
                    "type": "function",
                    "function": {**one, "arguments": json.dumps(json.loads(one["arguments"]), indent=indent)},
                }
                for one in functions
            ]
        return echo


