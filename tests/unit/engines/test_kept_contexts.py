"""Contexts that conversations leave for their next turn."""

from __future__ import annotations

import torch

from megatron_dapo.engines.kept_contexts import KeptContext, KeptContexts


def context(*tokens: int) -> KeptContext:
    return KeptContext(tokens, torch.zeros(1, 2, 1, len(tokens) - 1, 1))


def test_only_tokens_that_continue_a_context_find_it_and_find_it_once() -> None:
    kept = KeptContexts(4)
    for tokens, is_continued in [((1, 2, 3, 4), True), ((1, 2, 3), False), ((1, 2), False), ((1, 9, 3, 4), False)]:
        kept.keep("a", context(1, 2, 3))
        assert (kept.take("a", tokens) is not None) == is_continued
        assert kept.take("a", tokens) is None
    assert kept.take("b", (1, 2, 3, 4)) is None


def test_the_oldest_contexts_go_first_and_a_new_turn_renews_its_conversation() -> None:
    kept = KeptContexts(2)
    for name in "ab":
        kept.keep(name, context(1, 2))
    kept.keep("a", context(1, 2, 3))
    kept.keep("c", context(1, 2))
    assert [name for name in "abc" if kept.take(name, (1, 2, 3, 4)) is not None] == ["a", "c"]
