"""Characters of each token, with a byte-level tokenizer that cuts characters in pieces."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from megatron_dapo.telemetry.token_texts import TokenTexts


class SentencePieces:
    """Decodes as SentencePiece does: the space before a first token is dropped."""

    WORDS = ("▁Hello", "▁there", "!", "</s>")

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(self.WORDS[token] for token in tokens if token != 3).replace("▁", " ").removeprefix(" ")


@pytest.mark.parametrize("text", ["Answer: 7", "x → ∑ü 漢字 🙂!", "", "\n\n  a"])
def test_counts_cover_the_text(repository: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(repository / "examples/quickstart/base_model")
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    decoded = tokenizer.decode(ids, skip_special_tokens=True)
    counts = TokenTexts(tokenizer).character_counts(ids, decoded)
    assert len(counts) == len(ids) and sum(counts) == len(decoded) and counts[-1] == 0


def test_a_space_that_is_dropped_alone_is_counted() -> None:
    texts = TokenTexts(SentencePieces())
    assert texts.character_counts([0, 1, 2, 3], "Hello there!") == [5, 6, 1, 0]
    assert texts.character_counts([0, 1], "Goodbye there") == []
    assert texts.character_counts([0], "Hello there") == []
