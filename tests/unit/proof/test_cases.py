"""The proof covers what it says it covers."""

from __future__ import annotations

import pytest

from megatron_dapo.algorithms.aggregation import AGGREGATIONS
from megatron_dapo.proof.cases import CUTS, RATIOS, SEQUENCES, expert_layouts, layouts, make_batch
from megatron_dapo.proof.oracle import CLIP_HIGH, CLIP_LOW, DUAL_CLIP, WEIGHTS


def test_four_processes_have_every_layout_once() -> None:
    found = layouts(4)
    assert len(found) == len(set(found)) == 19
    sizes = {(layout.tensor, layout.pipeline, layout.context, layout.data) for layout in found}
    assert sizes == {
        (t, p, c, 4 // (t * p * c)) for t in (1, 2, 4) for p in (1, 2, 4) for c in (1, 2, 4) if 4 % (t * p * c) == 0
    }
    assert {layout.describe() for layout in found} >= {
        "TP2 PP2 VPP2 CP1 DP1 SP",
        "TP2 PP1 CP2 DP1 SP",
        "TP1 PP2 VPP2 CP2 DP1",
        "TP1 PP1 CP1 DP4",
    }


def test_layouts_of_sizes_without_a_power_of_two() -> None:
    assert [layout.describe() for layout in layouts(1)] == ["TP1 PP1 CP1 DP1"]
    assert {layout.describe() for layout in layouts(3)} == {
        "TP1 PP1 CP1 DP3",
        "TP1 PP1 CP3 DP1",
        "TP1 PP3 CP1 DP1",
        "TP1 PP3 VPP2 CP1 DP1",
        "TP3 PP1 CP1 DP1",
        "TP3 PP1 CP1 DP1 SP",
    }


def test_layouts_of_experts() -> None:
    assert expert_layouts(1) == []
    found = expert_layouts(4)
    assert len(found) == len(set(found)) == 17
    assert {(layout.expert, layout.expert_tensor_size) for layout in found} == {(2, 1), (2, 2), (4, 1)}
    assert {layout.describe() for layout in found} >= {
        "TP1 PP1 CP1 DP4 EP2",
        "TP1 PP2 CP1 DP2 EP2",
        "TP1 PP1 CP2 DP2 EP4",
        "TP2 PP1 CP1 DP2 EP2 SP",
        "TP4 PP1 CP1 DP1 EP4 ETP1 SP",
    }


def test_every_cut_packing_and_aggregation_is_compared() -> None:
    assert {(cut.micro_batch, cut.packing) for cut in CUTS} == {
        *((size, "packed") for size in ("1", "2", "4", "dynamic")),
        *((size, "padded") for size in ("2", "4", "dynamic")),
    }
    assert set(AGGREGATIONS) == set(WEIGHTS)
    assert set(SEQUENCES) == {"1", "2", "4", "dynamic"}


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


@pytest.mark.parametrize("bound", [1 - CLIP_LOW, 1 + CLIP_HIGH, DUAL_CLIP])
def test_ratios_lie_on_both_sides_of_every_bound_and_away_from_it(bound) -> None:
    assert min(RATIOS) < bound < max(RATIOS)
    assert min(abs(ratio - bound) for ratio in RATIOS) > 0.02
