"""The turn that a request of a chat client follows.

A client sends the whole conversation with each request. What it sends is compared with what it was given, and never
encoded again: a request that begins with a conversation that was served continues that conversation's token stream.

    request:   system  user  assistant  tool            new: tool; follows the turn that said `assistant`
    served:    system  user  assistant

    request:   system  user  assistant* tool            * was edited: no served conversation is a beginning of it.
    served:    system  user  assistant                  A stream begins that is rendered from the request's messages.

Served turns form a tree. A turn's first continuation extends its stream; any other is a branch, a stream that begins
with the turn's context, in which tokens that were sampled before are context and are not trained again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_dapo.data.template import Messages
from megatron_dapo.data.turns import ROLES

Match = Literal["strict", "loose"]


class RequestError(ValueError):
    """A request that no turn can answer; the message is the client's."""


class TooManyBranches(RuntimeError):
    """An episode whose client began more streams than it may have."""


@dataclass(eq=False)
class ServedTurn:
    """A turn that a request is answered with."""

    number: int  # index among the requests of an episode
    stream: int  # the token stream that it is in, from 0
    parent: ServedTurn | None  # the turn whose context it continues; None: its context is all of the request's messages
    messages: Messages  # new ones: those after the parent's answer
    tools: Sequence[Mapping[str, Any]]
    answer: Mapping[str, Any] | None = None  # the assistant's message; None: not sampled yet
    is_abandoned: bool = False  # its client went away before it had read the answer
    children: list[ServedTurn] = field(default_factory=list)
    begins_stream: bool = False
    reason: str = ""  # cause of a stream other than the first

    def conversation(self) -> Messages:
        """Return all messages up to its answer, which it must have."""
        turns: list[ServedTurn] = []
        turn: ServedTurn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        said = [(*turn.messages, turn.answer) for turn in reversed(turns)]
        return [message for messages in said for message in messages if message is not None]


@dataclass(eq=False)
class _Place:
    """A sequence of messages that served conversations begin with."""

    next: dict[str, _Place] = field(default_factory=dict)  # keyed by the canonical form of the following message
    turns: list[ServedTurn] = field(default_factory=list)  # those whose answer is its last message, as they were served
    asked: list[ServedTurn] = field(default_factory=list)  # those that answer it


class ConversationTree:
    """Turns of one episode, by the conversations that led to them."""

    def __init__(self, *, match: Match = "loose", max_streams: int = 16, roles: Sequence[str] = ROLES) -> None:
        """`roles`: of messages that may follow an answer."""
        self._canonical, self._roles = _CANONICAL[match], roles
        self._max_streams = max_streams
        self._roots: dict[str, _Place] = {}  # keyed by the canonical form of the tools, which are in the context too
        # Turns that have no answer yet, with the messages that they answer.
        self._places: dict[ServedTurn, _Place] = {}
        self.turns: list[ServedTurn] = []
        self.num_streams = 0

    def ask(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        is_retry: bool = False,
        after: ServedTurn | None = None,
    ) -> ServedTurn:
        """Return the turn that answers a request: a new one, or the one that an equal request abandoned.

        Equal requests at the same time are two samples, an equal one after an answer is a third; `is_retry`: the client
        says that it did not read the answer; `after`: the turn whose answer it follows, if several are alike. RequestError if nothing can follow the messages, TooManyBranches if a
        stream more than allowed would begin.
        """
        _check(messages)
        root = self._roots.setdefault(_json(list(tools)), _Place())
        place, parent, start = self._last_served(root, messages, after)
        others = {message["role"] for message in messages[start:]}.difference(self._roles)
        if parent is not None and others:
            allowed = " or ".join(self._roles)
            raise RequestError(f"a message of the role {others.pop()} cannot follow an answer of this model; use {allowed}")
        reason = "" if parent is not None or not self.turns else self._drift(root, messages)
        for message in messages[start:]:
            place = place.next.setdefault(self._canonical(message), _Place())
        asked = [turn for turn in place.asked if after is None or turn.parent is parent]
        for turn in asked:
            if turn.is_abandoned or (is_retry and not turn.children and turn is asked[-1]):
                turn.is_abandoned = False
                return turn
        turn = self._begin(parent, tuple(messages[start:]), tools, reason)
        place.asked.append(turn)
        self._places[turn] = place
        return turn

    def follows(self, messages: Messages, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[ServedTurn | None, Messages]:
        """Return the turn that a request would follow, and its messages after that turn's answer; the tree stays as it is.

        RequestError as of `ask`.
        """
        _check(messages)
        _, parent, start = self._last_served(self._roots.get(_json(list(tools)), _Place()), messages)
        return parent, messages[start:]

    def answered(self, turn: ServedTurn, answer: Mapping[str, Any]) -> None:
        """Take the sampled turn as the assistant's message that the client is given."""
        assert turn.answer is None, f"turn {turn.number} has an answer"
        turn.answer = answer
        place = self._places.pop(turn).next.setdefault(self._canonical(answer), _Place())
        place.turns.append(turn)

    def _last_served(
        self, root: _Place, messages: Messages, after: ServedTurn | None = None
    ) -> tuple[_Place, ServedTurn | None, int]:
        """Return the longest served conversation that the messages begin with, its last turn, and its number of messages.

        It is only one that is followed by no further answer: an answer that was not served is text that the client made up.
        """
        last_answer = max((index for index, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
        place = root
        for message in messages[: last_answer + 1]:
            following = place.next.get(self._canonical(message))
            if following is None:
                return root, None, 0
            place = following
        if last_answer < 0 or not place.turns:
            return root, None, 0
        unfollowed = [turn for turn in place.turns if not turn.children]  # several answers may be alike
        parent = after if after in place.turns else (unfollowed or place.turns)[-1]
        return place, parent, last_answer + 1

    def _begin(
        self, parent: ServedTurn | None, messages: Messages, tools: Sequence[Mapping[str, Any]], reason: str
    ) -> ServedTurn:
        extends = parent is not None and not parent.children
        if not extends and self.num_streams == self._max_streams:
            raise TooManyBranches(
                f"the client began more than {self._max_streams} conversations in one episode; "
                "raise environment.max_branches if it is meant to"
            )
        stream = parent.stream if parent is not None and extends else self.num_streams
        self.num_streams += not extends
        if parent is not None and not extends:
            reason = f"another continuation of turn {parent.number}"
        turn = ServedTurn(len(self.turns), stream, parent, messages, tools, begins_stream=not extends, reason=reason)
        self.turns.append(turn)
        if parent is not None:
            parent.children.append(turn)
        return turn

    def _drift(self, root: _Place, messages: Messages) -> str:
        """Return why a request continues no conversation: which message is not as it was served."""
        if all(message["role"] != "assistant" for message in messages):
            return "a new conversation"
        if any(self._last_served(other, messages)[1] for other in self._roots.values()):
            return "other tools"
        place = root
        for index, message in enumerate(messages):
            following = place.next.get(self._canonical(message))
            if following is None or (message["role"] == "assistant" and not following.turns):
                return f"the client changed message {index + 1} of {len(messages)} ({message['role']})"
            place = following
        raise AssertionError("no message is changed, but the messages continue no conversation")


def _check(messages: Messages) -> None:
    if not messages:
        raise RequestError("messages is empty; give at least one")
    if messages[-1]["role"] == "assistant":
        raise RequestError("the last message is the assistant's, and a turn of the policy is never continued by a client")


_json = json.JSONEncoder(sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode


def _loose(message: Mapping[str, Any]) -> str:
    """Return a message without what clients change in passing.

    Ids of tool calls, reasoning, empty fields, white space around an answer, and the spelling of arguments.
    """
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content) if all(map(_is_text, content)) else _json(content)
    content = content or ""
    calls = [
        [call["function"]["name"], arguments_of(call["function"].get("arguments"))]
        for call in message.get("tool_calls") or ()
    ]
    is_answer = message["role"] == "assistant"
    return _json([message["role"], content.strip() if is_answer else content, message.get("name") or "", calls])


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text"


def arguments_of(arguments: Any) -> Any:
    """Return the arguments of a call as JSON values; a text that is no JSON stays one."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments.strip()


_CANONICAL: dict[Match, Callable[[Mapping[str, Any]], str]] = {"strict": lambda message: _json(dict(message)), "loose": _loose}
