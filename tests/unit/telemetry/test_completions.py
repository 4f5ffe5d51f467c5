"""Responses in a terminal: what a person reads of a group, whatever a model writes."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from megatron_dapo.telemetry.completions import (
    before_and_after_table,
    best_and_worst,
    completions_table,
    conversation_table,
    distinct_tasks,
    excerpt,
    responses_file,
)
from megatron_dapo.telemetry.samples import json_lines
from megatron_dapo.types import Completion, Episode, Segment, Turn, VersionRange
from tests.made_runs import a_sample

BEFORE, AFTER = "Solve the problem.\n\n", "\n\nAnswer in the last line."


def rendered(*arguments: object, **options: object) -> str:
    stream = io.StringIO()
    Console(file=stream, width=120).print(completions_table(*arguments, **options))  # type: ignore[arg-type]
    return stream.getvalue()


def test_a_group_shows_its_best_and_its_worst_response() -> None:
    group = [
        a_sample(1, 0, "wrong", "2 + 5 = 8\nAnswer: 8", reward=-1.0),
        a_sample(1, 1, text="x" * 500 + " Answer: 7", reward=0.75, reward_parts={"verifier": 1.0, "overlong": -0.25}),
        a_sample(1, 2, "truncated", "and so on", reward=-0.5),
    ]
    text = rendered(best_and_worst(group), ("best", "worst"), title="step 1")
    for words in (
        "step 1: Problem 1 [expected: 7]",
        "0.75",
        "overlong -0.25",
        "Answer: 7",
        "-1.00",
        "wrong",
        "Answer: 8",
    ):
        assert words in text, words
    assert "and so on" not in text and len(text.splitlines()) <= 12


def test_a_cut_response_and_a_failed_reward_say_so() -> None:
    group = [
        a_sample(1, 0, "truncated", "abc"),
        a_sample(1, 1, "error", "abc", error="KeyError: 'JUDGE_KEY'"),
    ]
    text = rendered(group)
    assert "cut at 3 tokens" in text and "error: KeyError: 'JUDGE_KEY'" in text


def test_markup_and_control_characters_of_a_model_are_only_text() -> None:
    text = rendered([a_sample(1, text="[bold red]x[/bold red] \x1b[2J")])
    assert "[bold red]x[/bold red] \\u001b[2J" in text and "\x1b" not in text


@pytest.mark.parametrize(
    ("tasks", "expected"),
    [
        (["Tom has 3.", "Mia has 4."], ["Tom has 3.", "Mia has 4."]),
        (["Tom has 3.\nHow many?", "Mia has 4.\nHow many?"], ["Tom has 3.", "Mia has 4."]),
        (["Tom has 3.\nHow many?", "How many?"], ["Tom has 3.\nHow many?", "How many?"]),
        (["same", "same"], None),
    ],
)
def test_instructions_that_all_prompts_share_are_left_out(tasks: list[str], expected: list[str] | None) -> None:
    prompts = [BEFORE + task + AFTER for task in tasks]
    assert distinct_tasks(prompts) == (expected or prompts)


def test_an_excerpt_keeps_the_end() -> None:
    text = excerpt("first words\n" + "word " * 200 + "Answer: 42")
    assert text.startswith("first words") and text.endswith("Answer: 42") and len(text) < 260


def test_the_same_problem_before_and_after_is_the_one_that_rose_most(tmp_path: Path) -> None:
    assert before_and_after_table(tmp_path) is None
    for step, rewards in ((0, (-1.0, -1.0, 1.0)), (6, (1.0, 1.0, 1.0)), (12, (-1.0, 1.0, 1.0))):
        records = [
            a_sample(
                step,
                number,
                text=f"step {step}",
                reward=reward,
                prompt_id=f"p{number}",
                prompt=[{"role": "user", "content": f"Problem {number}"}],
            )
            for number, reward in enumerate(rewards)
        ]
        responses_file(tmp_path, step).write_text(json_lines(records))
    table = before_and_after_table(tmp_path)
    assert table is not None
    stream = io.StringIO()
    Console(file=stream, width=100).print(table)
    rows = [line.split() for line in stream.getvalue().splitlines() if line.strip().startswith("step")]
    assert "Problem 1" in stream.getvalue() and [row[:3] for row in rows] == [
        ["step", "0", "-1.00"],
        ["step", "12", "1.00"],
    ]


def test_an_episode_is_shown_turn_by_turn():
    turns = (Turn(0, 2, 5), Turn(5, 6, 6))
    branch = Segment((1, 4), np.array([20]), np.zeros(1), (VersionRange(0, 1, 0),), (Turn(0, 1, 1),), 0, "a summary")
    episode = Episode("done", turns, (branch,))
    completion = Completion(
        "r", np.arange(10, 16), np.zeros(6), "stop", (VersionRange(0, 6, 0),), prompt_ids=(1, 2, 3), episode=episode
    )
    table = conversation_table(completion, lambda ids: " ".join(str(token) for token in ids), "episode")
    cells = [[str(cell) for cell in column.cells] for column in table.columns]
    assert cells == [
        ["read", "sampled", "read", "sampled", "", "read", "sampled"],
        ["3", "2", "3", "1", "", "2", "1"],
        ["1 2 3", "10 11", "12 13 14", "15", "a summary", "1 4", "20"],
    ]
