"""Characters of a response's text that each of its tokens covers, so that readers can show a text token by token."""

from __future__ import annotations

from typing import Any

_INCOMPLETE = "\ufffd"  # a token of a byte-level vocabulary may end within a character


class TokenTexts:
    """Texts of single tokens, each decoded once: a batch has millions of tokens and a vocabulary some hundred thousand."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer`: of transformers."""
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def character_counts(self, token_ids: list[int], text: str) -> list[int]:
        """Return the number of characters of `text` that each token covers; their sum is its length.

        `text` is the response decoded without special tokens, which cover nothing. Of the tokens that share a
        character, the last one covers it. [] if the tokenizer decodes tokens differently in context than one at a time.
        """
        counts, place, pending = [], 0, []
        for token in token_ids:
            pending.append(token)
            piece = self._known_text(token) if len(pending) == 1 else self._decode(pending)
            if _INCOMPLETE in piece and not text.startswith(piece, place):
                counts.append(0)
                continue
            # SentencePiece drops the space before a token that is decoded by itself.
            length = next((n for n in (len(piece), len(piece) + 1) if text[place : place + n].endswith(piece)), -1)
            if length < 0 or (length > len(piece) and text[place] != " "):
                return []
            counts.append(length)
            place, pending = place + length, []
        return counts if place == len(text) else []

    def _known_text(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = self._decode([token])
        return self._known[token]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)
