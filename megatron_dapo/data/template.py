"""Chat templates and stop tokens.

Messages become token ids here once; engine and trainer use these ids, and no text is tokenized a second time.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from jinja2 import TemplateError  # comes with torch

from megatron_dapo.untrusted import blamed_on, read_json

logger = logging.getLogger(__name__)

Messages = Sequence[Mapping[str, Any]]  # "role", "content"; with tools also "tool_calls", "name", "tool_call_id"


class Tokenizer(Protocol):
    """The methods of a Hugging Face tokenizer that are used here."""

    chat_template: Any
    eos_token_id: int | None

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...

    def encode(self, text: str, **options: Any) -> list[int]: ...

    def decode(self, token_ids: Any, **options: Any) -> str: ...

    def get_added_vocab(self) -> dict[str, int]: ...


# ---- templates


def _render_chat(tokenizer: Tokenizer, messages: Messages, options: Mapping[str, Any]) -> list[int]:
    return tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        tokenize=True,
        add_generation_prompt=True,
        return_dict=False,  # the default of transformers 5 is a dictionary
        **options,
    )


def _render_plain(tokenizer: Tokenizer, messages: Messages, options: Mapping[str, Any]) -> list[int]:
    """Join the contents of the turns by newlines, for a base model to continue."""
    return tokenizer.encode("\n".join(message["content"] for message in messages) + "\n", **options)


_TEMPLATES = {
    "chat": _render_chat,
    "plain": _render_plain,
}


@dataclass(frozen=True)
class PromptTemplate:
    """Rendering of messages to token ids.

    `name` is "chat" (the tokenizer's own chat template) or "plain" (the bare text, for base models without one);
    `options` go to the chat template unchanged, e.g. {"enable_thinking": False}. `vocab_size`: rows of the model's embedding.
    """

    tokenizer: Tokenizer
    name: str = "chat"
    options: Mapping[str, Any] | None = None
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        if self.name not in _TEMPLATES:
            raise ValueError(f"unknown prompt template {self.name!r}: choose one of {', '.join(sorted(_TEMPLATES))}")
        if self.name == "chat" and not getattr(self.tokenizer, "chat_template", None):
            raise ValueError(
                "the tokenizer has no chat template: choose the template 'plain', which gives the model the bare text, "
                "or use a tokenizer directory whose tokenizer_config.json or chat_template.jinja has one"
            )

    def render(self, messages: Messages) -> tuple[int, ...]:
        """Return the token ids of a prompt for the model to continue.

        ValueError if the chat template rejects it, or a token is outside of the model's vocabulary.
        """
        try:
            ids = tuple(int(token) for token in _TEMPLATES[self.name](self.tokenizer, messages, self.options or {}))
        except TemplateError as error:
            # Some templates have no system role and require user and assistant to alternate.
            roles = ", ".join(message["role"] for message in messages)
            fix = (
                "put the text of a system message at the start of the user's"
                if any(message["role"] == "system" for message in messages)
                else 'mend the template, or set data.template = "plain"'
            )
            raise ValueError(f"the model's chat template refuses messages of the roles {roles}: {error}; {fix}") from error
        if not ids:
            raise ValueError(f"template {self.name!r} renders these messages to no token at all: {list(messages)!r}")
        return self._within_vocabulary(ids)

    def text(self, messages: Messages, add_generation_prompt: bool = True) -> str:
        """Return the text that the chat template renders, special tokens spelled out. It raises the template's errors."""
        return self.tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **(self.options or {}),
        )

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of rendered text, in which a special token's spelling is the token."""
        return self._within_vocabulary(tuple(self.tokenizer.encode(text, add_special_tokens=False)))

    def _within_vocabulary(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        if self.vocab_size is not None and ids and max(ids) >= self.vocab_size:
            raise ValueError(
                f"the tokenizer gives token {max(ids)} ({self.tokenizer.decode([max(ids)])!r}), but the model's embedding has "
                f"rows 0..{self.vocab_size - 1}: take the tokenizer that belongs to the model, or remove its added tokens"
            )
        return ids

    @property
    def hash(self) -> str:
        """Hash of the template, for results: equal hashes render equal messages to equal text."""
        source = self.tokenizer.chat_template if self.name == "chat" else None
        description = json.dumps([self.name, source, dict(self.options or {})], sort_keys=True)
        return hashlib.sha256(description.encode()).hexdigest()[:16]

    def describe(self, messages: Messages) -> dict[str, Any]:
        """Return one prompt's template, its hash, token ids and decoded text, for the step-0 report."""
        ids = self.render(messages)
        return {
            "template": self.name,
            "template_hash": self.hash,
            "token_ids": list(ids),
            "text": self.tokenizer.decode(list(ids), skip_special_tokens=False),
        }


# ---- files of a tokenizer

_TOKEN_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_LONGEST_TOKEN = 512  # characters; tokenizers takes seconds to build the automaton of a much longer one


def check_tokenizer_files(directory: Path) -> None:
    """Raise ValueError if there are no tokenizer files, or one is broken or has a special token of absurd length."""
    files = [directory / name for name in _TOKEN_FILES if (directory / name).is_file()]
    if not files and not (directory / "tokenizer.model").is_file():
        raise ValueError(f"{directory}: no tokenizer files there")
    for file in files:
        document = read_json(file)
        with blamed_on(file):
            longest = max(map(len, _special_tokens(document)), default=0)
        if longest > _LONGEST_TOKEN:
            raise ValueError(f"{file}: a special token has {longest:,} characters, at most {_LONGEST_TOKEN} are read")


def _special_tokens(document: Any) -> Iterator[str]:
    """Yield every text of a tokenizer's file except vocabulary, merges and chat template: its tokens are among them."""
    parts = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for name, part in parts:
        if isinstance(part, str) and name != "chat_template":
            yield part
        elif name not in ("model", "chat_template"):
            yield from _special_tokens(part)
    if isinstance(document, dict):
        yield from document  # added_tokens.json has them as keys


# ---- stop tokens


@dataclass(frozen=True)
class StopTokens:
    """Every token that ends a response, with the files that name it."""

    token_ids: tuple[int, ...]  # ascending
    sources: Mapping[str, tuple[int, ...]]
    agree: bool  # all files that name any name the same ones

    def report(self) -> str:
        return ", ".join(f"{source}: {list(ids) or 'none'}" for source, ids in self.sources.items())


def resolve_stop_token_ids(
    config_eos: int | Sequence[int] | None,
    generation_config_eos: int | Sequence[int] | None,
    tokenizer_eos: int | Sequence[int] | None,
) -> StopTokens:
    """Return the union of the end-of-sequence ids of config.json, generation_config.json and the tokenizer.

    Disagreement is logged as a warning. ValueError when no file names any.
    """
    # Base and chat models differ in which file is right, and with a missed stop token no response ends: so all count.
    sources = {
        "config.json": _as_ids(config_eos),
        "generation_config.json": _as_ids(generation_config_eos),
        "tokenizer": _as_ids(tokenizer_eos),
    }
    named = [frozenset(ids) for ids in sources.values() if ids]
    if not named:
        raise ValueError("no end-of-sequence token in config.json, generation_config.json or the tokenizer")
    stop_tokens = StopTokens(tuple(sorted(frozenset().union(*named))), sources, len(set(named)) == 1)
    if not stop_tokens.agree:
        logger.warning(
            "the end-of-sequence tokens disagree (%s): generation stops at any of %s",
            stop_tokens.report(),
            list(stop_tokens.token_ids),
        )
    return stop_tokens


def _as_ids(eos: int | Sequence[int] | None) -> tuple[int, ...]:
    if eos is None:
        return ()
    ids = [eos] if isinstance(eos, int) else list(eos)
    if any(type(token) is not int or token < 0 for token in ids):
        raise ValueError(f"eos_token_id {eos!r:.100} is neither a token id nor a list of token ids")
    return tuple(sorted(set(ids)))
