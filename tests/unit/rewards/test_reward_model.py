"""Preset `reward_model` on real classifiers, against transformers called by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForSequenceClassification

from megatron_dapo.config.reward_schema import RewardConfig, RewardModelConfig
from megatron_dapo.rewards.pool.pool import VerifierPool
from megatron_dapo.rewards.result import RewardSample
from megatron_dapo.rewards.verifiers import reward_model
from megatron_dapo.rewards.verifiers.verifier import Verifier
from tests.reward_samples import FIELDS

ROOT = Path(__file__).resolve().parents[3]
BASE = ROOT / "examples" / "quickstart" / "base_model"


def save_classifier(directory: Path, num_labels: int) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    torch.manual_seed(num_labels)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_labels=num_labels, pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id,
    )  # fmt: skip
    if num_labels > 1:
        config.id2label = {index: f"label{index}" for index in range(num_labels)}
    Qwen2ForSequenceClassification(config).float().save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def expected(directory: Path, response: str) -> torch.Tensor:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    messages = [*FIELDS["messages"], {"role": "assistant", "content": response}]
    token_ids = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False)[
        "input_ids"
    ]
    model = Qwen2ForSequenceClassification.from_pretrained(directory).eval()
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0]


def pool_of(directory: Path, **own: object) -> VerifierPool:
    own = {"path": str(directory), "dtype": "float32", **own}
    return VerifierPool("reward_model", RewardConfig(timeout_seconds=60.0, reward_model=own, batch_size=4))


def test_scores_are_those_of_transformers_whatever_the_batch(tmp_path: Path) -> None:
    directory = save_classifier(tmp_path / "model", 1)
    responses = ["4", "It is four, as two and two are.", "", "5 " * 40, "x"]
    with pool_of(directory, threshold=0.0) as pool:
        scores = pool.score_many([(number, text, "", False, FIELDS) for number, text in enumerate(responses)])
    for number, text in enumerate(responses):
        value = float(expected(directory, text)[0])
        assert scores[number].reward == pytest.approx(value, abs=1e-4)
        assert scores[number].accuracy == float(value >= 0)


def load(directory: Path, **own: object) -> Verifier:
    return reward_model.load(RewardModelConfig(path=str(directory), dtype="float32", **own).model_dump(), {})


def test_a_label_is_a_probability(tmp_path: Path) -> None:
    directory = save_classifier(tmp_path / "model", 3)
    verifier = load(directory, label="label2", threshold=0.5)
    [result] = verifier.score([RewardSample(response="4", answer="", **FIELDS)])
    assert result.reward == pytest.approx(float(torch.softmax(expected(directory, "4"), -1)[2]), abs=1e-5)
    with pytest.raises(ValueError, match="none of the classifier's 3 outputs: label0, label1, label2"):
        load(directory, label="helpful")


def test_a_language_model_is_no_classifier(tmp_path: Path) -> None:
    assert AutoModelForCausalLM.from_pretrained(BASE) is not None
    with pytest.raises(ValueError, match="no sequence classifier: its weights have no score.weight"):
        load(BASE)
    with pytest.raises(ValueError, match="no_such"):
        load(tmp_path / "no_such")
