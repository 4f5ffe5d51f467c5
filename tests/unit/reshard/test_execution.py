"""Order of the exchange: buckets of both ends are equal, and no rank waits for one that waits for it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch

from megatron_dapo.reshard import execution
from megatron_dapo.reshard.execution import execute_transfers
from megatron_dapo.reshard.layout import Shard
from megatron_dapo.reshard.planner import Transfer
from megatron_dapo.reshard.slices import Slice


class Message(NamedTuple):
    sender: int
    receiver: int
    sizes: tuple[int, ...]  # elements of its transfers


def _transfer(number: int, size: int, source: int, destination: int) -> Transfer:
    shard = Shard(f"t{number}", (0,), (size,), f"t{number}", (0,))
    return Transfer(shard.tensor, Slice((0,), (size,)), source, destination, shard, shard)


def _random_transfers(chosen: random.Random, num_ranks: int) -> list[Transfer]:
    """Return transfers of any number between any two ranks, small and larger than a bucket."""
    sizes = [1, 3, 1_000, (1 << 18) - 1, 1 << 18, 3 << 18, 5 << 20]
    ends = [(a, b) for a in range(num_ranks) for b in range(num_ranks) if chosen.random() < 0.6]
    return [
        _transfer(number, chosen.choice(sizes), *chosen.choice(ends))
        for number in range(chosen.randrange(60) * bool(ends))
    ]


def _operations(
    transfers: Sequence[Transfer], rank: int, num_ranks: int, patch: pytest.MonkeyPatch
) -> list[tuple[Message, ...]]:
    """Return what a rank sends and receives at a time, one tuple after the other."""
    found: list[tuple[Message, ...]] = []

    def note(dtype_of, send, receive, to, source, sources, destinations, group) -> tuple[int, int]:
        ends = ((rank, to, send), (source, rank, receive))
        found.append(tuple(Message(a, b, tuple(t.bounds.volume for t in bucket)) for a, b, bucket in ends if bucket))
        return 0, 0

    patch.setattr(execution, "_exchange", note)
    patch.setattr(execution, "_copy_local", lambda *arguments: 0)
    patch.setattr(execution.dist, "get_world_size", lambda group: num_ranks)
    patch.setattr(execution.dist, "get_rank", lambda group: rank)
    receives = [each for each in transfers if each.destination == rank]
    sends = [each for each in transfers if each.source == rank]
    execute_transfers(receives, sends, lambda name: torch.float32, {}, {}, object(), bucket_bytes=4 << 20)  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("seed", range(40))
def test_every_rank_ends_where_a_message_waits_for_both_its_ends(seed: int, monkeypatch: pytest.MonkeyPatch):
    chosen = random.Random(seed)
    num_ranks = chosen.randrange(2, 9)
    transfers = _random_transfers(chosen, num_ranks)
    waiting = [_operations(transfers, rank, num_ranks, monkeypatch) for rank in range(num_ranks)]
    crossing = [each for each in transfers if each.source != each.destination]
    sent = [m for rank, rest in enumerate(waiting) for now in rest for m in now if m.sender == rank]
    assert sum(len(message.sizes) for message in sent) == len(crossing)
    assert all(sum(message.sizes) <= 1 << 20 or len(message.sizes) == 1 for message in sent)
    # A large one travels without a copy, which only a separate message allows.
    assert not [message for message in sent if max(message.sizes) >= 1 << 18 and len(message.sizes) > 1]
    # Ranks go on in any order; a message ends once both its ends are at it, as a send without a buffer does.
    open_ends: list[set[Message]] = [set(rest[0]) if rest else set() for rest in waiting]
    while any(waiting):
        met = [
            m for rank in range(num_ranks) for m in open_ends[rank] if m.sender == rank and m in open_ends[m.receiver]
        ]
        assert met, f"{sum(map(len, waiting))} steps are left and no rank can go on"
        message = chosen.choice(met)
        for rank in (message.sender, message.receiver):
            open_ends[rank].discard(message)
            if not open_ends[rank]:
                waiting[rank].pop(0)
                open_ends[rank] = set(waiting[rank][0]) if waiting[rank] else set()
