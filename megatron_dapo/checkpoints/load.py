"""From a Hugging Face folder into one rank's parameters: only this rank's boxes are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch

from megatron_dapo.checkpoints.huggingface import HFCheckpoint
from megatron_dapo.checkpoints.megatron_layout import MegatronLayout
from megatron_dapo.parallel.reshard.boxes import Box
from megatron_dapo.parallel.reshard.executors import Buffers, PieceReader, execute_from_reader
from megatron_dapo.parallel.reshard.layout import Layout, Piece, local_holes
from megatron_dapo.parallel.reshard.planner import plan


@dataclass(frozen=True)
class WeightLoadReport:
    """What one rank read."""

    num_tensors: int  # Hugging Face tensors this rank holds a part of
    num_model_tensors: int  # of the whole model
    num_elements: int  # written into parameters
    num_padding_elements: int  # set to zero
    bytes_read: int = 0  # from storage


def load_from_huggingface(
    folder: str | Path, layout: MegatronLayout, rank: int, parameters: Buffers
) -> WeightLoadReport:
    """Fills `parameters` (local name -> tensor, any float type) of `rank` from the model in `folder`; padding becomes
    zero.

    Raises ValueError where the folder is incomplete or does not fit the layout's architecture, and where `parameters`
    are not exactly the layout's local buffers. Every element is written exactly once or is padding; anything else
    fails.
    """
    with HFCheckpoint(folder) as source:
        source.check_aliases(layout.architecture)
        already_read = source.bytes_read
        report = fill(source.layout(layout.architecture), source, layout, rank, parameters)
        return replace(report, bytes_read=source.bytes_read - already_read)


def fill(
    source: Layout, reader: PieceReader, layout: MegatronLayout, rank: int, parameters: Buffers
) -> WeightLoadReport:
    """Fills `parameters` of `rank` with what `reader` gives of `source`; padding becomes zero. Every element is written
    exactly once or is padding; anything else fails."""
    check_buffers(layout.local_shapes(rank), parameters, f"rank {rank}")
    transfers = plan(source, layout).receives(rank)
    with torch.no_grad():
        written = execute_from_reader(transfers, reader, parameters)
    padding = zero_padding(layout.pieces(rank), parameters)
    check_complete(written, padding, parameters)
    return WeightLoadReport(
        num_tensors=len({transfer.tensor for transfer in transfers}),
        num_model_tensors=len(layout.tensors),
        num_elements=sum(written.values()),
        num_padding_elements=sum(padding.values()),
    )


def check_buffers(expected: Mapping[str, tuple[int, ...]], buffers: Buffers, who: str) -> None:
    """ValueError unless the buffers have exactly the expected names and shapes."""
    missing, unknown = sorted(set(expected) - set(buffers)), sorted(set(buffers) - set(expected))
    if missing or unknown:
        raise ValueError(
            f"{who}: {len(missing)} parameters of the layout are missing {missing[:5]}, "
            f"{len(unknown)} are not in it {unknown[:5]} "
            f"({len(buffers)} given, {len(expected)} expected)"
        )
    for name, shape in expected.items():
        if tuple(buffers[name].shape) != tuple(shape):
            raise ValueError(f"{who}: {name} is {tuple(buffers[name].shape)}, the layout says {tuple(shape)}")


def zero_padding(pieces: tuple[Piece, ...], buffers: Buffers) -> dict[str, int]:
    """Sets every local element that no piece covers to zero (vocabulary padding); returns their number by buffer."""
    holes = local_holes(pieces, {name: tuple(buffer.shape) for name, buffer in buffers.items()})
    for name, boxes in holes.items():
        for box in boxes:
            _part(buffers[name], box).zero_()
    return {name: sum(box.volume for box in boxes) for name, boxes in holes.items()}


def check_complete(written: Mapping[str, int], padding: Mapping[str, int], buffers: Buffers) -> None:
    """Every element of every buffer was written once or is padding (the pieces are disjoint, so the counts decide)."""
    for name, buffer in buffers.items():
        total = prod(buffer.shape)
        assert written[name] + padding[name] == total, (
            f"{name}: {written[name]} elements written and {padding[name]} of padding make up {total}"
        )


def _part(buffer: torch.Tensor, box: Box) -> torch.Tensor:
    part = buffer.detach()
    for dim, (start, size) in enumerate(zip(box.offset, box.shape)):
        part = part.narrow(dim, start, size)
    return part
