"""Proof, at the start of a run, that a chat template's deltas continue the stream of an episode exactly.

Conversations of all kinds that a template accepts (with and without thinking, tool calls, consecutive tool results) are
rendered whole and compared with `TurnTemplate`'s deltas:

(a) the text after a turn does not depend on the turns before it;
(b) the stop token is the last token of the turn or the first of the delta, exactly once;
(c) the delta's ids are those that the whole text has there: a turn ends at a token boundary;
(d) the text up to the end of the turn stays as it was when messages follow, or the user says what then happens.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Any

from megatron_dapo.data.template import Messages
from megatron_dapo.data.turns import PROBE, TEMPLATE_ERRORS, TurnTemplate, absent_from, turns_before
from megatron_dapo.untrusted import one_line

_CONTENTS = (
    "7",
    "Find x.",
    "ends in a space ",
    "\n\nline",
    "naïve 🤔",
    '{"value": [1, 2]}',
    "a < b & c",
    "1,024",
    "tab\t",
    "...",
)
_THOUGHT = "zqThoughtqz"
_REASONING = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), _THOUGHT)  # templates differ in the name


@dataclass(frozen=True)
class Rewrite:
    """A rule by which a template renders an earlier turn differently when a message of `role` follows it."""

    rule: str
    role: str

    def __str__(self) -> str:
        return f"{self.rule} when a {self.role} message follows"


@dataclass(frozen=True)
class TemplateProof:
    """A template whose deltas are exact, for messages of the roles of `turns`."""

    turns: TurnTemplate
    refused: Mapping[str, str]  # other role -> why none of its messages can follow a turn
    rewrites: tuple[Rewrite, ...]  # empty: the history is stable
    num_conversations: int

    def describe(self) -> dict[str, Any]:
        return {
            "template_hash": self.turns.template.hash,
            "history": self.turns.history,
            "roles": list(self.turns.roles),
            "refused": dict(self.refused),
            "rewrites": [str(rewrite) for rewrite in self.rewrites],
            "num_conversations": self.num_conversations,
        }


def prove_template(turns: TurnTemplate) -> TemplateProof:
    """Return the proof of a template.

    ValueError in one line if (a), (b) or (c) fails for every role, or (d) fails and the history is "refuse".
    """
    refused: dict[str, str] = {}
    checks: list[_Check] = []
    for role in turns.roles:
        try:
            checks += _prove_role(turns, role, [other for other in turns.roles if other not in refused])
        except TEMPLATE_ERRORS as error:
            refused[role] = one_line(error)
    proven = replace(turns, roles=tuple(role for role in turns.roles if role not in refused))
    if not proven.roles:
        raise ValueError(f"no message can follow a turn: {next(iter(refused.values()))}")
    rewrites = tuple(dict.fromkeys(rewrite for check in checks for rewrite in check.rewrites))
    if rewrites and turns.history == "refuse":
        raise ValueError(
            f'the model\'s chat template {"; it ".join(map(str, rewrites))}: set turns.history = "keep" (an episode '
            'keeps what was sampled, and the model sees it) or "rewrite" (the template\'s text begins a new segment)'
        )
    return TemplateProof(proven, refused, rewrites, sum(check.num_turns for check in checks))


# ---- conversations


@dataclass(frozen=True)
class _Check:
    """Result for one context and what follows its turn, over the turns that the template renders between them."""

    num_turns: int
    rewrites: tuple[Rewrite, ...]


def _prove_role(turns: TurnTemplate, role: str, roles: Sequence[str]) -> list[_Check]:
    """Return the checks of a role's messages. ValueError if a check fails, or the template leaves the messages out."""
    if turns.template.name == "plain":
        return []  # it has no text but the messages', each in its line
    marker = "zqContentqz"
    if marker not in turns.delta_text([{"role": role, "content": marker, "name": "tool"}]):
        raise ValueError(f"the model's chat template leaves out messages of the role {role}")
    _check_end(turns, role)
    checks = [_check(turns, context, new) for context, new in _conversations(role, roles)]
    return [check for check in checks if check.num_turns]


def _conversations(role: str, roles: Sequence[str]) -> Iterator[tuple[Messages, Messages]]:
    """Yield contexts that end before a turn, each with messages that follow the turn, the first of them of `role`."""
    draw = random.Random(0)

    def message(role: str, **fields: Any) -> dict[str, Any]:
        return {"role": role, "content": draw.choice(_CONTENTS), **fields}

    def tool(number: int = 1) -> dict[str, Any]:
        return message("tool", name=f"tool{number}", tool_call_id=f"call{number:05}")

    appended = [[tool()], [tool(1), tool(2)]] if role == "tool" else [[message(role)], [message(role)]]
    if role == "tool" and "user" in roles:
        appended.append([tool(), message("user")])
    call = next(iter(turns_before([tool()], "7")))
    for new in appended:
        thought = message("assistant", **_REASONING)
        yield [message("user")], new
        yield [message("system"), message("user")], new
        yield [message("user"), message("assistant"), message("user")], new
        yield [message("user"), thought, message("user")], new
        yield [message("user"), call, tool()], new
        yield [message("user"), {**call, **_REASONING}, tool(), thought, message("user")], new


def _turns(turn: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a turn without thinking, with it in a field, and with it in the text."""
    yield turn
    yield {**turn, **_REASONING}
    if turn["content"]:
        yield {**turn, "content": f"<think>\n{_THOUGHT}\n</think>\n\n{turn['content']}"}


# ---- checks


def _check_end(turns: TurnTemplate, role: str) -> None:
    """Raise ValueError unless an answer ends with a stop token, once: in the turn or at the begin of the delta."""
    sentinel = absent_from(())
    answer = {"role": "assistant", "content": sentinel}
    last = turns.split([*PROBE, answer], sentinel, add_generation_prompt=False)[1]
    delta = turns.delta_text([{"role": role, "content": "7", "name": "tool"}])
    rest, stops = delta[len(turns.closing) :], turns.stop_texts
    stop = turns.template.encode(delta)[len(turns.template.encode(turns.closing)) :][:1]
    is_in_delta = rest.startswith(stops) and stop[0] in turns.stop_token_ids
    if not delta.startswith(turns.closing) or not (is_in_delta or last.startswith(stops)):
        raise ValueError(
            f"the model's chat template ends an answer with {(last or delta)[:40]!r}, and none of the stop tokens "
            f"({', '.join(stops)}) is there: a turn would not end; name its token in generation_config.json's "
            "eos_token_id"
        )
    twice = [stop for stop in stops if rest.startswith(stop + stop)]
    if twice:
        raise ValueError(f"the model's chat template ends an answer with two stop tokens: {rest[:40]!r}")


def _check(turns: TurnTemplate, context: Messages, new: Messages) -> _Check:
    """Check one conversation with each turn that its template renders. ValueError if (a) or (c) fails."""
    sentinel = absent_from(new)
    expected = turns.delta_text(new)
    ids = turns.template.encode(expected)
    num_turns, rewrites, lost_prompt = 0, [], None
    keeps_prompt = False
    for turn in turns_before(new, sentinel):
        for variant in _turns(turn):
            try:
                prompt = turns.template.text(context)
                before = turns.split([*context, variant], sentinel, add_generation_prompt=False)[0]
                after, delta = turns.split([*context, variant, *new], sentinel)
            except TEMPLATE_ERRORS:
                continue  # the template refuses this conversation
            num_turns += 1
            _check_delta(turns, after, delta, expected, ids)
            if not before.startswith(prompt):
                lost_prompt = lost_prompt or _lost_end(prompt, before)
                continue  # no turn after this prompt: e.g. it opens a thought, and this turn has none
            keeps_prompt = True
            if after != before:
                rewrites.append(Rewrite(_rule(before, after), new[-1]["role"]))
        if (
            num_turns
        ):  # the kind of turn that `delta_text` has here: with calls of the tools that answer, if it renders them
            break
    if num_turns and not keeps_prompt:
        rewrites.append(
            Rewrite(f"drops {lost_prompt!r} of its generation prompt from an earlier turn", new[-1]["role"])
        )
    return _Check(num_turns, tuple(rewrites))


def _check_delta(turns: TurnTemplate, after: str, delta: str, expected: str, ids: tuple[int, ...]) -> None:
    if delta != expected:
        here, there = _difference(delta, expected)
        raise ValueError(
            f"the model's chat template renders what follows an answer by what precedes it, {here!r} in one conversation "
            f"and {there!r} in another: an episode cannot be continued exactly"
        )
    texts = (after, *_CONTENTS)  # a turn may end in anything
    if any(turns.template.encode(text + delta)[-len(ids) :] != ids for text in texts):
        raise ValueError(
            f"the model's tokenizer joins the end of an answer with {delta[:20]!r} after it: an episode cannot be "
            "continued exactly; mark the template's tokens as special in the tokenizer"
        )


def _rule(before: str, after: str) -> str:
    if _THOUGHT in before and _THOUGHT not in after:
        return "drops earlier thinking"
    old, new = _difference(before, after)
    return f"drops {old!r} of an earlier answer" if not new else f"renders {old!r} of an earlier answer as {new!r}"


def _difference(old: str, new: str) -> tuple[str, str]:
    """Return the first part in which two texts differ, in at most 40 characters each."""
    blocks = SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    _, start, end, new_start, new_end = next(block for block in blocks if block[0] != "equal")
    if new_start == new_end:  # choose, among equal deletions, the one that begins with a tag
        while start and old[start - 1] == old[end - 1]:
            start, end = start - 1, end - 1
        while old[start] != "<" and old[start] == old[end : end + 1]:
            start, end = start + 1, end + 1
    return old[start:end][:40], new[new_start:new_end][:40]


def _lost_end(prompt: str, text: str) -> str:
    """Return the end of `prompt` that `text` does not begin with, from the begin of a tag."""
    start = len(os.path.commonprefix([prompt, text]))
    tag = prompt.rfind("<", 0, start)
    return prompt[start if tag < 0 or ">" in prompt[tag:start] else tag :]
