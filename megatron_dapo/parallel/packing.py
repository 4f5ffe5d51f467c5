"""Packed micro-batches: the assignment of sequences to data-parallel ranks and micro-batches, and their memory layout.

Planning is arithmetic on lengths, the same on every rank. It guarantees an equal number of micro-batches on every
data-parallel rank (a multiple of the pipeline size under virtual pipelining), every sequence exactly once, and no
micro-batch above the limits. A micro-batch without a sequence is planned only if there are fewer sequences than
micro-batches needed for an equal number on every rank (for example, fewer sequences than ranks). It is packed as a few
masked tokens that no sum includes.

When packed, every per-token field is at the position that PREDICTS the token (see `MicroBatch`): response token j of a
sequence with prompt length n is at position n + j - 1. Response tokens keep their targets and values even if the loss
mask is 0; prompt positions and padding hold 0 in every field.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from megatron_dapo.parallel.balance import Parts, balanced_partition, fewest_parts, spread
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.rounding import round_up
from megatron_dapo.token_support import FILLER, support_table
from megatron_dapo.types import MicroBatch, TrainSample

PADDING_ID = ""  # sample id of the masked sequence that pads a micro-batch

Moved = TypeVar("Moved")
# [data-parallel rank][micro-batch] -> indices of its sequences, empty for a masked micro-batch
MicroBatchPlan = tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True)
class MicroBatchLimits:
    """Limits of one micro-batch, before context parallelism cuts it: padded tokens, sequences, or both. 0: no
    limit.

    Within the limits, work is balanced by the cost of sequences. `attention_parity`: length of a sequence whose
    attention costs as much as the rest of the model (`ModelArchitecture.attention_parity`). 0: all tokens cost the
    same.
    """

    max_tokens: int = 0
    max_sequences: int = 0
    attention_parity: int = 0

    def cost(self, tokens: int) -> int:
        """Return the cost of a sequence in an arbitrary unit: linear in its tokens, plus quadratic for attention."""
        return tokens * (self.attention_parity + tokens) if self.attention_parity else tokens

    def __post_init__(self) -> None:
        if min(self.max_tokens, self.max_sequences) < 0 or not self.max_tokens + self.max_sequences:
            raise ValueError(
                f"micro-batch limits: max_tokens {self.max_tokens} and max_sequences {self.max_sequences}; give at "
                "least one positive limit"
            )


def plan_micro_batches(lengths: Sequence[int], layout: ParallelLayout, limits: MicroBatchLimits) -> MicroBatchPlan:
    """Assign the sequences of one optimizer mini-batch to data-parallel ranks and micro-batches, balanced by cost.

    lengths: true token counts of the sequences (prompt + response). There are as few micro-batches as the
    limits allow, the largest first, so that a memory error occurs immediately.
    Raise ValueError if a sequence is larger than the token limit.
    """
    assert lengths, "a mini-batch has a sequence"
    num_ranks = layout.data
    sizes = [round_up(length, layout.sequence_alignment) for length in lengths]
    capacity = _capacity(lengths, sizes, layout, limits)
    max_items = limits.max_sequences or None
    fewest = fewest_parts(sizes, capacity, max_items)
    per_rank = round_up(-(-len(fewest) // num_ranks), layout.pipeline if layout.virtual_pipeline > 1 else 1)
    num_parts = min(per_rank * num_ranks, len(sizes))
    costs = [limits.cost(size) for size in sizes]
    # Balancing ignores the capacity; parts with equal tokens come closest to it, even if equal costs exceed it.
    balanced = (balanced_partition(by, num_parts, max_items) for by in (costs, sizes))
    # The fewest parts respect it, and so do parts split off from them.
    parts = next((parts for parts in balanced if max(_loads(parts, sizes)) <= capacity), None) or spread(
        fewest, sizes, num_parts
    )
    return _deal(parts, costs, num_ranks, per_rank)


def _capacity(lengths: Sequence[int], sizes: Sequence[int], layout: ParallelLayout, limits: MicroBatchLimits) -> int:
    """Return the padded tokens a micro-batch may hold so that its tail padding also stays within the limit."""
    if not limits.max_tokens:
        return sum(sizes)
    alignment = layout.micro_batch_alignment
    capacity = limits.max_tokens // alignment * alignment
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    if sizes[largest] > capacity:
        needed = round_up(sizes[largest], alignment)
        raise ValueError(
            f"sequence {largest} has {lengths[largest]} tokens, {needed} with padding, but a micro-batch holds at most "
            f"{limits.max_tokens}; raise the micro-batch token limit to at least {needed} or shorten prompts and "
            "responses"
        )
    return capacity


def _loads(parts: Parts, sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[index] for index in part) for part in parts]


def _deal(parts: Parts, costs: Sequence[int], num_ranks: int, per_rank: int) -> MicroBatchPlan:
    """Give every rank `per_rank` of the parts, balancing the ranks, and empty micro-batches if there are too few
    parts."""
    loads = _loads(parts, costs)
    ranks = balanced_partition(loads, num_ranks, per_rank)
    empty: tuple[tuple[int, ...], ...] = ((),) * per_rank
    return tuple((tuple(tuple(sorted(parts[part])) for part in rank) + empty)[:per_rank] for rank in ranks)


# Fields of a sample [R] that a micro-batch has under the same name; None becomes 0.
_PER_TOKEN = ("loss_mask", "advantages", "rollout_logprobs", "staleness", "values", "returns")
_REALS = (*_PER_TOKEN, "loss_weights", "positive_weights")


def pack(
    samples: Sequence[TrainSample], loss_weights: Sequence[float], layout: ParallelLayout, sequence_length: int = 0
) -> MicroBatch:
    """Pack `samples` one after another into a micro-batch.

    loss_weights: one number per sample, the weight of each of its trained tokens in the optimizer step's loss. Each
    sequence is padded to a multiple of `layout.sequence_alignment`, and to at least `sequence_length` tokens; the whole
    to a multiple of `layout.micro_batch_alignment` by a separate masked sequence (true length 0, id PADDING_ID).
    Without samples there is only that sequence. Raise ValueError if a sample's per-token fields do not have the length
    of its response.
    """
    if len(samples) != len(loss_weights):
        raise ValueError(f"pack: {len(samples)} samples but {len(loss_weights)} loss weights")
    padded = [round_up(max(sample.num_tokens, sequence_length), layout.sequence_alignment) for sample in samples]
    true_lengths = [sample.num_tokens for sample in samples]
    sample_ids = [sample.sample_id for sample in samples]
    tail = round_up(max(sum(padded), 1), layout.micro_batch_alignment) - sum(padded)
    if tail:
        padded.append(tail)
        true_lengths.append(0)
        sample_ids.append(PADDING_ID)
    bounds = torch.tensor([0, *padded]).cumsum(0)
    routing, is_routed = _routing(samples, bounds.tolist())
    support = _support(samples, bounds.tolist())
    integers = {name: torch.zeros(int(bounds[-1]), dtype=torch.int64) for name in ("token_ids", "targets")}
    reals = {name: torch.zeros(int(bounds[-1])) for name in _REALS}
    # Not strict: the bounds also hold the padding sequence's start and the end.
    places = [
        _write(sample, weight, start, integers, reals)
        for sample, weight, start in zip(samples, loss_weights, bounds.tolist(), strict=False)
    ]
    sizes = bounds[1:] - bounds[:-1]
    return MicroBatch(
        **integers,
        **reals,
        position_ids=torch.arange(int(bounds[-1])) - bounds[:-1].repeat_interleave(sizes),
        cu_seqlens=bounds.to(torch.int32),
        sequence_lengths=tuple(true_lengths),
        sequence_ids=torch.arange(len(padded)).repeat_interleave(sizes),
        sample_ids=tuple(sample_ids),
        response_positions=torch.cat([torch.arange(place.start, place.stop) for place in places]) if places else None,
        routing=routing,
        is_routed=is_routed,
        support=support,
    )


def _routing(samples: Sequence[TrainSample], bounds: Sequence[int]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the experts of each packed token, and which tokens have known experts; None for both if none do."""
    known = [sample.routing for sample in samples if sample.routing is not None]
    if not known:
        return None, None
    routing = known[0].new_zeros(bounds[-1], *known[0].shape[1:])
    is_routed = torch.zeros(bounds[-1], dtype=torch.bool)
    for sample, start in zip(samples, bounds, strict=False):
        if sample.routing is not None:
            if len(sample.routing) != sample.num_tokens - 1:
                raise ValueError(
                    f"sample {sample.sample_id!r}: the experts of {len(sample.routing)} tokens, the engine read "
                    f"{sample.num_tokens - 1}"
                )
            routing[start : start + len(sample.routing)] = sample.routing
            is_routed[start : start + len(sample.routing)] = True
    return routing, is_routed


def _support(samples: Sequence[TrainSample], bounds: Sequence[int]) -> torch.Tensor | None:
    """Return the support of each packed token's target, None if no sample has any."""
    tables = [None if sample.support is None else support_table(sample.support) for sample in samples]
    widths = [table.size(1) for table in tables if table is not None]
    if not widths:
        return None
    support = torch.full((bounds[-1], max(widths)), FILLER, dtype=torch.int32)
    for sample, table, start in zip(samples, tables, bounds, strict=False):
        if table is None:
            continue
        if len(table) != sample.num_response_tokens:
            raise ValueError(
                f"sample {sample.sample_id!r}: the supports of {len(table)} tokens, its response has "
                f"{sample.num_response_tokens}"
            )
        is_drawn = (table == sample.tokens[sample.prompt_length :, None]).any(dim=1) | (table[:, 0] == FILLER)
        if not is_drawn.all():
            index = int(is_drawn.int().argmin())
            raise ValueError(f"sample {sample.sample_id!r}: response token {index} is not in the support it was drawn from")
        first = start + sample.prompt_length - 1  # one earlier: predicts the token
        support[first : first + len(table), : table.size(1)] = table
    return support


def _write(
    sample: TrainSample, weight: float, start: int, integers: dict[str, torch.Tensor], reals: dict[str, torch.Tensor]
) -> slice:
    """Put one sample's fields at its place; return the positions that predict its response."""
    num_response = sample.num_response_tokens
    if sample.prompt_length < 1 or num_response < 0:
        raise ValueError(
            f"sample {sample.sample_id!r}: prompt length {sample.prompt_length} of {sample.num_tokens} tokens; the "
            "prompt needs at least one"
        )
    for name in ("loss_mask", "advantages", "rollout_logprobs"):
        if getattr(sample, name).shape != (num_response,):
            raise ValueError(
                f"sample {sample.sample_id!r}: {name} has shape {tuple(getattr(sample, name).shape)}, its response "
                f"has {num_response} tokens"
            )
    integers["token_ids"][start : start + sample.num_tokens] = sample.tokens
    place = slice(start + sample.prompt_length - 1, start + sample.num_tokens - 1)  # one earlier: predicts the token
    integers["targets"][place] = sample.tokens[sample.prompt_length :]
    for name in _PER_TOKEN:
        if (per_token := getattr(sample, name)) is not None:
            reals[name][place] = per_token
    reals["loss_weights"][place] = sample.loss_mask * weight
    reals["positive_weights"][place] = sample.loss_mask * sample.positive_weight
    return place


def pad_to_longest(samples: Sequence[TrainSample], loss_weights: Sequence[float], layout: ParallelLayout) -> MicroBatch:
    """Pack like `pack`, but pad every sequence to the longest of the micro-batch."""
    return pack(
        samples, loss_weights, layout, sequence_length=max((sample.num_tokens for sample in samples), default=0)
    )


def to_device(value: Moved, device: torch.device | str | int) -> Moved:
    """Return a dataclass with its tensors, nested ones included, on `device`.

    A copy from the host to a GPU is queued on the current stream; the host does not wait for it.
    """
    moved: Any = value
    if isinstance(value, torch.Tensor):
        is_upload = value.device.type == "cpu" and torch.device(device).type == "cuda"
        # The host would wait for a copy from memory that is not page-locked.
        moved = value.pin_memory().to(device, non_blocking=True) if is_upload else value.to(device)
    elif dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        moved = dataclasses.replace(moved, **{name: to_device(getattr(value, name), device) for name in names})
    return moved


def unpack_responses(
    values: torch.Tensor, micro_batch: MicroBatch, prompt_lengths: Sequence[int], num_after: int = 0
) -> dict[str, torch.Tensor]:
    """Return per-token `values` [P, ...] of a packed micro-batch as {sample id: [R, ...]}, response token j at index j.

    prompt_lengths: prompt lengths of the micro-batch's samples in order, without its padding sequence. num_after: 1 adds
    the last token's position, which predicts the token after the response.
    """
    starts = micro_batch.cu_seqlens.tolist()
    real = [place for place, name in enumerate(micro_batch.sample_ids) if name != PADDING_ID]
    assert len(real) == len(prompt_lengths), (
        f"{len(real)} samples in the micro-batch, {len(prompt_lengths)} prompt lengths"
    )
    return {
        micro_batch.sample_ids[place]: values[
            starts[place] + prompt - 1 : starts[place] + micro_batch.sequence_lengths[place] - 1 + num_after
        ]
        for place, prompt in zip(real, prompt_lengths, strict=True)
    }
