"""Given responses as batches: every example once an epoch, and an exact state."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from megatron_dapo.data.examples import Example
from megatron_dapo.data.prompt_stream import PromptStream
from megatron_dapo.rollout.collector import CollectorInputs
from megatron_dapo.rollout.example_collector import ExampleCollector
from megatron_dapo.rollout.serialization import join_state, split_state
from megatron_dapo.types import Prompt

TEN = {f"p{i}": Example(Prompt(f"p{i}", (), (1, 2), ""), f"text {i}", np.arange(3, 5 + i)) for i in range(10)}


def collector(max_epochs: int | None = None, on_progress=None) -> ExampleCollector:
    prompts = {name: example.prompt for name, example in TEN.items()}
    stream = PromptStream(tuple(TEN), seed=3, max_epochs=max_epochs)
    return ExampleCollector(CollectorInputs(stream, prompts, None, None, on_progress), TEN)


def names(batch) -> list[str]:
    return [group.prompt.prompt_id for group in batch.groups]


def test_every_example_comes_once_an_epoch_with_reward_one() -> None:
    source = collector(max_epochs=2)
    batches = [source.collect(4) for _ in range(5)]
    assert Counter(name for batch in batches for name in names(batch)) == dict.fromkeys(TEN, 2)
    assert [batch.training_version for batch in batches] == [0, 1, 2, 3, 4]
    for batch in batches:
        for group in batch.groups:
            (sample,) = group.samples
            example = TEN[group.prompt.prompt_id]
            assert sample.reward == 1 and sample.text == example.text
            assert sample.completion.token_ids.tolist() == example.token_ids.tolist()
            assert sample.completion.versions[0].version == batch.training_version, "no token is stale"
    end = source.collect(4)
    assert end.should_stop and not end.groups and end.exhausted == "prompts"
    assert source.accounting().is_balanced and source.accounting().trained == 20


def test_the_state_continues_the_same_order() -> None:
    source = collector()
    first = source.collect(4)
    document, tensors = split_state(source.state_dict())
    rest = [names(source.collect(4)) for _ in range(4)]
    other = collector()
    other.load_state_dict(join_state(document, tensors))
    assert [names(other.collect(4)) for _ in range(4)] == rest
    assert other.train_step == source.train_step == 5 and other.accounting() == source.accounting()
    again = collector()
    again.load_state_dict({**document, "stream": document["stream"]})
    with pytest.raises(ValueError, match="collector state has version 2, given responses have 'given 1'"):
        again.load_state_dict({**document, "version": 2})
    assert names(first) == names(collector().collect(4))


def test_a_batch_that_is_given_back_is_drawn_again() -> None:
    source = collector()
    batch = source.collect(4)
    saved = source.state_dict(untrained=[batch])
    source.give_back(batch)
    assert names(source.collect(4)) == names(batch) and source.accounting().is_balanced
    other = collector()
    other.load_state_dict(saved)
    assert names(other.collect(4)) == names(batch) and other.accounting().is_balanced


def test_a_run_that_is_asked_to_stop_draws_nothing() -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    source = collector()
    with pytest.raises(KeyboardInterrupt):
        source.collect(4, between_polls=stop)
    assert source.accounting().drawn == 0 and names(source.collect(4)) == names(collector().collect(4))
