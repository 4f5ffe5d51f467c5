"""Senders that launch buckets in one order never wait for each other, on however few hardware queues, and lose no time."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from megatron_dapo.bridge.protocol.p2p_stream import LaunchOrder, Position
from megatron_dapo.bridge.protocol.peer_group import PeerError
from tests.unit.bridge.protocol.hardware_queues import Item, Launches, seconds

NUM_PLANS = 40


def plan(draw: random.Random) -> list[Item]:
    """Buckets of 2 to 4 engines of one or two ranks, each from some of 2 to 4 senders."""
    senders, size = range(draw.randint(2, 4)), draw.choice((1, 2))
    ranks = range(draw.randint(2, 4) * size)
    # More than one writer for a third of the buckets, as in a plan from TP4 PP2 to TP4.
    writers = [draw.sample(senders, draw.choice((1, 1, len(senders)))) for _ in range(24)]
    return [
        Item(index, rank // size, rank, {sender: 1.0 / len(chosen) for sender in chosen})
        for rank in ranks
        for index, chosen in enumerate(writers[: draw.randint(8, 24)])
    ]


def by_position(items: Sequence[Item]) -> Launches:
    ordered = sorted(items, key=lambda item: (item.index, item.engine, item.engine_rank))
    senders = sorted({sender for item in items for sender in item.num_bytes})
    return {sender: [item for item in ordered if sender in item.num_bytes] for sender in senders}


def by_threads(items: Sequence[Item], draw: random.Random) -> Launches:
    """The order of one free thread an engine."""

    def merged(launched: Sequence[Item]) -> Iterator[Item]:
        streams = {engine: [item for item in launched if item.engine == engine] for engine in {i.engine for i in launched}}
        while streams := {engine: stream for engine, stream in streams.items() if stream}:
            stream = draw.choice(list(streams.values()))
            for _ in range(draw.randint(1, 8)):
                if stream:
                    yield stream.pop(0)

    return {sender: list(merged(launched)) for sender, launched in by_position(items).items()}


def test_free_threads_deadlock_on_one_queue_and_one_order_never_does() -> None:
    plans = [plan(random.Random(seed)) for seed in range(NUM_PLANS)]
    free = [by_threads(items, random.Random(seed)) for seed, items in enumerate(plans)]
    deadlocks = [seconds(items, launches) is None for items, launches in zip(plans, free)]
    assert sum(deadlocks) > 0.9 * NUM_PLANS
    assert all(seconds(items, launches, num_queues=8) for items, launches in zip(plans, free))
    for num_queues in (1, 2, 8):
        assert all(seconds(items, by_position(items), num_queues) for items in plans)


def test_one_order_on_one_queue_takes_no_longer_than_free_threads_on_many() -> None:
    in_order = free = one_by_one = 0.0
    for seed in range(NUM_PLANS):
        items = plan(random.Random(seed))
        in_order += seconds(items, by_position(items)) or float("inf")
        free += seconds(items, by_threads(items, random.Random(seed)), num_queues=8) or float("inf")
        engine_after_engine = {
            sender: sorted(launched, key=lambda item: item.engine) for sender, launched in by_position(items).items()
        }
        one_by_one += seconds(items, engine_after_engine) or float("inf")
    assert in_order < free
    # Why indices come before engines: one engine after the other would leave receivers idle.
    assert one_by_one > 1.15 * in_order


def launch_all(order: LaunchOrder, positions: Sequence[Position], launch: Callable[[Position], None]) -> None:
    """One thread an engine, each through its positions and then out of the order."""

    def run(engine: int) -> None:
        for position in positions:
            if position[1] == engine:
                with order.turn(position, time.monotonic() + 30):
                    launch(position)
        order.leave(engine)

    threads = [threading.Thread(target=run, args=(engine,)) for engine in {engine for _, engine, _ in positions}]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


@pytest.mark.parametrize("seed", range(5))
def test_threads_launch_by_position(seed: int) -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        draw, launched = random.Random(seed), list[Position]()
        positions = [(index, e, 2 * e + n) for index in range(40) for e in range(4) for n in (0, 1) if draw.random() < 0.6]
        launch_all(LaunchOrder(range(4)), positions, launched.append)
    finally:
        sys.setswitchinterval(interval)
    assert launched == positions == sorted(positions)


def test_an_engine_that_fails_holds_nobody_back() -> None:
    order, launched = LaunchOrder((0, 1, 2)), list[Position]()
    order.leave(0)  # It has launched nothing, like one that did not join.
    launch_all(order, [(0, 1, 1), (0, 2, 2), (1, 1, 1)], launched.append)
    assert launched == [(0, 1, 1), (0, 2, 2), (1, 1, 1)]


def test_an_engine_that_never_comes_holds_the_others_until_the_deadline() -> None:
    order = LaunchOrder((0, 1))
    with pytest.raises(PeerError, match="bucket 3 still waits for those of engine 0"):
        with order.turn((3, 1, 1), time.monotonic() + 0.01):
            raise AssertionError("launched")


def test_independent_connections_need_no_order() -> None:
    order = LaunchOrder(())
    with order.turn((7, 0, 0), 0.0), order.turn((3, 1, 1), 0.0):
        pass
