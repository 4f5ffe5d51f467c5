"""Connections, bytes, memory and seconds of a run's start and of a weight sync at 128, 1,024 and 16,384 ranks.

    python benchmarks/scale_start.py [--json] [--tiny] [--real] [--namespaces]

Each figure is the worst of several ranks (rank 0, first ranks of nodes low and high in the tree, others), each in a
process of its own with the run's own classes and stand-ins for all other ranks (`scale/one_rank.py`). Counted are the
groups of `Coordination`, those that carry forwarded weights, and an estimate of NCCL's; torch's own store and the HTTP
connections by which rank 0 generates are not. The check starts 2 and 4 nodes of 2 processes over gloo, as real and as
simulated ranks, and compares every rank's payload bytes, messages and connections; with `--namespaces` (root) each node is
a network namespace, and the bytes of the nodes' interfaces are compared with the payload that left them.

    max_connections    to other nodes
    gb_N               a rank's own memory after start and one sync: plans, groups, coordination
    update_mb_N        sent and received by coordination in one weight sync, the commands to a node's own servers included
    seconds_N          Python of start and one sync by the clock, to be read on an idle machine
    cpu_seconds_N      the same in CPU time of the process, which other load on the machine hardly changes

N counts GPUs. Both ways of placing engines are measured (`LAYOUTS`): on the trainer's GPUs through shared memory, and on
separate GPUs by point-to-point, with half of the GPUs training.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import options

ROOT = Path(__file__).resolve().parents[1]
LAYOUT = "examples/layouts/colocated_16nodes.toml"
LAYOUTS = {
    "colocated": (LAYOUT, 8),
    "disaggregated": ("examples/layouts/disaggregated_16nodes.toml", 4),
}  # ranks a node
SIZES = (128, 1024, 16384)
GPUS_PER_NODE = 8
DEADLINE_S = 300.0
# Groups whose NCCL communicators a step creates: torch makes them at their first collective.
NCCL_GROUPS = (
    "default_pg",
    "DATA_PARALLEL_GROUP_WITH_CP",
    "MODEL_PARALLEL_GROUP",
    "PIPELINE_MODEL_PARALLEL_GROUP",
    "EMBEDDING_GROUP",
    "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP",
)
# Of one communicator: two neighbors in the ring, four in the double binary tree, two of the bootstrap.
NCCL_PEERS = 8
SMALL = (
    "parallel.tp_size=2",
    "parallel.pp_size=2",
    "sglang.tp_size=1",
    "sglang.servers_per_node=2",
)


def positions(num_ranks: int, per_node: int) -> list[int]:
    """Return rank 0, the first of the second node, another first one of the highest group of the tree, and two others."""
    return [0, per_node - 1, per_node, num_ranks // 2, num_ranks - 1]


def case_of(rank: int, num_ranks: int, **changes: Any) -> dict[str, Any]:
    """Return the description of one rank for `scale.one_rank`."""
    case = {
        "ranks": num_ranks,
        "rank": rank,
        "per_node": GPUS_PER_NODE,
        "recipe": str(ROOT / LAYOUT),
        "overrides": [],
        "layers": 64,
        "host": "127.0.0.1",
        "store": "",
    }
    return {**case, **changes}


def start(case: dict[str, Any], prefix: Sequence[str] = ()) -> subprocess.Popen[str]:
    """Start the process of one rank."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    if case.get("interface"):
        environment["GLOO_SOCKET_IFNAME"] = case["interface"]
    command = [*prefix, sys.executable, __file__, "--case", json.dumps(case)]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Return what a rank's process found. RuntimeError with the end of its log if it failed."""
    try:
        output, log = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    if process.returncode:
        raise RuntimeError(f"a rank ended with code {process.returncode}:\n{log[-3000:]}")
    return json.loads(output.splitlines()[-1])


def simulate(num_ranks: int, ranks: Sequence[int], **changes: Any) -> list[dict[str, Any]]:
    """Return what some ranks of a simulated run find, one process after the other: their seconds count."""
    return [finish(start(case_of(rank, num_ranks, **changes))) for rank in ranks]


def nccl_connections(one: dict[str, Any]) -> int:
    """Estimate the connections to other nodes of a rank's NCCL communicators, those to an engine's ranks included."""
    return one["nccl_p2p"] + sum(min(NCCL_PEERS, one["groups"].get(name, 0)) for name in NCCL_GROUPS)


def summary(found: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the worst of some ranks."""

    def update_bytes(one: dict[str, Any]) -> int:
        kinds = ("coordination", "commands")
        return sum(one[way].get(kind, 0) for way in ("sent", "received") for kind in kinds)

    return {
        "connections": max(one["connections_away"] + nccl_connections(one) for one in found),
        "connections_coordination": max(one["connections_away"] for one in found),
        "connections_nccl_estimate": max(nccl_connections(one) for one in found),
        "connections_of": [one["connections_away"] + nccl_connections(one) for one in found],
        "gb": max(one["gb"] for one in found),
        "update_mb": max(map(update_bytes, found)) / 1e6,
        "messages": max(sum(one["messages"].values()) for one in found),
        "seconds": max(one["seconds"]["start"] for one in found),
        "cpu_seconds": max(one["seconds"]["cpu"] for one in found),
        "seconds_update": max(one["seconds"]["update"] for one in found),
    }


def check(num_nodes: int, layers: int, namespaces: bool) -> dict[str, Any]:
    """Compare real ranks on `num_nodes` nodes of 2 processes with simulated ones."""
    num_ranks, per_node = 2 * num_nodes, 2
    changes = {"per_node": per_node, "overrides": list(SMALL), "layers": layers}
    with ExitStack() as stack:
        hosts, prefixes, interface = ["127.0.0.1"] * num_nodes, [[]] * num_nodes, ""
        if namespaces:
            nodes = stack.enter_context(Namespaces(num_nodes))
            hosts, prefixes, interface = nodes.addresses, nodes.prefixes, "eth0"
        store = f"{hosts[0]}:{29500 if namespaces else free_port()}"
        processes = []
        for rank in range(num_ranks):
            node = rank // per_node
            case = case_of(rank, num_ranks, store=store, host=hosts[node], interface=interface, **changes)
            processes.append(start(case, prefixes[node]))
            stack.callback(processes[-1].kill)
        with ThreadPoolExecutor(num_ranks) as pool:
            real = list(pool.map(finish, processes))
    simulated = simulate(num_ranks, range(num_ranks), **changes)
    kinds = ("sent", "sent_away", "received", "messages")
    differences = [
        abs(ours[kind].get(what, 0) - theirs[kind].get(what, 0))
        for ours, theirs in zip(real, simulated)
        for kind in kinds
        for what in ("coordination", "forwarding")
    ]
    result = {
        "payload_bytes": sum(sum(one["sent"].values()) for one in real),
        "bytes_difference": max(differences),
        "connections_difference": max(abs(a["connections"] - b["connections"]) for a, b in zip(real, simulated)),
        # Beside the counted ones a process has those of torch: a store, the default group and listeners.
        "sockets": [one["sockets"] for one in real],
        "sockets_counted": [one["connections"] for one in real],
    }
    if namespaces:
        # All ranks of a node see the counters of one interface.
        away = [
            sum(one["sent_away"].get(k, 0) for k in ("coordination", "forwarding") for one in real[i : i + 2])
            for i in range(0, num_ranks, 2)
        ]
        result["payload_left_node"] = away
        result["interface_sent"] = [real[i]["interface"][1] for i in range(0, num_ranks, 2)]
        result["interface_ratio"] = max(s / a for s, a in zip(result["interface_sent"], away))
    return result


def free_port() -> int:
    """Return a port of loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Namespaces:
    """Network namespaces on a private bridge; all are removed at the end. Needs root and iproute2."""

    def __init__(self, num_nodes: int) -> None:
        self._names = [f"scale{os.getpid()}-{node}" for node in range(num_nodes)]
        self._switch = f"scale{os.getpid()}-sw"
        self.addresses = [f"10.78.0.{10 + node}" for node in range(num_nodes)]
        self.prefixes = [["ip", "netns", "exec", name] for name in self._names]

    def __enter__(self) -> Namespaces:
        try:
            _ip("netns", "add", self._switch)
            _ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
            _ip("-n", self._switch, "link", "set", "br0", "up")
            for number, (name, address) in enumerate(zip(self._names, self.addresses)):
                _ip("netns", "add", name)
                _ip(
                    "-n",
                    name,
                    "link",
                    "add",
                    "eth0",
                    "type",
                    "veth",
                    "peer",
                    "name",
                    f"port{number}",
                    "netns",
                    self._switch,
                )
                _ip("-n", self._switch, "link", "set", f"port{number}", "master", "br0", "up")
                _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
                for device in ("lo", "eth0"):
                    _ip("-n", name, "link", "set", device, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in (*self._names, self._switch):
            subprocess.run(["ip", "netns", "delete", name], check=False, stderr=subprocess.DEVNULL)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def main() -> None:
    parser = options.parser(__doc__, "rank 0 of 128 and the check of 2 nodes")
    parser.add_argument("--real", action="store_true", help="only the check of 2 and 4 nodes")
    parser.add_argument(
        "--namespaces", action="store_true", help="a network namespace for each node of the check (root)"
    )
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        from benchmarks.scale.one_rank import run

        print(json.dumps(run(json.loads(arguments.case))), flush=True)
        os._exit(0)  # groups whose other ends are gone need no farewell
    sizes: Sequence[int] = () if arguments.real else SIZES[:1] if arguments.tiny else SIZES
    layers = 4 if arguments.tiny else 16
    result: dict[str, Any] = {}
    for size in sizes:
        for name, (layout, per_node) in LAYOUTS.items():
            ranks = size * per_node // GPUS_PER_NODE
            chosen = [0] if arguments.tiny else positions(ranks, per_node)
            found = simulate(ranks, chosen, recipe=str(ROOT / layout), per_node=per_node)
            result[f"{name}_{size}"] = {"ranks": chosen, **summary(found)}
        for key in ("gb", "update_mb", "seconds", "cpu_seconds"):
            result[f"{key}_{size}"] = max(result[f"{name}_{size}"][key] for name in LAYOUTS)
    if sizes:
        result["max_connections"] = max(result[f"{name}_{size}"]["connections"] for name in LAYOUTS for size in sizes)
    checks = {f"nodes_{n}": check(n, layers, arguments.namespaces) for n in ((2,) if arguments.tiny else (2, 4))}
    result.update(checks)
    result["bytes_difference"] = max(one["bytes_difference"] for one in checks.values())
    options.show(result, arguments)


if __name__ == "__main__":
    main()
