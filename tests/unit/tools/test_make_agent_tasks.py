from __future__ import annotations

import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from megatron_dapo.config import load_config
from megatron_dapo.environments import Step
from tools.make_agent_tasks import HIGHEST, MOST_GUESSES, NUM_BLIND_TURNS, NUM_HELDOUT, NUM_TRAIN, files

EXAMPLES = Path(__file__).parents[3] / "examples" / "agents"


def rows_of(name: str) -> list[dict]:
    return [json.loads(line) for line in files()[name].splitlines()]


def test_the_shipped_problems_are_those_that_it_makes():
    for name, content in files().items():
        assert (EXAMPLES / name).read_text(encoding="utf-8") == content


@pytest.mark.parametrize("task", ["calculator", "guess"])
def test_no_problem_is_in_both_files(task: str):
    train, heldout = rows_of(f"{task}/train.jsonl"), rows_of(f"{task}/heldout.jsonl")
    assert (len(train), len(heldout)) == (NUM_TRAIN, NUM_HELDOUT)
    assert not {row["question"] for row in train} & {row["question"] for row in heldout}


def test_answers_are_right():
    for row in (*rows_of("calculator/train.jsonl"), *rows_of("calculator/heldout.jsonl")):
        a, _, b, _, c = row["question"].removeprefix("What is ").removesuffix("?").split()
        assert int(row["answer"]) == int(a) * int(b) + int(c)


def test_answers_to_blind_turns_are_true_of_some_number():
    rows = rows_of("guess/start.jsonl")
    assert len(rows) == NUM_BLIND_TURNS
    for row in rows:
        said = [(int(row["prompt"][at]["content"]), row["prompt"][at + 1]["content"]) for at in range(1, len(row["prompt"]), 2)]
        left = [n for n in range(1, HIGHEST + 1) if all(n != g and (g < n) == (word == "higher") for g, word in said)]
        assert left and len(said) < MOST_GUESSES and 1 <= int(row["response"]) <= HIGHEST


def game(number: int):
    module = runpy.run_path(str(EXAMPLES / "guess" / "guess.py"))
    assert (module["HIGHEST"], module["MOST_GUESSES"]) == (HIGHEST, MOST_GUESSES)
    environment = object.__new__(module["Guess"])
    assert environment.reset(type("Task", (dict,), {"messages": ["begin"]})(answer=str(number)), 0) == ["begin"]
    return lambda text: environment.step(SimpleNamespace(text=text))


def test_the_game_rewards_what_its_answers_allow():
    guess = game(20)
    assert guess("10") == Step("higher", reward=0.0) and guess(" 25\n") == Step("lower", reward=0.0)
    assert guess("9") == Step("higher", reward=-1.0) and guess("twenty") == Step("higher", reward=-1.0)
    assert guess("25") == Step("lower", reward=-1.0)
    assert guess("20") == Step(done=True, reward=1.0, correct=True, parts={"guesses": 6})
    guess = game(3)
    for text in ("31", "30", "29", "28", "27", "26", "25", "24", "23"):
        assert guess(text) == Step("lower", reward=0.0)
    assert guess("28") == Step(done=True, reward=-1.0, correct=False, parts={"guesses": 10})


def test_bisection_always_finds_the_number():
    for number in range(1, HIGHEST + 1):
        guess, low, high = game(number), 1, HIGHEST
        while not (step := guess(str((low + high) // 2))).done:
            low, high = ((low + high) // 2 + 1, high) if step.messages == "higher" else (low, (low + high) // 2 - 1)
        assert step.correct and step.parts["guesses"] <= 5


def test_the_recipes_limits_hold_every_turn_of_the_game():
    """Rows of sft that are longer than `data.max_prompt_tokens` are left out with only a warning."""
    config = load_config(EXAMPLES / "guess" / "guess.toml").config
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)

    def length_of(messages: list[dict]) -> int:
        return len(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))

    longest = max(length_of(row["prompt"]) for row in rows_of("guess/start.jsonl"))
    guesses = [{"role": "assistant", "content": "31"}, {"role": "user", "content": "higher"}] * MOST_GUESSES
    game_tokens = length_of([{"role": "user", "content": "Game 512. Guess a number from 1 to 31."}, *guesses])
    assert longest <= config.data.max_prompt_tokens
    assert MOST_GUESSES == config.environment.max_turns
    assert game_tokens <= config.environment.max_context_tokens
    assert MOST_GUESSES * config.environment.max_turn_tokens <= config.rollout.max_response_tokens
