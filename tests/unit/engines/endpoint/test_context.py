"""Counts of contexts are the lengths of the streams that they are sampled in."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.data.published_templates import any_ids, content, turn_template

from megatron_dapo.data.turns import TurnTemplate
from megatron_dapo.engines.endpoint.context import num_context_tokens
from megatron_dapo.engines.endpoint.format import ChatAnswer
from megatron_dapo.types import FinishReason

TOOL: dict[str, Any] = {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}}
REASONS: tuple[FinishReason, ...] = ("stop", "length")


def with_tools(turns: TurnTemplate) -> TurnTemplate:
    return replace(turns, template=replace(turns.template, options={"tools": [{"type": "function", "function": TOOL}]}))


@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "phi3"])
def test_a_count_is_the_length_of_the_stream(name: str) -> None:
    turns, draw = turn_template(name), random.Random(name)
    for _ in range(20):
        tools = draw.choice([(), (TOOL,)])
        shown = with_tools(turns) if tools else turns
        messages = [{"role": "user", "content": content(draw)}]
        stream = list(shown.template.render(messages))
        assert num_context_tokens(turns, messages, tools, None, begins_episode=True) == len(stream)
        for _ in range(3):
            num_prompt, reason = len(stream), draw.choice(REASONS)
            sampled = any_ids(draw, turns)
            stream += [*sampled, turns.stop_token_ids[0]] if reason == "stop" else sampled
            new = [{"role": "user", "content": content(draw)}]
            answer = ChatAnswer("", reason, num_prompt_tokens=num_prompt, num_tokens=len(stream) - num_prompt)
            counted = num_context_tokens(turns, new, tools, answer, begins_episode=False)
            stream += shown.follow(stream, (), new).token_ids
            assert counted == len(stream)


def test_a_history_that_the_template_may_rewrite_is_not_counted() -> None:
    with pytest.raises(ValueError, match='not counted with turns.history = "rewrite"'):
        num_context_tokens(turn_template("qwen3", "rewrite"), [{"role": "user", "content": "a"}], (), None, True)
