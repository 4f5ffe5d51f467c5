"""Makes per-token numbers of responses available on every rank: values from the critic's layout, log-probs from the
policy's.

Each token is on one data-parallel rank and one context rank, on their last pipeline stage; one tensor rank of those
reports it. All others contribute 0, so the sum over all ranks is exactly the number. The two layouts are independent
and only share whole samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.distributed as dist

from megatron_dapo.megatron.context import context_token_index
from megatron_dapo.parallel.collectives import communication_device
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.parallel.packing import PADDING_ID, unpack_responses
from megatron_dapo.types import MicroBatch, TrainSample


def is_reporting_rank(layout: ParallelLayout, rank: int) -> bool:
    """Return True for one tensor rank of a last stage: the other tensor ranks hold the same numbers."""
    coordinates = layout.coordinates(rank)
    return coordinates.tensor == 0 and coordinates.pipeline == layout.pipeline - 1


def gather_response_tokens(
    outputs: Sequence[torch.Tensor | None],
    micro_batches: Sequence[MicroBatch],
    samples: Sequence[TrainSample],
    layout: ParallelLayout,
    rank: int,
    num_after: int = 0,
) -> list[torch.Tensor]:
    """Return [R + num_after] float32 on the CPU for each of `samples`, the same on every rank.

    Collective over the world: ranks without the model call `receive_response_tokens`.

    outputs: for this rank's `micro_batches`, [P_local] in its context rank's token order; None off the last pipeline
    stage. samples: all ranks' samples, in the same order everywhere. num_after: see `unpack_responses`.
    """
    lengths = [sample.num_response_tokens + num_after for sample in samples]
    # Not strict: the last sum is the end of all tokens.
    starts = dict(zip((sample.sample_id for sample in samples), accumulate(lengths, initial=0), strict=False))
    assert len(starts) == len(samples), "sample ids of a batch are unique"
    prompt_lengths = {sample.sample_id: sample.prompt_length for sample in samples}
    flat = torch.zeros(sum(lengths))
    if is_reporting_rank(layout, rank):
        local = [output.detach().float() for output in outputs if output is not None]
        assert len(local) == len(outputs), "the last pipeline stage has outputs"
        # Use a single transfer, because the host waits for each one.
        on_host = torch.cat(local).cpu().split([output.numel() for output in local])
        for output, micro_batch in zip(on_host, micro_batches, strict=True):
            whole = _whole(output, micro_batch, layout, rank)
            prompts = [prompt_lengths[name] for name in micro_batch.sample_ids if name != PADDING_ID]
            for name, part in unpack_responses(whole, micro_batch, prompts, num_after).items():
                flat[starts[name] : starts[name] + part.numel()] += part
    return _summed(flat, lengths)


def receive_response_tokens(samples: Sequence[TrainSample], num_after: int = 0) -> list[torch.Tensor]:
    """Receive the result of `gather_response_tokens` on a rank without the model. Collective over the world."""
    lengths = [sample.num_response_tokens + num_after for sample in samples]
    return _summed(torch.zeros(sum(lengths)), lengths)


def _summed(flat: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
    if dist.is_initialized():
        traveling = flat.to(communication_device())
        dist.all_reduce(traveling)
        flat = traveling.cpu()
    return list(flat.split(list(lengths)))


def _whole(output: torch.Tensor, micro_batch: MicroBatch, layout: ParallelLayout, rank: int) -> torch.Tensor:
    """Return [P] with this context rank's tokens at their positions and 0 at all others."""
    if layout.context == 1:
        return output
    index = context_token_index(micro_batch.cu_seqlens, layout.coordinates(rank).context, layout.context)
    return torch.zeros(micro_batch.num_tokens).index_copy(0, index, output)
