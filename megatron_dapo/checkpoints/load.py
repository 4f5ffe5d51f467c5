"""Fill one rank's parameters at random, or from a Hugging Face directory, of which it reads only its slices."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch

from megatron_dapo.checkpoints.formats.huggingface import HFCheckpoint
from megatron_dapo.checkpoints.formats.peft import AddedAdapters, PeftAdapters
from megatron_dapo.checkpoints.layouts.computed import ComputedLayout
from megatron_dapo.checkpoints.layouts.megatron import MegatronLayout
from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.reshard.execution import Buffers, ShardReader, execute_from_reader
from megatron_dapo.reshard.layout import (
    Layout,
    Shard,
    SingleHolderLayout,
    TensorSpec,
    local_holes,
    shard_view,
    slice_view,
)
from megatron_dapo.reshard.planner import plan
from megatron_dapo.reshard.slices import Slice

logger = logging.getLogger(__name__)

STANDARD_DEVIATION = 0.02  # initializer_range of the published configs


@dataclass(frozen=True)
class WeightLoadReport:
    num_tensors: int  # Hugging Face tensors of which this rank holds elements
    num_model_tensors: int  # the whole model's
    num_elements: int  # written into parameters
    num_padding_elements: int  # set to zero
    bytes_read: int = 0  # storage only
    fresh: tuple[str, ...] = ()  # tensors of a value head that the directory does not have


def load_from_huggingface(
    directory: str | Path, layout: MegatronLayout, rank: int, parameters: Buffers, adapters: Path | None = None
) -> WeightLoadReport:
    """Fill `parameters` (local name -> tensor, any float type) of `rank` from the model in `directory`, with the adapters of
    the PEFT directory `adapters` merged in; padding becomes zero.

    Raises ValueError if the directory is incomplete or does not fit the layout's architecture, and if `parameters` are
    not exactly the layout's local buffers. Every element is written exactly once or is padding; anything else fails.
    """
    with ExitStack() as files:
        source = files.enter_context(HFCheckpoint(directory))
        reader: ShardReader = source
        if adapters is not None:
            added = files.enter_context(PeftAdapters(adapters))
            added.check(layout.architecture.shapes())
            reader = AddedAdapters(source, added)
        source.check_aliases(layout.architecture)
        # The comparison of aliases reads tensors too; the report counts only the load.
        already_read = source.bytes_read
        if source.num_dequantized and rank == 0:
            logger.info("%s: %d matrices of experts in MXFP4 are dequantized", directory, source.num_dequantized)
        report = fill(source.layout(layout.architecture), reader, layout, rank, parameters)
        _require_numbers(source, layout.shards(rank), parameters)
        return replace(report, bytes_read=source.bytes_read - already_read)


def _require_numbers(source: HFCheckpoint, shards: Iterable[Shard], parameters: Buffers) -> None:
    """Raise ValueError, naming a tensor and its file, if a weight is not a number."""
    with torch.no_grad():
        # A sum is NaN if one of its terms is; sums of infinities, which are too, are looked at.
        suspects = {name for name, buffer in parameters.items() if torch.isnan(buffer.sum())}
        for shard in shards:
            if shard.local in suspects and (count := int(torch.isnan(shard_view(parameters[shard.local], shard)).sum())):
                file = source.path / source.files[shard.tensor]
                raise ValueError(f"{file}: {count} elements of {shard.tensor} are not a number: take another copy of the model")


def initialize_randomly(seed: int, layout: MegatronLayout, rank: int, parameters: Buffers) -> WeightLoadReport:
    """Fill `parameters` of `rank` with random weights; padding becomes zero."""
    # Made in fp32 and cast on the way in: a bfloat16 model starts as the fp32 one, rounded.
    specs = {name: TensorSpec(shape, torch.float32) for name, shape in layout.architecture.shapes().items()}
    reader = RandomReader(seed, layout.architecture)
    return fill(SingleHolderLayout(specs, layout.num_ranks), reader, layout, rank, parameters)


def fill(
    source: Layout, reader: ShardReader, layout: ComputedLayout, rank: int, parameters: Buffers
) -> WeightLoadReport:
    """Fill `parameters` of `rank` from `source` through `reader`; padding becomes zero. Asserts that every element
    is written exactly once or is padding."""
    # Before any read: a parameter that the model lacks would otherwise be noticed after the whole load.
    check_buffers(layout.local_shapes(rank), parameters, f"rank {rank}")
    transfers = plan(source, layout).receives(rank)
    with torch.no_grad():
        written = execute_from_reader(transfers, reader, parameters)
    padding = zero_padding(layout.shards(rank), parameters)
    check_complete(written, padding, parameters)
    return WeightLoadReport(
        num_tensors=len({transfer.tensor for transfer in transfers}),
        num_model_tensors=len(layout.tensors),
        num_elements=sum(written.values()),
        num_padding_elements=sum(padding.values()),
    )


def check_buffers(expected: Mapping[str, tuple[int, ...]], buffers: Buffers, owner: str) -> None:
    """Raise ValueError unless the buffers have exactly the expected names and shapes."""
    missing, unknown = sorted(set(expected) - set(buffers)), sorted(set(buffers) - set(expected))
    if missing or unknown:
        raise ValueError(
            f"{owner}: {len(missing)} parameters of the layout are missing {missing[:5]}, "
            f"{len(unknown)} are not in it {unknown[:5]} "
            f"({len(buffers)} given, {len(expected)} expected)"
        )
    for name, shape in expected.items():
        if tuple(buffers[name].shape) != tuple(shape):
            raise ValueError(f"{owner}: {name} is {tuple(buffers[name].shape)}, the layout says {tuple(shape)}")


def zero_padding(shards: tuple[Shard, ...], buffers: Buffers) -> dict[str, int]:
    """Set every local element that no shard covers (vocabulary padding) to zero; return their number by buffer."""
    holes = local_holes(shards, {name: tuple(buffer.shape) for name, buffer in buffers.items()})
    for name, slices in holes.items():
        for bounds in slices:
            slice_view(buffers[name].detach(), bounds).zero_()
    return {name: sum(bounds.volume for bounds in slices) for name, slices in holes.items()}


def check_complete(written: Mapping[str, int], padding: Mapping[str, int], buffers: Buffers) -> None:
    """Assert that every element of every buffer was written once or is padding."""
    for name, buffer in buffers.items():
        # Shards and padding are disjoint, so equal counts mean that nothing was missed or written twice.
        total = prod(buffer.shape)
        assert written[name] + padding[name] == total, (
            f"{name}: {written[name]} elements written and {padding[name]} of padding make up {total}"
        )


class TensorReader:
    """A `ShardReader` that serves tensors from memory, and the others from another reader."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], others: ShardReader | None = None) -> None:
        self._tensors, self._others = tensors, others

    def read(self, rank: int, shard: Shard, bounds: Slice, out: torch.Tensor) -> None:
        """Copy `bounds` of a tensor to `out`; see `ShardReader`."""
        if self._others is not None and shard.tensor not in self._tensors:
            self._others.read(rank, shard, bounds, out)
        else:
            out.copy_(slice_view(self._tensors[shard.tensor], bounds))


class RandomReader:
    """Random tensors that depend only on a seed and the tensor's name: every layout starts from the same model."""

    def __init__(self, seed: int, architecture: ModelArchitecture) -> None:
        self._seed = seed
        self._norm = 0.0 if architecture.zero_centered_norms else 1.0
        # Slices of one tensor are read one after another, so keeping the last tensor avoids making it again.
        self._name = ""
        self._tensor = torch.zeros(0)

    def read(self, rank: int, shard: Shard, bounds: Slice, out: torch.Tensor) -> None:
        """Copy `bounds` of a random tensor to `out`; see `ShardReader`."""
        if shard.tensor != self._name:
            self._name, self._tensor = shard.tensor, self._make(shard.tensor, shard.shape)
        out.copy_(slice_view(self._tensor, bounds).reshape(out.shape))

    def _make(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.full(shape, self._norm)
        if name.endswith(".bias"):
            return torch.zeros(shape)
        return random_normal(self._seed, name, shape) * STANDARD_DEVIATION


def random_normal(seed: int, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return an fp32 tensor of mean 0 and variance 1 that depends only on the seed and the name."""
    return torch.randn(shape, generator=seeded_generator(seed, name))


def seeded_generator(seed: int, name: str) -> torch.Generator:
    """Return a generator that depends only on the seed and a tensor's name."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    # torch takes signed 64-bit seeds; the shift keeps this one positive.
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
