"""Forwards the frames of one cable of the virtual cluster, with delay and loss as its standard input says.

The cable leaves the switch and the forwarder stands between both until its standard input is closed. Kernels without netem
have no other delay.
"""

from __future__ import annotations

import heapq
import json
import os
import random
import select
import socket
import subprocess
import sys
import time

_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 263, 15, 23  # linux/if_packet.h
_ETH_P_ALL = 3
_FRAME = 1 << 17
SEED = 0


def stand_between(cable: str) -> None:
    """Forward the frames of a cable, in the switch's network namespace, until standard input ends."""
    inner, outer = "fw-in", "fw-out"
    # Frames of a cable that is in the bridge never reach a socket before the bridge has them: it leaves the bridge.
    _ip("link", "add", inner, "type", "veth", "peer", "name", outer)
    for name in (inner, outer):
        _ip("link", "set", name, "up")
    ends = [_socket(cable), _socket(inner)]
    _ip("link", "set", cable, "nomaster")
    _ip("link", "set", outer, "master", "switch")
    try:
        forward(ends, sys.stdin.fileno())
    finally:
        _ip("link", "del", inner)
        _ip("link", "set", cable, "master", "switch")


def forward(ends: list[socket.socket], control: int) -> None:
    """Forward frames between two sockets until the pipe `control` is closed; its lines set delay and loss."""
    draw = random.Random(SEED)
    delay_s, loss = 0.0, 0.0
    queue: list[tuple[float, int, int, bytes]] = []  # when, order, to which end, frame
    number = 0
    print("ready", flush=True)
    while True:
        wait = max(0.0, queue[0][0] - time.monotonic()) if queue else None
        ready = select.select([control, *ends], [], [], wait)[0]
        now = time.monotonic()
        if control in ready:
            line = os.read(control, 4096)
            if not line:
                return
            setting = json.loads(line)
            delay_s, loss = setting["delay_s"], setting["loss"]
        for index, end in enumerate(ends):
            if end in ready:
                frame = end.recv(_FRAME)
                if draw.random() >= loss:
                    number += 1
                    heapq.heappush(queue, (now + delay_s, number, 1 - index, frame))
        while queue and queue[0][0] <= time.monotonic():
            _, _, to, frame = heapq.heappop(queue)
            try:
                ends[to].send(frame)
            except OSError:
                pass  # a full queue drops frames, as a switch does


def _socket(name: str) -> socket.socket:
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
    # Frames between namespaces have neither checksums nor the size of a wire's frames: the header before each says so.
    end.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    end.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    end.bind((name, 0))
    return end


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
