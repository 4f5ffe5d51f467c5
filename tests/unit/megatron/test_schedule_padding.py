"""Micro-batches of a pipeline made equal in length: the lengths, and the sequences of padding, token by token."""

from __future__ import annotations

import pytest
import torch

from megatron_dapo.megatron.context import context_token_index
from megatron_dapo.megatron.schedule import MAX_PADDED_SHARE, common_length, prepare
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.parallel.packing import pack
from megatron_dapo.types import TrainSample


def _micro_batch(lengths: list[int], layout: ParallelLayout):
    samples = [
        TrainSample(str(i), 0, torch.arange(1, n + 1), 1, torch.ones(n - 1), torch.ones(n - 1), torch.zeros(n - 1))
        for i, n in enumerate(lengths)
    ]
    return pack(samples, [1.0] * len(samples), layout)


def test_padding_is_added_where_it_costs_little():
    assert common_length([1000]) == 1000
    assert common_length([1000, 1000, 984]) == 1000
    assert common_length([1000, 900]) == 0
    longest, rest = 1020, [1000] * 99
    assert common_length([longest, *rest]) == longest and 100 * longest <= (1 + MAX_PADDED_SHARE) * 100_200


@pytest.mark.parametrize("context", [1, 2])
@pytest.mark.parametrize("tensor", [1, 2])
def test_padding_stands_behind_the_micro_batch_in_sequences_of_its_own(context, tensor):
    layout = ParallelLayout(
        2 * context * tensor, pipeline=2, context=context, tensor=tensor, sequence_parallel=tensor > 1
    )
    batches = [_micro_batch(lengths, layout) for lengths in ([60_000, 9_001], [40_000, 27_777])]
    assert batches[0].num_tokens > batches[1].num_tokens
    for rank in range(layout.world_size):
        prepared = prepare(batches, layout, rank)
        for one, whole in zip(prepared, batches, strict=True):
            bounds, length = one.packed.cu_seqlens_q, batches[0].num_tokens
            assert bounds[: whole.cu_seqlens.numel()].tolist() == whole.cu_seqlens.tolist()
            assert int(bounds[-1]) == length == one.token_ids.numel() * context
            added = (bounds[1:] - bounds[:-1])[whole.cu_seqlens.numel() - 1 :]
            assert (added > 0).all() and (added <= 512).all() and (added % layout.sequence_alignment == 0).all()
            # All tokens of the micro-batch and all positions, placed one by one.
            tokens, positions = torch.zeros(length, dtype=torch.int64), torch.zeros(length, dtype=torch.int64)
            tokens[: whole.num_tokens] = whole.token_ids
            for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist()):
                positions[start:stop] = torch.arange(stop - start)
            index = torch.arange(length)
            if context > 1:
                index = context_token_index(bounds, layout.coordinates(rank).context, context)
            own = one.micro_batch.num_tokens
            assert torch.equal(one.token_ids[:own], tokens[index][:own]) and torch.equal(
                one.packed.position_ids, positions[index]
            )
            # Padding has the micro-batch's own tokens, for routers that would send equal ones to the same experts.
            assert torch.equal(one.token_ids, one.token_ids[:own].repeat(3)[: one.token_ids.numel()])
            # The loss sees only the micro-batch, and its tokens come first.
            assert one.micro_batch.num_tokens * context == whole.num_tokens
            assert torch.equal(one.token_ids[: one.micro_batch.num_tokens], one.micro_batch.token_ids)


def test_without_a_pipeline_nothing_is_added():
    layout = ParallelLayout(1)
    batches = [_micro_batch([1000], layout), _micro_batch([999], layout)]
    assert [one.token_ids.numel() for one in prepare(batches, layout, 0)] == [1000, 999]
