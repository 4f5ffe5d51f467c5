from __future__ import annotations

import json
from pathlib import Path

from tools.make_agent_tasks import NUM_HELDOUT, NUM_TRAIN, files

EXAMPLES = Path(__file__).parents[3] / "examples" / "agents"


def test_the_shipped_problems_are_those_that_it_makes():
    for name, content in files().items():
        assert (EXAMPLES / name).read_text(encoding="utf-8") == content


def test_no_problem_is_in_both_files_and_answers_are_right():
    train, heldout = ([json.loads(line) for line in content.splitlines()] for content in files().values())
    assert (len(train), len(heldout)) == (NUM_TRAIN, NUM_HELDOUT)
    assert not {row["question"] for row in train} & {row["question"] for row in heldout}
    for row in (*train, *heldout):
        a, _, b, _, c = row["question"].removeprefix("What is ").removesuffix("?").split()
        assert int(row["answer"]) == int(a) * int(b) + int(c)
