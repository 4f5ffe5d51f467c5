"""Layout of a model's training state: which elements of which Hugging Face tensor a rank holds, updates, and saves.

Main params and both moments are fp32 tensors of the parameters' shapes, so one slice of a tensor names the same elements of
all four. Under the distributed optimizer a rank updates a flat range of each local parameter; ranges are cut anywhere
and become at most 2 * ndim - 1 slices each (`reshard.slices.flat_range_slices`). Everything is arithmetic: ranks do not
communicate.

A frozen parameter has no optimizer state, and is split evenly over the ranks that could update it.

Replicated elements are saved once. A rank saves the elements that no other rank updates. `reshard.assignment.worst_fit`
distributes those that several ranks update identically: norms over tensor ranks, tied embeddings of the first and last
stage, and everything without the distributed optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm, prod
from types import MappingProxyType
from typing import NamedTuple

import torch

from megatron_dapo.checkpoints.layouts.lora import LoraLayout
from megatron_dapo.checkpoints.layouts.megatron import MegatronLayout
from megatron_dapo.models.architecture import LANGUAGE_MODEL
from megatron_dapo.reshard.assignment import Candidate, worst_fit
from megatron_dapo.reshard.layout import Shard, local_slice
from megatron_dapo.reshard.slices import Coordinates, flat_range_slices, intersect
from megatron_dapo.rounding import round_up

EXPERTS = ".mlp.experts."
MAX_SLICE = 1 << 22  # elements; bounds the slices of a tensor, so that ranks can share the reading of one
MIN_SLICE = 1 << 14
_SLICES_PER_RANK = 32  # minimum, if only the number of slices balances the ranks
_PARAMETER_ALIGNMENT = 64  # elements, in megatron-core's buffers (param_and_grad_buffer.py)
_BUCKET_ALIGNMENT = 128
# Parameters of a layer in the order in which megatron-core's modules without Transformer Engine register them.
LAYER_ORDER = (
    "input_layernorm.weight",
    "self_attention.core_attention.softmax_offset",
    "self_attention.linear_proj.weight",
    "self_attention.linear_proj.bias",
    "self_attention.linear_proj.post_layernorm.weight",
    "self_attention.linear_qkv.weight",
    "self_attention.linear_qkv.bias",
    "self_attention.linear_qkv.layer_norm_weight",
    "self_attention.q_layernorm.weight",
    "self_attention.k_layernorm.weight",
    "self_attention.dt_bias",
    "self_attention.A_log",
    "self_attention.in_proj.weight",
    "self_attention.in_proj.layer_norm_weight",
    "self_attention.conv1d.weight",
    "self_attention.out_norm.weight",
    "self_attention.out_proj.weight",
    "self_attention.linear_q_proj.weight",
    "self_attention.linear_q_down_proj.weight",
    "self_attention.linear_q_up_proj.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.linear_kv_down_proj.weight",
    "self_attention.linear_kv_up_proj.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight",
    "pre_mlp_layernorm.weight",
    "mlp.router.weight",
    "mlp.router.bias",
    "mlp.router.expert_bias",
    "mlp.shared_experts.gate_weight",
    "mlp.shared_experts.linear_fc1.weight",
    "mlp.shared_experts.linear_fc2.weight",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc1.layer_norm_weight",
    "mlp.linear_fc2.weight",
    "mlp.linear_fc2.post_layernorm.weight",
    "linear_fc1.weight",  # an expert's
    "linear_fc1.bias",
    "linear_fc2.weight",
    "linear_fc2.bias",
)

# Part that critic.freeze names -> what the names of its local parameters contain.
_FROZEN = MappingProxyType({"attention": ".self_attention."})
_NEVER_TRAINED = ".mlp.router.expert_bias"

Range = tuple[int, int]  # elements [start, end) of a flattened local parameter


def is_frozen(local: str, parts: Sequence[str]) -> bool:
    """Return True if a local parameter belongs to one of the frozen parts (`critic.freeze`), or is never trained."""
    return local.endswith(_NEVER_TRAINED) or any(_FROZEN[part] in local for part in parts)


class Owners(NamedTuple):
    """Ranks that hold the same local parameters of one kind, in the order that splits the optimizer state."""

    key: tuple[int, ...]
    ranks: tuple[int, ...]
    parameters: Mapping[str, Coordinates]  # shape by local name, in the model's order


@dataclass(frozen=True)
class _Instance:
    """A local parameter of one set of owners. `content` is equal for instances that hold the same elements."""

    owners: Owners
    local: str
    content: tuple[tuple[str, Coordinates, Coordinates, Coordinates], ...]


class StateLayout:
    """Training state of a model of layout `weights`, with or without the distributed optimizer.

    Args:
        weights: the layout of the trained parameters.
        distributed: the optimizer state is split over data- and context-parallel ranks.
        order: names of a layer's parameters in the order in which the modules register them. Ranges depend on it.
        grouped: a layer registers one matrix of all experts before the next (`moe_grouped_gemm`), not expert by expert.
        ranges: the known ranges of every rank, if they differ from those of one buffer per model chunk and type.
        frozen: parts without optimizer state, see `is_frozen`.
    """

    def __init__(
        self,
        weights: MegatronLayout | LoraLayout,
        distributed: bool,
        order: Sequence[str] = LAYER_ORDER,
        ranges: Sequence[Mapping[str, Range]] | None = None,
        grouped: bool = False,
        frozen: Sequence[str] = (),
    ) -> None:
        self.weights, self.frozen = weights, frozen
        self.distributed = distributed
        self._place = {name: index for index, name in enumerate(order)}
        self._known, self._grouped = ranges, grouped
        self._ranges: dict[tuple[int, ...], list[dict[str, Range]]] = {}
        self._shards_of: dict[int, dict[str, list[Shard]]] = {}
        self._updated: dict[int, tuple[Shard, ...]] = {}

    @property
    def num_ranks(self) -> int:
        return self.weights.num_ranks

    def updated(self, rank: int) -> tuple[Shard, ...]:
        """Return the shards that a rank's optimizer updates, each contiguous in the flattened local parameter."""
        if rank not in self._updated:
            found = [
                shard
                for local, (start, end) in self.ranges(rank).items()
                for shard in self._slices(rank, local, start, end)
            ]
            self._updated[rank] = tuple(found)
        return self._updated[rank]

    def ranges(self, rank: int) -> dict[str, Range]:
        """Return the range of each local parameter that a rank's optimizer updates, or would if the parameter were not frozen,
        without empty ranges."""
        return {
            local: owned
            for owners in self._owners_of(rank)
            for local, owned in self._ranges_of(owners)[owners.ranks.index(rank)].items()
        }

    def saved(self, rank: int) -> tuple[Shard, ...]:
        """Return the shards that a rank saves, in the form of `updated`; all ranks together save every element once."""
        return self._saved.get(rank, ())

    @cached_property
    def _saved(self) -> dict[int, tuple[Shard, ...]]:
        slices: dict[int, list[Shard]] = {}
        for rank, local, start, end in self._assigned():
            for first in range(start, end, MAX_SLICE):
                last = min(first + MAX_SLICE, end)
                slices.setdefault(rank, []).extend(self._slices(rank, local, first, last))
        return {rank: tuple(found) for rank, found in slices.items()}

    @cached_property
    def _dealt_out(self) -> int:
        """Maximum number of elements in one of the parts that are distributed among replicas."""
        elements = sum(spec.num_elements for spec in self.weights.tensors.values())
        return max(MIN_SLICE, min(MAX_SLICE, elements // (_SLICES_PER_RANK * self.num_ranks)))

    def _assigned(self) -> Iterator[tuple[int, str, int, int]]:
        """Yield (rank, local parameter, start, end) of everything saved, padding included."""
        loads: dict[int, int] = {}
        shared: list[tuple[list[tuple[int, str]], int, int]] = []
        for instances in self._by_content().values():
            if len(instances) == 1 and self.distributed:
                [instance] = instances
                for index, ranges in enumerate(self._ranges_of(instance.owners)):
                    if instance.local in ranges:
                        start, end = ranges[instance.local]
                        rank = instance.owners.ranks[index]
                        loads[rank] = loads.get(rank, 0) + end - start
                        yield rank, instance.local, start, end
            else:
                shared += self._cut(instances)
        candidates = [Candidate(end - start, [rank for rank, _ in holders]) for holders, start, end in shared]
        for (holders, start, end), rank in zip(shared, worst_fit(candidates, loads)):
            yield rank, dict(holders)[rank], start, end

    def _cut(self, instances: Sequence[_Instance]) -> Iterator[tuple[list[tuple[int, str]], int, int]]:
        """Yield ([(rank, local name) of each rank that updates it], start, end) for each part of a parameter."""
        shape = instances[0].owners.parameters[instances[0].local]
        size = prod(shape)
        if not self.distributed:
            holders = [(rank, instance.local) for instance in instances for rank in instance.owners.ranks]
            # Cut at row boundaries if rows are short enough: that makes fewer slices.
            row = prod(shape[1:])
            step = max(self._dealt_out // row, 1) * row if row <= self._dealt_out else self._dealt_out
            yield from ((holders, start, min(start + step, size)) for start in range(0, size, step))
            return
        held = [
            [
                (*ranges[each.local], rank, each.local)
                for rank, ranges in zip(each.owners.ranks, self._ranges_of(each.owners))
                if each.local in ranges
            ]
            for each in instances
        ]
        borders = sorted({border for ranges in held for start, end, *_ in ranges for border in (start, end)})
        for start, end in zip(borders, borders[1:]):
            yield [(r, local) for ranges in held for a, b, r, local in ranges if a <= start and end <= b], start, end

    def _by_content(self) -> dict[object, list[_Instance]]:
        instances: dict[object, list[_Instance]] = {}
        for owners in self._owners.values():
            shards = self._by_local(owners.ranks[0])
            for local in owners.parameters:
                content = tuple((s.tensor, s.global_offset, s.shape, s.local_offset) for s in shards.get(local, ()))
                if content:  # a buffer of only padding is not saved
                    instances.setdefault(content, []).append(_Instance(owners, local, content))
        return instances

    def _owners_of(self, rank: int) -> list[Owners]:
        return [self._owners[key] for key in self._owner_keys(rank) if key in self._owners]

    def _owner_keys(self, rank: int) -> list[tuple[int, ...]]:
        """Return the keys of the owners of dense parameters, and of experts, that a rank belongs to."""
        parallel = self.weights.parallel
        dense = parallel.coordinates(rank)
        keys: list[tuple[int, ...]] = [(dense.tensor, dense.pipeline)]
        if self.weights.architecture.experts is not None:
            experts = parallel.expert_coordinates(rank)
            keys.append((experts.tensor, experts.expert, dense.pipeline))
        return keys

    @cached_property
    def _owners(self) -> dict[tuple[int, ...], Owners]:
        ranks: dict[tuple[int, ...], list[int]] = {}
        # In rank order, as in megatron-core's groups.
        for rank in range(self.num_ranks):
            for key in self._owner_keys(rank):
                ranks.setdefault(key, []).append(rank)
        owners = {}
        for key, members in ranks.items():
            shapes = self.weights.local_shapes(members[0])
            mine = {local: shape for local, shape in shapes.items() if (EXPERTS in local) == (len(key) == 3)}
            if mine:
                ordered = dict(sorted(mine.items(), key=lambda item: self._order(item[0])))
                owners[key] = Owners(key, tuple(members), ordered)
        return owners

    def _order(self, local: str) -> tuple[int, ...]:
        """Return the sort key of a parameter on its rank: chunk, layer, expert and place in the layer."""
        stage, _, path = local.partition(".")
        if path.startswith("decoder.layers."):
            layer, _, name = path.removeprefix("decoder.layers.").partition(".")
            expert = 0
            if EXPERTS in local:
                number, _, name = name.partition("local_experts.")[2].partition(".")
                expert = int(number)
            place = self._place.get(name, len(self._place))
            return int(stage), 1, int(layer), *((place, expert) if self._grouped else (expert, place))
        kind = 0 if path.startswith("embedding.") else 2 if path.startswith("decoder.") else 3
        return int(stage), kind, 0, 0, int(path.endswith("bias"))

    def _ranges_of(self, owners: Owners) -> list[dict[str, Range]]:
        if owners.key not in self._ranges:
            shapes = owners.parameters.items()
            sizes = {local: prod(shape) for local, shape in shapes if not is_frozen(local, self.frozen)}
            if self._known is not None:
                everyone = (self._known[rank] for rank in owners.ranks)
                ranges = [{local: own[local] for local in sizes if local in own} for own in everyone]
            elif self.distributed:
                ranges = [{} for _ in owners.ranks]
                specs = self.weights.local_specs(owners.ranks[0])
                buffers: dict[tuple[str, torch.dtype], dict[str, int]] = {}
                for local, size in sizes.items():
                    buffers.setdefault((local.partition(".")[0], specs[local].dtype), {})[local] = size
                for buffer in buffers.values():
                    _share(buffer, self._has_own_bucket, ranges)
            else:
                ranges = [{local: (0, size) for local, size in sizes.items()} for _ in owners.ranks]
            for local in owners.parameters.keys() - sizes.keys():
                self._add_frozen(local, prod(owners.parameters[local]), ranges)
            self._ranges[owners.key] = ranges
        return self._ranges[owners.key]

    def _add_frozen(self, local: str, size: int, ranges: list[dict[str, Range]]) -> None:
        count = len(ranges) if self.distributed else 1
        for index, own in enumerate(ranges):
            start, end = (size * (index % count) // count, size * (index % count + 1) // count)
            if start < end:
                own[local] = start, end

    def _has_own_bucket(self, local: str) -> bool:
        """Return True for a tied embedding under pipeline parallelism, which megatron-core gives a separate bucket."""
        architecture = self.weights.architecture
        if not architecture.tie_word_embeddings or self.weights.parallel.pipeline == 1:
            return False
        # A value head's output layer is not a copy of the embedding.
        is_copy = architecture.head == LANGUAGE_MODEL and local.endswith(".output_layer.weight")
        return is_copy or local.endswith(".word_embeddings.weight")

    def _by_local(self, rank: int) -> dict[str, list[Shard]]:
        # Replicas of a rank share one tuple of shards, and so one table.
        shards = self.weights.shards(rank)
        if id(shards) not in self._shards_of:
            shards_of: dict[str, list[Shard]] = {}
            for shard in shards:
                shards_of.setdefault(shard.local, []).append(shard)
            self._shards_of[id(shards)] = shards_of
        return self._shards_of[id(shards)]

    def _slices(self, rank: int, local: str, start: int, end: int) -> Iterator[Shard]:
        """Yield elements [start, end) of a flattened local parameter as slices of global tensors, without padding."""
        shape = self.weights.local_specs(rank)[local].shape
        strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
        for bounds in flat_range_slices(shape, start, end):
            for shard in self._by_local(rank).get(local, ()):
                here = local_slice(shard)
                common = intersect(bounds, here)
                if common is not None:
                    offset = tuple(g + c - h for g, c, h in zip(shard.global_offset, common.offset, here.offset))
                    position = sum(o * stride for o, stride in zip(common.offset, strides))
                    yield Shard(shard.tensor, offset, common.shape, local, (position,))


def _share(sizes: dict[str, int], has_own_bucket: Callable[[str], bool], ranges: list[dict[str, Range]]) -> None:
    """Add the ranges of the parameters of one model chunk and type, as megatron-core cuts its buffer among the ranks.

    From the last parameter to the first. Each starts at a multiple of 64 elements; buckets are padded to split evenly.
    """
    count = len(ranges)
    multiple = lcm(count, _BUCKET_ALIGNMENT)
    bucket: list[tuple[str, int, int]] = []
    bucket_start = end = 0

    def close(at: int) -> int:
        nonlocal bucket, bucket_start
        bucket_end = round_up(at, multiple)
        share = (bucket_end - bucket_start) // count
        for local, first, last in bucket:
            for index in range((first - bucket_start) // share, -(-(last - bucket_start) // share)):
                start = bucket_start + index * share
                owned = max(first, start) - first, min(last, start + share) - first
                ranges[index][local] = owned
        bucket, bucket_start = [], bucket_end
        return bucket_end

    for local in reversed(sizes):
        start, is_separate = round_up(end, _PARAMETER_ALIGNMENT), has_own_bucket(local)
        if is_separate and bucket:
            start = close(start)
        end = start + sizes[local]
        bucket.append((local, start, end))
        if is_separate:
            end = close(end)
    if bucket:
        close(end)
