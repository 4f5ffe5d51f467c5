"""The choice of samples for a page, and a token's numbers in one character each."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from megatron_dapo.report.run_files import read_run
from megatron_dapo.report.samples import _DIGITS, _spread, kind_of, samples_for_page
from tests.made_runs import a_sample, make_run


@pytest.mark.parametrize("size", [0, 1, 2, 3, 7, 64, 100])
def test_any_start_of_the_order_is_spread_over_all(size: int) -> None:
    order = _spread(size)
    assert sorted(order) == list(range(size))
    if size >= 8:
        first = sorted(order[:8])
        assert order[0] == size - 1 and max(b - a for a, b in zip(first, first[1:])) <= size / 4


def test_kinds() -> None:
    assert [
        kind_of(a_sample(1, outcome=outcome), False) for outcome in ("correct", "unparsable", "truncated", "timeout")
    ] == [
        "right",
        "wrong",
        "truncated",
        "other",
    ]
    assert kind_of(a_sample(1), True) == "filtered"


def test_numbers_of_tokens_survive_their_digits(tmp_path: Path) -> None:
    logprobs, advantages = [0.0, -0.01, -0.5, -3.0, -40.0], [0.0, 0.5, -1.0, 2.0, -2.0]
    text = "ab" + "c" * 70 + "de"
    sample = a_sample(1, text=text, token_chars=[1, 1, 70, 0, 2], logprobs=logprobs, token_advantages=advantages)
    run = read_run(make_run(tmp_path / "run", samples=[sample], filtered=[]))
    (found,) = samples_for_page([run], 100_000)["list"]
    assert found["chars"] == "BB/HAC"  # "/" stands for 63 more
    read = [-12 * (_DIGITS.index(digit) / 63) ** 2 for digit in found["logprobs"]]
    assert read == pytest.approx([0.0, -0.01, -0.5, -3.0, -12.0], abs=0.1)
    assert read[:3] == pytest.approx([0.0, -0.01, -0.5], abs=0.02)
    signed = [(_DIGITS.index(digit) - 31) / 31 * found["scale"] for digit in found["advantages"]]
    assert signed == pytest.approx(advantages, abs=0.04)


def test_long_responses_keep_begin_and_end(tmp_path: Path) -> None:
    text = "".join(chr(97 + place % 26) for place in range(20_000))
    bare = a_sample(2, text=text, token_chars=[], logprobs=[])
    run = read_run(make_run(tmp_path / "run", samples=[a_sample(1, text=text), bare], filtered=[]))
    without, found = samples_for_page([run], 1_000_000)["list"]
    assert found["text"] == text[:2000] + text[-1000:] and found["cut"] == [2000, 17_000]
    assert len(found["chars"]) == len(found["logprobs"]) == 3000
    assert found["num_tokens"] == 20_000
    assert len(without["text"]) < 12_100 and "chars" not in without


def test_the_limit_holds_and_every_kind_has_its_turn(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", 200))
    found = samples_for_page([run], 30_000)
    assert len(json.dumps(found)) < 33_000
    counts = {
        kind: sum(each["kind"] == kind for each in found["list"])
        for kind in ("right", "wrong", "truncated", "filtered")
    }
    assert max(counts.values()) - min(counts.values()) <= 1 and min(counts.values()) > 5
    assert found["read"][0]["right"] == 200


def test_groups_stay_whole(tmp_path: Path) -> None:
    records = [a_sample(step, number, "correct" if number else "wrong") for step in range(1, 101) for number in range(4)]
    found = samples_for_page([read_run(make_run(tmp_path / "run", samples=records, filtered=[]))], 30_000)
    counts = Counter(each["step"] for each in found["list"])
    assert len(counts) > 5 and set(sorted(counts.values())[1:]) == {4}, "the page is full within one group at most"


def test_turns_of_an_episode_are_those_of_the_tokens_that_are_shown(tmp_path: Path) -> None:
    """Of a long one the places after the gap move; turns of other streams are shown with their texts."""
    turn = {"segment": 0, "tokens": [0, 2, 4], "reward": -0.2, "calls": ["look: ok"]}
    turns = [turn, {**turn, "segment": 1}, {**turn, "tokens": [4, 4900, 5000], "reward": 0.0}]
    short = a_sample(1, text="abcdef", token_chars=[1] * 6, logprobs=[-1.0] * 6, response_ids=list(range(6)))
    short["episode"] = {"end": "done", "figures": {"searches": 2.0}, "turns": [turns[0], {**turns[1], "cut": True}]}
    short["branches"] = [{"reason": "a search", "prompt": "p" * 5000, "turns": [["found", ""]]}]
    long = a_sample(2, text="a" * 5000, token_chars=[1] * 5000, logprobs=[-1.0] * 5000, response_ids=list(range(5000)))
    long["episode"] = {"end": "max_turns", "turns": turns}
    run = read_run(make_run(tmp_path / "run", samples=[short, long], filtered=[]))
    shown = {one["step"]: one for one in samples_for_page([run], 10**6)["list"]}
    facts = {"number": 1, "reward": -0.2, "calls": ["look: ok"]}
    assert shown[1]["turns"] == [{"tokens": [0, 2, 4], **facts}] and shown[1]["end"] == "done"
    (branch,) = shown[1]["branches"]
    assert branch["turns"] == [{"texts": ["found", ""], **facts, "number": 2, "cut": True}]
    assert (branch["reason"], branch["num_tokens"], shown[1]["figures"]) == ("a search", 2, {"searches": 2.0})
    assert 500 < len(branch["prompt"]) < 700
    assert shown[2]["cut"] == [2000, 2000] and [one["tokens"] for one in shown[2]["turns"]] == [[0, 2, 4], [4, 2900, 3000]]
