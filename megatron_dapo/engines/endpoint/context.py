"""Number of tokens of a turn's context, counted as the episode engine builds it: without the ids, which are its."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_dapo.data.template import Messages, PromptTemplate
from megatron_dapo.data.turns import TurnTemplate
from megatron_dapo.engines.endpoint.format import ChatAnswer


def num_context_tokens(
    turns: TurnTemplate,
    messages: Messages,
    tools: Sequence[Mapping[str, Any]],
    after: ChatAnswer | None,
    begins_episode: bool,
) -> int:
    """Return the number of tokens of the context that messages have after an answer, or as a conversation.

    A turn that ended by itself is taken to have ended with the template's end token: after another stop token, the
    context has one more. ValueError if the template refuses the messages, or may render the answer differently.
    """
    if turns.history == "rewrite":
        raise ValueError('tokens are not counted with turns.history = "rewrite": its contexts depend on the sampled ids')
    if tools and turns.template.name != "plain":
        shown = [{"type": "function", "function": dict(schema)} for schema in tools]
        turns = replace(turns, template=replace(turns.template, options={**(turns.template.options or {}), "tools": shown}))
    if after is None:
        return len(turns.template.render(messages) if begins_episode else turns.begin(messages))
    last_tokens = turns.stop_token_ids if after.finish_reason == "stop" else (None,)
    num_new = min(len(turns.delta(token, messages)) for token in last_tokens)
    return after.num_prompt_tokens + after.num_tokens + num_new


def read_turn_template(settings: Mapping[str, Any]) -> TurnTemplate:
    """Read the template of a run. `settings`: path, trust_remote_code, name, options, history."""
    # transformers takes seconds to import, and few programs count tokens.
    from megatron_dapo.data.model_inputs import read_model_inputs

    inputs = read_model_inputs(Path(settings["path"]), settings["trust_remote_code"])
    template = PromptTemplate(inputs.tokenizer, settings["name"], settings["options"])
    return TurnTemplate(template, inputs.stop_tokens.token_ids, settings["history"])
