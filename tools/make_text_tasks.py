"""Make the problems of `examples/smollm2` with reasoning-gym: rows of the DAPO-Math-17k schema, from a seed.

    make .venv-tasks       # reasoning-gym, which a run does not need
    PYTHONPATH=.venv-tasks python -m tools.make_text_tasks --output examples/smollm2

Two sets: `sums` (sums and differences of two one-digit numbers: there are 200) and `mixture` (sums of three, products,
equations, sorting, greatest common divisors, letters, spelling and word order). Each has problems to train on and
held-out ones; no problem is in both.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import reasoning_gym

INSTRUCTION = "Reply with one line: Answer: <answer>"
# One example of the form, which a small model cannot do without.
EXAMPLE = ("What is 2 + 2?", "Answer: 4")
TRAIN_SEED, HELDOUT_SEED = 2002, 1001

# Name of a task -> reasoning-gym's data set and its settings.
Task = tuple[str, Mapping[str, Any]]
SUMS: Mapping[str, Task] = {
    "sum_of_two": ("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}),
}
MIXTURE: Mapping[str, Task] = {
    "sum_of_three": ("chain_sum", {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}),
    "product": ("products", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}),
    "equation": (
        "simple_equations",
        {"min_terms": 2, "max_terms": 2, "min_value": 1, "max_value": 10, "operators_weights": (0.5, 0.5, 0.0)},
    ),
    "number_sorting": (
        "number_sorting",
        {"min_numbers": 3, "max_numbers": 3, "min_decimals": 0, "max_decimals": 0, "min_value": 0, "max_value": 99},
    ),
    "gcd": ("gcd", {"min_value": 2, "max_value": 30}),
    "letter_counting": ("letter_counting", {"min_words": 2, "max_words": 4}),
    "spell_backward": ("spell_backward", {"min_word_len": 3, "max_word_len": 4}),
    "word_order": ("word_sequence_reversal", {"min_words": 3, "max_words": 3}),
}
# Tasks, problems to train on (at most), held-out ones.
SETS: Mapping[str, tuple[Mapping[str, Task], int, int]] = {"sums": (SUMS, 136, 64), "mixture": (MIXTURE, 1600, 200)}


def rows(name: str, task: Task, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the problems of a task, without an end."""
    dataset, settings = task
    problems = reasoning_gym.create_dataset(dataset, size=1 << 20, seed=seed, **settings)
    for index in range(len(problems)):
        item = problems[index]
        question, answer = item["question"], str(item["answer"])
        if dataset == "number_sorting":  # the rest describes reasoning-gym's own form of an answer
            question = question.split("\n")[0].replace(".0", "")
            answer = ", ".join(re.findall(r"-?\d+", answer.replace(".0", "")))
        yield {
            "data_source": name,
            "prompt": [
                {"role": "system", "content": INSTRUCTION},
                {"role": "user", "content": EXAMPLE[0]},
                {"role": "assistant", "content": EXAMPLE[1]},
                {"role": "user", "content": question.strip()},
            ],
            "ability": "REASONING",
            "reward_model": {"ground_truth": answer, "style": "rule"},
            "extra_info": {"index": f"{name}-{seed}-{index}"},
        }


def split(
    tasks: Mapping[str, Task], num_train: int, num_heldout: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return `num_train` and `num_heldout` different problems, equally many of each task if it has as many."""
    heldout: list[dict[str, Any]] = []
    train: list[dict[str, Any]] = []
    seen: set[str] = set()
    for target, seed, count in ((heldout, HELDOUT_SEED, num_heldout), (train, TRAIN_SEED, num_train)):
        for name, task in tasks.items():
            target += _different(rows(name, task, seed), seen, count // len(tasks))
        random.Random(seed).shuffle(target)
    return train, heldout


def _different(problems: Iterator[dict[str, Any]], seen: set[str], count: int) -> list[dict[str, Any]]:
    """Take `count` unseen problems, or fewer if a task repeats itself."""
    taken: list[dict[str, Any]] = []
    misses = 0
    for row in problems:
        question = row["prompt"][-1]["content"]
        if question in seen:
            misses += 1
        else:
            seen.add(question)
            taken.append(row)
        if len(taken) == count or misses > 20 * count:
            break
    return taken


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    for name, (tasks, num_train, num_heldout) in SETS.items():
        for part, found in zip(("train", "heldout"), split(tasks, num_train, num_heldout), strict=True):
            path = options.output / f"{name}_{part}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
            print(f"{path}: {len(found)} problems")


if __name__ == "__main__":
    main()
