"""Traffic of a plan over all ranks at once: bytes and messages, without listing any transfer.

A plan for 16,384 ranks has tens of millions of transfers. Ranks that hold and want the same are counted together, so
that the whole table takes seconds to compute.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch

from megatron_dapo.reshard.planner import ANYWHERE, LoadBalancer, ReshardPlan, SliceRequest

_EXACT = 1 << 62  # products below it fit an int64


@dataclass(frozen=True)
class TrafficTable:
    """Pairs of ranks with traffic, in order of the destination and then the source; all int64 [num_pairs].

    Copies within a rank are only in `local` [num_ranks], in bytes.
    """

    num_ranks: int
    ranks_per_node: int
    source: torch.Tensor
    destination: torch.Tensor
    num_bytes: torch.Tensor
    num_overlaps: torch.Tensor
    local: torch.Tensor

    @property
    def sent(self) -> torch.Tensor:
        """Bytes each rank sends to others, int64 [num_ranks]."""
        return self._by_rank(self.source, self.num_bytes)

    @property
    def received(self) -> torch.Tensor:
        """Bytes each rank receives from others, int64 [num_ranks]."""
        return self._by_rank(self.destination, self.num_bytes)

    @property
    def crosses(self) -> torch.Tensor:
        """True for pairs on two nodes, bool [num_pairs]."""
        return self.source // self.ranks_per_node != self.destination // self.ranks_per_node

    def num_messages(self, bucket_bytes: int) -> int:
        """Return the number of messages if each pair fills buckets one after another."""
        return int(((self.num_bytes + bucket_bytes - 1) // bucket_bytes).sum())

    def _by_rank(self, ranks: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.zeros(self.num_ranks, dtype=torch.int64).index_add_(0, ranks, values)


class _Pairs(NamedTuple):
    """Runs of overlaps between two ranks; int64 [num_runs] each."""

    source: torch.Tensor
    destination: torch.Tensor
    num_bytes: torch.Tensor
    num_overlaps: torch.Tensor


def traffic_table(plan: ReshardPlan) -> TrafficTable:
    """Return the table of a plan; a rank's row sums are `plan.traffic(rank)`."""
    # Many small tensors kept between large freed ones would fragment memory; plain arrays do not.
    columns = [array("q") for _ in _Pairs._fields]
    for run in chain(_across_nodes(plan), _within_nodes(plan)):
        for column, values in zip(columns, run):
            column.extend(values.tolist())
    source, destination, num_bytes, num_overlaps = (torch.tensor(column, dtype=torch.int64) for column in columns)
    # One number per pair, ordered by destination and then source.
    pairs, index = torch.unique(destination * plan.num_ranks + source, return_inverse=True)
    return TrafficTable(
        num_ranks=plan.num_ranks,
        ranks_per_node=plan.ranks_per_node,
        source=pairs % plan.num_ranks,
        destination=pairs // plan.num_ranks,
        num_bytes=torch.zeros_like(pairs).index_add_(0, index, num_bytes),
        num_overlaps=torch.zeros_like(pairs).index_add_(0, index, num_overlaps),
        local=_local(plan),
    )


def _local(plan: ReshardPlan) -> torch.Tensor:
    local = torch.zeros(plan.num_ranks, dtype=torch.int64)
    for receiver, ranks in plan.receiver_classes.items():
        requested = plan.requested(receiver.group).items()
        local[ranks] = sum(request.num_bytes for groups, request in requested if receiver.own in groups)
    return local


def _across_nodes(plan: ReshardPlan) -> Iterator[_Pairs]:
    for receiver, ranks in plan.receiver_classes.items():
        for groups, request in plan.requests(receiver)[1].items():
            yield _runs(plan.balancer((ANYWHERE, groups)), request, ranks)


def _within_nodes(plan: ReshardPlan) -> Iterator[_Pairs]:
    """Nodes whose ranks hold and want the same have the same pairs, shifted."""
    size = plan.ranks_per_node
    alike: dict[tuple[object, ...], list[int]] = {}
    for node in range(-(-plan.destination.num_ranks // size)):
        alike.setdefault(plan.node_content(node), []).append(node)
    for nodes in alike.values():
        first = nodes[0]
        found = [
            _runs(plan.balancer(key), request, [rank])
            for rank in range(first * size, min((first + 1) * size, plan.destination.num_ranks))
            for key, request in plan.requests_of(rank)
            if key[0] == first
        ]
        shifts = (torch.tensor(nodes) - first) * size
        yield from (_shifted(pairs, shifts) for pairs in found)


def _shifted(pairs: _Pairs, shifts: torch.Tensor) -> _Pairs:
    return _Pairs(
        (pairs.source[None, :] + shifts[:, None]).flatten(),
        (pairs.destination[None, :] + shifts[:, None]).flatten(),
        pairs.num_bytes.repeat(len(shifts)),
        pairs.num_overlaps.repeat(len(shifts)),
    )


def _runs(balancer: LoadBalancer, request: SliceRequest, ranks: list[int]) -> _Pairs:
    """Runs of overlaps that one holder serves, for destinations `ranks` that all have this request."""
    sizes, members = torch.tensor(request.sizes), torch.tensor(balancer.members)
    keys = torch.arange(len(ranks))[:, None] * len(members) + _holders(balancer, request, ranks)
    runs, counts = torch.unique_consecutive(keys.flatten(), return_counts=True)
    ends = counts.cumsum(0)
    total = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.repeat(len(ranks)).cumsum(0)])
    destination = torch.tensor(ranks)[runs // len(members)]
    return _Pairs(members[runs % len(members)], destination, total[ends] - total[ends - counts], counts)


def _holders(balancer: LoadBalancer, request: SliceRequest, ranks: Iterable[int]) -> torch.Tensor:
    """Index among the balancer's members of the one that serves each overlap of each rank, [ranks, overlaps]."""
    starts, count, total = [balancer.start(rank) for rank in ranks], len(balancer.members), balancer.num_bytes
    if 2 * total * count < _EXACT:
        doubled = 2 * torch.tensor(starts)[:, None] + torch.tensor(request.middles)[None, :]
        return doubled * count // (2 * total)
    # Python's integers: these products overflow an int64.
    return torch.tensor([[(2 * start + m) * count // (2 * total) for m in request.middles] for start in starts])
