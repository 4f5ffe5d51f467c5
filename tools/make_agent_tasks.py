"""Make the problems of `examples/agents`: rows with a question and its answer, from a seed.

    python -m tools.make_agent_tasks --output examples/agents
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

NUM_TRAIN, NUM_HELDOUT = 512, 64
_SEED = 7


def calculator_rows() -> list[dict[str, str]]:
    """Return distinct problems a * b + c with two-digit numbers, which a small model cannot solve without a calculator."""
    rng, problems = random.Random(_SEED), {}
    while len(problems) < NUM_TRAIN + NUM_HELDOUT:
        a, b, c = (rng.randint(11, 99) for _ in range(3))
        problems[a, b, c] = {"question": f"What is {a} * {b} + {c}?", "answer": str(a * b + c)}
    return list(problems.values())


def files() -> dict[str, str]:
    """Return the files' contents by their paths."""
    rows = calculator_rows()
    parts = {"train": rows[:NUM_TRAIN], "heldout": rows[NUM_TRAIN:]}
    return {f"calculator/{name}.jsonl": "".join(json.dumps(row) + "\n" for row in part) for name, part in parts.items()}


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
