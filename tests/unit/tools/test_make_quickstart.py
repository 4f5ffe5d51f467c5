"""Files of `examples/quickstart`: data, tokenizer and base model are as the script and the README describe them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM, Qwen2Tokenizer

from tools.make_quickstart import DEFAULT_SEED, encode, split_problems
from tools.quickstart_task import TEMPLATE, Flaws, write_corpus

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "quickstart"
BASE_MODEL = EXAMPLES / "base_model"
FILES = ("heldout", "train", "spread")


@pytest.fixture(scope="module")
def rows() -> dict[str, list[dict]]:
    return {name: [json.loads(line) for line in (EXAMPLES / f"{name}.jsonl").open()] for name in FILES}


@pytest.fixture(scope="module")
def tokenizer() -> Qwen2Tokenizer:
    return AutoTokenizer.from_pretrained(BASE_MODEL)


@pytest.fixture(scope="module")
def model() -> Qwen2ForCausalLM:
    return AutoModelForCausalLM.from_pretrained(BASE_MODEL, dtype=torch.float32).eval()


def problem_of(row: dict) -> str:
    before, after = TEMPLATE.split("{problem}")
    content = row["prompt"][0]["content"]
    assert content.startswith(before) and content.endswith(after)
    return content[len(before) : -len(after)]


def exercise_of(text: str) -> tuple[int, ...]:
    """(start, change, change, ...) read only from the words; 0 stands for doubling."""
    first, *events = text.split(". ")[:-1]
    changes = []
    for event in events:
        if event.endswith(" double"):
            changes.append(0)
        else:
            verb, amount = re.fullmatch(r"In \w+ \w+ (\w+) (\d+)", event).groups()
            changes.append(int(amount) if verb in {"finds", "gets"} else -int(amount))
    return (int(re.search(r"\d+", first).group()), *changes)


def evaluate(exercise: tuple[int, ...]) -> int:
    total, *changes = exercise
    for change in changes:
        total = total + change if change else 2 * total
    return total


@pytest.mark.parametrize("name", FILES)
def test_answers_match_the_problem_texts(rows: dict[str, list[dict]], name: str) -> None:
    for row in rows[name]:
        assert str(evaluate(exercise_of(problem_of(row)))) == row["reward_model"]["ground_truth"]


def test_heldout_is_disjoint_from_training(rows: dict[str, list[dict]]) -> None:
    exercises = {name: {exercise_of(problem_of(row)) for row in rows[name]} for name in FILES}
    assert len(exercises["heldout"]) == len(rows["heldout"]) >= 100
    assert len(exercises["train"]) == len(rows["train"]) >= 1000
    assert len(exercises["spread"]) == len(rows["spread"]) >= 500
    assert not exercises["heldout"] & exercises["train"]
    assert not exercises["spread"] & (exercises["heldout"] | exercises["train"])


def test_stop_and_pad_agree_everywhere(tokenizer: Qwen2Tokenizer, model: Qwen2ForCausalLM) -> None:
    stop, pad = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert stop != pad
    for source in (tokenizer, model.config, model.generation_config):
        assert (source.eos_token_id, source.pad_token_id) == (stop, pad)


def test_the_model_divides_by_every_layout_of_four_processes(model: Qwen2ForCausalLM) -> None:
    config = model.config
    assert config.architectures == ["Qwen2ForCausalLM"]
    for count in (config.num_attention_heads, config.num_key_value_heads, config.num_hidden_layers):
        assert count % 4 == 0
    assert config.hidden_size % 4 == 0 and config.intermediate_size % 4 == 0
    assert config.vocab_size % 128 != 0, "the vocabulary should need padding"
    with safe_open(BASE_MODEL / "model.safetensors", "pt") as tensors:
        names = set(tensors.keys())
    assert "lm_head.weight" not in names and "model.embed_tokens.weight" in names


@torch.no_grad()
def test_the_base_knows_the_skill_but_not_surely(tokenizer: Qwen2Tokenizer, model: Qwen2ForCausalLM) -> None:
    """Teacher-forced on right chains: nearly always every digit is the likeliest, yet the chain is seldom sampled."""
    flawless = Flaws(easy_slip=0, hard_slip=0, skipped_line=0, unformatted_answer=0, no_answer=0, recheck=0)
    heldout, _, _ = split_problems(DEFAULT_SEED, 0)
    likeliest, sampled = [], []
    for example in encode(tokenizer, write_corpus(1, heldout[:48], flawless)):
        token_ids = torch.tensor([example.token_ids])
        logprobs = model(token_ids).logits[0, example.num_prompt_tokens - 1 : -1].log_softmax(-1)
        targets = token_ids[0, example.num_prompt_tokens :]
        is_digit = torch.tensor([tokenizer.decode([token_id]).isdigit() for token_id in targets.tolist()])
        likeliest.append(bool((logprobs.argmax(-1) == targets)[is_digit].all()))
        sampled.append(logprobs.gather(1, targets[:, None]).sum().exp().item())
    assert sum(likeliest) / len(likeliest) >= 0.85
    assert 0.1 <= sum(sampled) / len(sampled) <= 0.45
