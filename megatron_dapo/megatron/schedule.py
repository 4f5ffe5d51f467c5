"""Execution of packed micro-batches by megatron-core's pipeline schedules, and sums of their metrics."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import tee
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_dapo.megatron.attention import PackedSequences
from megatron_dapo.megatron.context import context_token_index, slice_for_context
from megatron_dapo.megatron.experts import EngineRouting
from megatron_dapo.megatron.model import unwrap
from megatron_dapo.megatron.parallel_state import Groups
from megatron_dapo.megatron.precision import keeping_scales
from megatron_dapo.parallel.layout import ParallelLayout, RankCoordinates
from megatron_dapo.parallel.packing import to_device
from megatron_dapo.rounding import round_up
from megatron_dapo.types import MicroBatch

Output = TypeVar("Output")
# (last chunk, its output, context-sliced micro-batch) -> the input of a loss
ReadOutput = Callable[[GPTModel, torch.Tensor, MicroBatch], Output]
# (context-sliced micro-batch, result of ReadOutput, index of the micro-batch) -> (scalar loss, scalar sums by name)
Loss = Callable[[MicroBatch, Output, int], tuple[torch.Tensor, Mapping[str, torch.Tensor]]]


# Share of a step's tokens that making micro-batches equal may add as padding. Stages that know the length in advance
# need not exchange it at every hand-over, which makes the host wait for the device
# (p2p_communication.py:_communicate_shapes).
MAX_PADDED_SHARE = 0.02
_PADDING_SEQUENCE = 512  # tokens of a padding sequence, so that its attention costs no more than a normal sequence's


@dataclass(frozen=True)
class PreparedMicroBatch:
    """One micro-batch as this rank computes it, shared by all its chunks; on the host until the first chunk uses it.

    The model computes `token_ids` and the `position_ids` of `packed` [P_padded]: those of the micro-batch, followed
    by masked sequences if all have one length. Losses only see the micro-batch.
    """

    index: int
    micro_batch: MicroBatch  # context-sliced, without routing
    packed: PackedSequences
    token_ids: torch.Tensor


def prepare(
    micro_batches: Sequence[MicroBatch], layout: ParallelLayout, rank: int, fixed_tokens: int = 0
) -> list[PreparedMicroBatch]:
    """Slice the micro-batches for this rank, each padded to `fixed_tokens` if that is not 0. Raise ValueError if they
    cannot run on the layout or are longer."""
    if not micro_batches:
        raise ValueError("a step needs at least one micro-batch")
    if layout.virtual_pipeline > 1 and len(micro_batches) % layout.pipeline:
        raise ValueError(
            f"virtual pipelining runs micro-batches in groups of pipeline = {layout.pipeline}, "
            f"but there are {len(micro_batches)}; "
            f"pack into a multiple of {layout.pipeline}"
        )
    coordinates = layout.coordinates(rank)
    lengths = [micro_batch.num_tokens for micro_batch in micro_batches]
    if 0 < fixed_tokens < max(lengths):
        raise ValueError(
            f"a micro-batch has {max(lengths)} tokens, and the buffers of megatron.tp_comm_overlap are for {fixed_tokens}; "
            "lower the packing limit or raise training.micro_batch_tokens"
        )
    length = fixed_tokens or (common_length(lengths) if layout.pipeline > 1 else 0)
    return [
        _prepare_one(index, micro_batch, layout, coordinates, length)
        for index, micro_batch in enumerate(micro_batches)
    ]


def common_length(lengths: Sequence[int]) -> int:
    """Return the common length to pad micro-batches to, or 0 if padding would cost more than it saves."""
    padded = len(lengths) * max(lengths)
    return max(lengths) if padded <= (1 + MAX_PADDED_SHARE) * sum(lengths) else 0


def _prepare_one(
    index: int, micro_batch: MicroBatch, layout: ParallelLayout, coordinates: RankCoordinates, length: int
) -> PreparedMicroBatch:
    context_rank, has_head = coordinates.context, coordinates.pipeline == layout.pipeline - 1
    num_tokens, end = micro_batch.num_tokens, int(micro_batch.cu_seqlens[-1])
    if num_tokens != end or num_tokens % layout.micro_batch_alignment:
        raise ValueError(
            f"micro-batch {index}: {num_tokens} tokens, cu_seqlens end at {end}; "
            f"under {layout.describe()} both must be the same multiple of {layout.micro_batch_alignment}"
        )
    local = slice_for_context(micro_batch, context_rank, layout.context)
    bounds, positions = _with_padding(micro_batch.cu_seqlens, length, layout, context_rank)
    position_ids = torch.cat((local.position_ids, positions.to(local.position_ids)))
    longest = int((bounds[1:] - bounds[:-1]).max())
    packed = PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        context_rank=context_rank,
        context_size=layout.context,
        position_ids=position_ids,
        routing=_engine_routing(local, positions.numel()),
    )
    # Repeat its tokens: a router spreads them over as many experts, but would send a single token to the same ones.
    repeats = -(-positions.numel() // local.num_tokens)
    token_ids = torch.cat((local.token_ids, local.token_ids.repeat(repeats)[: positions.numel()]))
    # Routing is the largest field, and no loss reads it; supports are for the head.
    return PreparedMicroBatch(
        index, replace(local, routing=None, is_routed=None, support=local.support if has_head else None), packed, token_ids
    )


def _engine_routing(local: MicroBatch, num_padding: int) -> EngineRouting | None:
    """Return the micro-batch's routing, extended by padding with unknown experts."""
    if local.routing is None or local.is_routed is None:
        return None
    pad = torch.nn.functional.pad
    return EngineRouting(pad(local.routing, (0, 0, 0, 0, 0, num_padding)), pad(local.is_routed, (0, num_padding)))


def _with_padding(
    cu_seqlens: torch.Tensor, length: int, layout: ParallelLayout, context_rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bounds of the sequences with padding up to `length`, and this rank's positions in the padding only."""
    end, size = int(cu_seqlens[-1]), round_up(_PADDING_SEQUENCE, layout.sequence_alignment)
    if length <= end:
        return cu_seqlens, torch.empty(0, dtype=torch.int64)
    more = torch.tensor([*range(end + size, length, size), length], dtype=cu_seqlens.dtype)
    padding = torch.cat((torch.zeros(1, dtype=torch.int64), more.to(torch.int64) - end))
    index = torch.arange(length - end)
    if layout.context > 1:
        index = context_token_index(padding, context_rank, layout.context)
    start = padding[torch.bucketize(index, padding[1:], right=True)]
    return torch.cat((cu_seqlens, more.to(cu_seqlens.device))), index - start


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

    Return each micro-batch's metrics on the last pipeline stage, and an empty list elsewhere. With the distributed
    optimizer a rank's gradients are complete only in its shard; `reduce_fully` completes all of them on every rank.
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
        output = read(unwrap(chunk), hidden[:, : item.micro_batch.num_tokens], item.micro_batch)
        loss, data = loss_fn(item.micro_batch, output, item.index)
        # megatron-core expects a token count here. It is unused: losses are already divided by global counts.
        return loss, torch.ones((), dtype=torch.int), data

    def step(iterator: Iterator[PreparedMicroBatch], chunk: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        item = next(iterator)
        assert item.packed.position_ids is not None, "a packed micro-batch without position_ids"
        hidden = chunk(
            input_ids=item.token_ids[None],
            position_ids=item.packed.position_ids[None],
            attention_mask=None,
            packed_seq_params=item.packed,
        )
        return hidden, partial(finish, chunk=chunk, item=item)

    lengths = {item.token_ids.numel() for item in prepared}
    context_size = prepared[0].packed.context_size
    for chunk in chunks:
        # All stages have the same micro-batches, so they all decide the same.
        unwrap(chunk).config.variable_seq_lengths = len(lengths) > 1
    # Each chunk draws every micro-batch, which moves to the device for the first chunk. With a single chunk,
    # megatron-core takes the bare iterator.
    device = torch.cuda.current_device()
    iterators = tee((to_device(item, device) for item in prepared), len(chunks))
    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=list(iterators) if len(chunks) > 1 else iterators[0],
        model=list(chunks),
        num_microbatches=len(prepared),
        seq_length=max(lengths) * context_size,  # unused if stages exchange the real lengths
        micro_batch_size=1,
        **mode,
    )


def sum_gradients(config: TransformerConfig) -> None:
    """Make megatron-core's schedules sum gradients over ranks without dividing them by a count of tokens."""
    # With calculate_per_token_loss, they would divide by the summed counts of `finish`.

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
    # Other stages know neither the names nor their number, so the sizes go first.
    source = dist.get_global_rank(group, group.size() - 1)
    text = torch.frombuffer(bytearray(json.dumps(names).encode()), dtype=torch.uint8).to(totals.device)
    sizes = torch.tensor([text.numel(), totals.numel()], device=totals.device)
    dist.broadcast(sizes, src=source, group=group)
    if group.rank() != group.size() - 1:
        text, totals = text.new_empty(int(sizes[0])), totals.new_empty(int(sizes[1]))
    dist.broadcast(text, src=source, group=group)
    dist.broadcast(totals, src=source, group=group)
    return json.loads(bytes(text.tolist())), totals
