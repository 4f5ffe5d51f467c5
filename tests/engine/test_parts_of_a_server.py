"""A stock server of two tensor ranks, each on its own node: network namespaces with a cable between them, made here."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tools.virtual_cluster import unavailable

# tests/unit/engines/sglang/test_lifeline.py ends the parts with each other; test_p2p_weight_sync.py has two ranks on one node.
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
ADDRESSES = ("10.91.0.1", "10.91.0.2")
# A node's own shared memory: ranks must not believe that they are neighbors.
IN_NODE = ["unshare", "--mount", "--ipc", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh"]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def nodes() -> Iterator[list[str]]:
    """The names of two network namespaces that reach each other and nothing else."""
    if reason := unavailable():
        pytest.skip(f"no network namespaces on this machine: {reason}")
    names = [f"part-{secrets.token_hex(3)}-{index}" for index in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("-n", names[0], "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@pytest.fixture
def start_part(
    nodes: list[str], engine_python: Path, key_file: Path, tiny_model_untied: Path, tmp_path: Path
) -> Iterator[Callable[[int], subprocess.Popen[str]]]:
    """`start_part(node)`: the program of that node."""
    started = []

    def start(node: int) -> subprocess.Popen[str]:
        fields = {
            "python": str(engine_python),
            "model_path": str(tiny_model_untied),
            "key_file": str(key_file),
            "log_dir": str(tmp_path),
            "tensor_parallel": 2,
            "num_nodes": 2,
            "node_rank": node,
            "host": ADDRESSES[node],
            "max_total_tokens": 4096,
            "random_weights": True,
            "start_timeout_s": 400.0,
            "meeting_file": str(tmp_path / "meeting"),
        }
        program = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("part_of_server.py")), json.dumps(fields)]
        started.append(
            subprocess.Popen(
                ["ip", "netns", "exec", nodes[node], *IN_NODE, *program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=(tmp_path / f"node_{node}.log").open("w"),
                text=True,
                env={**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"},
            )
        )
        return started[-1]

    yield start
    for process in started:
        assert process.stdin is not None
        process.stdin.close()
    for process in started:
        process.wait(60)


def heard(process: subprocess.Popen[str], log: Path) -> dict[str, Any]:
    """Return the next line of a part's program."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, log.read_text()[-4000:]
    return json.loads(line)


def test_two_parts_serve_what_both_were_given_and_end_together(start_part: Callable[[int], Any], tmp_path: Path) -> None:
    parts, logs = [start_part(node) for node in range(2)], [tmp_path / f"node_{node}.log" for node in range(2)]
    first, second = (heard(part, log) for part, log in zip(parts, logs, strict=True))
    assert first["up"] and second["up"]
    assert max(heard(parts[0], logs[0])["gaps"]) < 1e-4
    os.kill(second["pid"], signal.SIGKILL)
    parts[0].stdin.write("60\n")
    parts[0].stdin.flush()
    end = heard(parts[0], logs[0])
    assert not end["alive"] and end["seconds"] < 30, "a collective would wait for minutes"
    assert f"the part of this server at {ADDRESSES[1]} has ended" in end["reason"]
    assert {path.name for path in tmp_path.glob("engine_*.log")} == {"engine_0.log", "engine_0_node_1.log"}
