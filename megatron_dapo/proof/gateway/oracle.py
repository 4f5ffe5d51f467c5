"""What the endpoint must do with a request, by a search over all conversations that were served.

It knows neither the tree nor the streams: it compares messages one by one, and spells every context out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = Mapping[str, Any]
STOP = 0  # token that ends a message


@dataclass(eq=False)
class Request:
    """A request that was answered or waits for its answer."""

    messages: Sequence[Message]
    tools: Sequence[Message]
    parent: Request | None  # the request whose answer it continues
    stream: int
    context: list[int]  # the ids that its turn must be sampled after
    answer: Message | None = None
    ids: list[int] = field(default_factory=list)  # sampled for it
    is_lost: bool = False  # its client went away
    is_continued: bool = False


def text_of(message: Message) -> str:
    content = message["content"] or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def calls_of(message: Message) -> list[tuple[str, Any]]:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


def is_same(one: Message, other: Message) -> bool:
    """Compare what an agent is told, without what clients change in passing."""
    if one["role"] != other["role"] or calls_of(one) != calls_of(other):
        return False
    if one["role"] == "assistant":
        return text_of(one).strip() == text_of(other).strip()
    return text_of(one) == text_of(other)


def are_same(some: Sequence[Message], others: Sequence[Message]) -> bool:
    return len(some) == len(others) and all(map(is_same, some, others))


def encoded(messages: Sequence[Message]) -> list[int]:
    """Return the ids of messages and of the begin of an answer; see `world.ByteTokenizer`."""
    ids: list[int] = []
    for message in messages:
        calls = "".join(f"\4{name}: {json.dumps(arguments)}" for name, arguments in calls_of(message))
        ids += [*f"\1{message['role']}\2{text_of(message)}{calls}".encode(), STOP]
    return [*ids, *b"\1assistant\2"]


class Oracle:
    """All requests of an episode."""

    def __init__(self, max_streams: int) -> None:
        self.requests: list[Request] = []
        self.num_streams, self._max_streams = 0, max_streams

    def ask(
        self, messages: Sequence[Message], tools: Sequence[Message], is_retry: bool, after: int | None = None
    ) -> Request | None:
        """Return the request that is answered: a new one, or one that was not read; None: the episode is lost.

        `after`: the messages follow the answer to this request.
        """
        parent = self._continued(messages, tools)
        if after is not None:
            parent = self.requests[after]
            assert parent.answer is not None, f"request {after} has no answer"
            messages = [*parent.messages, parent.answer, *messages]
        alike = [one for one in self.requests if one.tools == tools and are_same(one.messages, messages)]
        if after is not None:
            alike = [one for one in alike if one.parent is parent]
        for one in alike:
            if one.is_lost or (is_retry and one is alike[-1] and not one.is_continued):
                one.is_lost = False
                return one
        begins = parent is None or parent.is_continued
        if begins and self.num_streams == self._max_streams:
            return None
        if parent is None:
            context = [*f"\3{','.join(tool['name'] for tool in tools)}".encode(), STOP] if tools else []
            context += encoded(messages)
        else:
            end = [] if parent.ids[-1] == STOP else [STOP]
            context = [*parent.context, *parent.ids, *end, *encoded(messages[len(parent.messages) + 1 :])]
            parent.is_continued = True
        stream = self.num_streams if begins or parent is None else parent.stream
        self.num_streams += begins
        self.requests.append(Request(messages, tools, parent, stream, context))
        return self.requests[-1]

    def _continued(self, messages: Sequence[Message], tools: Sequence[Message]) -> Request | None:
        """Return the request whose conversation, with its answer, the messages end with nothing but news after."""
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        served = [
            one
            for one in self.requests
            if answers
            and one.answer is not None
            and one.tools == tools
            and are_same([*one.messages, one.answer], messages[: answers[-1] + 1])
        ]
        open_ones = [one for one in served if not one.is_continued]
        return (open_ones or served)[-1] if served else None
