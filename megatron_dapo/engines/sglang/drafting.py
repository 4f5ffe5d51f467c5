"""What SGLang's n-gram drafting reads of the policy's own past: in each server a corpus of earlier responses.

A server with drafting looks up how the end of a response continued before, in its corpus and in the responses that it
generates now, and verifies several such tokens in one decoding step. Verification samples from the policy, so the
distribution stays what it is. A corpus is global in its server: the responses to a prompt go where its past is.

Corpora are of token ids. SGLang takes them only as text, so servers with drafting have a tokenizer whose words are the ids.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

TOKENIZER = "tokenizer"  # directory in a server's scratch
_PER_PROMPT = 8  # newest responses kept for a prompt
# A corpus is built anew as a whole: once it would change by this share.
_REBUILD_SHARE = 0.25
PromptIds = tuple[int, ...]


@dataclass
class _Past:
    """The last responses to a prompt."""

    server: int
    version: int = -1  # policy version that ended the newest
    responses: deque[np.ndarray] = field(default_factory=lambda: deque(maxlen=_PER_PROMPT))  # [tokens] int32 each

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.responses))

    @property
    def expected_length(self) -> float:
        return self.num_tokens / len(self.responses)


class DraftHistory:
    """The policy's past by prompt, and which server has it.

    A server's corpus has the pasts of the prompts with the longest expected responses, which are those that a batch waits
    for, up to `max_tokens`. What does not fit is dropped, and so is what `max_age` versions have not visited.
    """

    def __init__(self, num_servers: int, max_tokens: int, max_age: int) -> None:
        self.max_tokens, self.max_age = max_tokens, max_age
        self._pasts: dict[PromptIds, _Past] = {}
        self._new_tokens = [0] * num_servers  # each server's, counted since its corpus was built
        self._loaded_tokens = [0] * num_servers

    def server_of(self, prompt_ids: PromptIds) -> int | None:
        """Return the server that has the past of a prompt; None without any."""
        past = self._pasts.get(prompt_ids)
        return past.server if past else None

    def note(self, prompt_ids: PromptIds, token_ids: np.ndarray, server: int, version: int) -> None:
        """Remember a finished response of `server`. The past of a prompt moves with it."""
        past = self._pasts.setdefault(prompt_ids, _Past(server))
        past.server, past.version = server, version
        past.responses.append(token_ids)
        self._new_tokens[server] += len(token_ids)

    def take(self, server: int, version: int) -> list[np.ndarray] | None:
        """Return the documents of a server's next corpus, None if its last one is still good.

        Drops what is too old, or does not fit.
        """
        if self._new_tokens[server] <= _REBUILD_SHARE * self._loaded_tokens[server]:
            return None
        own = {prompt: past for prompt, past in self._pasts.items() if past.server == server}
        left, documents = self.max_tokens, list[np.ndarray]()
        for prompt, past in sorted(own.items(), key=lambda item: -item[1].expected_length):
            if version - past.version > self.max_age or past.num_tokens > left:
                del self._pasts[prompt]
                continue
            left -= past.num_tokens
            documents.extend(past.responses)
        self._new_tokens[server], self._loaded_tokens[server] = 0, self.max_tokens - left
        return documents

    def forget_loaded(self, server: int) -> None:
        """A server has started anew, without a corpus: the next one is due at once."""
        self._new_tokens[server] += self._loaded_tokens[server] + 1
        self._loaded_tokens[server] = 0

    @property
    def num_tokens(self) -> int:
        return sum(past.num_tokens for past in self._pasts.values())


def as_text(token_ids: Iterable[int]) -> str:
    """Return a document whose words are token ids."""
    return " ".join(map(str, token_ids))


def write_tokenizer(directory: Path, vocab_size: int) -> Path:
    """Write a tokenizer whose words are the ids of their tokens, and return its directory."""
    directory.mkdir(parents=True)
    parts = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    model = {"type": "WordLevel", "vocab": {str(token): token for token in range(vocab_size)}, "unk_token": "0"}
    cut = {"type": "WhitespaceSplit"}
    document: dict[str, Any] = {"version": "1.0", **parts, "added_tokens": [], "pre_tokenizer": cut, "model": model}
    (directory / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return directory


def drafting_arguments(draft_tokens: int, corpus_tokens: int, tokenizer: Path) -> dict[str, object]:
    """Return SGLang's arguments for servers that draft.

    draft_tokens: verified in a step, the one that is certain included.
    """
    return {
        "speculative-algorithm": "NGRAM",
        "speculative-num-draft-tokens": draft_tokens,
        # Half for the past; the rest for the responses that run, such as those of the same group.
        "speculative-ngram-external-sam-budget": draft_tokens // 2,
        # The next corpus is loaded before the last one is removed; documents have separators.
        "speculative-ngram-external-corpus-max-tokens": 3 * corpus_tokens,
        "page-size": 1,  # drafts are trees, which most kernels take of single tokens only
        "tokenizer-path": tokenizer,
    }


def drafting_problem(server: Mapping[str, object]) -> str:
    """Return why a server's drafting would change what is sampled, by its /server_info; "" if it does not."""
    if server.get("speculative_algorithm") != "NGRAM":
        return "it drafts nothing: start it with --speculative-algorithm NGRAM"
    if server.get("device") != "cuda":
        return f"on {server.get('device')} it takes the likeliest token instead of sampling: set sglang.drafting = \"off\""
    thresholds = [server.get(f"speculative_accept_threshold_{name}") for name in ("single", "acc")]
    if any(value != 1.0 for value in thresholds):
        return f"it accepts drafts below thresholds {thresholds}: both must be 1.0"
    return ""


def documents_of(responses: Sequence[np.ndarray]) -> list[str]:
    """Return responses as the documents of a corpus."""
    return [as_text(response.tolist()) for response in responses]
