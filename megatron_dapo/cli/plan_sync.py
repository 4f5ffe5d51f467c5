"""Cost of a weight sync from a trainer layout into SGLang engines, computed without GPUs and process groups.

Bytes of every rank, messages, memory and time, for up to tens of thousands of ranks.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_dapo.bridge.sources import expected_layouts
from megatron_dapo.bridge.sync_plan import EngineLayout
from megatron_dapo.bridge.transports.adapters import AdapterEngineLayout
from megatron_dapo.checkpoints.layouts.lora import LoraLayout
from megatron_dapo.checkpoints.layouts.megatron import megatron_layout
from megatron_dapo.checkpoints.layouts.sglang import sglang_layout
from megatron_dapo.config import layout_overrides, load_config
from megatron_dapo.doctor.recipe import size
from megatron_dapo.models.config_json import planned_directory, read_architecture
from megatron_dapo.plan.cluster import GPUS_PER_NODE, NETWORK_GBIT, Cluster, server_gpus
from megatron_dapo.plan.device import GPUS, Gpu
from megatron_dapo.plan.weight_sync import SyncTraffic, sync_seconds
from megatron_dapo.reshard.layout import Layout, PartialLayout, ShiftedLayout
from megatron_dapo.reshard.planner import plan
from megatron_dapo.reshard.traffic import TrafficTable, traffic_table
from megatron_dapo.rounding import MIB
from megatron_dapo.trainer.topology import parallel_layout

GB = 1e9
NUM_TOP_SENDERS = 5


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
    shard_bytes: Range  # an engine rank's parameters, padding included
    sent: Range  # trainer ranks
    received: Range  # engine ranks
    local: Range  # engine ranks
    sent_between_nodes: int  # all ranks; bytes that a node's servers share in its memory count once
    bytes_ratio: float  # largest (received + local) / shard
    top_senders: tuple[tuple[int, int], ...]  # (rank, bytes)
    pairs: int  # pairs of ranks that exchange something
    slices: int  # slices that move between ranks
    messages: int
    bucket_bytes: int
    peak_extra_bytes: int  # an engine rank's: two buckets and the largest parameter
    seconds: dict[str, float]  # parts of an update
    gpu: str
    network_gbit: float
    digest: str
    plan_seconds: float
    plan_gb: float  # resident set of this process at its peak


def plan_sync(
    recipe: Path,
    overrides: Sequence[str] = (),
    layout: str | None = None,
    *,
    world_size: int | None = None,
    engine_tp: int | None = None,
    engine_ep: int | None = None,
    engines: int | None = None,
    device: str = "cuda",
    ranks_per_node: int = GPUS_PER_NODE,
    gpu: Gpu = GPUS["H100"],
    network_gbit: float = NETWORK_GBIT,
) -> SyncFigures:
    """Return the figures for a recipe's model, of which only config.json is read. Arguments that are None are the recipe's.

    Without a number of engines there are as many as fit the trainer's ranks. Raises ValueError for what does not fit.
    """
    start = time.perf_counter()
    config = load_config(recipe, [*overrides, *(layout_overrides(layout) if layout else [])]).config
    sglang, dtype = config.sglang, getattr(torch, config.model.dtype)
    parallel = parallel_layout(config, world_size or config.num_processes)
    engine_tp, engine_ep = engine_tp or sglang.tp_size, engine_ep or sglang.ep_size
    engines = engines or parallel.world_size // engine_tp
    has_own_nodes = sglang.placement == "disaggregated"
    _check_sizes(parallel.world_size, engine_tp, engines, has_own_nodes)
    architecture = read_architecture(planned_directory(config.model.path))
    plain = sglang_layout(architecture, engine_tp, dtype, engines, expert_parallel=engine_ep, device=device)
    trainer, lora = megatron_layout(architecture, parallel, dtype), config.model.lora
    source: Layout | None
    if lora.serves_adapters:
        source = LoraLayout(trainer, lora.rank, lora.targets)
        engine: EngineLayout = AdapterEngineLayout(source.tensors, engine_tp, engines)
    else:
        source, engine = expected_layouts(sglang.quantization, plain, trainer)
    assert source is not None, "the trainer has a layout"
    # Engines next to the trainer's ranks share its nodes; separate ones follow on nodes after them.
    offset = -(-source.num_ranks // ranks_per_node) * ranks_per_node if has_own_nodes else 0
    destination: Layout = ShiftedLayout(engine, offset) if offset else engine
    reshard = plan(source, destination, ranks_per_node=ranks_per_node)
    table = traffic_table(reshard)
    served = slice(offset, offset + engine.num_ranks)
    # The engines are equal, so the ranks of one stand for all.
    specs = [engine.local_specs(rank).values() for rank in range(engine_tp)]
    shards = torch.tensor([sum(spec.num_bytes for spec in rank) for rank in specs]).repeat(engines)
    cluster = Cluster(
        -(-source.num_ranks // max(1, ranks_per_node - server_gpus(config))), ranks_per_node, network_gbit=network_gbit
    )
    between = into = 0
    if has_own_nodes and cluster.num_nodes > 1:
        between = int(table.num_bytes.sum())
        into = -(-between // cluster.num_nodes)
    elif not has_own_nodes:
        together = -(-engines // cluster.num_nodes) if sglang.shared_memory == "host" else 1
        between, into = bytes_between_nodes(source, engine, engine_tp, together, ranks_per_node)
    traffic = SyncTraffic(int(shards.max()), int(shards.sum()), between, into, source.num_ranks)
    bucket_bytes = sglang.weight_sync_bucket_mb * MIB
    return SyncFigures(
        trainer=parallel.describe(),
        trainer_ranks=source.num_ranks,
        engine=f"TP{engine_tp} EP{engine_ep} x {engines} on {device}",
        engine_ranks=engine.num_ranks,
        dtype=config.model.dtype,
        quantization=sglang.quantization,
        model_bytes=sum(spec.num_bytes for spec in source.tensors.values()),
        **_bytes_of_ranks(table, shards, source.num_ranks, served),
        sent_between_nodes=between,
        pairs=len(table.source),
        slices=int(table.num_overlaps.sum()),
        messages=table.num_messages(bucket_bytes),
        bucket_bytes=bucket_bytes,
        peak_extra_bytes=2 * bucket_bytes + max(spec.num_bytes for spec in specs[0]),
        seconds=dict(sync_seconds(config, traffic, cluster, gpu)),
        gpu=gpu.name,
        network_gbit=network_gbit,
        digest=reshard.digest.hex(),
        plan_seconds=time.perf_counter() - start,
        plan_gb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GB,  # Linux counts it in KiB
    )


def bytes_between_nodes(
    source: Layout, engines: Layout, engine_ranks: int, engines_of_node: int, ranks_per_node: int
) -> tuple[int, int]:
    """Return the bytes that servers on the trainer's nodes get from other nodes, and those of the node that gets most.

    `engines_of_node` servers of a node get each byte together, as the bridge plans them.
    """
    target = engines
    if engines_of_node > 1:
        firsts = range(0, engines.num_ranks // engine_ranks, engines_of_node)
        target = PartialLayout(engines, {first * engine_ranks + rank for first in firsts for rank in range(engine_ranks)})
    table = traffic_table(plan(source, target, ranks_per_node=ranks_per_node, prefer_own=engines_of_node == 1))
    nodes = table.destination[table.crosses] // ranks_per_node
    by_node = torch.zeros(-(-table.num_ranks // ranks_per_node), dtype=torch.int64)
    by_node.index_add_(0, nodes, table.num_bytes[table.crosses])
    return int(by_node.sum()), int(by_node.max())


def _bytes_of_ranks(table: TrafficTable, shards: torch.Tensor, num_senders: int, served: slice) -> dict[str, Any]:
    sent, received, local = table.sent, table.received[served], table.local[served]
    # stable: of ranks that send the same, the first ones are named, in every run.
    top = torch.argsort(sent, descending=True, stable=True)[:NUM_TOP_SENDERS].tolist()
    return {
        "shard_bytes": _range(shards),
        "sent": _range(sent[:num_senders]),
        "received": _range(received),
        "local": _range(local),
        "bytes_ratio": float(((received + local) / shards).max()),
        "top_senders": tuple((rank, int(sent[rank])) for rank in top),
    }


def _check_sizes(trainer_ranks: int, engine_tp: int, engines: int, has_own_nodes: bool) -> None:
    if engines < 1:
        raise ValueError(f"an engine of {engine_tp} ranks does not fit {trainer_ranks} trainer ranks; give --engines")
    if not has_own_nodes and engine_tp * engines > trainer_ranks:
        raise ValueError(
            f"{engines} engines of {engine_tp} ranks share the devices of {trainer_ranks} trainer ranks "
            "(sglang.placement = colocated); start fewer or set it to disaggregated"
        )


def _range(values: torch.Tensor) -> Range:
    return Range(int(values.min()), float(values.double().mean()), int(values.max()))


def describe_sync(figures: SyncFigures) -> list[str]:
    """The figures in lines for a person."""
    f = figures
    top = ", ".join(f"rank {rank} {size(num_bytes)}" for rank, num_bytes in f.top_senders)
    types = f.dtype if f.quantization == "none" else f"linear layers in {f.quantization}, the rest in {f.dtype}"
    return [
        f"trainer: {f.trainer}, {f.trainer_ranks} ranks; engines: {f.engine}, {f.engine_ranks} ranks; {types}",
        f"model: {size(f.model_bytes)}; shard of an engine rank: {_span(f.shard_bytes)}",
        f"sent by a trainer rank: {_span(f.sent)}; most: {top}",
        f"received by an engine rank: {_span(f.received)}; copied within the rank: {_span(f.local)}; "
        f"{f.bytes_ratio:.4f} of its shard",
        f"between nodes: {size(f.sent_between_nodes)} in all",
        f"messages: {f.messages} of at most {size(f.bucket_bytes)} between {f.pairs} pairs of ranks, {f.slices} slices",
        f"peak extra memory of an engine rank: {size(f.peak_extra_bytes)} (two buckets and the largest parameter)",
        f"time: {sum(f.seconds.values()):.3f} s ({', '.join(f'{name} {part:.2f}' for name, part in f.seconds.items())}) "
        f"with {f.gpu}, {f.network_gbit:g} Gbit/s a node for TCP",
        f"plan: {f.digest}, made in {f.plan_seconds:.1f} s with {f.plan_gb:.2f} GB",
    ]


def _span(r: Range) -> str:
    return size(r.max) if r.min == r.max else f"{size(r.min)} to {size(r.max)}, mean {size(r.mean)}"
