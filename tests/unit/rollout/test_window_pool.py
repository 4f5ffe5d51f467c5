"""The pool of windows: its two queues, and what a full window is in the light of the whole response."""

from __future__ import annotations

import json

import numpy as np
import pytest

from megatron_dapo.rollout.windows import WindowPool, behind_window
from megatron_dapo.types import Completion, FinishReason, Prompt, SamplingParams, VersionRange

PROMPT = Prompt("p", (), (1, 2, 3), "42")
SAMPLING = SamplingParams(max_new_tokens=5, stop_token_ids=(9,))


def completion(tokens: tuple[int, ...], reason: FinishReason = "abort") -> Completion:
    versions = (VersionRange(0, len(tokens), 0),) if tokens else ()
    return Completion("g/0", tokens, (-0.5,) * len(tokens), reason, versions)


@pytest.mark.parametrize(
    ("tokens", "returned", "ended"),
    [
        ((4, 5, 6), "length", "abort"),  # the window is full: it continues in the next
        ((4, 5, 6), "abort", "abort"),  # stopped when it was just full
        ((4, 5), "abort", "abort"),  # an engine died
        ((4, 5, 9), "stop", "stop"),
        ((4, 5, 9), "length", "stop"),  # the stop token is the window's last
        ((4, 5, 9), "abort", "stop"),
        ((4, 9), "stop", "stop"),
        ((4, 5), "length", "length"),  # the engine itself can go no further
    ],
)
def test_a_full_window_is_not_the_end(tokens: tuple[int, ...], returned: FinishReason, ended: FinishReason) -> None:
    assert behind_window(completion(tokens, returned), 3, SAMPLING).finish_reason == ended


def test_the_maximum_is_the_end() -> None:
    for returned in ("length", "abort"):
        assert behind_window(completion((4, 5, 6, 7, 8), returned), 5, SAMPLING).finish_reason == "length"
        assert behind_window(completion((4, 5, 6, 7, 9), returned), 5, SAMPLING).finish_reason == "stop"


def test_unfinished_responses_go_ahead_of_those_not_started_each_in_order() -> None:
    pool = WindowPool()
    pool.begin("a", PROMPT, 1, 3)
    pool.begin("b", PROMPT, 1, 3)
    assert pool.take(4) == [("a", 0), ("a", 1), ("a", 2), ("b", 0)]
    assert (pool.num_waiting, pool.num_not_started) == (6, 2)
    for group_id, index in (("a", 0), ("b", 0)):
        pool[group_id].add(index, completion((4, 5)))
        pool[group_id].end_window(index)
    pool["a"].add(1, completion((4, 9), "stop"))
    pool["a"].finish(1, 1.0)
    assert pool.take(9) == [("a", 0), ("a", 2), ("b", 0), ("b", 1), ("b", 2)]
    assert pool["a"].starts == {0: (2,), 2: ()} and pool["b"].starts == {0: (2,), 1: (), 2: ()}
    assert (pool["a"].num_finished, pool["a"].accuracy_sum, pool.num_not_started) == (1, 1.0, 0)


def test_a_group_leaves_with_its_last_response() -> None:
    pool = WindowPool()
    pool.begin("a", PROMPT, 1, 2)
    pool.take(1)
    pool["a"].add(0, completion((9,), "stop"))
    pool["a"].finish(0, 0.0)
    pool.drop_finished()
    assert [group.num_waiting for group in pool.groups] == [1], "one is not started"
    pool.take(1)
    pool["a"].add(1, completion((9,), "stop"))
    pool["a"].finish(1, 0.0)
    pool.drop_finished()
    assert pool.groups == ()


def test_the_state_is_that_of_the_pool_not_of_its_history() -> None:
    pools = [WindowPool(), WindowPool()]
    for pool, order in zip(pools, [(0, 1), (1, 0)], strict=True):
        pool.begin("a", PROMPT, 1, 3)
        pool.take(2)
        for index in order:
            pool["a"].add(index, completion((4, 5 + index)))
    states = [json.dumps(pool.state_dict(), default=np.ndarray.tolist) for pool in pools]
    assert states[0] == states[1]
    restored = WindowPool()
    restored.load_state_dict(json.loads(states[0]), {"p": PROMPT})
    assert json.dumps(restored.state_dict(), default=np.ndarray.tolist) == states[0]
    assert restored.take(9) == [("a", 0), ("a", 1), ("a", 2)]
    assert restored["a"].completions[1] == pools[0]["a"].completions[1] and restored["a"].prompt == PROMPT
