"""Published chat templates as files, each with a tokenizer that has its special tokens."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megatron_dapo.data.template import PromptTemplate
from megatron_dapo.data.turns import History, TurnTemplate

DIRECTORY = Path(__file__).parent / "chat_templates"
ORIGINS: dict[str, dict[str, Any]] = json.loads((DIRECTORY / "origins.json").read_text(encoding="utf-8"))
NAMES = sorted(ORIGINS)
SPECIAL = re.compile(r"<\|[\w/:.\-▁]+\|>|<｜[^｜]+｜>|</?s>|<\w+_of_\w+>|<\|\w+>|<\w+\|>|<sop>|\[gMASK\]")


@cache
def _merges() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A byte-level vocabulary with merges, also across spaces, line breaks and punctuation."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    texts = [
        (DIRECTORY / f"{name}.jinja").read_text(encoding="utf-8") for name in ("qwen3", "gptoss", "phi3", "gemma3")
    ]
    tokenizer.train_from_iterator([line for text in texts for line in text.split("%}")], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


@cache
def turn_template(name: str, history: History = "keep", **options: Any) -> TurnTemplate:
    origin, source = ORIGINS[name], (DIRECTORY / f"{name}.jinja").read_text(encoding="utf-8")
    special = dict.fromkeys([*origin["stops"], *filter(None, [origin["bos"]]), *sorted(set(SPECIAL.findall(source)))])
    vocabulary, merges = _merges()
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=origin["bos"], eos_token=origin["stops"][0])
    fast.chat_template = source
    stops = tuple(fast.convert_tokens_to_ids(origin["stops"]))
    return TurnTemplate(PromptTemplate(fast, options=options), stops, history)


WORDS = ("The sum", " is 42", ".", "\n\n", " ", "naïve 🤔", '{"a": 1}', "<b>", "12*3", "\t", "...", " x", "'s")


def content(draw: random.Random) -> str:
    """A message's text; templates trim it, so it has no space at its ends."""
    return "".join(draw.choices(WORDS, k=draw.randint(1, 6))).strip() or "7"


def any_ids(draw: random.Random, turns: TurnTemplate) -> list[int]:
    """Ids that no text has: any tokens but the stop tokens, halves of characters and special ones among them."""
    size = len(turns.template.tokenizer)  # type: ignore[arg-type]
    return [token for token in draw.choices(range(size), k=draw.randint(1, 12)) if token not in turns.stop_token_ids]
