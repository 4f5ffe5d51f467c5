"""Start and weight syncs of one rank of a run: its groups, servers and plans, made by the classes that a run uses.

Simulated: the default group is torch's fake one, and the other ranks are stand-ins that answer as healthy ones would. Real:
the process is one of `ranks` over gloo. Either way the servers are stand-ins in the leaders' processes, which take every
bucket and answer with the checksums of zeros: the weights are zeros of a model with the layers and the proportions of
Qwen2.5-32B at a 16th of its widths (a 256th of the bytes, buckets as well), so that the plans are of full size.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.scale.ledger import CountedGroup, CountedPeers, Ledger, Neighbors
from megatron_dapo.bridge.protocol import peer_group
from megatron_dapo.bridge.protocol.arena import Arena, ArenaSpec, create_arena
from megatron_dapo.bridge.protocol.messages import Command, CommandReply, Manifest
from megatron_dapo.bridge.sync_plan import ExpectedChecksums
from megatron_dapo.bridge.transports import shared_memory
from megatron_dapo.bridge.transports.base import TransferResult
from megatron_dapo.bridge.transports.p2p import P2PTransport
from megatron_dapo.checkpoints.layouts.megatron import megatron_layout
from megatron_dapo.config.loader import load_config
from megatron_dapo.megatron.parallel_state import initialize_parallel_state
from megatron_dapo.models.config_json import read_architecture
from megatron_dapo.parallel import coordination
from megatron_dapo.parallel.rank0_commands import Rank0Commands
from megatron_dapo.trainer import connect_engines, start_engines
from megatron_dapo.trainer.topology import run_topology

MODEL = {
    "model_type": "qwen2",
    "vocab_size": 9504,
    "hidden_size": 320,
    "intermediate_size": 1728,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
SCALE = 256  # divisor of byte sizes
ENOUGH = 1 << 40  # buckets that a stand-in claims to have loaded


class StandInServer:
    """A server that takes all weights at once. Control of it, and its registry entry."""

    def __init__(self, index: int, ledger: Ledger) -> None:
        self.url = f"http://10.0.0.1:{30000 + index % 30000}"
        self._ledger = ledger
        self._arenas: dict[str, Arena] = {}
        self._manifests: list[Manifest] = []

    def update_weights_from_tensor(self, payloads: Sequence[bytes], load_format: str, **_: Any) -> None:
        """Count the message and reply that every parameter is zero."""
        self._ledger.sent["commands"] += sum(map(len, payloads))
        self._ledger.messages["commands"] += 1
        for number, payload in enumerate(payloads):
            commands = [Command.decode(text) for text, _ in pickle.loads(payload)]
            spec = ArenaSpec.from_json(commands[0].channel["arena"])
            if commands[0].manifest is not None:
                self._manifests[number:] = [commands[0].manifest]
            if spec.path not in self._arenas:
                self._arenas[spec.path] = Arena(spec)
            arena, manifest, last = self._arenas[spec.path], self._manifests[number], commands[-1]
            arena.progress.count_loaded(ENOUGH)
            checksums = dict.fromkeys(manifest.parameters, 0)
            reply = CommandReply(last.id, last.op, ok=True, version=manifest.version, checksums=checksums)
            arena.write_reply(reply.encode())

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None  # pause, flush, resume, stop, ...

    def is_alive(self) -> bool:
        """Return True."""
        return True

    def wait_until_healthy(self) -> Any:
        """Return at once."""
        return SimpleNamespace(api_version=None, max_total_tokens=None)


class CountedP2P(P2PTransport):
    """The p2p transport whose engines take all weights at once: exchanges, plans and chunks are real, messages are counted.

    On GPUs bytes take NCCL: a communicator for each engine, with two connections of its bootstrap, and one to each peer.
    """

    ledger: Ledger
    nccl: dict[str, int]  # group -> connections to other nodes

    def send(self, sources: Any) -> None:
        """Count what this rank would send to its engines, and the connections of their groups."""
        for engine in self._own_engines:
            members = self.members(engine)
            everyone = [*members.trainers, *(self._beside(rank) for rank in members.engine_ranks)]
            for number in self.peers(engine):
                self.ledger.connect(f"p2p {engine}, member {number}", everyone[number])
            away = [self.ledger.node_of(rank) != self.ledger.node_of(self.rank) for rank in everyone]
            self.nccl[f"p2p {engine}"] = min(2, sum(away)) + sum(away[number] for number in self.peers(engine))
            for outgoing in self._outgoing(engine, members, sources):
                for message in outgoing.messages:
                    to = members.engine_ranks[message.member - len(members.trainers)]
                    self.ledger.send("p2p", self._beside(to), message.stop - message.start)
            for engine_rank in members.engine_ranks if self.handles.leaders[engine] == self.rank else ():
                manifest = self.plan.manifest(engine_rank, "", "", 1)
                self.ledger.sent["commands"] += len(json.dumps(manifest.to_json()))
        self._failed = self._failed_anywhere({})

    def finish(self) -> TransferResult:
        """Return the replies of engines full of zeros."""
        result, version = TransferResult(ExpectedChecksums(self.plan)), self._request.version
        for engine in self.handles.led_by(self.rank, self._request.engines):
            names = [self.plan.parameter_names(rank) for rank in self.plan.ranks_of(engine)]
            result.replies[engine] = tuple(
                CommandReply("", "finish", ok=True, version=version, checksums=dict.fromkeys(of_rank, 0))
                for of_rank in names
            )
        return result

    def _beside(self, engine_rank: int) -> int:
        """Return a trainer rank on the engine rank's node."""
        return self.handles.leaders[engine_rank // self.plan.engines.tensor_parallel]


class OtherRanks:
    """Answers of the other ranks of a simulated run."""

    def __init__(self, num_ranks: int, per_node: int, servers_per_node: int, rank: int, slot_bytes: int) -> None:
        self._num_ranks, self._per_node, self._rank = num_ranks, per_node, rank
        self._servers_per_node = servers_per_node
        self._slot_bytes = slot_bytes
        self.arenas: dict[str, Any] = {}  # this node's, as its leader announces them

    def answer(self, value: Any, first: int, last: int) -> Any:
        """Return what stands for ranks [first, last) if this rank's part of an exchange is `value`."""
        ranks = range(first, min(last, self._num_ranks))
        leaders = [rank for rank in ranks if rank % self._per_node == 0]
        match value:
            case [str(), *_]:
                return [f"node{rank // self._per_node}" for rank in ranks]
            case [{"entries": _}, *_]:
                return [self._entries(rank) for rank in ranks]
            case [{"arenas": _, "pid": pid, "slots": slots}]:
                is_leader = first % self._per_node == 0
                return [{"arenas": self.arenas if is_leader else {}, "pid": pid, "slots": slots}]
            case [dict() as failures, dict() as measured]:
                return [failures, self._measured(measured, leaders)]
            case dict() if value:  # groups of the p2p transport: every leader offers one for each of its engines
                return {
                    str(e): ["", ["0" * 32, "10.0.0.1", 30000]] for leader in leaders for e in self._engines(leader)
                }
        return value

    def _engines(self, leader: int) -> range:
        node = leader // self._per_node
        return range(node * self._servers_per_node, (node + 1) * self._servers_per_node)

    def _measured(self, own: dict[str, Any], leaders: Sequence[int]) -> dict[int, Any]:
        """Return what leaders report of their engines when this rank reports `own`; nothing if it leads but reports none."""
        steps = dict.fromkeys(("pause", "flush", "begin", "transfer", "end", "label", "resume"), 0.1234)
        example = next(iter(own.values()), [1 << 30, steps])
        says_nothing = not own and self._rank % self._per_node == 0
        return {} if says_nothing else {engine: example for leader in leaders for engine in self._engines(leader)}

    def _entries(self, rank: int) -> dict[str, Any]:
        engines = self._engines(rank) if rank % self._per_node == 0 else ()
        return {
            "entries": [{"index": e, "url": f"http://10.0.0.1:{30000 + e % 30000}"} for e in engines],
            "problems": [],
        }

    def create_arenas(self, engine_ranks: Sequence[int]) -> None:
        """Create what the leader of this rank's node would, with engines that have loaded everything."""
        for engine_rank in engine_ranks:
            spec = create_arena(
                shared_memory.default_directory(), f"scale-{self._rank}-{engine_rank}", self._slot_bytes
            )
            self.arenas[str(engine_rank)] = spec.to_json()
            Arena(spec).progress.count_loaded(ENOUGH)

    def remove_arenas(self) -> None:
        """Unlink them."""
        for spec in self.arenas.values():
            Path(spec["path"]).unlink(missing_ok=True)


def simulated_coordination(neighbors: Neighbors) -> type[coordination.Coordination]:
    """Return the coordination whose groups ask `neighbors`: it tells them what is exchanged."""

    class Simulated(coordination.Coordination):
        def merge(
            self, value: Any, combine: Any, waiting_for: str, timeout_s: float | None = None, down: Any = None
        ) -> Any:
            if not self._is_on_top:
                whole = combine([neighbors.answer(combine([json.loads(json.dumps(value))]), 0, self.size)])
                neighbors.expected = whole if down is None else down(whole)
            return super().merge(value, combine, waiting_for, timeout_s, down)

        def broadcast(self, value: Any | None, source: int = 0) -> Any:
            neighbors.expected = "0" * 32  # a group's name, the only value that rank 0 sends here
            return super().broadcast(value, source)

        def barrier(self, waiting_for: str) -> None:
            neighbors.expected = ""
            super().barrier(waiting_for)

        def _exchange(self, level: Any, value: Any, waiting_for: str, end: float) -> list:
            neighbors.own = json.loads(json.dumps(value))
            return super()._exchange(level, value, waiting_for, end)

    return Simulated


@contextmanager
def counted(case: dict[str, Any], ledger: Ledger, neighbors: Neighbors | None) -> Iterator[None]:
    """Put counting groups and stand-in servers in the place of the real ones."""
    numbers = iter(range(1000))
    real_join, real_gloo = coordination._join, peer_group._gloo

    def join(ranks: Sequence[int], timeout_s: float) -> Any:
        inner = real_join(ranks, timeout_s) if neighbors is None else None
        return CountedGroup(ranks, ledger, inner, neighbors, next(numbers))

    def gloo(store: dist.Store, rank: int, size: int, timeout: timedelta, host: str, *, lazy: bool = False) -> Any:
        inner = real_gloo(store, rank, size, timeout, host, lazy=lazy) if neighbors is None else None
        return CountedPeers(ledger, inner)

    with ExitStack() as stack:
        patch = mock.patch.object
        stack.enter_context(patch(coordination, "_join", join))
        stack.enter_context(patch(peer_group, "_gloo", gloo))
        stack.enter_context(patch(CountedP2P, "ledger", ledger, create=True))
        stack.enter_context(patch(CountedP2P, "nccl", {}, create=True))
        stack.enter_context(patch(connect_engines, "P2PTransport", CountedP2P))
        stack.enter_context(patch(connect_engines, "MIB", (1 << 20) // SCALE))
        place = start_engines.ServerPlace
        stack.enter_context(patch(place, "spawn", lambda _, index, *arguments: StandInServer(index, ledger)))
        stack.enter_context(patch(place, "client", lambda _, servers, server: StandInServer(server.index, ledger)))
        engine = SimpleNamespace(failed_servers={}, set_policy_version=lambda version: None, close=lambda: None)
        stack.enter_context(patch(connect_engines, "sglang_engine", lambda *_: engine))
        stack.enter_context(patch(place, "own_address", lambda _: case["host"]))
        stack.enter_context(patch(socket, "gethostname", lambda: f"node{case['rank'] // case['per_node']}"))
        if neighbors is not None:
            stack.enter_context(patch(coordination, "Coordination", simulated_coordination(neighbors)))
        yield


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Return what one rank opens, sends and holds.

    `case`: ranks, rank, per_node, overrides (of the layout's recipe), layers, host; store (port) and timeout of a real run.
    """
    torch.set_num_threads(1)
    rank, num_ranks, per_node = case["rank"], case["ranks"], case["per_node"]
    ledger = Ledger(lambda r: r // per_node, rank)
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps({**MODEL, "num_hidden_layers": case["layers"]}))
        overrides = [f"parallel.num_processes={num_ranks}", f"model.path={model}", f"run.output_dir={directory}/run"]
        config = load_config(Path(case["recipe"]), [*overrides, *case["overrides"]]).config
        config.run.output_dir.mkdir(parents=True, exist_ok=True)
        if case["store"]:
            init = f"tcp://{case['store']}"
            dist.init_process_group(
                "gloo", init_method=init, rank=rank, world_size=num_ranks, timeout=timedelta(minutes=3)
            )
            neighbors = others = None
        else:
            from torch.testing._internal.distributed.fake_pg import FakeStore

            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
            slot_bytes = config.sglang.weight_sync_bucket_mb * (1 << 20) // SCALE
            others = OtherRanks(num_ranks, per_node, config.sglang.servers_per_node, rank, slot_bytes)
            neighbors = Neighbors(others.answer)
        with counted(case, ledger, neighbors):
            try:
                return _measure(config, case, ledger, others)
            finally:
                if others is not None:
                    others.remove_arenas()


def _measure(config: Any, case: dict[str, Any], ledger: Ledger, others: OtherRanks | None) -> dict[str, Any]:
    gc.collect()
    held, start, cpu_start = anonymous_bytes(), time.perf_counter(), time.process_time()
    topology = run_topology(config)
    layout = topology.policy_layout
    initialize_parallel_state(layout)
    seconds = {"groups": time.perf_counter() - start}
    architecture = read_architecture(config.model.path)
    tensors = megatron_layout(architecture, layout, torch.bfloat16)
    weights = {
        name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in tensors.local_shapes(case["rank"]).items()
    }
    actor = SimpleNamespace(tensors=tensors, named_local_parameters=lambda: weights)
    with ExitStack() as stack:
        commands = Rank0Commands(topology.coordination)
        servers = start_engines.start_engines(config, topology, commands, stack)
        engines = connect_engines.connect_engines(config, topology.policy, commands, servers, actor)
        if others is not None and case["rank"] % case["per_node"]:
            size, node = config.sglang.tp_size, case["rank"] // case["per_node"]
            first = node * config.sglang.servers_per_node * size
            others.create_arenas(range(first, first + config.sglang.servers_per_node * size))
        engines.publisher.publish(1)
        seconds["start"], seconds["cpu"] = time.perf_counter() - start, time.process_time() - cpu_start
        gc.collect()
        held = anonymous_bytes() - held
        if others is not None:
            others.arenas = {}  # kept from the first sync on
        ledger.forget_bytes()
        if case["store"]:
            dist.barrier()
        before = interface_bytes(case["interface"]) if case.get("interface") else (0, 0)
        start = time.perf_counter()
        engines.publisher.publish(2)
        seconds["update"] = time.perf_counter() - start
        found = ledger.to_json()
        if case["store"]:
            dist.barrier()
        after = interface_bytes(case["interface"]) if case.get("interface") else (0, 0)
        sockets = open_sockets()
    return {
        "rank": case["rank"],
        "seconds": seconds,
        "gb": held / 1e9,
        **found,
        "sockets": sockets,
        "interface": [b - a for a, b in zip(before, after)],
        "groups": {} if case["store"] else groups_across_nodes(case["rank"], case["per_node"]),
        "nccl_p2p": sum(getattr(CountedP2P, "nccl", {}).values()),
    }


def groups_across_nodes(rank: int, per_node: int) -> dict[str, int]:
    """Return name -> number of ranks on other nodes, of the groups for tensors that this rank is in."""
    world, found = dist.distributed_c10d._world, {}
    for group in world.pg_map:
        ranks = dist.get_process_group_ranks(group)
        away = sum(other // per_node != rank // per_node for other in ranks)
        found[group.group_desc] = max(away, found.get(group.group_desc, 0))
    return {name: away for name, away in found.items() if away}


def anonymous_bytes() -> int:
    """Return this process's own memory, without files and shared memory."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")) * 1024


def open_sockets() -> int:
    """Return the number of sockets that this process has open."""
    count = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            count += os.readlink(entry).startswith("socket:")
        except FileNotFoundError:  # the listing's own descriptor
            continue
    return count


def interface_bytes(name: str) -> tuple[int, int]:
    """Return bytes received and sent by a network interface of this process's namespace."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    values = next(line.split(":")[1].split() for line in lines if line.strip().startswith(name + ":"))
    return int(values[0]), int(values[8])
