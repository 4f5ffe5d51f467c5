"""The replay buffer: whole groups, staleness, order, and an exact state."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.rollout.buffer import ReplayBuffer
from megatron_dapo.rollout.serialization import group_from_json, group_to_json
from megatron_dapo.types import Completion, Group, Prompt, Score, ScoredSample, VersionRange


def make_group(name: str, version: int = 0, logprobs: tuple[float, ...] = (-0.1, -2.5)) -> Group:
    tokens = tuple(range(len(logprobs)))
    completion = Completion(f"{name}/0", tokens, logprobs, "stop", (VersionRange(0, len(logprobs), version),))
    score = Score(1.0, 1.0, "correct", "42", {"other_preset": 0.0, "tail": [1, None]})
    sample = ScoredSample(f"{name}/0", completion, "it is 42", score, {"verifier": 1.0, "overlong": -0.25})
    prompt = Prompt("p" + name, ({"role": "user", "content": "6 x 7?"},), (1, 2, 3), "42", "test", {"index": 5})
    return Group(name, prompt, (sample,), version, 2)


def names(groups: list[Group]) -> list[str]:
    return [group.group_id for group in groups]


def test_first_in_first_out_and_whole_groups() -> None:
    buffer = ReplayBuffer()
    groups = [make_group(str(i)) for i in range(5)]
    for group in groups:
        buffer.put(group)
    assert buffer.take(2, 0) == groups[:2]
    assert buffer.take(10, 0) == groups[2:]
    assert buffer.take(1, 0) == [] and len(buffer) == 0


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_nothing_too_stale_is_handed_out(max_staleness: int) -> None:
    buffer = ReplayBuffer(max_staleness)
    for version in range(6):
        buffer.put(make_group(str(version), version))
    assert buffer.num_available(5) == max_staleness + 1
    assert names(buffer.evict(5)) == [str(v) for v in range(6) if 5 - v > max_staleness]
    assert names(buffer.take(99, 5)) == [str(v) for v in range(6) if 5 - v <= max_staleness]
    assert len(buffer) == 0


def test_take_skips_stale_groups_without_losing_them() -> None:
    buffer = ReplayBuffer(0)
    buffer.put(make_group("old", 0))
    buffer.put(make_group("new", 1))
    assert names(buffer.take(5, 1)) == ["new"]
    assert names(buffer.evict(1)) == ["old"]


def test_groups_given_back_go_first() -> None:
    buffer = ReplayBuffer()
    for name in "abc":
        buffer.put(make_group(name))
    taken = buffer.take(2, 0)
    buffer.give_back(taken)
    assert names(buffer.take(3, 0)) == ["a", "b", "c"]


def test_state_survives_json_exactly() -> None:
    buffer = ReplayBuffer(2)
    for version in range(3):
        buffer.put(make_group(str(version), version))
    taken = buffer.take(1, 2)
    restored = ReplayBuffer(2)
    restored.load_state_dict(json.loads(json.dumps(buffer.state_dict(), default=np.ndarray.tolist)))
    states = [json.dumps(each.state_dict(), default=np.ndarray.tolist) for each in (restored, buffer)]
    assert states[0] == states[1]
    assert restored.take(9, 2) == buffer.take(9, 2)
    assert len(taken) == 1
    with pytest.raises(ValueError, match="version 99"):
        restored.load_state_dict({"version": 99})


@given(st.lists(st.floats(max_value=0.0, allow_nan=False, allow_infinity=False, width=32), max_size=20))
def test_log_probs_keep_every_bit(logprobs: list[float]) -> None:
    group = make_group("a", logprobs=tuple(logprobs))
    restored = group_from_json(json.loads(json.dumps(group_to_json(group), default=np.ndarray.tolist)))
    assert restored == group
    assert [x.hex() for x in restored.samples[0].completion.logprobs.tolist()] == [x.hex() for x in logprobs]


def test_a_group_cannot_be_put_twice() -> None:
    buffer = ReplayBuffer()
    buffer.put(make_group("a"))
    with pytest.raises(AssertionError, match="already in the buffer"):
        buffer.put(make_group("a"))
