"""Cost of a weight sync from a trainer layout into SGLang engines, computed without GPUs and process groups.

Bytes of every rank, messages, memory and time, for up to tens of thousands of ranks.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from megatron_dapo.bridge.sources import expected_layouts
from megatron_dapo.checkpoints.architecture import DTYPES, ModelArchitecture
from megatron_dapo.checkpoints.megatron_layout import megatron_layout
from megatron_dapo.checkpoints.sglang_layout import sglang_layout
from megatron_dapo.config import layout_overrides, load_config
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.reshard.layout import Layout, ShiftedLayout
from megatron_dapo.reshard.planner import plan
from megatron_dapo.reshard.traffic import Links, TrafficTable, traffic_table
from megatron_dapo.trainer.topology import parallel_layout

GB, MIB = 1e9, 1 << 20
NUM_TOP_SENDERS = 5


@dataclass(frozen=True)
class EngineOptions:
    """The engine side. Engines beside the trainer's ranks share its nodes; those apart follow on nodes of their own."""

    tensor_parallel: int
    num_engines: int
    expert_parallel: int = 1
    device: str = "cuda"
    apart: bool = False
    quantization: str = "none"  # as sglang.quantization


@dataclass(frozen=True)
class Range:
    """Bytes over the ranks of one side."""

    min: int
    mean: float
    max: int


@dataclass(frozen=True)
class SyncFigures:
    """One update of all engines. Bytes of a rank do not count what it copies within itself (`local`)."""

    trainer: str
    trainer_ranks: int
    engine: str
    engine_ranks: int
    dtype: str
    quantization: str
    model_bytes: int
    shard_bytes: Range  # of an engine rank's parameters, padding included
    sent: Range  # over trainer ranks
    received: Range  # over engine ranks
    local: Range  # over engine ranks
    sent_between_nodes: int  # of all ranks
    bytes_ratio: float  # largest (received + local) / shard
    top_senders: tuple[tuple[int, int], ...]  # (rank, bytes)
    pairs: int  # of ranks that exchange something
    slices: int  # that move between ranks
    messages: int
    bucket_bytes: int
    peak_extra_bytes: int  # of an engine rank: two buckets and the largest parameter
    seconds: float
    within_node_gb_s: float
    between_nodes_gb_s: float
    digest: str
    plan_seconds: float
    plan_gb: float  # resident set of this process at its peak


def plan_sync(
    architecture: ModelArchitecture,
    parallel: ParallelLayout,
    dtype: torch.dtype,
    engines: EngineOptions,
    *,
    ranks_per_node: int = 8,
    bucket_bytes: int = 256 * MIB,
    links: Links = Links(400 * GB, 50 * GB),
) -> SyncFigures:
    """Figures of one update. Raises ValueError where the model does not fit a layout."""
    start = time.perf_counter()
    master = megatron_layout(architecture, parallel, dtype)
    plain = sglang_layout(
        architecture,
        engines.tensor_parallel,
        dtype,
        engines.num_engines,
        expert_parallel=engines.expert_parallel,
        device=engines.device,
    )
    source, engine = expected_layouts(engines.quantization, plain, master)
    # Engines apart start on a node of their own.
    offset = -(-source.num_ranks // ranks_per_node) * ranks_per_node if engines.apart else 0
    destination: Layout = ShiftedLayout(engine, offset) if offset else engine
    reshard = plan(source, destination, ranks_per_node=ranks_per_node)
    table = traffic_table(reshard)
    served = slice(offset, offset + engine.num_ranks)
    shards = torch.tensor([_shard_bytes(engine.local_specs(rank).values()) for rank in range(engine.tensor_parallel)])
    shards = shards.repeat(engines.num_engines)
    sent, received, local = table.sent, table.received, table.local
    top = torch.argsort(sent, descending=True, stable=True)[:NUM_TOP_SENDERS].tolist()
    largest = max(spec.num_bytes for spec in engine.local_specs(0).values())
    return SyncFigures(
        trainer=parallel.describe(),
        trainer_ranks=source.num_ranks,
        engine=f"TP{engines.tensor_parallel} EP{engines.expert_parallel} x {engines.num_engines} on {engines.device}",
        engine_ranks=engine.num_ranks,
        dtype=str(dtype).removeprefix("torch."),
        quantization=engines.quantization,
        model_bytes=sum(spec.num_bytes for spec in source.tensors.values()),
        shard_bytes=_range(shards),
        sent=_range(sent[: source.num_ranks]),
        received=_range(received[served]),
        local=_range(local[served]),
        sent_between_nodes=int(table.num_bytes[table.crosses].sum()),
        bytes_ratio=float(((received + local)[served] / shards).max()),
        top_senders=tuple((rank, int(sent[rank])) for rank in top),
        pairs=len(table.source),
        slices=int(table.num_overlaps.sum()),
        messages=table.num_messages(bucket_bytes),
        bucket_bytes=bucket_bytes,
        peak_extra_bytes=2 * bucket_bytes + largest,
        seconds=_seconds(table, links),
        within_node_gb_s=links.within_node / GB,
        between_nodes_gb_s=links.between_nodes / GB,
        digest=reshard.digest.hex(),
        plan_seconds=time.perf_counter() - start,
        plan_gb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GB,
    )


def plan_sync_of_recipe(
    recipe: Path,
    overrides: Sequence[str] = (),
    layout: str | None = None,
    *,
    world_size: int | None = None,
    engine_tp: int | None = None,
    engine_ep: int | None = None,
    engines: int | None = None,
    device: str = "cuda",
    ranks_per_node: int = 8,
    links: Links = Links(400 * GB, 50 * GB),
) -> SyncFigures:
    """Return the figures for a recipe's model, whose config.json alone is read. Arguments that are None are the recipe's.

    Without a number of engines there are as many as fit the trainer's ranks. Raises ValueError for what does not fit.
    """
    config = load_config(recipe, [*overrides, *(layout_overrides(layout) if layout else [])]).config
    parallel = parallel_layout(config, world_size or config.num_processes)
    size = engine_tp or config.sglang.tp_size
    number = engines or parallel.world_size // size
    if number < 1:
        raise ValueError(f"an engine of {size} ranks does not fit {parallel.world_size} trainer ranks; give --engines")
    options = EngineOptions(
        size,
        number,
        engine_ep or config.sglang.ep_size,
        device,
        apart=config.sglang.placement == "disaggregated",
        quantization=config.sglang.quantization,
    )
    if not options.apart and size * number > parallel.world_size:
        raise ValueError(
            f"{number} engines of {size} ranks share the devices of {parallel.world_size} trainer ranks "
            "(sglang.placement = colocated); start fewer or set it to disaggregated"
        )
    return plan_sync(
        ModelArchitecture.from_directory(config.model.path),
        parallel,
        DTYPES[config.model.dtype],
        options,
        ranks_per_node=ranks_per_node,
        bucket_bytes=config.sglang.weight_sync_bucket_mb * MIB,
        links=links,
    )


def _shard_bytes(specs: Sequence) -> int:
    return sum(spec.num_bytes for spec in specs)


def _range(values: torch.Tensor) -> Range:
    return Range(int(values.min()), float(values.double().mean()), int(values.max()))


def _seconds(table: TrafficTable, links: Links) -> float:
    if min(links.within_node, links.between_nodes) <= 0:
        raise ValueError("link speeds must be positive")
    return table.seconds(links)


def to_json(figures: SyncFigures) -> dict:
    return asdict(figures)


def describe_sync(figures: SyncFigures) -> list[str]:
    """The figures in lines for a person."""
    f = figures
    top = ", ".join(f"rank {rank} {_size(num_bytes)}" for rank, num_bytes in f.top_senders)
    return [
        f"trainer: {f.trainer}, {f.trainer_ranks} ranks; engines: {f.engine}, {f.engine_ranks} ranks; "
        f"{_element_types(f)}",
        f"model: {_size(f.model_bytes)}; shard of an engine rank: {_span(f.shard_bytes)}",
        f"sent by a trainer rank: {_span(f.sent)}; most: {top}",
        f"received by an engine rank: {_span(f.received)}; copied within the rank: {_span(f.local)}; "
        f"{f.bytes_ratio:.4f} of its shard",
        f"between nodes: {_size(f.sent_between_nodes)} in all",
        f"messages: {f.messages} of at most {_size(f.bucket_bytes)} between {f.pairs} pairs of ranks, {f.slices} slices",
        f"peak extra memory of an engine rank: {_size(f.peak_extra_bytes)} (two buckets and the largest parameter)",
        f"time: {f.seconds:.3f} s at {f.within_node_gb_s:g} GB/s within a node and {f.between_nodes_gb_s:g} GB/s "
        "between nodes, per rank and direction",
        f"plan: {f.digest}, made in {f.plan_seconds:.1f} s with {f.plan_gb:.2f} GB",
    ]


def _element_types(figures: SyncFigures) -> str:
    if figures.quantization == "none":
        return figures.dtype
    return f"linear layers in {figures.quantization}, the rest in {figures.dtype}"


def _span(r: Range) -> str:
    return _size(r.max) if r.min == r.max else f"{_size(r.min)} to {_size(r.max)}, mean {_size(r.mean)}"


def _size(num_bytes: float) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.3g} {unit}"
    return f"{num_bytes:.0f} B"
