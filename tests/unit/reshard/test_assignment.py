from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from megatron_dapo.reshard.assignment import Candidate, balance, worst_fit

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "golden.json").read_text())["systems"]["dedup_worst_fit"]


def test_worst_fit_is_that_of_the_golden_example() -> None:
    names = [name for name, _, _ in GOLDEN["items"]]
    candidates = [Candidate(size, holders) for _, size, holders in GOLDEN["items"]]
    chosen = worst_fit(candidates)
    assert dict(zip(names, chosen)) == GOLDEN["owner"]
    loads: Counter[int] = Counter()
    for candidate, rank in zip(candidates, chosen):
        loads[rank] += candidate.size
    assert {str(rank): load for rank, load in loads.items()} == GOLDEN["load"]
    assert balance(loads.values()) == pytest.approx(140 * 4 / 338)


def test_work_that_ranks_have_already_counts() -> None:
    assert worst_fit([Candidate(5, [0, 1]), Candidate(5, [0, 1])], {0: 11}) == [1, 1]


def test_a_piece_that_nobody_holds_is_an_error() -> None:
    with pytest.raises(ValueError, match="candidate 0 of size 3 has no rank"):
        worst_fit([Candidate(3, [])])
