"""The slice of a packed micro-batch that one context-parallel rank computes."""

from __future__ import annotations

import dataclasses

import torch

from megatron_dapo.types import MicroBatch

PER_TOKEN_FIELDS = (
    "token_ids",
    "position_ids",
    "targets",
    "sequence_ids",
    "loss_mask",
    "loss_weights",
    "advantages",
    "rollout_logprobs",
    "staleness",
    "values",
    "returns",
    "positive_weights",
    "routing",
    "is_routed",
    "support",
)


def context_token_index(cu_seqlens: torch.Tensor, context_rank: int, context_size: int) -> torch.Tensor:
    """Return the positions [P / C] int64 in the packed micro-batch that rank `context_rank` of C = `context_size` holds.

    Raise ValueError if a sequence's padded length is not a multiple of 2C.
    """
    # Every sequence is cut into 2C equal chunks; the rank holds chunks r and 2C - 1 - r, an early and a late one, so that
    # all ranks have the same causal work. Transformer Engine's context parallelism assumes this order.
    bounds = cu_seqlens.to("cpu", torch.int64)
    lengths = bounds[1:] - bounds[:-1]
    if torch.any(lengths % (2 * context_size)):
        bad = lengths[lengths % (2 * context_size) != 0][0]
        raise ValueError(
            f"context parallel {context_size}: a packed sequence has {bad} tokens, "
            f"not a multiple of {2 * context_size}; "
            "pack with the layout's sequence_alignment"
        )
    chunk = lengths // (2 * context_size)
    first = bounds[:-1] + context_rank * chunk
    second = bounds[:-1] + (2 * context_size - 1 - context_rank) * chunk
    starts = torch.stack((first, second), dim=1).flatten()
    sizes = chunk.repeat_interleave(2)
    shift = starts - (sizes.cumsum(0) - sizes)
    return torch.arange(int(sizes.sum())) + shift.repeat_interleave(sizes)


def slice_for_context(micro_batch: MicroBatch, context_rank: int, context_size: int) -> MicroBatch:
    """Return the micro-batch with every per-token field cut to this context rank's slice.

    `cu_seqlens` and `sequence_lengths` still describe whole sequences; `sequence_ids` gives each token's sequence.
    """
    if context_size == 1:
        return micro_batch
    index = context_token_index(micro_batch.cu_seqlens, context_rank, context_size).to(micro_batch.token_ids.device)
    fields = {name: getattr(micro_batch, name) for name in PER_TOKEN_FIELDS}
    # Keep `sample_ids` and the lengths: attention across ranks needs whole sequences.
    parts = {name: values.index_select(0, index) for name, values in fields.items() if values is not None}
    if (positions := micro_batch.response_positions) is not None:
        is_response = torch.zeros(micro_batch.num_tokens, dtype=torch.bool, device=index.device)
        is_response[positions] = True
        parts["response_positions"] = is_response.index_select(0, index).nonzero()[:, 0]
    return dataclasses.replace(micro_batch, **parts)
