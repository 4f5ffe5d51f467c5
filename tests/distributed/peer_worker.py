"""Program of each process of test_peer_group.py: `python peer_worker.py SCENARIO RANK SIZE HOST PORT NAME`.

Prints one JSON object: what happened, and the seconds it took.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch

from megatron_dapo.bridge.protocol.peer_group import Address, PeerError, PeerGroup, join

PATIENCE_S = 60.0  # deadline of a member that waits for a failure, which must come sooner
NUM_ELEMENTS = 1 << 20
JOIN_S = 60.0


def ring(group: PeerGroup) -> str:
    """Send three messages from every member to every other concurrently; order and values hold."""
    others = [peer for peer in range(group.size) if peer != group.rank]
    sent = [(torch.full((1000,), float(10 * group.rank + i)), to) for to in others for i in range(3)]
    received = [(torch.zeros(1000), source, i) for source in others for i in range(3)]
    deadline = time.monotonic() + PATIENCE_S
    pending = [group.receive(tensor, source) for tensor, source, _ in received]
    pending += [group.send(tensor, to) for tensor, to in sent]
    for message in pending:
        message.wait(deadline)
    for tensor, source, i in received:
        assert bool((tensor == 10 * source + i).all()), (source, i, tensor[0])
    return "ok"


def dies(group: PeerGroup) -> str:
    """Member 1 dies while member 0 waits for it; member 2 waits for 0 and fails when 0 closes."""
    if group.rank == 1:
        time.sleep(0.5)
        os._exit(9)
    return _fails(group, {0: 1, 2: 0}[group.rank], PATIENCE_S)


def closes(group: PeerGroup) -> str:
    """Member 1 closes its group but stays alive, while 0 waits for it and 2 receives from it."""
    if group.rank == 1:
        time.sleep(0.5)
        held = [group.send(torch.zeros(NUM_ELEMENTS), 2), group.receive(torch.zeros(NUM_ELEMENTS), 0)]
        group.close()
        others_are_done()
        return f"closed with {len(held)} messages under way"
    return _fails(group, 1, PATIENCE_S)


def late(group: PeerGroup) -> str:
    """Member 1 stays silent: member 0 gives up at its own deadline, and member 2, which waits for 0, right after it."""
    if group.rank == 1:
        others_are_done()
        return "slept"
    return _fails(group, 1, 2.0) if group.rank == 0 else _fails(group, 0, PATIENCE_S)


def absent(group: PeerGroup) -> str:
    raise AssertionError("a group with an absent member was joined")


def others_are_done() -> None:
    """Wait for the end of input: the parent closes it when the other members are done."""
    sys.stdin.read()


def _fails(group: PeerGroup, peer: int, seconds: float) -> str:
    try:
        while True:
            tensor = torch.zeros(NUM_ELEMENTS)
            group.receive(tensor, peer).wait(time.monotonic() + seconds)
    except PeerError as error:
        return str(error)
    finally:
        group.close()


SCENARIOS = {f.__name__: f for f in (ring, dies, closes, late, absent)}


def main() -> None:
    scenario, rank, size, host, port, name = sys.argv[1:]
    torch.set_num_threads(1)
    start = time.monotonic()
    try:
        timeout_s = 4.0 if scenario == "absent" else JOIN_S
        group = join(Address(host, int(port)), name, int(rank), int(size), timeout_s=timeout_s)
        start = time.monotonic()
        outcome = SCENARIOS[scenario](group)
    except PeerError as error:
        outcome = f"join: {error}"
    print(json.dumps({"outcome": outcome, "seconds": time.monotonic() - start}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
