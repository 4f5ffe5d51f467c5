"""Token ids that follow a sampled turn when messages are appended to its conversation.

    stream:   prompt ids | sampled ids | delta | sampled ids | delta | ...
                           the engine's  encoded once  the engine's

A stream only grows: a sampled turn stays as the engine returned it, and only the new messages are encoded. Their text
is cut from a short conversation that the chat template renders: a probe, an answer that is a sentinel, the new messages,
and the prompt for the next turn. The delta is everything after the sentinel, so its cost is that of the new messages.

A message is text: if an environment says "<|im_end|>", the model reads these characters and not the token.

`data/template_proof.py` proves at the start of a run that the cut is exact for a template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

from jinja2 import TemplateError  # comes with torch

from megatron_dapo.data.template import Messages, PromptTemplate
from megatron_dapo.untrusted import one_line

History = Literal["refuse", "keep", "rewrite"]

ROLES = ("user", "tool")  # roles of messages that an environment appends
PROBE: Messages = ({"role": "user", "content": "probe"},)
_CUT = "zqCutqz"
_SHORT_CHARS, _NUM_SHORT = 2048, 1024  # messages whose ids are kept, and how many
# A template takes fields of messages for granted, and is code of the model's author.
TEMPLATE_ERRORS = (TemplateError, TypeError, LookupError, AttributeError, ValueError)


@dataclass(frozen=True)
class Continuation:
    """Token ids of appended messages: they follow the stream, or are the whole prompt of a new segment."""

    token_ids: tuple[int, ...]
    begins_segment: bool = False


@dataclass(frozen=True)
class TurnTemplate:
    """The ids between two sampled turns.

    `history` says what happens if the template renders earlier turns differently once messages follow: "keep" leaves
    the stream as it was sampled, "rewrite" begins a new segment with the template's ids. "refuse" is for templates that
    are proven not to.
    """

    template: PromptTemplate
    stop_token_ids: tuple[int, ...]
    history: History = "refuse"
    roles: tuple[str, ...] = (
        ROLES  # roles of messages that may follow; `prove_template` leaves those that the template can say
    )

    def delta(self, last_token: int | None, messages: Messages) -> tuple[int, ...]:
        """Return the ids that follow a turn whose last token is `last_token`, up to the begin of the next turn.

        A turn that was sampled up to the template's end token has it already. Any other one, cut or ended by another
        stop token, gets it from the delta, where it is observed and not trained. ValueError if a message cannot follow.
        """
        as_json = json.dumps(messages)
        ids = self._short_delta(as_json) if len(as_json) <= _SHORT_CHARS else self._delta(messages)
        end = ids[: self._num_closing + 1]
        return ids[end.index(last_token) + 1 :] if last_token in end else ids

    def _delta(self, messages: Messages) -> tuple[int, ...]:
        return self._encode(self.delta_text(self._as_text(messages)))

    @cached_property
    def _short_delta(self) -> Callable[[str], tuple[int, ...]]:
        """Return `_delta` of messages as JSON, from a cache: environments repeat short answers, as do episodes of a group."""
        return lru_cache(_NUM_SHORT)(lambda as_json: self._delta(json.loads(as_json)))

    def delta_text(self, messages: Messages) -> str:
        """Return the text after a turn's content: its end token, the messages, the prompt for the next turn."""
        roles = [message["role"] for message in messages]
        if not messages or set(roles) - set(self.roles):
            raise ValueError(
                f"the model's chat template has no place for messages of the roles {', '.join(roles) or 'none'} after "
                f"an answer, only for {', '.join(self.roles) or 'none'}: say it in a message of another role"
            )
        if self._is_plain:
            return self.stop_texts[0] + "".join(f"\n{message['content']}" for message in messages) + "\n"
        sentinel = absent_from(messages)
        reason: Exception | None = None
        for turn in turns_before(messages, sentinel):
            try:
                return self.split([*PROBE, turn, *messages], sentinel)[1]
            except TEMPLATE_ERRORS as error:
                reason = reason or error
        raise ValueError(
            f"the model's chat template refuses messages of the roles {', '.join(roles)} after an answer: "
            f"{one_line(reason)}"
        )

    def split(self, messages: Messages, sentinel: str, add_generation_prompt: bool = True) -> tuple[str, str]:
        """Render `messages` and cut the text at the end of the turn that has the sentinel, before its end token.

        A turn with tool calls ends at the first stop token after the sentinel, because the rest of the call is between
        them. ValueError if the sentinel is not rendered, or no stop token ends the call.
        """
        text = self.template.text(messages, add_generation_prompt)
        end = text.rfind(sentinel) + len(sentinel)
        if end < len(sentinel):
            raise ValueError("the template leaves out the content of an answer")
        if any(sentinel in json.dumps(message.get("tool_calls", "")) for message in messages):
            stops = [at for stop in self.stop_texts if (at := text.find(stop, end)) >= 0]
            if not stops:
                raise ValueError(f"no stop token ({', '.join(self.stop_texts)}) ends a tool call")
            end = min(stops)
        return text[:end], text[end:]

    def begin(self, messages: Messages) -> tuple[int, ...]:
        """Return the ids of a conversation that begins a stream, and may have answers in it that no stream has.

        ValueError if the template refuses it.
        """
        if self._is_plain:
            return self.template.render(messages)
        try:
            return self._encode(self.template.text(self._as_text(messages)))
        except TEMPLATE_ERRORS as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(f"the model's chat template refuses messages of the roles {roles}: {one_line(error)}") from error

    def follow(self, stream: Sequence[int], history: Messages, messages: Messages) -> Continuation:
        """Return how a stream continues when `messages` are appended; its last id is the last sampled one.

        `history` has the messages of the stream, each sampled turn as an assistant's message. It is read only if the
        template may rewrite it.
        """
        delta = self.delta(stream[-1] if len(stream) else None, messages)
        if self.history == "rewrite" and not self._is_plain:
            rendered = self.begin([*history, *messages])
            # Sampled ids need not be those that their text has, so texts are compared, both decoded from ids.
            if self._decoded(rendered) != self._decoded([*stream, *delta]):
                return Continuation(rendered, begins_segment=True)
        return Continuation(delta)

    def _as_text(self, messages: Messages) -> list[Mapping[str, Any]]:
        """Return messages in which each spelling of a token is cut in two, for `_encode`; a turn's own text stays."""
        return [
            {**message, "content": self._spellings.sub(_cut_in_two, message["content"])}
            if message["role"] != "assistant" and isinstance(message.get("content"), str)
            else message
            for message in messages
        ]

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(token for part in text.split(_CUT) for token in self.template.encode(part))

    @cached_property
    def _spellings(self) -> re.Pattern[str]:
        """Spellings of the tokens that a tokenizer finds in a text before it splits it, such as "<|im_end|>"."""
        names = [name for name in self.template.tokenizer.get_added_vocab() if len(name.split()) == 1 < len(name)]
        longest_first = sorted(names, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    @cached_property
    def closing(self) -> str:
        """Text between an answer and its stop token, which the model samples too; "" in most templates."""
        if self._is_plain:
            return ""
        sentinel = absent_from(())
        ending = self.split(
            [*PROBE, {"role": "assistant", "content": sentinel}], sentinel, add_generation_prompt=False
        )[1]
        return ending[: min((at for stop in self.stop_texts if (at := ending.find(stop)) >= 0), default=0)]

    @cached_property
    def _num_closing(self) -> int:
        return len(self.template.encode(self.closing))

    @cached_property
    def stop_texts(self) -> tuple[str, ...]:
        return tuple(self._decoded([stop]) for stop in self.stop_token_ids)

    @property
    def _is_plain(self) -> bool:
        return self.template.name == "plain"

    def _decoded(self, ids: Sequence[int]) -> str:
        tokenizer = self.template.tokenizer
        return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def turns_before(messages: Messages, sentinel: str) -> Iterator[Mapping[str, Any]]:
    """Yield turns that `messages` can follow, each with the sentinel: calls of the tools that answer, a plain answer."""
    answers = []
    for message in messages:
        if message["role"] != "tool":
            break
        answers.append(message)
    # Templates want arguments as an object or as its JSON text; some render no calls, or only one a turn.
    for arguments in ({"value": sentinel}, json.dumps({"value": sentinel})) if answers else ():
        calls = [
            {
                "type": "function",
                "id": answer.get("tool_call_id") or f"call{index:05}",
                "function": {"name": answer.get("name") or "tool", "arguments": arguments},
            }
            for index, answer in enumerate(answers)
        ]
        yield {"role": "assistant", "content": "", "tool_calls": calls}
        yield {"role": "assistant", "content": "", "tool_calls": calls[-1:]}
    yield {"role": "assistant", "content": sentinel}


def _cut_in_two(spelling: re.Match[str]) -> str:
    return f"{spelling[0][0]}{_CUT}{spelling[0][1:]}"


def absent_from(messages: Messages) -> str:
    """Return a text that is in none of the messages, and that no template trims, escapes or splits."""
    sentinel, texts = "zqEndOfTurnqz", json.dumps([dict(message) for message in messages], default=str)
    while sentinel in texts:
        sentinel += "q"
    return sentinel
