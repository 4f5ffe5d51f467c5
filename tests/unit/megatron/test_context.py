from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from actor_checks import make_micro_batch, sequences

from megatron_dapo.megatron.context import PER_TOKEN_FIELDS, context_token_index, slice_for_context
from megatron_dapo.parallel.layout import ParallelLayout


def test_pieces_are_those_of_the_zigzag() -> None:
    bounds = torch.tensor([0, 8, 12], dtype=torch.int32)
    assert context_token_index(bounds, 0, 2).tolist() == [0, 1, 6, 7, 8, 11]
    assert context_token_index(bounds, 1, 2).tolist() == [2, 3, 4, 5, 9, 10]


@pytest.mark.parametrize("context_size", [1, 2, 4])
def test_the_ranks_hold_every_token_once_with_its_fields(context_size: int) -> None:
    layout = ParallelLayout(world_size=context_size, context=context_size)
    micro_batch = make_micro_batch(sequences((5, 17, 1, 30), 3), layout, 49, seed=1)
    optional = ("staleness", "values", "returns", "positive_weights")
    micro_batch = replace(micro_batch, **{name: torch.rand(micro_batch.num_tokens) for name in optional})
    routing = torch.randint(0, 256, (micro_batch.num_tokens, 3, 2), dtype=torch.uint8)
    micro_batch = replace(micro_batch, routing=routing, is_routed=torch.rand(micro_batch.num_tokens) < 0.5)
    micro_batch = replace(micro_batch, support=torch.randint(0, 49, (micro_batch.num_tokens, 4), dtype=torch.int32))
    slices = [slice_for_context(micro_batch, rank, context_size) for rank in range(context_size)]
    for name in PER_TOKEN_FIELDS:
        whole = getattr(micro_batch, name)
        together = torch.empty_like(whole)
        for rank, part in enumerate(slices):
            assert part.num_tokens == micro_batch.num_tokens // context_size
            index = context_token_index(micro_batch.cu_seqlens, rank, context_size) if context_size > 1 else slice(None)
            together[index] = getattr(part, name)
        assert torch.equal(together, whole), name
    assert all(torch.equal(part.cu_seqlens, micro_batch.cu_seqlens) for part in slices)


def test_a_sequence_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="has 6 tokens, not a multiple of 4"):
        context_token_index(torch.tensor([0, 8, 14]), 0, 2)
