"""Preset `reward_model`: the score of a Hugging Face sequence classifier, in each verifier process or on a server.

The conversation (prompt and response) goes through the classifier's own chat template. The score is a classifier's
single output or, with several outputs, the probability of the one that `label` names by index or name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from megatron_dapo.rewards.result import RewardSample, VerifierResult
from megatron_dapo.rewards.verifiers.service import Service, ServiceError
from megatron_dapo.rewards.verifiers.verifier import Verifier

REVISION = "1"


def load(own: Mapping[str, Any], pool: Mapping[str, Any]) -> Verifier:
    """Return the verifier for a model loaded here, or for the server at `url`.

    ValueError for a directory without a usable classifier.
    """
    path = own["path"]
    if not path:
        raise ValueError("verifier 'reward_model': set reward.reward_model.path to a Hugging Face sequence classifier")
    try:
        tokenizer, config = AutoTokenizer.from_pretrained(path), AutoConfig.from_pretrained(path)
        model = None if own["url"] else _model(path, own)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"verifier 'reward_model': {path}: {error}") from error
    column, max_tokens = label_index(config, own["label"]), own["max_tokens"]
    threshold = own["threshold"]

    def results(logits: torch.Tensor) -> list[VerifierResult]:
        values = logits[:, 0] if column is None else torch.softmax(logits, -1)[:, column]
        return [VerifierResult("correct" if value >= threshold else "wrong", reward=value) for value in values.tolist()]

    def tokens(samples: Sequence[RewardSample]) -> list[list[int]]:
        return [tokens_of(tokenizer, sample, max_tokens) for sample in samples]

    def score(samples: Sequence[RewardSample]) -> list[VerifierResult]:
        return results(_logits(model, tokenizer, tokens(samples)))

    score_later = None
    if model is None:
        service = Service(own, pool["timeout_s"], "/classify")

        async def ask(samples: Sequence[RewardSample]) -> list[VerifierResult]:
            encoded = tokens(samples)
            return results(logits_of(await service.post({"input_ids": encoded}), len(samples), config.num_labels))

        async def score_later(samples: Sequence[RewardSample]) -> list[VerifierResult]:
            return await service.within_deadline(ask(samples), len(samples))

    version = f"reward_model-{REVISION}:{path}"
    return Verifier("reward_model", version, score, lambda answer: None, True, score_later, is_batched=True)


def _model(path: str, own: Mapping[str, Any]) -> Any:
    model, found = AutoModelForSequenceClassification.from_pretrained(
        path, dtype=getattr(torch, own["dtype"]), output_loading_info=True
    )
    if found["missing_keys"]:  # a language model without a head: its scores would be random
        missing = ", ".join(sorted(found["missing_keys"])[:3])
        raise ValueError(f"no sequence classifier: its weights have no {missing}")
    return model.to(own["device"] or ("cuda" if torch.cuda.is_available() else "cpu")).eval()


def _logits(model: Any, tokenizer: Any, token_ids: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the outputs of a model that is loaded here. # [samples, labels]"""
    if model.config.pad_token_id is None:
        has_padding = tokenizer.pad_token_id is not None
        model.config.pad_token_id = tokenizer.pad_token_id if has_padding else tokenizer.eos_token_id
    tokenizer.pad_token_id, tokenizer.padding_side = model.config.pad_token_id, "right"
    batch = tokenizer.pad({"input_ids": token_ids}, return_tensors="pt").to(model.device)
    with torch.inference_mode():
        return model(**batch).logits.float()


def logits_of(reply: Any, num_samples: int, num_labels: int) -> torch.Tensor:
    """Return the outputs in a server's reply. Raises ServiceError for a reply of another form."""
    try:
        rows = [list(map(float, one["embedding"])) for one in reply]
    except (TypeError, KeyError, ValueError) as error:
        raise ServiceError(f"the reply is no list of a classifier's outputs: {str(reply)[:200]!r}") from error
    if len(rows) != num_samples or any(len(row) != num_labels for row in rows):
        found = f"{len(rows)} of {sorted({len(row) for row in rows})}"
        raise ServiceError(f"{num_samples} responses have {num_labels} outputs each; the reply has {found}")
    return torch.tensor(rows)


def tokens_of(tokenizer: Any, sample: RewardSample, max_tokens: int) -> list[int]:
    """Return the token ids of prompt and response; if longer, the last `max_tokens`, which have the response."""
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
