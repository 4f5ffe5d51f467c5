"""Runs packed micro-batches through the chunks with megatron-core's pipeline schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_dapo.megatron.attention import PackedSequences
from megatron_dapo.megatron.context import slice_for_context
from megatron_dapo.megatron.model import unwrap
from megatron_dapo.megatron.scales import keeping_scales
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.types import MicroBatch

Output = TypeVar("Output")
# (the last chunk, what it returned, context-sliced micro-batch) -> what a loss is made of
ReadOutput = Callable[[GPTModel, torch.Tensor, MicroBatch], Output]
# (context-sliced micro-batch, what was read, its index) -> (scalar loss, scalar sums by name)
Loss = Callable[[MicroBatch, Output, int], tuple[torch.Tensor, Mapping[str, torch.Tensor]]]


@dataclass(frozen=True)
class PreparedMicroBatch:
    """One micro-batch as this rank computes it; made once and read by all its chunks."""

    index: int
    micro_batch: MicroBatch  # context-sliced
    packed: PackedSequences


def prepare(micro_batches: Sequence[MicroBatch], layout: ParallelLayout, rank: int) -> list[PreparedMicroBatch]:
    """Slice the micro-batches for this rank. ValueError where they cannot run."""
    if not micro_batches:
        raise ValueError("a step needs at least one micro-batch")
    if layout.virtual_pipeline > 1 and len(micro_batches) % layout.pipeline:
        raise ValueError(
            f"virtual pipelining runs micro-batches in groups of pipeline = {layout.pipeline}, "
            f"but there are {len(micro_batches)}; "
            f"pack into a multiple of {layout.pipeline}"
        )
    context_rank = layout.coordinates(rank).context
    return [_prepare_one(index, micro_batch, layout, context_rank) for index, micro_batch in enumerate(micro_batches)]


def _prepare_one(index: int, micro_batch: MicroBatch, layout: ParallelLayout, context_rank: int) -> PreparedMicroBatch:
    num_tokens, end = micro_batch.num_tokens, int(micro_batch.cu_seqlens[-1])
    if num_tokens != end or num_tokens % layout.micro_batch_alignment:
        raise ValueError(
            f"micro-batch {index}: {num_tokens} tokens, cu_seqlens end at {end}; "
            f"under {layout.describe()} both must be the same multiple of {layout.micro_batch_alignment}"
        )
    local = slice_for_context(micro_batch, context_rank, layout.context)
    longest = micro_batch.max_sequence_length
    packed = PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=micro_batch.cu_seqlens,
        cu_seqlens_kv=micro_batch.cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        context_rank=context_rank,
        context_size=layout.context,
        position_ids=local.position_ids,
    )
    return PreparedMicroBatch(index, local, packed)


def forward(
    chunks: Sequence[torch.nn.Module], prepared: Sequence[PreparedMicroBatch], read: ReadOutput[Output]
) -> list[Output | None]:
    """What `read` makes of every micro-batch without gradients; None on ranks off the last pipeline stage. The chunks
    are as they were afterwards, scales of FP8 included."""

    def keep(
        hidden: torch.Tensor, chunk: torch.nn.Module, item: PreparedMicroBatch
    ) -> tuple[torch.Tensor, torch.Tensor, Output]:
        outputs = read(unwrap(chunk), hidden, item.micro_batch)
        return hidden.new_zeros(()), torch.ones((), dtype=torch.int), outputs

    with torch.no_grad(), keeping_scales(chunks):
        outputs = _run(chunks, prepared, keep, forward_only=True)
    return list(outputs) if outputs else [None] * len(prepared)


def forward_backward(
    chunks: Sequence[torch.nn.Module],
    prepared: Sequence[PreparedMicroBatch],
    read: ReadOutput[Output],
    loss_fn: Loss[Output],
    reduce_fully: bool = False,
) -> list[Mapping[str, torch.Tensor]]:
    """Add the gradients of the summed losses to the chunks' fp32 gradients, summed over data x context ranks too.

    Returns each micro-batch's metrics on the last pipeline stage, else nothing. With the distributed optimizer a rank's
    gradients are complete only in its own shard, unless `reduce_fully` asks for all of them everywhere.
    """

    def finish(
        hidden: torch.Tensor, chunk: torch.nn.Module, item: PreparedMicroBatch
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        outputs = read(unwrap(chunk), hidden, item.micro_batch)
        loss, metrics = loss_fn(item.micro_batch, outputs, item.index)
        # The count is not used: losses are divided by global counts before they get here.
        return loss, torch.ones((), dtype=torch.int), metrics

    return _run(chunks, prepared, finish, forward_only=False, force_all_reduce=reduce_fully)


def _run(
    chunks: Sequence[torch.nn.Module], prepared: Sequence[PreparedMicroBatch], finish: Callable[..., Any], **mode: Any
) -> list[Any]:
    """Run megatron-core's schedule; `finish` turns the last chunk's output into (loss, count, data)."""

    def step(iterator: Iterator[PreparedMicroBatch], chunk: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
        item = next(iterator)
        hidden = chunk(
            input_ids=item.micro_batch.token_ids[None],
            position_ids=item.micro_batch.position_ids[None],
            attention_mask=None,
            packed_seq_params=item.packed,
        )
        return hidden, partial(finish, chunk=chunk, item=item)

    longest = max(item.micro_batch.num_tokens for item in prepared)
    iterators = [iter(prepared) for _ in chunks]
    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks),
        num_microbatches=len(prepared),
        seq_length=longest,  # lengths are sent along with the tensors: this one only has to be there
        micro_batch_size=1,
        **mode,
    )


def sum_gradients(config: TransformerConfig) -> None:
    """Make megatron-core's schedules sum gradients over ranks without dividing them by a count of tokens."""

    def finalize(model: list[torch.nn.Module], num_tokens: torch.Tensor | None = None, **settings: Any) -> None:
        finalize_model_grads(model, num_tokens=None, **settings)

    config.finalize_model_grads_func = finalize
