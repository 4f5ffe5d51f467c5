"""Layouts of a weight sync to engines that serve FP8: e4m3 values, and one scale for each block of 128 x 128.

    parameters = read_parameters(engines, described)  # described by a server; without one: `expected_parameters`
    source = Fp8SourceLayout(actor.tensors, Fp8EngineLayout(engines, parameters))

Both sides agree on global tensors: a quantized tensor X keeps its name and shape and is e4m3, and X_scale_inv (float32)
holds one number per block, by which the block's values are multiplied to restore the weights. The layout of the scales
follows from that of X. `bridge.fp8_weights` computes both from the trainer's parameters while it fills buckets.

No list says which tensors are quantized: those whose engine parameter is e4m3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from megatron_dapo.checkpoints.formats.huggingface import dtype_name
from megatron_dapo.checkpoints.layouts.computed import ComputedLayout, RankContents
from megatron_dapo.checkpoints.layouts.sglang import SglangLayout
from megatron_dapo.models.architecture import EMBEDDING, LM_HEAD
from megatron_dapo.models.parts.experts import ROUTER
from megatron_dapo.models.parts.gated_delta import BETA_AND_ALPHA, CONVOLUTION
from megatron_dapo.models.parts.shared_expert import SHARED_GATE
from megatron_dapo.ops.fp8 import BLOCK, E4M3
from megatron_dapo.reshard.layout import Layout, Shard, TensorSpec
from megatron_dapo.reshard.slices import Slice

SCALES = "_scale_inv"  # suffix of the scales of a tensor or parameter, as checkpoints and SGLang name them
# In some models (Qwen2, Llama, DeepSeek-V3) each attention has two further scalars under FP8, for key-value caches in FP8.
# Here caches have the model's type, so nothing reads the scalars; they are 1, as after loading a checkpoint without them.
KV_SCALES = tuple(f".{attention}.{scale}" for attention in ("attn", "attn_mha", "attn_mqa") for scale in ("k_scale", "v_scale"))
KV_SCALE_VALUE = 1.0

_SCALE_DTYPE = torch.float32
_PLAIN = (EMBEDDING, LM_HEAD, ROUTER, SHARED_GATE, CONVOLUTION, BETA_AND_ALPHA)
_DIMS = ("row", "column")


@dataclass(frozen=True)
class Fp8Parameters:
    """Parameters of an FP8 engine that are not in the model's type; the same on all its ranks."""

    quantized: frozenset[str]  # parameters that are e4m3
    constants: frozenset[str]  # scalars that are always KV_SCALE_VALUE


def expected_parameters(engines: SglangLayout) -> Fp8Parameters:
    """Return the expected answer of a server, for plans without one.

    SGLang quantizes the layers it calls linear, experts included, but not embedding, head, routers, gates and convolutions.
    Scales of caches are missing here: only a server knows which models have them.
    """
    # Ranks differ in rows, not in names; rank 0 stands for all.
    specs = engines.local_specs(0)
    matrices = (name for name, spec in specs.items() if len(spec.shape) > 1)
    return Fp8Parameters(frozenset(name for name in matrices if not name.endswith(_PLAIN)), frozenset())


def read_parameters(engines: SglangLayout, described: Sequence[Mapping[str, TensorSpec]]) -> Fp8Parameters:
    """Return the FP8 parameters of an engine, given shape and type of every parameter of each of its ranks.

    Raises ValueError if a weight sync cannot fill a parameter, or if none is in FP8. The engine itself compares shapes
    when a weight sync begins.
    """
    if len(described) != engines.tensor_parallel:
        raise ValueError(f"an engine of {engines.tensor_parallel} ranks described {len(described)} ranks")
    found = {_classify(engines.local_specs(rank), specs) for rank, specs in enumerate(described)}
    if len(found) > 1:
        raise ValueError("the ranks of one engine quantize different parameters; they must serve one model")
    (parameters,) = found
    if not parameters.quantized:
        raise ValueError(
            "the server holds no parameter in FP8: start it with a quantization_config of fp8 in blocks of "
            f'[{BLOCK}, {BLOCK}], or set sglang.quantization = "none"'
        )
    return parameters


def _classify(own: Mapping[str, TensorSpec], described: Mapping[str, TensorSpec]) -> Fp8Parameters:
    quantized = {name for name, spec in described.items() if name in own and spec.dtype == E4M3}
    constants = {name for name, spec in described.items() if name.endswith(KV_SCALES) and not spec.shape}
    # Every quantized parameter needs scales: e4m3 without them may be another scheme, such as one scale per matrix.
    scales = {name + SCALES for name in quantized}
    for name, spec in described.items():
        known = name in quantized or name in constants
        if name in scales and spec.dtype == _SCALE_DTYPE or name in own and spec.dtype == own[name].dtype:
            known = True
        if not known:
            raise ValueError(
                f"the engine has {name!r} {tuple(spec.shape)} {dtype_name(spec.dtype)}, which is not FP8 in blocks of {BLOCK} "
                f"with {dtype_name(_SCALE_DTYPE)} scales: SGLang repacks weights for some products (GPUs without FP8; "
                "DeepGEMM on Blackwell); start the server with --fp8-gemm-backend triton or without quantization"
            )
    if missing := scales - described.keys():
        raise ValueError(f"the engine has no {min(missing)!r}, its FP8 is not in blocks; set weight_block_size")
    return Fp8Parameters(frozenset(quantized), frozenset(constants))


def blocks_of(size: int) -> int:
    """Return the number of blocks that `size` rows or columns reach into."""
    # Rounded up: a smaller last block also has a scale.
    return -(-size // BLOCK)


def block_slice(offset: Sequence[int], shape: Sequence[int]) -> Slice:
    """Return the slice of blocks that a slice of a matrix reaches into."""
    start = tuple(o // BLOCK for o in offset)
    return Slice(start, tuple(blocks_of(o + n) - s for o, n, s in zip(offset, shape, start)))


def _global_tensors(
    tensors: Mapping[str, TensorSpec], quantized: frozenset[str], constants: frozenset[str]
) -> dict[str, TensorSpec]:
    """Return the tensors of a weight sync: a quantized tensor is e4m3 and is followed by its scales."""
    found: dict[str, TensorSpec] = {}
    for name, spec in tensors.items():
        found[name] = TensorSpec(spec.shape, E4M3) if name in quantized else spec
        if name in quantized:
            found[name + SCALES] = TensorSpec(tuple(blocks_of(size) for size in spec.shape), _SCALE_DTYPE)
    return found | {name: TensorSpec((), _SCALE_DTYPE) for name in sorted(constants)}


def _constant(name: str) -> Shard:
    return Shard(name, (), (), name, ())


class Fp8EngineLayout(ComputedLayout):
    """`EngineLayout` of engines that serve FP8: `engines` with the types and scales of `parameters`."""

    def __init__(self, engines: SglangLayout, parameters: Fp8Parameters) -> None:
        self.engines = engines
        self.parameters = parameters
        self.tensor_parallel = engines.tensor_parallel
        # All ranks of one engine together: under expert parallelism, no rank has a shard of every matrix.
        self.quantized = frozenset(
            shard.tensor
            for rank in range(engines.tensor_parallel)
            for shard in engines.shards(rank)
            if shard.local in parameters.quantized
        )
        super().__init__(_global_tensors(engines.tensors, self.quantized, parameters.constants))

    @property
    def num_ranks(self) -> int:
        return self.engines.num_ranks

    def _replica_key(self, rank: int) -> int:
        return rank % self.tensor_parallel

    def _compute(self, rank: int) -> RankContents:
        tensor = self._replica_key(rank)
        return RankContents(tuple(self._shards(tensor)), dict(self._specs(tensor)))

    def _shards(self, rank: int) -> Iterator[Shard]:
        for shard in self.engines.shards(rank):
            yield shard
            if shard.local in self.parameters.quantized:
                yield self._scales_of(shard, rank)
        yield from map(_constant, sorted(self.parameters.constants))

    def _specs(self, rank: int) -> Iterator[tuple[str, TensorSpec]]:
        for name, spec in self.engines.local_specs(rank).items():
            if name not in self.parameters.quantized:
                yield name, spec
                continue
            *stack, rows, columns = spec.shape
            yield name, TensorSpec(spec.shape, E4M3)
            yield name + SCALES, TensorSpec((*stack, blocks_of(rows), blocks_of(columns)), _SCALE_DTYPE)
        for name in sorted(self.parameters.constants):
            yield name, TensorSpec((), _SCALE_DTYPE)

    def _scales_of(self, shard: Shard, rank: int) -> Shard:
        """Return the shard of scales of a shard. Raises ValueError if it begins inside a block, which SGLang cannot load."""
        *stack, row, column = shard.local_offset
        for dim, (start, place) in enumerate(zip(shard.global_offset, (row, column))):
            if start % BLOCK or place % BLOCK:
                shape = self.engines.tensors[shard.tensor].shape
                raise ValueError(
                    f"FP8 in blocks of {BLOCK}: rank {rank} of an engine with tensor parallel size "
                    f"{self.tensor_parallel} holds {_DIMS[dim]}s [{start}, {start + shard.shape[dim]}) of {shard.tensor} "
                    f"{tuple(shape)} from {_DIMS[dim]} {place} of {shard.local} on; both must begin at a multiple of "
                    f"{BLOCK}: choose a smaller sglang.tp_size, or serve this model without quantization"
                )
        blocks = block_slice(shard.global_offset, shard.shape)
        local_offset = (*stack, row // BLOCK, column // BLOCK)
        return Shard(shard.tensor + SCALES, blocks.offset, blocks.shape, shard.local + SCALES, local_offset)


class Fp8SourceLayout:
    """The trainer's side of the sync: quantized tensors are where `trainer` has their weights, under its local names.

    The scales of the blocks that a rank's shard of tensor X touches are one local buffer, "X_scale_inv". If the
    trainer's tensor parallelism cuts a block, every rank with a part of it has its scale (`shared`).
    """

    def __init__(self, trainer: Layout, engines: Fp8EngineLayout) -> None:
        self.trainer = trainer
        self.quantized = engines.quantized
        self.constants = engines.parameters.constants
        self.tensors = _global_tensors(trainer.tensors, self.quantized, self.constants)
        # Keyed by the identity of the trainer's tuple, which the entry keeps alive: replicas share one tuple.
        self._cache: dict[int, tuple[tuple[Shard, ...], tuple[Shard, ...], dict[str, Slice]]] = {}

    @property
    def num_ranks(self) -> int:
        return self.trainer.num_ranks

    def shards(self, rank: int) -> tuple[Shard, ...]:
        """Return the shards of weights, scales and constants that a rank has."""
        return self._rank(rank)[1]

    def buffer_names(self, rank: int) -> frozenset[str]:
        """Return the names of a rank's local buffers, scales and constants included."""
        extra = (name + SCALES for name in self.touched(rank))
        return self.trainer.buffer_names(rank) | frozenset(extra) | self.constants

    def touched(self, rank: int) -> Mapping[str, Slice]:
        """Return quantized tensor -> slice of the blocks that a rank's shard reaches into."""
        return self._rank(rank)[2]

    @cached_property
    def shared(self) -> tuple[str, ...]:
        """Quantized tensors of which a rank touches a block that it does not hold whole, whose largest magnitude all exchange."""
        cut: set[str] = set()
        for shards in {id(p): p for p in map(self.trainer.shards, range(self.num_ranks))}.values():
            for name, slices in self._slices(shards).items():
                bounds = _bounding(slices)
                ends = (start + size for start, size in zip(*bounds))
                shape = self.tensors[name].shape
                # An end inside a block is a cut, unless the tensor itself ends there.
                if any(o % BLOCK for o in bounds.offset) or any(e % BLOCK and e != n for e, n in zip(ends, shape)):
                    cut.add(name)
                # Queries, keys and values of its heads may be apart in one tensor, with those of other ranks in between.
                if sum(one.volume for one in slices) < bounds.volume:
                    cut.add(name)
        return tuple(name for name in self.tensors if name in cut)

    def _rank(self, rank: int) -> tuple[tuple[Shard, ...], tuple[Shard, ...], dict[str, Slice]]:
        own = self.trainer.shards(rank)
        if id(own) not in self._cache:
            touched = {name: block_slice(*_bounding(slices)) for name, slices in self._slices(own).items()}
            scales = (Shard(name + SCALES, *bounds, name + SCALES, (0, 0)) for name, bounds in touched.items())
            self._cache[id(own)] = (own, (*own, *scales, *map(_constant, sorted(self.constants))), touched)
        return self._cache[id(own)]

    def _slices(self, shards: Sequence[Shard]) -> dict[str, list[Slice]]:
        """Return the slices that the shards of each quantized tensor hold."""
        slices: dict[str, list[Slice]] = {}
        for shard in shards:
            if shard.tensor in self.quantized:
                slices.setdefault(shard.tensor, []).append(shard.bounds)
        return slices


def _bounding(slices: Sequence[Slice]) -> Slice:
    """Return the smallest slice that holds all of them."""
    starts = tuple(min(bounds.offset[dim] for bounds in slices) for dim in range(2))
    stops = tuple(max(bounds.offset[dim] + bounds.shape[dim] for bounds in slices) for dim in range(2))
    return Slice(starts, tuple(stop - start for start, stop in zip(starts, stops)))
