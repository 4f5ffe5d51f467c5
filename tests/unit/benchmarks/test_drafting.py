"""The reference automaton against a search through the corpus, and what a recorded response would have been drafted."""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples

TOKENS = st.lists(st.integers(0, 2), max_size=24)


@pytest.fixture(scope="module", autouse=True)
def automaton(benchmarks_on_the_path: None) -> Iterator[ModuleType]:
    global drafts
    drafts = importlib.import_module("drafts.automaton")
    yield drafts


def ends_of(corpus: Sequence[int], words: Sequence[int]) -> frozenset[int]:
    """Return the positions at which `words` end in the corpus."""
    size = len(words)
    return frozenset(end for end in range(size - 1, len(corpus)) if list(corpus[end - size + 1 : end + 1]) == list(words))


def continuations(corpus: Sequence[int], ends: frozenset[int]) -> list[tuple[int, frozenset[int]]]:
    """Return the tokens that follow, with their positions, the most recent first."""
    found: dict[int, set[int]] = {}
    for end in ends:
        if end + 1 < len(corpus) and corpus[end + 1] != drafts.SEPARATOR:
            found.setdefault(corpus[end + 1], set()).add(end + 1)
    return sorted(((token, frozenset(at)) for token, at in found.items()), key=lambda pair: -max(pair[1]))


def draft_by_search(corpus: Sequence[int], context: Sequence[int], num_nodes: int) -> Any:
    root: dict[int, Any] = {}
    left, scale, seen = num_nodes, (drafts.MAX_BREADTH - drafts.MIN_BREADTH) / (drafts.DEPTH - 1), set()
    tail = list(context[-drafts.DEPTH :])
    for size in range(len(tail), 0, -1):
        ends = ends_of(corpus, tail[len(tail) - size :])
        # Suffixes that end in the same places are one state, whose length is that of the longest.
        if not ends or ends in seen or not continuations(corpus, ends):
            continue
        seen.add(ends)
        queue = deque([(root, (drafts.DEPTH - 1 - size) * scale + drafts.MIN_BREADTH, ends)])
        while queue and left > 0:
            parent, breadth, ends = queue.popleft()
            for token, after in continuations(corpus, ends)[: max(1, int(breadth))]:
                if left <= 0:
                    break
                left -= token not in parent
                queue.append((parent.setdefault(token, {}), breadth - scale, after))
    return root


@settings(max_examples=examples(500), deadline=None)
@given(st.lists(TOKENS, max_size=4), TOKENS, st.integers(1, 12))
def test_drafts_are_those_of_a_search_through_the_corpus(documents: list[list[int]], context: list[int], nodes: int) -> None:
    corpus = [token for index, document in enumerate(documents) for token in (([drafts.SEPARATOR] if index else []) + document)]
    automaton = drafts.SuffixAutomaton(documents)
    assert automaton.draft(context, nodes) == draft_by_search(corpus, context, nodes)


def size_of(tree: dict[int, Any]) -> int:
    return sum(1 + size_of(below) for below in tree.values())


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(TOKENS, min_size=1, max_size=4), TOKENS, st.integers(1, 12))
def test_a_draft_keeps_to_its_budget(documents: list[list[int]], context: list[int], nodes: int) -> None:
    assert size_of(drafts.SuffixAutomaton(documents).draft(context, nodes)) <= nodes


def test_a_response_that_was_said_before_takes_a_step_for_every_draft() -> None:
    response = list(range(100, 141))  # 40 tokens after the first
    said = drafts.SuffixAutomaton([response])
    assert drafts.decoding_steps(said, [1, 2], response, 7) == 5  # seven accepted and one more, each time
    assert drafts.decoding_steps(drafts.SuffixAutomaton([]), [1, 2], response, 7) == 40
    assert drafts.decoding_steps(drafts.SuffixAutomaton([[9, 9, 9]]), [1, 2], response, 7) == 40


@pytest.mark.parametrize(("tokens", "count"), [([1, 2, 3], 2), ([1, 5], 2), ([4], 0), ([1], 1), ([], 0)])
def test_accepted_tokens_follow_the_tree(tokens: list[int], count: int) -> None:
    assert drafts.accepted({1: {2: {}, 5: {}}}, tokens) == count


def test_replay_counts_every_token_after_the_first_of_a_response() -> None:
    benchmark = importlib.import_module("drafting")
    step = [((1, 2), [7, 8, 9, 3]), ((1, 2), [7, 8, 9, 3]), ((5,), [6])]
    [found] = benchmark.replay([step, step], (7, 1), 1000)
    # Three tokens are drafted in one step once the prompt's past is known, or two at a time.
    assert found == {"counts": {7: [(3, 1), (3, 1)], 1: [(3, 2), (3, 2)]}, "corpus": 9}
    assert benchmark.ratio(found["counts"][7]) == 3.0 and benchmark.ratio(found["counts"][1]) == 1.5
    assert benchmark.longest([(1, 1), (9, 4), (3, 2), (5, 5), (2, 2)]) == [(9, 4)]
