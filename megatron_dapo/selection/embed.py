"""Embeddings of responses, one row each, centered over the data set.

Hidden states of language models share a direction that is larger than the differences between texts, so all cosines are
near 1; subtracting the mean makes them comparable (Mu and Viswanath, arXiv 1702.01417).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_dapo.algorithms.selection import ngram_embedding
from megatron_dapo.types import Prompt, ScoredSample
from megatron_dapo.untrusted import blamed_on

BATCH_TOKENS = 8192  # padded tokens of a forward pass

# Responses with their prompts -> embeddings [m, d] float32.
Embed = Callable[[Sequence[tuple[Prompt, ScoredSample]]], np.ndarray]


def by_ngrams(pairs: Sequence[tuple[Prompt, ScoredSample]]) -> np.ndarray:
    """Return counts of hashed word n-grams; not centered, because texts without common words are dissimilar anyway."""
    return np.stack([ngram_embedding(sample.text) for _, sample in pairs]) if pairs else np.zeros((0, 1), np.float32)


def hidden_states(directory: Path, dtype: torch.dtype, trust_remote_code: bool = False) -> Embed:
    """Return the embedding from the policy in `directory`: the mean of its last hidden states over the response's
    tokens."""
    model = _load(directory, dtype, trust_remote_code)

    def embed(pairs: Sequence[tuple[Prompt, ScoredSample]]) -> np.ndarray:
        sequences = [[*prompt.token_ids, *sample.completion.token_ids.tolist()] for prompt, sample in pairs]
        starts = [len(prompt.token_ids) for prompt, _ in pairs]
        return centered(_pooled(model, sequences, starts))

    return embed


def sentence_encoder(directory: Path, trust_remote_code: bool = False) -> Embed:
    """Return the embedding from the sentence encoder in `directory`: the mean of its last hidden states over the
    response."""
    from transformers import AutoTokenizer

    model = _load(directory, torch.float32, trust_remote_code)
    with blamed_on(directory, Exception):
        tokenizer = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=trust_remote_code)
    limit = getattr(model.config, "max_position_embeddings", None) or 512

    def embed(pairs: Sequence[tuple[Prompt, ScoredSample]]) -> np.ndarray:
        sequences = [tokenizer.encode(sample.text)[:limit] or [0] for _, sample in pairs]
        return centered(_pooled(model, sequences, [0] * len(sequences)))

    return embed


def centered(embeddings: np.ndarray) -> np.ndarray:
    """Subtract the mean row; a single row, which would become zero, is left unchanged."""
    return embeddings - embeddings.mean(axis=0) if len(embeddings) > 1 else embeddings


def _load(directory: Path, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    from transformers import AutoModel

    if not (directory / "config.json").is_file():
        raise ValueError(f"{directory}: no config.json there; name a Hugging Face model directory")
    with blamed_on(directory, Exception):
        model = AutoModel.from_pretrained(
            str(directory), dtype=dtype, trust_remote_code=trust_remote_code, local_files_only=True
        )
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def _pooled(model: Any, sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> np.ndarray:
    """Return the mean hidden state of each sequence's tokens from its start on, [m, d] float32."""
    rows: list[np.ndarray | None] = [None] * len(sequences)
    for batch in _batches([len(sequence) for sequence in sequences]):
        width = max(len(sequences[index]) for index in batch)
        tokens = torch.zeros(len(batch), width, dtype=torch.int64)
        attended, pooled = torch.zeros_like(tokens), torch.zeros(len(batch), width)
        for row, index in enumerate(batch):
            length = len(sequences[index])
            tokens[row, :length] = torch.tensor(sequences[index])
            attended[row, :length] = 1
            pooled[row, starts[index] : length] = 1
        with torch.inference_mode():
            hidden = model(
                input_ids=tokens.to(model.device), attention_mask=attended.to(model.device)
            ).last_hidden_state
        weights = pooled.to(hidden.device)[..., None]
        means = (hidden.float() * weights).sum(1) / weights.sum(1).clamp(min=1)
        for row, index in enumerate(batch):
            rows[index] = means[row].cpu().numpy()
    return np.stack(rows) if rows else np.zeros((0, 1), np.float32)  # type: ignore[arg-type]


def _batches(lengths: Sequence[int]) -> list[list[int]]:
    """Cut sequences, long ones first, into batches of at most BATCH_TOKENS padded tokens."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= BATCH_TOKENS:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
