"""The pre-flight of a run's nodes: what each one computes, copies, sends and writes, against the median of all.

    srun --ntasks-per-node=8 megatron-dapo preflight LAYOUT --directory runs      # torchrun: add --no-python
    node3: matrix product 41 TFLOP/s (7 % of the median), memory ..., all-reduce ..., disk ...: SLOW

Every rank measures its own device; a node's figure is that of its slowest rank. An all-reduce over all nodes runs at the
pace of the slowest link and names nobody, so nodes all-reduce in pairs, in several rounds with other partners, and a node's
figure is its best round: a healthy node that meets a slow one once is not slow. With a layout, its tensor-parallel groups are
measured like that too, and its data-parallel groups are compared with each other: all of them use all nodes, but each of them
other network cards. A network that NCCL cannot use at all ends the pre-flight within three minutes, not the run in thirty.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_dapo.launch.environment import ProcessEnvironment, prepare_rendezvous, process_environment
from megatron_dapo.parallel.store import restrict_stores
from megatron_dapo.rounding import MIB

if TYPE_CHECKING:
    from megatron_dapo.parallel.layout import ParallelLayout

NUM_ROUNDS = 3
_NAME_BYTES = 64
_SMALL_BYTES, _LARGE_BYTES = MIB, 64 * MIB  # bytes of an all-reduce
_SLOW_S = 0.25  # limit for the small all-reduce; beyond it the large one would take a minute and say the same
_DISK_BYTES = 64 * MIB
_REPEATS = 3
_TIMEOUT = timedelta(minutes=3)  # limit of a collective


@dataclass(frozen=True)
class Measure:
    """Something that is measured on every node."""

    name: str
    unit: str
    scale: float  # operations/s or bytes/s in one unit


MEASURES = (
    Measure("matrix product", "TFLOP/s", 1e12),
    Measure("memory", "GB/s", 1e9),
    Measure("all-reduce", "GB/s", 1e9),
    Measure("tensor-parallel all-reduce", "GB/s", 1e9),
    Measure("disk", "MB/s", 1e6),
)


def partners(num_nodes: int, round_number: int) -> list[int | None]:
    """Return each node's partner in a round of a tournament in which everyone meets everyone else; None: it sits out."""
    seats = num_nodes + num_nodes % 2
    turn = round_number % (seats - 1) if seats > 1 else 0
    order = [0, *((place + turn) % (seats - 1) + 1 for place in range(seats - 1))]
    partners: list[int | None] = [None] * num_nodes
    for first, second in zip(order[: seats // 2], reversed(order), strict=False):
        if first < num_nodes and second < num_nodes:
            partners[first], partners[second] = second, first
    return partners


def judge(figures: Mapping[str, Sequence[float]], tolerance: float) -> tuple[list[str], list[str]]:
    """Return a line for each node and the names of the slow ones.

    figures: of each node by name, in the order of MEASURES and in units per second; 0 if nothing was measured.
    tolerance: share of the median below which a figure is slow.
    """
    medians = [median(column) for column in zip(*figures.values(), strict=True)]
    lines, slow = [], []
    for node, values in figures.items():
        shares = [value / middle if middle else 1.0 for value, middle in zip(values, medians, strict=True)]
        parts = [
            f"{measure.name} {value / measure.scale:.3g} {measure.unit} ({100 * share:.0f} % of the median)"
            for measure, value, share in zip(MEASURES, values, shares, strict=True)
            if value
        ]
        is_slow = min(shares) < tolerance
        lines.append(f"{node}: {', '.join(parts)}{': SLOW' if is_slow else ''}")
        slow += [node] if is_slow else []
    return lines, slow


def groups_of(layout: ParallelLayout) -> tuple[list[list[int]], list[list[int]]]:
    """Return the tensor-parallel groups of a layout and its data-parallel ones (with context), as ranks."""
    tensor: dict[tuple[int, ...], list[int]] = {}
    data: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        tensor.setdefault((at.pipeline, at.data, at.context), []).append(rank)
        data.setdefault((at.pipeline, at.tensor), []).append(rank)
    return list(tensor.values()), list(data.values())


def judge_groups(figures: Mapping[tuple[int, ...], float], tolerance: float) -> list[str]:
    """Return a line for each data-parallel group whose all-reduce, in bytes a second, is slow against the median of all."""
    middle = median(figures.values()) if figures else 0.0
    return [
        f"data-parallel group of ranks {', '.join(map(str, ranks[:4]))}{', ...' * (len(ranks) > 4)}: all-reduce "
        f"{figure / 1e9:.3g} GB/s ({100 * figure / middle:.0f} % of the median): SLOW"
        for ranks, figure in figures.items()
        if figure < tolerance * middle
    ]


def preflight(
    directory: Path,
    tolerance: float,
    say: Callable[[str], None],
    layout: ParallelLayout | None = None,
) -> int:
    """Measure all nodes; every process of the job calls it. Rank 0 prints, and all return 1 if a node is slow, else 0.

    directory: on the file system of the runs. layout: one whose groups are measured too. Raises ValueError without a
    launcher's variables for several nodes.
    """
    process = process_environment()
    prepare_rendezvous(process)
    restrict_stores(process.num_nodes)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", process.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=_TIMEOUT)
    try:
        return _measure_all(process, device, directory, tolerance, say, layout)
    finally:
        dist.destroy_process_group()


def _measure_all(
    process: ProcessEnvironment,
    device: torch.device,
    directory: Path,
    tolerance: float,
    say: Callable[[str], None],
    layout: ParallelLayout | None,
) -> int:
    places, names = _places(process)
    own = [_matrix_product(device), _memory_bandwidth(device)]
    dist.barrier()
    own.append(_all_reduce_bandwidth(process, places, device))
    dist.barrier()
    tensor_groups, data_groups = groups_of(layout) if layout is not None else ([], [])
    own.append(_group_bandwidth(tensor_groups, device) or float("inf"))
    dist.barrier()
    of_data_group = _group_bandwidth(data_groups, device)
    dist.barrier()
    own.append(_disk_bandwidth(directory, process.rank) if process.local_rank == 0 else float("inf"))
    gathered = [torch.zeros(len(own) + 1, dtype=torch.float64) for _ in range(process.world_size)]
    dist.all_gather(gathered, torch.tensor([*own, of_data_group], dtype=torch.float64))
    figures = {
        # Values that no rank of a node has measured are 0.
        names[node]: torch.stack([gathered[rank][:-1] for rank in ranks.values()]).amin(0).nan_to_num(posinf=0.0).tolist()
        for node, ranks in sorted(places.items())
    }
    lines, slow = judge(figures, tolerance)
    of_groups = {tuple(ranks): float(gathered[ranks[0]][-1]) for ranks in data_groups if len(ranks) > 1}
    slow_groups = judge_groups(of_groups, tolerance)
    if process.rank == 0:
        for line in [*lines, *slow_groups]:
            say(line)
        if slow:
            say(f"slow nodes: {','.join(slow)}; leave them out (sbatch --exclude={','.join(slow)}) or mend them")
    return 1 if slow or slow_groups else 0


def _places(process: ProcessEnvironment) -> tuple[dict[int, dict[int, int]], dict[int, str]]:
    """Return the rank by node and number on the node, and the host name by node."""
    name = os.uname().nodename.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
    own = torch.tensor([process.node_rank, process.local_rank, *name])
    gathered = [torch.zeros_like(own) for _ in range(process.world_size)]
    dist.all_gather(gathered, own)
    places: dict[int, dict[int, int]] = {}
    names = {}
    for rank, row in enumerate(gathered):
        node, local, *text = row.tolist()
        places.setdefault(node, {})[local] = rank
        names[node] = bytes(text).rstrip(b"\0").decode(errors="replace")
    # Nodes of one name, as several agents on one machine have, are told apart by their number.
    is_unique = len(set(names.values())) == len(names)
    return places, names if is_unique else {node: f"{name}-{node}" for node, name in names.items()}


def _best_seconds(action: Callable[[], object], device: torch.device) -> float:
    """Return the shortest time of several, after one that warms up."""
    action()
    seconds = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _matrix_product(device: torch.device) -> float:
    """Return operations a second."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (768, torch.float32)
    left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    return 2 * size**3 / _best_seconds(lambda: left @ right, device)


def _memory_bandwidth(device: torch.device) -> float:
    """Return bytes read and written a second by a copy."""
    source = torch.ones((4096 if device.type == "cuda" else 128) * MIB, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / _best_seconds(lambda: target.copy_(source), device)


def _all_reduce_bandwidth(
    process: ProcessEnvironment, places: Mapping[int, Mapping[int, int]], device: torch.device
) -> float:
    """Return the bytes a second of all-reduces with the same rank of other nodes, in the best round; 0 with one node."""
    nodes = sorted(places)
    best = 0.0
    for number in range(min(NUM_ROUNDS, len(nodes) - 1)):
        partner = partners(len(nodes), number)[nodes.index(process.node_rank)]
        rank = places[nodes[partner]].get(process.local_rank) if partner is not None else None
        seconds = _exchange_seconds(rank, _SMALL_BYTES, device)
        slowest = torch.tensor(seconds)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)  # a round begins for all at once
        num_bytes = _SMALL_BYTES
        if slowest.item() < _SLOW_S:
            num_bytes, seconds = _LARGE_BYTES, _exchange_seconds(rank, _LARGE_BYTES, device)
        if rank is not None:
            best = max(best, num_bytes / seconds)
        dist.barrier()
    return best


def _exchange_seconds(partner: int | None, num_bytes: int, device: torch.device) -> float:
    """Return the time of an all-reduce of two ranks: halves are exchanged and added, then the sums are exchanged."""
    if partner is None:
        return 0.0
    halves = torch.ones(2, num_bytes // 8, device=device)
    own = int(dist.get_rank() > partner)
    received = torch.empty_like(halves[0])

    def exchange() -> None:
        for source, target in ((halves[1 - own], received), (halves[own], halves[1 - own])):
            operations = [dist.P2POp(dist.isend, source, partner), dist.P2POp(dist.irecv, target, partner)]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            if target is received:
                halves[own].add_(received)

    return _best_seconds(exchange, device)


def _group_bandwidth(groups: Sequence[Sequence[int]], device: torch.device) -> float:
    """Return the bytes a second of an all-reduce in this rank's group, while all groups make one; 0 in a group of one or none."""
    own = None
    for ranks in groups:
        group = dist.new_group(ranks, timeout=_TIMEOUT)
        own = group if dist.get_rank() in ranks and len(ranks) > 1 else own
    if own is None:
        return 0.0
    for num_bytes in (_SMALL_BYTES, _LARGE_BYTES):
        values = torch.ones(num_bytes // 4, device=device)
        slowest = torch.tensor(_best_seconds(partial(dist.all_reduce, values, group=own), device))
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=own)
        if slowest.item() > _SLOW_S:
            break
    return num_bytes / float(slowest)


def _disk_bandwidth(directory: Path, rank: int) -> float:
    """Return the bytes a second of a file that is written to the end and flushed."""
    directory.mkdir(parents=True, exist_ok=True)
    path, block = directory / f".preflight_{rank}", os.urandom(MIB)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        start = time.perf_counter()
        for _ in range(_DISK_BYTES // len(block)):
            os.write(descriptor, block)
        os.fsync(descriptor)
        return _DISK_BYTES / (time.perf_counter() - start)
    finally:
        os.close(descriptor)
        path.unlink()
