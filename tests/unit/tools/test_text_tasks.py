"""Problems of `examples/smollm2`: every gold answer is computed again from its question, and the verifier reads it."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_dapo.rewards.verifiers.dapo import score

DIRECTORY = Path(__file__).resolve().parents[3] / "examples" / "smollm2"
FILES = ("sums_train", "sums_heldout", "mixture_train", "mixture_heldout")


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DIRECTORY / f"{name}.jsonl").open(encoding="utf-8")]


def question(row: dict[str, Any]) -> str:
    return row["prompt"][-1]["content"]


def integers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"-?\d+", text)]


def arithmetic(text: str) -> str:
    expression = text.rpartition(":")[2].rstrip("= ")
    assert re.fullmatch(r"[\d +-]+", expression)
    return str(eval(expression))  # only digits, signs and blanks


def equation(text: str) -> str:
    left, right = re.search(r"(?:: |satisfies: )([^:]*) = (-?\d+)$", text).groups()
    [variable] = re.findall(r"[a-z]", left)
    [found] = [value for value in range(-200, 201) if eval(left, {variable: value}) == int(right)]
    return str(found)


def sorting(text: str) -> str:
    return ", ".join(map(str, sorted(integers(text), reverse="descending" in text)))


def letters(text: str) -> str:
    letter, words = re.search(r'letter "(.)" appear in the text: "(.*)"', text).groups()
    return str(words.lower().count(letter.lower()))


SOLUTIONS: dict[str, Callable[[str], str]] = {
    "sum_of_two": arithmetic,
    "sum_of_three": arithmetic,
    "product": lambda text: str(math.prod(integers(text))),
    "equation": equation,
    "number_sorting": sorting,
    "gcd": lambda text: str(math.gcd(*integers(text))),
    "letter_counting": letters,
    "spell_backward": lambda text: text.rpartition(": ")[2][::-1],
    "word_order": lambda text: ", ".join(reversed(text.rpartition(": ")[2].split(", "))),
}


@pytest.mark.parametrize("name", FILES)
def test_gold_answers_are_right(name: str) -> None:
    for row in rows(name):
        assert SOLUTIONS[row["data_source"]](question(row)) == row["reward_model"]["ground_truth"], row


@pytest.mark.parametrize("name", FILES)
def test_the_verifier_takes_the_gold_answer_in_the_form_that_the_prompt_requests(name: str) -> None:
    for row in rows(name):
        gold = row["reward_model"]["ground_truth"]
        assert score(f"Answer: {gold}", gold).outcome == "correct", row
        assert score("Answer: none", gold).outcome == "wrong"
        assert row["prompt"][0]["content"].endswith("Answer: <answer>")


@pytest.mark.parametrize(("name", "train", "heldout"), [("sums", 136, 64), ("mixture", 1475, 200)])
def test_no_problem_is_in_both_files(name: str, train: int, heldout: int) -> None:
    parts = [[question(row) for row in rows(f"{name}_{part}")] for part in ("train", "heldout")]
    assert [len(part) for part in parts] == [train, heldout]
    assert max(Counter(parts[0] + parts[1]).values()) == 1
