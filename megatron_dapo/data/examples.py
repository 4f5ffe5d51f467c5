"""Given responses for supervised fine-tuning: rows of Parquet and JSON-lines files, tokenized once.

prompt      chat messages [{"role", "content"}], the same as JSON text, or plain text
response    the text to learn
messages    instead of both: chat messages, the last of which is the assistant's and is learned

Other columns are ignored. A response ends with the stop token that the chat template puts after it, so that the policy
also learns to stop. The loss covers only these tokens, those of the last turn.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dapo.data.files import Columns, checked_messages, prompt_id_of, read_table
from megatron_dapo.data.template import PromptTemplate, StopTokens
from megatron_dapo.types import Prompt

logger = logging.getLogger(__name__)

EXAMPLE_COLUMNS = Columns((), ("prompt", "response", "messages"))


@dataclass(frozen=True, eq=False)
class Example:
    """A prompt and the response to learn."""

    prompt: Prompt
    token_ids: np.ndarray  # [R] int32, of the response with its stop token


def load_examples(
    paths: Sequence[Path],
    template: PromptTemplate,
    stop_tokens: StopTokens,
    max_prompt_tokens: int,
    max_response_tokens: int,
) -> dict[str, Example]:
    """Read examples in file order, by prompt id, which also hashes the response: equal rows count once.

    Those with too long a prompt or response are left out, counted and logged.

    Raises ValueError on a missing, empty, damaged or wrongly structured file, and if no example is short enough.
    """
    end = end_of_response(template, stop_tokens)
    examples: dict[str, Example] = {}
    num_rows = num_too_long = 0
    for path in paths:
        for location, values in read_table(path, EXAMPLE_COLUMNS):
            num_rows += 1
            messages, response = _checked_row(values, location)
            prompt_id = prompt_id_of(messages, response)
            if prompt_id in examples:
                continue
            prompt = Prompt(prompt_id, messages, template.render(messages), answer="")
            tokens = [*template.tokenizer.encode(response, add_special_tokens=False), end]
            if len(prompt.token_ids) > max_prompt_tokens or len(tokens) > max_response_tokens:
                num_too_long += 1
                continue
            examples[prompt_id] = Example(prompt, np.asarray(tokens, np.int32))
    if not examples:
        raise ValueError(
            f"all {num_rows} examples are longer than data.max_prompt_tokens = {max_prompt_tokens} or "
            f"rollout.max_response_tokens = {max_response_tokens}: raise them"
        )
    (logger.warning if num_too_long else logger.info)(
        "%d rows -> %d examples, each once; %d left out: longer than %d prompt or %d response tokens",
        *(num_rows, len(examples), num_too_long, max_prompt_tokens, max_response_tokens),
    )
    return examples


def end_of_response(template: PromptTemplate, stop_tokens: StopTokens) -> int:
    """Return the token that ends a response: with a chat template, the stop token it puts after an assistant turn."""
    if template.name == "chat":
        prompt = [{"role": "user", "content": "a"}]
        turns = [*prompt, {"role": "assistant", "content": "b"}]
        # A generation prompt may be longer than the turn's own head, so search what follows the prompt without one.
        whole = template.tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False)
        start = len(template.tokenizer.apply_chat_template(prompt, tokenize=True, return_dict=False))
        ends = [int(token) for token in whole[start:] if token in stop_tokens.token_ids]
        if ends:
            return ends[0]
    eos = template.tokenizer.eos_token_id
    return stop_tokens.token_ids[0] if eos is None else int(eos)


def _checked_row(values: Mapping[str, Any], location: str) -> tuple[tuple[Mapping[str, str], ...], str]:
    """Return the messages before a response, and the response."""
    if values.get("messages") is not None:
        *before, last = checked_messages(values["messages"], location)
        if last["role"] != "assistant" or not before:
            raise ValueError(
                f"{location}: messages must end with an assistant's turn after others, got {len(before) + 1} of which the "
                f"last one is the {last['role']}'s"
            )
        return tuple(before), last["content"]
    missing = [name for name in ("prompt", "response") if values.get(name) is None]
    if missing:
        raise ValueError(
            f"{location}: no {' and no '.join(missing)}; a row has prompt and response, or messages (found: "
            f"{', '.join(name for name in values if values[name] is not None) or 'nothing'})"
        )
    if not isinstance(values["response"], str) or not values["response"].strip():
        raise ValueError(f"{location}: response must be a text, got {values['response']!r:.100}")
    return checked_messages(values["prompt"], location), values["response"]
