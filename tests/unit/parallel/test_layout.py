"""The layout's arithmetic against megatron-core's own rank generator."""

from __future__ import annotations

import pytest

from megatron_dapo.parallel.layout import ParallelLayout, RankCoordinates

LAYOUTS = [
    ParallelLayout(1),
    ParallelLayout(8, tensor=2, pipeline=2),
    ParallelLayout(16, tensor=2, pipeline=2, context=2),
    ParallelLayout(24, tensor=3, context=2, pipeline=2),
    ParallelLayout(4, pipeline=4),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=ParallelLayout.describe)
def test_coordinates_follow_megatron_core_order(layout) -> None:
    from megatron.core.parallel_state import RankGenerator

    generator = RankGenerator(
        tp=layout.tensor, ep=1, dp=layout.data, pp=layout.pipeline, cp=layout.context, order="tp-cp-ep-dp-pp"
    )
    for axis, token in (("tensor", "tp"), ("context", "cp"), ("data", "dp"), ("pipeline", "pp")):
        for group in generator.get_ranks(token):
            assert [getattr(layout.coordinates(rank), axis) for rank in group] == list(range(getattr(layout, axis)))
    assert len({layout.coordinates(rank) for rank in range(layout.world_size)}) == layout.world_size


EXPERT_LAYOUTS = [
    ParallelLayout(8, expert=4),
    ParallelLayout(8, tensor=2, expert=2),
    ParallelLayout(16, tensor=2, pipeline=2, context=2, expert=4, expert_tensor=1),
    ParallelLayout(16, tensor=4, pipeline=2, expert=4, expert_tensor=2),
]


@pytest.mark.parametrize("layout", EXPERT_LAYOUTS, ids=ParallelLayout.describe)
def test_expert_coordinates_follow_megatron_core_order(layout) -> None:
    from megatron.core.parallel_state import RankGenerator

    size = layout.expert_tensor_size
    replicas = layout.world_size // (size * layout.expert * layout.pipeline)
    generator = RankGenerator(tp=size, ep=layout.expert, dp=replicas, pp=layout.pipeline, cp=1, order="tp-cp-ep-dp-pp")
    for axis, token, count in (("tensor", "tp", size), ("expert", "ep", layout.expert), ("data", "dp", replicas)):
        for group in generator.get_ranks(token):
            assert [getattr(layout.expert_coordinates(rank), axis) for rank in group] == list(range(count))


def test_layers_are_interleaved_over_stages_under_virtual_pipelining() -> None:
    layout = ParallelLayout(2, pipeline=2, virtual_pipeline=2)
    chunks = {(stage, vp): list(layout.layers_of(stage, vp, 8)) for stage in range(2) for vp in range(2)}
    assert chunks == {(0, 0): [0, 1], (1, 0): [2, 3], (0, 1): [4, 5], (1, 1): [6, 7]}


def test_alignments() -> None:
    assert ParallelLayout(1).sequence_alignment == ParallelLayout(1).micro_batch_alignment == 1
    assert ParallelLayout(4, tensor=4, sequence_parallel=True).micro_batch_alignment == 4
    assert ParallelLayout(6, tensor=3, context=2, sequence_parallel=True).micro_batch_alignment == 12
    assert ParallelLayout(4, tensor=2, context=2).sequence_alignment == 4


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"world_size": 4, "tensor": 3}, r"tensor 3 x pipeline 1 x context 1 = 3 does not divide the 4 processes"),
        ({"world_size": 2, "virtual_pipeline": 2}, "virtual_pipeline 2 needs pipeline > 1"),
        ({"world_size": 2, "sequence_parallel": True}, "tensor = 1"),
        ({"world_size": 2, "tensor": 0}, "tensor = 0, must be at least 1"),
        ({"world_size": 2, "expert": 3}, "expert 3 does not divide context x data = 2"),
        ({"world_size": 4, "tensor": 2, "expert": 2, "expert_tensor": 3}, "expert_tensor 3 does not divide tensor = 2"),
        ({"world_size": 4, "tensor": 2, "expert_tensor": 1}, "expert_tensor 1 other than tensor = 2 needs expert > 1"),
        ({"world_size": 4, "tensor": 2, "expert": 3, "expert_tensor": 1}, "1 x expert 3 does not divide the 4 ranks"),
    ],
)
def test_sizes_that_do_not_fit_are_errors(sizes, message) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelLayout(**sizes)


def test_layers_that_do_not_split_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"6 layers do not split over pipeline 2 x virtual_pipeline 2 = 4 chunks"):
        ParallelLayout(2, pipeline=2, virtual_pipeline=2).layers_of(0, 0, 6)


def test_describe_names_every_axis_in_use() -> None:
    layout = ParallelLayout(8, tensor=2, pipeline=2, virtual_pipeline=2, sequence_parallel=True)
    assert layout.describe() == "TP2 PP2 VPP2 CP1 DP2 SP"
    assert layout.coordinates(7) == RankCoordinates(tensor=1, context=0, data=1, pipeline=1)


@pytest.mark.parametrize(
    ("sizes", "num_layers", "chunks"),
    [
        ({"pipeline": 2, "first_stage_layers": 3}, 8, [[3], [5]]),
        ({"pipeline": 4, "first_stage_layers": 23, "last_stage_layers": 23}, 94, [[23], [24], [24], [23]]),
        ({"pipeline": 3, "last_stage_layers": 2}, 8, [[3], [3], [2]]),
        ({"pipeline": 2, "virtual_pipeline": 2, "first_stage_layers": 2, "last_stage_layers": 6}, 8, [[1, 1], [3, 3]]),
    ],
)
def test_the_first_and_last_stage_may_have_other_numbers_of_layers(sizes, num_layers, chunks) -> None:
    layout = ParallelLayout(sizes["pipeline"], **sizes)
    found = [
        [layout.layers_of(stage, chunk, num_layers) for chunk in range(layout.virtual_pipeline)]
        for stage in range(layout.pipeline)
    ]
    assert [[len(chunk) for chunk in stage] for stage in found] == chunks
    in_order = [layer for chunk in range(layout.virtual_pipeline) for stage in found for layer in stage[chunk]]
    assert in_order == list(range(num_layers))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"pipeline": 1, "first_stage_layers": 2}, r"\(2, 0\) need several stages"),
        (
            {"pipeline": 2, "first_stage_layers": 2, "last_stage_layers": 2},
            "8 layers do not split .* with 2 in the first and 2",
        ),
        ({"pipeline": 3, "first_stage_layers": 3}, "with 3 in the first and an even share in the last"),
        ({"pipeline": 2, "first_stage_layers": 8}, "8 layers do not split"),
        ({"pipeline": 2, "virtual_pipeline": 2, "first_stage_layers": 3}, "8 layers do not split"),
    ],
)
def test_numbers_of_layers_that_leave_a_rest_are_errors(sizes, message) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelLayout(sizes["pipeline"], **sizes).layers_of(0, 0, 8)
