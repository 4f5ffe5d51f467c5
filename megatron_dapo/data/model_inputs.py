"""Tokenizer and stop tokens of a model directory."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from megatron_dapo.data.template import StopTokens, check_tokenizer_files, resolve_stop_token_ids
from megatron_dapo.untrusted import blamed_on

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelInputs:
    """Tokenizer and stop tokens of a Hugging Face directory."""

    path: Path
    tokenizer: Any
    stop_tokens: StopTokens
    vocab_size: int | None = None  # rows of the embedding

    def decode(self, token_ids: Any) -> str:
        """Return the text of a response without special tokens."""
        return self.tokenizer.decode(np.asarray(token_ids).tolist(), skip_special_tokens=True)


def read_model_inputs(path: Path, trust_remote_code: bool) -> ModelInputs:
    """Read tokenizer and stop tokens of a Hugging Face directory."""
    check_tokenizer_files(path)
    with blamed_on(path, Exception):  # transformers and tokenizers raise what their parsers happen to
        tokenizer = AutoTokenizer.from_pretrained(str(path), trust_remote_code=trust_remote_code)
        config = AutoConfig.from_pretrained(str(path), trust_remote_code=trust_remote_code)
        has_file = (path / "generation_config.json").is_file()
        generation = GenerationConfig.from_pretrained(str(path)).eos_token_id if has_file else None
        # With a vision tower, only the language model's section may name it.
        eos = getattr(config, "eos_token_id", None) or config.get_text_config().eos_token_id
        stop_tokens = resolve_stop_token_ids(eos, generation, tokenizer.eos_token_id)
    logger.debug("responses end at %s (%s)", list(stop_tokens.token_ids), stop_tokens.report())
    return ModelInputs(path, tokenizer, stop_tokens, config.get_text_config().vocab_size)
