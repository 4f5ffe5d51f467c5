"""Make the problems of `examples/agents`: rows with a question and its answer, from a seed.

    python -m tools.make_agent_tasks --output examples/agents
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

NUM_TRAIN, NUM_HELDOUT = 512, 64
NUM_BLIND_TURNS = 2000
HIGHEST, MOST_GUESSES = 31, 10  # the values of examples/agents/guess/guess.py
_SEED = 7


def calculator_rows() -> list[dict[str, str]]:
    """Return distinct problems a * b + c with two-digit numbers, which a small model cannot solve without a calculator."""
    rng, problems = random.Random(_SEED), {}
    while len(problems) < NUM_TRAIN + NUM_HELDOUT:
        a, b, c = (rng.randint(11, 99) for _ in range(3))
        problems[a, b, c] = {"question": f"What is {a} * {b} + {c}?", "answer": str(a * b + c)}
    return list(problems.values())


def guess_rows() -> list[dict[str, str]]:
    """Return games, each with its number; the question says no more than which game it is."""
    rng = random.Random(_SEED)
    return [
        {"question": _question(game), "answer": str(rng.randint(1, HIGHEST))}
        for game in range(1, NUM_TRAIN + NUM_HELDOUT + 1)
    ]


def blind_turns() -> list[dict[str, Any]]:
    """Return turns of games in which every guess is a random number, whatever the answers were."""
    rng, rows = random.Random(_SEED + 1), []
    for game in range(NUM_BLIND_TURNS):
        number, messages = rng.randint(1, HIGHEST), [{"role": "user", "content": _question(1 + game % NUM_TRAIN)}]
        for _ in range(rng.randrange(MOST_GUESSES)):
            guess = rng.choice([other for other in range(1, HIGHEST + 1) if other != number])
            messages.append({"role": "assistant", "content": str(guess)})
            messages.append({"role": "user", "content": "higher" if guess < number else "lower"})
        rows.append({"prompt": messages, "response": str(rng.randint(1, HIGHEST))})
    return rows


def _question(game: int) -> str:
    return f"Game {game}. Guess a number from 1 to {HIGHEST}."


def files() -> dict[str, str]:
    """Return the files' contents by their paths."""
    found: dict[str, list[dict[str, Any]]] = {"guess/start.jsonl": blind_turns()}
    for name, rows in (("calculator", calculator_rows()), ("guess", guess_rows())):
        found |= {f"{name}/train.jsonl": rows[:NUM_TRAIN], f"{name}/heldout.jsonl": rows[NUM_TRAIN:]}
    return {name: "".join(json.dumps(row) + "\n" for row in rows) for name, rows in found.items()}


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("examples/agents"))
    output = parser.parse_args().output
    for name, content in files().items():
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        (output / name).write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
