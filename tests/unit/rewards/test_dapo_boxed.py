"""verl's scorer of August 2026: an answer line as before, else the last box as it stands."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.rewards.verifiers import dapo, dapo_boxed
from megatron_dapo.rewards.verifiers.dapo_boxed import BOX_CHARACTERS, gold_problem, score

# Response, gold answer, outcome, prediction.
TABLE = [
    ("So it is \\boxed{42}.", "42", "correct", "42"),
    ("\\boxed{1} and then \\boxed{42}", "42", "correct", "42"),  # the last one counts
    ("\\boxed{42} and then \\boxed{1}", "42", "wrong", "1"),
    ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}", "correct", "\\frac{1}{2}"),
    ("\\boxed{1,234}", "1234", "wrong", "1,234"),  # `dapo` would normalize both
    ("\\boxed{1,234}", "1,234", "correct", "1,234"),
    ("\\boxed{ 42}", "42", "wrong", " 42"),
    ("\\boxed{042}", "42", "wrong", "042"),
    ("\\boxed{}", "42", "wrong", ""),
    ("\\boxed {42}", "42", "unparsable", None),
    ("\\fbox{42}", "42", "unparsable", None),
    ("\\boxed{42", "42", "unparsable", None),
    ("\\boxed{42} and \\boxed{4", "42", "unparsable", None),  # the last one does not end
    ("the result is 42", "42", "unparsable", None),
    ("Answer: 41 \\boxed{42}", "42", "wrong", "4142"),  # the line comes first, whatever is in it
    ("Answer: 42\n\\boxed{41}", "42", "correct", "42"),
    ("\\boxed{42}\nAnswer: 41", "42", "wrong", "41"),
    ("Answer: [INVALID]\n\\boxed{42}", "42", "correct", "42"),
    ("Answer: 1,234", "1234", "correct", "1234"),
]


@pytest.mark.parametrize(("response", "gold", "outcome", "prediction"), TABLE)
def test_the_table(response: str, gold: str, outcome: str, prediction: str | None) -> None:
    result = score("Some steps.\n" + response, gold)
    assert (result.outcome, result.extracted) == (outcome, prediction)


def test_a_box_begins_within_the_last_hundred_characters() -> None:
    box = "\\boxed{42}"
    assert score(box + "x" * (BOX_CHARACTERS - len(box)), "42").outcome == "correct"
    assert score(box + "x" * (BOX_CHARACTERS - len(box) + 1), "42").outcome == "unparsable"


@given(st.text(alphabet="Answer: 42\\boxed{}\n,.$", max_size=60), st.sampled_from(["42", "1,234", "\\frac{1}{2}"]))
def test_a_response_with_an_answer_line_scores_as_published(text: str, gold: str) -> None:
    response = f"{text}\nAnswer: {gold}{text}"
    assert score(response, gold) == dapo.score(response, gold)
    assert dapo.score(response, gold).outcome != "unparsable"


def test_gold_answers_that_a_box_or_a_line_can_match() -> None:
    assert [gold_problem(gold) for gold in ("42", "1\n2", "degrees", "a{")] == [None] * 4
    assert gold_problem("7{" * 200) is not None and dapo.gold_problem("1\n2") is not None
    assert dapo_boxed.REVISION.endswith(dapo.REVISION)
