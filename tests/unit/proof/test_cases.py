"""The proof covers what it says it covers."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest

from megatron_dapo.algorithms.aggregation import AGGREGATIONS
from megatron_dapo.proof.cases import CUTS, PACKINGS, RATIOS, SEQUENCES, expert_layouts, layouts, make_batch
from megatron_dapo.proof.losses import PROOF_LOSSES
from megatron_dapo.proof.oracle import WEIGHTS


@pytest.mark.parametrize(("num_processes", "num_layouts"), [(1, 1), (3, 6), (4, 19)])
def test_every_layout_of_some_processes_is_there_once(num_processes: int, num_layouts: int) -> None:
    found = layouts(num_processes)
    assert len(found) == len(set(found)) == num_layouts
    sizes = {(layout.tensor, layout.pipeline, layout.context) for layout in found}
    divisors = [size for size in range(1, num_processes + 1) if num_processes % size == 0]
    assert sizes == {each for each in product(divisors, repeat=3) if num_processes % prod(each) == 0}
    assert all(layout.data * prod((layout.tensor, layout.pipeline, layout.context)) == num_processes for layout in found)
    for tensor, pipeline, _ in sizes:
        virtual = {layout.virtual_pipeline for layout in found if layout.pipeline == pipeline}
        sequence = {layout.sequence_parallel for layout in found if layout.tensor == tensor}
        assert virtual == ({1, 2} if pipeline > 1 else {1}) and sequence == ({False, True} if tensor > 1 else {False})


def test_layouts_of_experts() -> None:
    assert expert_layouts(1) == []
    found = expert_layouts(4)
    assert len(found) == len(set(found)) == 17
    assert {(layout.expert, layout.expert_tensor_size) for layout in found} == {(2, 1), (2, 2), (4, 1)}
    assert {layout.pipeline for layout in found} == {1, 2} and {layout.context for layout in found} == {1, 2, 4}


def test_every_cut_packing_and_aggregation_is_compared() -> None:
    assert len(CUTS) == len(set(CUTS)) == len(SEQUENCES) * len(PACKINGS) - 1, "one sequence is packed or padded alike"
    assert {cut.micro_batch for cut in CUTS} == {*SEQUENCES} and {cut.packing for cut in CUTS} == {*PACKINGS}
    assert set(WEIGHTS) == set(AGGREGATIONS) - {"rollout_token_mean"}  # It is token_mean for one mini-batch.


def test_batch_has_what_makes_denominators_and_masks_differ() -> None:
    batch = make_batch(203)
    lengths = [sample.num_response_tokens for sample in batch.samples]
    assert min(lengths) == 1 and max(lengths) == 60 and len(set(lengths)) > 8
    trained = [int(sample.loss_mask.sum()) for sample in batch.samples]
    assert trained.count(0) == 1, "one response is filtered out"
    gaps = [
        sample.loss_mask[:-1].min() == 0
        for sample in batch.samples
        if sample.loss_mask.any() and sample.num_response_tokens > 10
    ]
    assert all(gaps) and len(gaps) > 4
    groups = [sample.group_index for sample in batch.samples]
    assert len({groups.count(group) for group in groups}) > 2, "groups of different sizes"
    for sample in batch.samples:
        assert sample.num_response_tokens < 5 or (sample.advantages.min() < 0 < sample.advantages.max())
    assert all(0 <= int(sample.tokens.min()) and int(sample.tokens.max()) < 203 for sample in batch.samples)
    again = make_batch(203)
    assert all((a.tokens == b.tokens).all() for a, b in zip(batch.samples, again.samples, strict=True))


BOUNDS = {"clip_ratio_low": lambda low: 1 - low, "clip_ratio_high": lambda high: 1 + high, "dual_clip": float}
TOKEN_BOUNDS = sorted(
    {
        BOUNDS[key](value)
        for loss in PROOF_LOSSES.values()
        if not loss.has_sequence_advantage
        for key, value in loss.section.items()
        if key in BOUNDS
    }
)


@pytest.mark.parametrize("bound", TOKEN_BOUNDS)
def test_ratios_lie_on_both_sides_of_every_bound_and_away_from_it(bound) -> None:
    assert min(RATIOS) < bound < max(RATIOS)
    assert min(abs(ratio - bound) for ratio in RATIOS) > 0.02
