"""What is kept of the policy's past for drafts, where it goes, and which servers may draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from megatron_dapo.engines.sglang.drafting import DraftHistory, as_text, documents_of, drafting_problem, write_tokenizer
from tests.examples import examples


def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_the_longest_expected_responses_come_first_and_the_rest_is_dropped() -> None:
    history = DraftHistory(1, max_tokens=7, max_age=10)
    history.note((1,), tokens(1, 1), 0, 0)
    history.note((2,), tokens(2, 2, 2, 2), 0, 0)
    history.note((3,), tokens(3, 3, 3), 0, 0)
    history.note((3,), tokens(3), 0, 0)  # mean 2, four tokens together
    assert [document.tolist() for document in history.take(0, 0)] == [[2, 2, 2, 2], [1, 1]]
    assert history.num_tokens == 6 and history.server_of((3,)) is None and history.server_of((2,)) == 0


def test_what_no_version_has_visited_for_long_is_dropped() -> None:
    history = DraftHistory(1, max_tokens=100, max_age=2)
    history.note((1,), tokens(1, 1), 0, version=0)
    history.note((2,), tokens(2, 2), 0, version=1)
    assert [document.tolist() for document in history.take(0, 3)] == [[2, 2]]
    history.note((1,), tokens(1), 0, version=3)
    assert [document.tolist() for document in history.take(0, 3)] == [[2, 2], [1]]


def test_a_corpus_is_renewed_once_it_would_change_by_a_quarter() -> None:
    history = DraftHistory(2, max_tokens=1000, max_age=10)
    assert history.take(0, 0) is None
    history.note((1,), np.arange(100, dtype=np.int32), 0, 0)
    assert len(history.take(0, 0)) == 1 and history.take(1, 0) is None
    history.note((2,), np.arange(25, dtype=np.int32), 0, 1)
    assert history.take(0, 1) is None
    history.note((3,), tokens(1), 0, 1)
    assert len(history.take(0, 1)) == 3
    history.forget_loaded(0)  # a fresh server
    assert len(history.take(0, 1)) == 3 and history.take(0, 1) is None


def test_a_prompts_past_moves_to_the_server_that_answers_it() -> None:
    history = DraftHistory(2, max_tokens=1000, max_age=10)
    history.note((1,), tokens(1, 1), 0, 0)
    history.note((1,), tokens(2, 2), 1, 1)
    assert history.server_of((1,)) == 1
    assert history.take(0, 1) == [] and len(history.take(1, 1)) == 2


NOTES = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 20), st.integers(0, 1), st.integers(0, 1)), max_size=40)


@settings(max_examples=examples(200), deadline=None)
@given(NOTES, st.integers(1, 60))
def test_no_corpus_exceeds_its_bound_and_prompts_have_one_server(notes: list[tuple[int, int, int, int]], bound: int) -> None:
    history, version = DraftHistory(2, bound, max_age=3), 0
    for prompt, length, server, newer in notes:
        version += newer
        history.note((prompt,), np.full(length, prompt, np.int32), server, version)
    corpora = [history.take(server, version) or [] for server in range(2)]
    assert all(sum(map(len, documents)) <= bound for documents in corpora)
    assert history.num_tokens == sum(len(document) for documents in corpora for document in documents)
    prompts = [{int(document[0]) for document in documents} for documents in corpora]
    assert not prompts[0] & prompts[1]
    for server, found in enumerate(prompts):
        assert all(history.server_of((prompt,)) == server for prompt in found)


def test_a_servers_tokenizer_reads_ids_back_exactly(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(write_tokenizer(tmp_path / "tokenizer", 300) / "tokenizer.json"))
    ids = [0, 299, 17, 17, 5, 100]
    assert tokenizer.encode(as_text(ids), add_special_tokens=False).ids == ids
    assert documents_of([tokens(1, 2), tokens(30)]) == ["1 2", "30"]


GOOD = {
    "speculative_algorithm": "NGRAM",
    "device": "cuda",
    "speculative_accept_threshold_single": 1.0,
    "speculative_accept_threshold_acc": 1.0,
}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, ""),
        ({"speculative_algorithm": None}, "it drafts nothing"),
        ({"device": "cpu"}, "on cpu it takes the likeliest token instead of sampling"),
        ({"device": "xpu"}, "on xpu it takes the likeliest"),
        ({"speculative_accept_threshold_acc": 0.9}, "both must be 1.0"),
    ],
)
def test_a_server_that_would_sample_otherwise_is_refused(changes: dict[str, Any], problem: str) -> None:
    found = drafting_problem(GOOD | changes)
    assert problem in found and bool(found) == bool(problem)
