"""Preset `reward_model`: the score of a Hugging Face sequence classifier that each verifier process loads.

The conversation (prompt and response) goes through the classifier's own chat template. A classifier with one output gives that
number; of several, `label` chooses one by its index or name, as a probability.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from megatron_dapo.rewards.result import RewardSample, VerifierResult
from megatron_dapo.rewards.verifier import Verifier

REVISION = "1"


def load(own: Mapping[str, Any], pool: Mapping[str, Any]) -> Verifier:
    """Load tokenizer and model and return the verifier. ValueError for a directory without a usable classifier."""
    path = own.get("path", "")
    if not path:
        raise ValueError("verifier 'reward_model': set reward.reward_model.path to a Hugging Face sequence classifier")
    device = own.get("device") or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model, found = AutoModelForSequenceClassification.from_pretrained(
            path, dtype=getattr(torch, own.get("dtype", "bfloat16")), output_loading_info=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"verifier 'reward_model': {path}: {error}") from error
    if found["missing_keys"]:  # a language model without a head: its scores would be random
        missing = ", ".join(sorted(found["missing_keys"])[:3])
        raise ValueError(f"verifier 'reward_model': {path} is no sequence classifier: its weights have no {missing}")
    model.to(device).eval()
    if model.config.pad_token_id is None:
        model.config.pad_token_id = (
            tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        )
    tokenizer.pad_token_id, tokenizer.padding_side = model.config.pad_token_id, "right"
    column = label_index(model.config, own.get("label", ""))
    threshold, max_tokens = own.get("threshold", 0.0), own.get("max_tokens", 8192)

    def score(samples: Sequence[RewardSample]) -> list[VerifierResult]:
        encoded = [tokens_of(tokenizer, sample, max_tokens) for sample in samples]
        batch = tokenizer.pad({"input_ids": encoded}, return_tensors="pt").to(device)
        with torch.inference_mode():
            logits = model(**batch).logits.float()
        values = logits[:, 0] if column is None else torch.softmax(logits, -1)[:, column]
        return [VerifierResult("correct" if value >= threshold else "wrong", reward=value) for value in values.tolist()]

    version = f"reward_model-{REVISION}:{path}"
    return Verifier("reward_model", version, score, lambda answer: None, takes_sample=True, is_batched=True)


def tokens_of(tokenizer: Any, sample: RewardSample, max_tokens: int) -> list[int]:
    """Return the token ids of prompt and response; of a longer text the last `max_tokens`, which have the response."""
    messages = [*map(dict, sample.messages), {"role": "assistant", "content": sample.response}]
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        token_ids = tokenizer("\n".join(message["content"] for message in messages))["input_ids"]
    return list(token_ids[-max_tokens:])


def label_index(config: Any, label: str) -> int | None:
    """Return the output that a label names; None for a classifier with a single one. ValueError for an unknown label."""
    if config.num_labels == 1:
        return None
    names = {str(name): index for index, name in config.id2label.items()}
    if label in names:
        return int(names[label])
    if label.isdigit() and int(label) < config.num_labels:
        return int(label)
    raise ValueError(
        f"verifier 'reward_model': reward.reward_model.label {label!r} is none of the classifier's {config.num_labels} outputs: "
        f"{', '.join(names)}"
    )
