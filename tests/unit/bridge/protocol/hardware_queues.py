"""A model of the GPUs of a weight sync by NCCL: what a hardware queue lets run, and when.

A sender has one communicator an engine, and each communicator one stream. Streams share the GPU's hardware queues, of which
CUDA_DEVICE_MAX_CONNECTIONS=1 leaves one. A queue issues kernels in the order of their launch, each once the kernel before it
in its stream is complete: until then it holds back all that follow, also those of other streams. The kernel of a send runs
while the receiver's kernel of that bucket does, which waits for all senders of the bucket and starts after the one before it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Item:
    """One bucket of one engine rank."""

    index: int
    engine: int
    engine_rank: int
    num_bytes: Mapping[int, float] = field(hash=False)  # sender -> its part


Launches = Mapping[int, Sequence[Item]]  # sender -> what it launches, in order


def seconds(items: Sequence[Item], launches: Launches, num_queues: int = 1) -> float | None:
    """Return when the last byte has arrived, None if all wait for each other.

    Every sender sends, and every engine rank receives, 1 byte a second, shared evenly by the kernels that run there.
    """
    receives: dict[int, list[Item]] = defaultdict(list)
    for item in sorted(items, key=lambda item: item.index):
        receives[item.engine_rank].append(item)
    queues = {
        (sender, queue): [item for item in launched if item.engine % num_queues == queue]
        for sender, launched in launches.items()
        for queue in range(num_queues)
    }
    running: dict[tuple[int, int], Item] = {}  # (sender, engine) -> kernel of the stream
    left = {(sender, item): amount for item in items for sender, amount in item.num_bytes.items()}
    now = 0.0
    while left:
        for (sender, _), queue in queues.items():
            while queue and (sender, queue[0].engine) not in running:
                item = queue.pop(0)
                running[sender, item.engine] = item
        moving = [(s, item) for (s, _), item in running.items() if receives[item.engine_rank][0] == item]
        if not moving:
            return None
        sends, arrivals = defaultdict(int), defaultdict(int)
        for sender, item in moving:
            sends[sender] += 1
            arrivals[item.engine_rank] += 1
        rates = {(s, item): min(1 / sends[s], 1 / arrivals[item.engine_rank]) for s, item in moving}
        step = min(left[key] / rate for key, rate in rates.items())
        now += step
        for (sender, item), rate in rates.items():
            left[sender, item] -= rate * step
            if left[sender, item] <= 1e-9 * item.num_bytes[sender]:
                del left[sender, item], running[sender, item.engine]
        for queue in receives.values():
            while queue and not any((sender, queue[0]) in left for sender in queue[0].num_bytes):
                queue.pop(0)
    return now
