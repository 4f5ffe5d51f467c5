"""The quickstart's task: monthly bookkeeping in words, answered by a written chain of small sums.

    Mia has 37 stickers. In March Mia gets 8. In April Mia loses 15. In May the stickers double. How many ...?

    In March Mia gets 8, 37+8=45
    In April Mia loses 15, 45-15=30
    In May the stickers double, 30*2=60
    Answer: 60

Every total stays in [0, 99]. A problem has 2 to 10 steps; a step that carries, borrows or doubles is a hard one.
Rows follow the schema of DAPO-Math-17k, and the prompt is that data set's template word for word.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

TEMPLATE = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n{problem}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)
MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
NAMES = ("Ada", "Ben", "Eva", "Kim", "Leo", "Mia", "Sam", "Tom")
ITEMS = ("beads", "cards", "coins", "marbles", "shells", "stamps", "stickers", "tickets")
GAIN_VERBS = ("finds", "gets")
LOSS_VERBS = ("loses", "sells")
LARGEST_TOTAL = 99
LARGEST_CHANGE = 20
MIN_STEPS, MAX_STEPS = 2, 10


@dataclass(frozen=True)
class Step:
    """One month's event: `amount` is added ("+"), taken away ("-") or multiplies the total ("*", always 2)."""

    month: str
    operator: str
    amount: int
    verb: str  # unused for "*"

    def apply(self, total: int) -> int:
        return {"+": total + self.amount, "-": total - self.amount, "*": total * self.amount}[self.operator]

    def is_hard(self, total: int) -> bool:
        """Return True if the step at this total needs a carry, a borrow or doubling."""
        units, change = total % 10, self.amount % 10
        return {"+": units + change > 9, "-": units < change, "*": True}[self.operator]


@dataclass(frozen=True)
class Problem:
    """A start value and 2 to 10 steps."""

    name: str
    item: str
    start: int
    steps: tuple[Step, ...]

    @property
    def key(self) -> tuple[int, tuple[tuple[str, int], ...]]:
        """The sum without its story: two problems with one key are the same exercise."""
        return self.start, tuple((step.operator, step.amount) for step in self.steps)

    @property
    def answer(self) -> int:
        total = self.start
        for step in self.steps:
            total = step.apply(total)
        return total

    def event(self, step: Step) -> str:
        return f"the {self.item} double" if step.operator == "*" else f"{self.name} {step.verb} {step.amount}"

    def text(self) -> str:
        """The problem in words."""
        events = " ".join(f"In {step.month} {self.event(step)}." for step in self.steps)
        question = f"How many {self.item} does {self.name} have at the end?"
        return f"{self.name} has {self.start} {self.item}. {events} {question}"

    def line(self, step: Step, total: int, result: int) -> str:
        """The written step that leads from `total` to `result` (which a slip may have made wrong)."""
        return f"In {step.month} {self.event(step)}, {total}{step.operator}{step.amount}={result}"


def num_hard_steps(problem: Problem) -> int:
    """Steps that carry, borrow or double."""
    total, count = problem.start, 0
    for step in problem.steps:
        count += step.is_hard(total)
        total = step.apply(total)
    return count


def draw_problem(rng: random.Random) -> Problem:
    """A problem whose number of steps is the smaller of two uniform draws from 2..10: 4.5 on average, a thin tail."""
    name, item = rng.choice(NAMES), rng.choice(ITEMS)
    start = total = rng.randint(5, 90)
    first_month = rng.randrange(12)
    num_steps = min(rng.randint(MIN_STEPS, MAX_STEPS), rng.randint(MIN_STEPS, MAX_STEPS))
    steps: list[Step] = []
    for i in range(num_steps):
        step = _draw_step(rng, MONTHS[(first_month + i) % 12], total)
        steps.append(step)
        total = step.apply(total)
    return Problem(name, item, start, tuple(steps))


def _draw_step(rng: random.Random, month: str, total: int) -> Step:
    if 1 <= total <= LARGEST_TOTAL // 2 and rng.random() < 0.12:
        return Step(month, "*", 2, "")
    most_gained = min(LARGEST_CHANGE, LARGEST_TOTAL - total)
    most_lost = min(LARGEST_CHANGE, total)
    # In proportion to the room on either side the total stays near the middle and both signs stay common.
    if rng.randrange(most_gained + most_lost) < most_gained:
        return Step(month, "+", rng.randint(1, most_gained), rng.choice(GAIN_VERBS))
    return Step(month, "-", rng.randint(1, most_lost), rng.choice(LOSS_VERBS))


def draw_problems(seed: int, num_problems: int) -> list[Problem]:
    """`num_problems` problems, no two of them the same exercise (`Problem.key`)."""
    rng = random.Random(seed)
    problems: dict[Any, Problem] = {}
    while len(problems) < num_problems:
        problem = draw_problem(rng)
        problems.setdefault(problem.key, problem)
    return list(problems.values())


def to_row(problem: Problem) -> dict[str, Any]:
    """A row in the schema of DAPO-Math-17k."""
    text = problem.text()
    return {
        "data_source": "quickstart_bookkeeping",
        "prompt": [{"role": "user", "content": TEMPLATE.format(problem=text)}],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(problem.answer), "style": "rule"},
        "extra_info": {"index": str(uuid.uuid5(uuid.NAMESPACE_OID, text))},
    }


@dataclass(frozen=True)
class Flaws:
    """Error rates of the base model's corpus. A slip is uniform over 0..99: the right result stays the mode."""

    easy_slip: float = 0.005
    hard_slip: float = 0.34
    skipped_line: float = 0.005  # a step: the line is left out, its change forgotten
    unformatted_answer: float = 0.03  # a response: right number, not in the "Answer: N" form
    no_answer: float = 0.01  # a response: ends after the chain
    recheck: float = 0.08  # a chain: followed by doing it all again, perhaps with other slips


def write_response(rng: random.Random, problem: Problem, flaws: Flaws) -> str:
    """A response as the imperfect corpus has it."""
    lines, total = _write_chain(rng, problem, flaws)
    while rng.random() < flaws.recheck:
        lines.append("Let me check that again.")
        again, total = _write_chain(rng, problem, flaws)
        lines += again
    return "\n".join(lines + _write_answer(rng, total, flaws))


def _write_chain(rng: random.Random, problem: Problem, flaws: Flaws) -> tuple[list[str], int]:
    lines, total = [], problem.start
    for step in problem.steps:
        if rng.random() < flaws.skipped_line:
            continue
        # After a slip the chain continues from the wrong total, which may then leave 0..99.
        result = max(0, step.apply(total))
        if rng.random() < (flaws.hard_slip if step.is_hard(total) else flaws.easy_slip):
            result = rng.randrange(LARGEST_TOTAL + 1)
        lines.append(problem.line(step, total, result))
        total = result
    return lines, total


def _write_answer(rng: random.Random, total: int, flaws: Flaws) -> list[str]:
    roll = rng.random()
    if roll < flaws.no_answer:
        return []
    if roll < flaws.no_answer + flaws.unformatted_answer:
        return [rng.choice(("The answer is {}.", "Answer: **{}**", "So {} are left.")).format(total)]
    return [f"Answer: {total}"]


def write_corpus(seed: int, problems: Iterable[Problem], flaws: Flaws) -> list[tuple[str, str]]:
    """(prompt text, response text) pairs the base model is trained on."""
    rng = random.Random(seed)
    return [(TEMPLATE.format(problem=p.text()), write_response(rng, p, flaws)) for p in problems]
