from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.data.prompt_stream import PromptStream

NUM_PROMPTS = st.integers(min_value=1, max_value=12)
SEEDS = st.integers(min_value=-5, max_value=2**40)


def ids(num):
    return [f"p{i}" for i in range(num)]


def draw(stream, num):
    return [stream.next() for _ in range(num)]


@given(NUM_PROMPTS, SEEDS, st.integers(min_value=1, max_value=5))
def test_every_epoch_has_every_prompt_once(num, seed, num_epochs):
    stream = PromptStream(ids(num), seed)
    for epoch in range(num_epochs):
        assert sorted(draw(stream, num)) == sorted(ids(num))
        assert (stream.epoch, stream.num_drawn) == (epoch, (epoch + 1) * num)


@given(NUM_PROMPTS, SEEDS, st.integers(min_value=0, max_value=40), st.integers(min_value=1, max_value=30))
def test_a_resumed_stream_continues_as_the_uninterrupted_one(num, seed, before, after):
    uninterrupted = PromptStream(ids(num), seed)
    first = draw(uninterrupted, before)
    state = json.loads(json.dumps(uninterrupted.state_dict()))
    resumed = PromptStream(ids(num), seed)
    draw(resumed, 3)  # whatever it did before loading
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    expected = draw(uninterrupted, after)
    assert draw(resumed, after) == expected
    assert first + expected == draw(PromptStream(ids(num), seed), before + after)


OPERATIONS = st.lists(st.sampled_from(["draw", "requeue oldest", "save and load"]), max_size=60)


@given(NUM_PROMPTS, SEEDS, OPERATIONS)
def test_requeued_prompts_come_first_and_nothing_is_lost(num, seed, operations):
    """Against a model: the fresh order of an undisturbed stream, and a list of what was given back."""
    stream, fresh = PromptStream(ids(num), seed), PromptStream(ids(num), seed)
    outstanding, waiting = [], []
    for operation in operations:
        if operation == "draw":
            expected = waiting.pop(0) if waiting else fresh.next()
            assert stream.next() == expected
            outstanding.append(expected)
        elif operation == "requeue oldest" and outstanding:
            waiting.append(outstanding.pop(0))
            stream.requeue(waiting[-1])
        elif operation == "save and load":
            state = json.loads(json.dumps(stream.state_dict()))
            stream = PromptStream(ids(num), seed)
            stream.load_state_dict(state)
    assert stream.num_drawn == fresh.num_drawn


@given(NUM_PROMPTS, st.integers(min_value=1, max_value=4))
def test_max_epochs(num, max_epochs):
    stream = PromptStream(ids(num), 0, max_epochs=max_epochs)
    drawn = draw(stream, num * max_epochs)
    assert None not in drawn
    assert draw(stream, 2) == [None, None]
    resumed = PromptStream(ids(num), 0, max_epochs=max_epochs)
    resumed.load_state_dict(stream.state_dict())
    assert resumed.next() is None
    resumed.requeue("p0")
    assert draw(resumed, 2) == ["p0", None]
    longer = PromptStream(ids(num), 0, max_epochs=max_epochs + 1)
    longer.load_state_dict(stream.state_dict())
    assert longer.next() in ids(num)


def test_epochs_and_seeds_are_shuffled_differently():
    num = 100
    stream = PromptStream(ids(num), 0)
    orders = [tuple(draw(stream, num)) for _ in range(5)]
    orders += [tuple(draw(PromptStream(ids(num), seed), num)) for seed in range(1, 6)]
    assert len({*orders, tuple(ids(num))}) == 11


def test_the_order_is_the_same_on_every_host():
    expected = "p1 p4 p3 p0 p2 p5 p2 p3 p5 p1 p4 p0"
    assert draw(PromptStream(ids(6), 7), 12) == expected.split()


def test_shuffles_are_uniform():
    """Each of the 6 orders of 3 prompts about equally often over 6,000 epochs (5 standard deviations)."""
    stream, counts = PromptStream(ids(3), 1), {}
    for _ in range(6000):
        order = tuple(draw(stream, 3))
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 6
    assert all(abs(count - 1000) < 5 * (1000 * 5 / 6) ** 0.5 for count in counts.values())


def test_a_state_of_other_data_is_refused_with_both_named():
    state = PromptStream(ids(3), 0).state_dict()
    for other in (ids(4), ids(3)[::-1]):
        stream = PromptStream(other, 0)
        before = stream.state_dict()
        with pytest.raises(ValueError, match="another data set") as caught:
            stream.load_state_dict(state)
        assert state["fingerprint"] in str(caught.value) and before["fingerprint"] in str(caught.value)
        assert stream.state_dict() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "seed 1, the configuration 0"),
        ({"version": 9}, "version 9"),
        ({"position": 4}, "position 4 of 3"),
        ({"requeued": ["x"]}, r"unknown requeued prompts \['x'\]"),
    ],
)
def test_bad_states_are_refused(change, message):
    stream = PromptStream(ids(3), 0)
    with pytest.raises(ValueError, match=message):
        stream.load_state_dict({**stream.state_dict(), **change})


def test_bad_arguments_are_refused():
    for arguments, message in [
        (([], 0), "at least one prompt"),
        ((["a", "a"], 0), "1 of 2 prompt ids are repeated"),
        ((["a"], 0, 0), "max_epochs"),
    ]:
        with pytest.raises(ValueError, match=message):
            PromptStream(*arguments)
    with pytest.raises(ValueError, match="not of this data set"):
        PromptStream(["a"], 0).requeue("b")
