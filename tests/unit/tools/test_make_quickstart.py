"""Files of `examples/quickstart`: data, tokenizer and base model are as the script and the README describe them."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM, Qwen2Tokenizer

from tools.make_quickstart import (
    DEFAULT_SEED,
    IGNORED_LABEL,
    Example,
    Schedule,
    batches,
    encode,
    loss_of,
    make_tokenizer,
    model_config,
    save_base_model,
    split_problems,
    train,
    write_data,
)
from tools.quickstart_task import TEMPLATE, Flaws, draw_problems, write_corpus

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
    """(start, change, change, ...) read off the words alone; 0 stands for doubling."""
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
def test_rows_follow_the_published_schema(rows: dict[str, list[dict]], name: str) -> None:
    for row in rows[name]:
        assert set(row) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
        assert [set(turn) for turn in row["prompt"]] == [{"role", "content"}]
        assert row["prompt"][0]["role"] == "user"
        assert row["reward_model"]["style"] == "rule"
        assert re.fullmatch(r"\d{1,2}", row["reward_model"]["ground_truth"])
    indices = [row["extra_info"]["index"] for row in rows[name]]
    assert len(set(indices)) == len(indices)


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


def test_the_base_corpus_shares_no_exercise_with_either_file() -> None:
    keys = [{problem.key for problem in part} for part in split_problems(DEFAULT_SEED, 2000)]
    assert not keys[2] & (keys[0] | keys[1])


def test_the_script_writes_the_shipped_data(tmp_path: Path) -> None:
    write_data(DEFAULT_SEED, tmp_path)
    for name in FILES:
        assert (tmp_path / f"{name}.jsonl").read_bytes() == (EXAMPLES / f"{name}.jsonl").read_bytes()


def test_another_seed_writes_other_data(tmp_path: Path) -> None:
    write_data(DEFAULT_SEED + 1, tmp_path)
    assert (tmp_path / "heldout.jsonl").read_bytes() != (EXAMPLES / "heldout.jsonl").read_bytes()


def test_sizes() -> None:
    assert sum(path.stat().st_size for path in BASE_MODEL.rglob("*") if path.is_file()) <= 4_000_000
    assert sum((EXAMPLES / f"{name}.jsonl").stat().st_size for name in FILES) <= 1_800_000


def test_the_script_makes_the_shipped_tokenizer(tokenizer: Qwen2Tokenizer) -> None:
    made = make_tokenizer(DEFAULT_SEED)
    assert made.get_vocab() == tokenizer.get_vocab()
    text = "In May Mia gets 8, 37+8=45\n" + TEMPLATE
    assert made(text)["input_ids"] == tokenizer(text)["input_ids"]


@pytest.mark.parametrize(
    "text",
    ["In March Mia gets 8, 37+8=45\nAnswer: 45", TEMPLATE, " \n\n\t 007 ", "zażółć gęślą jaźń 日本語 🎉", "<unk>", ""],
)
def test_any_text_round_trips(tokenizer: Qwen2Tokenizer, text: str) -> None:
    token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(token_ids) == text
    assert all(0 <= token_id < len(tokenizer) for token_id in token_ids)


def test_digits_are_tokens_of_their_own(tokenizer: Qwen2Tokenizer) -> None:
    tokens = [tokenizer.decode([token_id]) for token_id in tokenizer("Mia has 137, 45")["input_ids"]]
    assert [token for token in tokens if token.strip().isdigit()] == ["1", "3", "7", "4", "5"]
    assert not any(len(token) > 1 and any(c.isdigit() for c in token) for token in tokenizer.get_vocab())


def test_chat_prompts_are_short_and_open_the_assistants_turn(
    rows: dict[str, list[dict]], tokenizer: Qwen2Tokenizer
) -> None:
    for row in rows["heldout"]:
        text = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
        content = row["prompt"][0]["content"]
        assert text == f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
        assert len(tokenizer(text)["input_ids"]) <= 128


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


def test_batches_hold_each_example_once_within_the_token_budget() -> None:
    examples = [Example(list(range(1 + i % 37)), 0) for i in range(500)]
    made = list(batches(random.Random(0), examples, 100))
    assert sorted(id(e) for batch in made for e in batch) == sorted(id(e) for e in examples)
    assert all(len(batch) * max(len(e.token_ids) for e in batch) <= 100 for batch in made)


def test_the_loss_sees_response_tokens_only(tokenizer: Qwen2Tokenizer, model: Qwen2ForCausalLM) -> None:
    examples = encode(tokenizer, write_corpus(4, draw_problems(4, 3), Flaws()))
    total, count = 0.0, 0
    for example in examples:
        labels = torch.tensor([example.token_ids])
        labels[:, : example.num_prompt_tokens] = IGNORED_LABEL
        num_scored = len(example.token_ids) - example.num_prompt_tokens
        with torch.no_grad():
            total += model(torch.tensor([example.token_ids]), labels=labels).loss.item() * num_scored
        count += num_scored
    assert loss_of(model, examples).item() == pytest.approx(total / count, rel=1e-4)


def test_a_few_steps_train_and_save_a_directory_transformers_loads(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(DEFAULT_SEED)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(model_config(tokenizer))
    examples = encode(tokenizer, write_corpus(4, draw_problems(4, 6), Flaws()))
    before = loss_of(model, examples).item()
    train(model, lambda: examples, Schedule(num_steps=6, warmup_steps=1))
    assert loss_of(model, examples).item() < 0.8 * before
    save_base_model(model, tokenizer, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, value in model.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name]), name
    assert AutoTokenizer.from_pretrained(tmp_path).get_vocab() == tokenizer.get_vocab()
