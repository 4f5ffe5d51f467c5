"""Given responses as batches: every example once an epoch, and an exact state."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from megatron_dapo.data.examples import Example
from megatron_dapo.data.prompt_stream import PromptStream
from megatron_dapo.parallel.coordination import Coordination
from megatron_dapo.trainer.metrics import sft_metrics
from megatron_dapo.trainer.sft import ExampleBatches, ExampleStream
from megatron_dapo.types import Prompt, TrainSample

TEN = {f"p{i}": Example(Prompt(f"p{i}", (), (1, 2), ""), np.arange(3, 5 + i)) for i in range(10)}


def stream_of(max_epochs: int | None = None) -> ExampleStream:
    return ExampleStream(TEN, PromptStream(tuple(TEN), seed=3, max_epochs=max_epochs))


def names(samples: list[TrainSample]) -> list[str]:
    """The examples differ in length."""
    return [f"p{sample.num_response_tokens - 2}" for sample in samples]


def test_every_example_comes_once_an_epoch_with_all_its_tokens() -> None:
    batches = ExampleBatches(stream_of(max_epochs=2), Coordination())
    drawn = [batches.next(4) for _ in range(6)]
    assert [len(batch) for batch in drawn] == [4] * 5 + [0]
    assert Counter(name for batch in drawn for name in names(batch)) == dict.fromkeys(TEN, 2)
    for batch in drawn:
        assert len({sample.group_index for sample in batch}) == len(batch), "each is a separate group"
        for name, sample in zip(names(batch), batch):
            assert sample.tokens.tolist() == [1, 2, *TEN[name].token_ids.tolist()]
            assert torch.equal(sample.loss_mask, torch.ones(sample.num_response_tokens))


def test_the_state_continues_the_same_order() -> None:
    source = stream_of()
    first = source.next(4)
    state = source.state_dict()
    rest = [source.next(4) for _ in range(4)]
    other = stream_of()
    other.load_state_dict(state)
    assert [other.next(4) for _ in range(4)] == rest and stream_of().next(4) == first
    with pytest.raises(ValueError, match="collector state has version 2, fine-tuning has 'sft 1'"):
        other.load_state_dict({**state, "version": 2})


def test_metrics_count_the_examples() -> None:
    samples = ExampleBatches(stream_of(), Coordination()).next(10)
    times = {"step": 2.0, "evaluate": 0.0, "checkpoint": 0.0, "train": 1.0}
    metrics = sft_metrics(samples, {"actor/loss": 0.5}, times)
    assert metrics["actor/loss"] == 0.5 and metrics["rollout/groups_trained"] == 10
    assert metrics["rollout/response_tokens_mean"] == 6.5 and metrics["rollout/response_tokens_max"] == 11
    assert metrics["throughput/samples_per_s"] == 5 and metrics["throughput/trained_tokens_per_s"] == 85
