"""Response tokens of a batch: the ranks of any layout together hold every token once."""

from __future__ import annotations

import pytest
import torch

from megatron_dapo.megatron.context import slice_for_context
from megatron_dapo.megatron.response_tokens import gather_response_tokens
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.parallel.mini_batch import build_micro_batches
from megatron_dapo.parallel.packing import MicroBatchLimits
from megatron_dapo.types import TrainSample

LAYOUTS = [
    ParallelLayout(1),
    ParallelLayout(2),
    ParallelLayout(2, tensor=2, sequence_parallel=True),
    ParallelLayout(4, context=2),
    ParallelLayout(8, tensor=2, pipeline=2, context=2),
]


def make_sample(index: int) -> TrainSample:
    prompt, response = 1 + index % 3, 2 + 5 * (index % 4)
    nothing = torch.zeros(response)
    tokens = torch.arange(prompt + response) + 100 * index
    return TrainSample(f"{index}/0", index, tokens, prompt, nothing, nothing, nothing)


@pytest.mark.parametrize("layout", LAYOUTS, ids=ParallelLayout.describe)
def test_every_token_comes_from_one_rank(layout: ParallelLayout) -> None:
    samples = [make_sample(index) for index in range(9)]
    total = [torch.zeros(sample.num_response_tokens) for sample in samples]
    for rank in range(layout.world_size):
        place = layout.coordinates(rank)
        micro_batches = build_micro_batches(
            samples, [0.0] * len(samples), layout, place.data, MicroBatchLimits(max_tokens=64)
        )
        is_last = place.pipeline == layout.pipeline - 1
        # The number of a position is the target there: what comes back must be the response itself.
        outputs = [
            slice_for_context(one, place.context, layout.context).targets.float() if is_last else None
            for one in micro_batches
        ]
        parts = gather_response_tokens(outputs, micro_batches, samples, layout, rank)
        total = [before + part for before, part in zip(total, parts, strict=True)]
    for sample, numbers in zip(samples, total, strict=True):
        assert numbers.tolist() == sample.tokens[sample.prompt_length :].tolist()
