"""Execution of packed micro-batches by megatron-core's pipeline schedules, and sums of their metrics."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_dapo.megatron.attention import PackedSequences
from megatron_dapo.megatron.context import slice_for_context
from megatron_dapo.megatron.model import unwrap
from megatron_dapo.megatron.parallel_state import Groups
from megatron_dapo.megatron.precision import keeping_scales
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.types import MicroBatch

Output = TypeVar("Output")
# (last chunk, its output, context-sliced micro-batch) -> the input of a loss
ReadOutput = Callable[[GPTModel, torch.Tensor, MicroBatch], Output]
# (context-sliced micro-batch, result of ReadOutput, index of the micro-batch) -> (scalar loss, scalar sums by name)
Loss = Callable[[MicroBatch, Output, int], tuple[torch.Tensor, Mapping[str, torch.Tensor]]]


@dataclass(frozen=True)
class PreparedMicroBatch:
    """One micro-batch as this rank computes it, shared by all its chunks."""

    index: int
    micro_batch: MicroBatch  # context-sliced
    packed: PackedSequences


def prepare(micro_batches: Sequence[MicroBatch], layout: ParallelLayout, rank: int) -> list[PreparedMicroBatch]:
    """Slice the micro-batches for this rank. ValueError where they cannot run on the layout."""
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
    """Return `read` of every micro-batch, without gradients; None on ranks off the last pipeline stage. The chunks are
    unchanged, scales of FP8 included."""

    def no_loss(micro_batch: MicroBatch, outputs: Output, index: int) -> tuple[torch.Tensor, Output]:
        return torch.zeros((), device=micro_batch.token_ids.device), outputs

    with torch.no_grad(), keeping_scales(chunks):
        outputs = _run(chunks, prepared, read, no_loss, forward_only=True)
    return list(outputs) if outputs else [None] * len(prepared)


def forward_backward(
    chunks: Sequence[torch.nn.Module],
    prepared: Sequence[PreparedMicroBatch],
    read: ReadOutput[Output],
    loss_fn: Loss[Output],
    reduce_fully: bool = False,
) -> list[Mapping[str, torch.Tensor]]:
    """Add the gradients of the losses' sum over micro-batches, data and context ranks to the chunks' fp32 gradients.

    Returns each micro-batch's metrics on the last pipeline stage, else an empty list. With the distributed optimizer a
    rank's gradients are complete in its own shard alone; `reduce_fully` completes all of them on every rank.
    """
    return _run(chunks, prepared, read, loss_fn, forward_only=False, force_all_reduce=reduce_fully)


def _run(
    chunks: Sequence[torch.nn.Module],
    prepared: Sequence[PreparedMicroBatch],
    read: ReadOutput[Output],
    loss_fn: Any,
    **mode: Any,
) -> list[Any]:
    """Run megatron-core's schedule and return the second result of `loss_fn` for each micro-batch, on the last stage."""

    def finish(hidden: torch.Tensor, chunk: torch.nn.Module, item: PreparedMicroBatch) -> tuple[torch.Tensor, ...]:
        loss, data = loss_fn(item.micro_batch, read(unwrap(chunk), hidden, item.micro_batch), item.index)
        # megatron-core wants a count of tokens here. It is not used: losses are divided by global counts already.
        return loss, torch.ones((), dtype=torch.int), data

    def step(iterator: Iterator[PreparedMicroBatch], chunk: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        item = next(iterator)
        hidden = chunk(
            input_ids=item.micro_batch.token_ids[None],
            position_ids=item.micro_batch.position_ids[None],
            attention_mask=None,
            packed_seq_params=item.packed,
        )
        return hidden, partial(finish, chunk=chunk, item=item)

    longest = max(item.micro_batch.num_tokens for item in prepared)
    # Each chunk draws every micro-batch; with a single chunk megatron-core takes the bare iterator.
    iterators = [iter(prepared) for _ in chunks]
    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks),
        num_microbatches=len(prepared),
        seq_length=longest,  # unused: with variable_seq_lengths stages exchange the real ones
        micro_batch_size=1,
        **mode,
    )


def sum_gradients(config: TransformerConfig) -> None:
    """Make megatron-core's schedules sum gradients over ranks without dividing them by a count of tokens."""
    # With calculate_per_token_loss it would divide by the summed counts of `finish`.

    def finalize(model: list[torch.nn.Module], num_tokens: torch.Tensor | None = None, **settings: Any) -> None:
        finalize_model_grads(model, num_tokens=None, **settings)

    config.finalize_model_grads_func = finalize


def sum_metrics(parts: Sequence[Mapping[str, torch.Tensor]], groups: Groups) -> dict[str, float]:
    """Sum the micro-batches' scalars over data x context ranks of the last pipeline stage, for all stages.

    `parts` is empty off the last stage. All data and context ranks must have the same metrics.
    """
    names = sorted(parts[0]) if parts else []
    device = torch.cuda.current_device()
    totals = torch.zeros(len(names), dtype=torch.float64, device=device)
    for part in parts:
        assert sorted(part) == names, f"micro-batches disagree on metrics: {sorted(part)} and {names}"
        for index, name in enumerate(names):
            totals[index] += part[name].detach()
    if groups.pipeline.rank() == groups.pipeline.size() - 1:
        dist.all_reduce(totals, group=groups.data_context)
    if groups.pipeline.size() > 1:
        names, totals = _broadcast(names, totals, groups.pipeline)
    return dict(zip(names, totals.tolist(), strict=True))


def _broadcast(names: list[str], totals: torch.Tensor, group: dist.ProcessGroup) -> tuple[list[str], torch.Tensor]:
    """Send names (as JSON) and totals from the last rank of `group` to the others."""
    # Other stages know neither the names nor how many there are: the sizes go first.
    source = dist.get_global_rank(group, group.size() - 1)
    text = torch.frombuffer(bytearray(json.dumps(names).encode()), dtype=torch.uint8).to(totals.device)
    sizes = torch.tensor([text.numel(), totals.numel()], device=totals.device)
    dist.broadcast(sizes, src=source, group=group)
    if group.rank() != group.size() - 1:
        text, totals = text.new_empty(int(sizes[0])), totals.new_empty(int(sizes[1]))
    dist.broadcast(text, src=source, group=group)
    dist.broadcast(totals, src=source, group=group)
    return json.loads(bytes(text.tolist())), totals
