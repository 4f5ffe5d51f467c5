"""Mini-batches: every sample once, groups whole unless asked, weights from the whole mini-batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.parallel.mini_batch import build_micro_batches, split_mini_batches
from megatron_dapo.parallel.packing import MicroBatchLimits
from megatron_dapo.types import TrainSample


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=20),
    st.integers(1, 8),
    st.sampled_from(["groups", "samples"]),
    st.none() | st.integers(0, 99),
)
def test_every_sample_is_in_one_mini_batch(group_sizes, per_mini_batch, split, seed) -> None:
    groups = [group for group, size in enumerate(group_sizes) for _ in range(size)]
    parts = split_mini_batches(groups, per_mini_batch, split=split, seed=seed)
    assert sorted(index for part in parts for index in part) == list(range(len(groups)))
    num_items = len(group_sizes) if split == "groups" else len(groups)
    assert len(parts) == -(-num_items // per_mini_batch) and all(parts)
    assert parts == split_mini_batches(groups, per_mini_batch, split=split, seed=seed)
    if split == "groups":
        members = [{groups[index] for index in part} for part in parts]
        assert sum(map(len, members)) == len(group_sizes), "a group straddles mini-batches"
        assert max(map(len, members)) <= per_mini_batch and max(map(len, members)) - min(map(len, members)) <= 1
    else:
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_seed_shuffles_and_none_keeps_the_order() -> None:
    groups = [index // 4 for index in range(64)]
    assert sum(split_mini_batches(groups, 4), []) == list(range(64))
    orders = [tuple(sum(split_mini_batches(groups, 16, split="samples", seed=seed), [])) for seed in range(3)]
    assert len(set(orders)) == 3
    straddling = split_mini_batches(groups, 16, split="samples", seed=1)
    assert sum(len({groups[index] for index in part}) for part in straddling) > 16


def test_no_samples_give_no_mini_batches() -> None:
    assert split_mini_batches([], 4) == [] == split_mini_batches([], 4, split="samples", seed=3)


def test_bad_settings_are_errors() -> None:
    with pytest.raises(ValueError, match="'rows' does not exist; there are: groups, samples"):
        split_mini_batches([0], 1, split="rows")
    with pytest.raises(ValueError, match="0 groups a mini-batch"):
        split_mini_batches([0], 0)


def make_samples(num: int) -> list[TrainSample]:
    return [
        TrainSample(
            f"g/{n}", n // 4, torch.arange(1, n + 5), 2, torch.ones(n + 2), torch.ones(n + 2), -torch.ones(n + 2)
        )
        for n in range(num)
    ]


@pytest.mark.parametrize(
    "layout", [ParallelLayout(1), ParallelLayout(4), ParallelLayout(4, pipeline=2, virtual_pipeline=2)]
)
@pytest.mark.parametrize("limits", [MicroBatchLimits(max_tokens=64), MicroBatchLimits(max_sequences=2)])
def test_weights_are_those_of_the_whole_mini_batch_on_every_rank(layout, limits) -> None:
    samples = make_samples(13)
    total = sum(float(sample.loss_mask.sum()) for sample in samples)
    weights = [1.0 / total] * 13
    batches = [
        batch for rank in range(layout.data) for batch in build_micro_batches(samples, weights, layout, rank, limits)
    ]
    assert sum(float(batch.loss_weights.double().sum()) for batch in batches) == pytest.approx(1.0, rel=1e-6)
    assert sorted(name for batch in batches for name in batch.sample_ids if name) == sorted(
        sample.sample_id for sample in samples
    )


def test_wrong_number_of_weights_is_an_error() -> None:
    with pytest.raises(ValueError, match="2 loss weights for 5 samples"):
        build_micro_batches(make_samples(5), [1.0, 1.0], ParallelLayout(1), 0, MicroBatchLimits(max_sequences=2))


def test_a_rollout_batch_is_packed_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    moves: list[object] = []
    to = torch.Tensor.to

    def record(tensor: torch.Tensor, *arguments: Any, **settings: Any) -> torch.Tensor:
        moves.extend(each for each in (*arguments, *settings.values()) if isinstance(each, (str, torch.device)))
        return to(tensor, *arguments, **settings)

    monkeypatch.setattr(torch.Tensor, "to", record)
    samples = make_samples(13)
    build_micro_batches(samples, [1.0] * 13, ParallelLayout(1), 0, MicroBatchLimits(max_sequences=2))
    assert not moves
