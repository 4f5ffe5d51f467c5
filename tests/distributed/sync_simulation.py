"""Engines without a server, and trainer ranks as threads, for tests of the weight sync.

A `SimulatedEngine` runs the real weight loader on a module that has the parameters of each engine rank; only HTTP is
missing. `run_ranks` runs every trainer rank in a thread; they agree through `ThreadCoordination`s.
"""

from __future__ import annotations

import json
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dapo.bridge.protocol import weight_loader
from megatron_dapo.bridge.protocol.peer_group import PeerGroup
from megatron_dapo.bridge.sync_plan import plan_sync
from megatron_dapo.bridge.transports.shared_memory import SharedMemoryTransport
from megatron_dapo.bridge.weight_sync import EngineHandles, SyncTimeouts, WeightSync
from megatron_dapo.checkpoints.layouts.megatron import MegatronLayout, megatron_layout
from megatron_dapo.checkpoints.layouts.sglang import SglangLayout, sglang_layout
from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.models.config_json import parse_architecture
from megatron_dapo.parallel.coordination import CoordinationError
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.parallel.nodes import NodeTopology
from megatron_dapo.reshard.layout import shard_view
from megatron_dapo.reshard.planner import plan
from tests.reshard_oracles import execute_in_memory

Tensors = dict[str, torch.Tensor]


class Parameters(torch.nn.Module):
    """A module whose named_parameters() are exactly the given ones, dotted names included."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        self._tensors = {name: torch.nn.Parameter(tensor) for name, tensor in tensors.items()}

    def named_parameters(self, *args: Any, **kwargs: Any):
        return iter(self._tensors.items())

    def parameters(self, *args: Any, **kwargs: Any):
        return iter(self._tensors.values())


def run_concurrently(actions: Sequence[Callable[[], None]]) -> None:
    """Run every action in a thread of its own; raise the first error."""
    errors: list[BaseException] = []

    def run(action: Callable[[], None]) -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(action,), daemon=True) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class SimulatedEngine:
    """One engine: its ranks' parameters, and whether it serves. Implements EngineControl.

    `served` is what a generation would read: (version label, parameters) snapshots taken while it is not paused.
    """

    def __init__(self, layout: SglangLayout, engine: int = 0) -> None:
        size = layout.tensor_parallel
        generator = torch.Generator().manual_seed(engine)
        self.models = [
            Parameters(
                {
                    name: torch.randn(spec.shape, generator=generator).to(spec.dtype)
                    for name, spec in layout.local_specs(rank).items()
                }
            )
            for rank in range(engine * size, (engine + 1) * size)
        ]
        self.is_paused = False
        self.is_alive = True
        self.session = False
        self.version: int | None = None
        self.calls: list[str] = []

    def _call(self, name: str) -> None:
        if not self.is_alive:
            raise ConnectionError("connection refused")
        self.calls.append(name)

    def pause(self) -> None:
        self._call("pause")
        self.is_paused = True

    def flush_cache(self) -> None:
        self._call("flush_cache")
        assert self.is_paused

    def begin_weight_update(self) -> None:
        self._call("begin")
        assert not self.session, "a session is open already"
        self.session = True

    def end_weight_update(self) -> None:
        self._call("end")
        assert self.session, "no session is open"
        self.session = False

    def update_weights_from_tensor(self, payloads, load_format=None) -> None:
        self._call("tensor")
        assert self.is_paused and self.session and len(payloads) == len(self.models)
        self.load_all(payloads)

    def load_all(self, payloads) -> None:
        """Load in all ranks concurrently, as the processes of a server do: no rank can finish a sync by itself."""
        run_concurrently([lambda m=m, p=p: self.load(m, p) for m, p in zip(self.models, payloads)])

    def load(self, model: Parameters, payload: bytes) -> None:
        weight_loader.load(model, pickle.loads(payload))

    def update_weights_from_disk(self, directory: str) -> None:
        raise NotImplementedError

    def update_weight_version(self, version: int) -> None:
        self._call("version")
        self.version = version

    def resume(self) -> None:
        self._call("resume")
        self.is_paused = False


class Rendezvous:
    """State that the ranks of one run share; `ThreadCoordination` is one rank's view of it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.condition = threading.Condition()
        self.rounds: dict[int, dict[int, Any]] = {}


class ThreadCoordination:
    """Agreement between threads, with deadlines."""

    def __init__(self, rendezvous: Rendezvous, rank: int) -> None:
        self._rendezvous = rendezvous
        self.rank = rank
        self.size = rendezvous.size
        self._round = 0

    def gather(self, value: Any, what: str, timeout_s: float) -> list[Any]:
        values = self._meet(json.dumps(value), what, timeout_s)
        return [json.loads(text) for text in values]

    def merge(
        self,
        value: Any,
        combine: Callable[[list], Any],
        what: str,
        timeout_s: float,
        down: Callable[[Any], Any] = lambda found: found,
    ) -> Any:
        return combine(self.gather(value, what, timeout_s))  # All ranks of one group know the whole, too.

    def sum(self, values: torch.Tensor, what: str, timeout_s: float) -> torch.Tensor:
        return torch.stack(self._meet(values.clone(), what, timeout_s)).sum(0)

    def _meet(self, value: Any, what: str, timeout_s: float) -> list[Any]:
        rendezvous, number = self._rendezvous, self._round
        self._round += 1
        with rendezvous.condition:
            rendezvous.rounds.setdefault(number, {})[self.rank] = value
            rendezvous.condition.notify_all()
            here = rendezvous.rounds[number]
            if not rendezvous.condition.wait_for(lambda: len(here) == self.size, timeout_s):
                raise CoordinationError(f"{what}: only ranks {sorted(here)} of {self.size} came in {timeout_s:.2f} s")
            return [here[rank] for rank in range(self.size)]


def run_ranks(num_ranks: int, body: Callable[[int], Any], timeout_s: float = 120.0) -> list[Any]:
    """`body(rank)` in one thread a rank; results, or the exception itself if a rank raised one."""
    outcomes: list[Any] = [None] * num_ranks

    def run(rank: int) -> None:
        try:
            outcomes[rank] = body(rank)
        except Exception as error:
            outcomes[rank] = error
        except SystemExit:
            pass  # a rank that dies has no outcome

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
        assert not thread.is_alive(), f"a rank hangs after {timeout_s} s"
    return outcomes


def break_sender(monkeypatch: pytest.MonkeyPatch, member: int) -> None:
    """Let every message but the first that this member of a peer group sends fail, in later groups as well."""
    original, count = PeerGroup.send, 0

    def send(self: PeerGroup, tensor: torch.Tensor, to: int, *tag: int):
        nonlocal count
        count += self.rank == member
        if self.rank == member and count > 1:
            raise RuntimeError("a made-up failure")
        return original(self, tensor, to, *tag)

    monkeypatch.setattr(PeerGroup, "send", send)


class World:
    """Trainer layout, engines and plan of one test, with weights that differ in every element."""

    def __init__(
        self,
        architecture: ModelArchitecture,
        parallel: ParallelLayout,
        *,
        tensor_parallel: int,
        num_engines: int = 1,
        dtype: torch.dtype = torch.float32,
        source_dtype: torch.dtype = torch.float32,
        bucket_bytes: int = 4096,
        ranks_per_node: int | None = None,
        device: str = "cpu",
        engines_per_node: int = 1,
    ) -> None:
        self.size = parallel.world_size
        self.nodes = NodeTopology(self.size, ranks_per_node or self.size)
        self.source: MegatronLayout = megatron_layout(architecture, parallel, source_dtype)
        self.layout = sglang_layout(architecture, tensor_parallel, dtype, num_engines, device=device)
        per_node = self.nodes.ranks_per_node
        self.plan = plan_sync(
            self.source, self.layout, bucket_bytes, ranks_per_node=per_node, engines_per_node=engines_per_node
        )
        self.reshard = plan(self.source, self.layout, ranks_per_node=per_node)
        # Engines are spread over the nodes, those that are to share one after the other.
        places = [engine // engines_per_node % self.nodes.num_nodes for engine in range(num_engines)]
        self.leaders = [self.nodes.ranks_of(place)[0] for place in places]

    def weights(self, version: int, share: float = 1.0) -> list[Tensors]:
        """Local buffers of every trainer rank at a version; replicas agree because they are cut from one model.

        `share`: of the elements that are the version's own; the others are those of version 0.
        """
        model, base = self._model(version), self._model(0)
        generator = torch.Generator().manual_seed(version)
        for name, values in model.items():
            own = torch.rand(values.shape, generator=generator) < share
            model[name] = torch.where(own, values, base[name])
        return [self.shards(model, rank) for rank in range(self.size)]

    def _model(self, version: int) -> Tensors:
        generator = torch.Generator().manual_seed(1000 + version)
        return {n: torch.randn(spec.shape, generator=generator) for n, spec in self.source.tensors.items()}

    def shards(self, model: Tensors, rank: int) -> Tensors:
        """A rank's local buffers, cut from Hugging Face tensors."""
        specs = self.source.local_specs(rank)
        buffers = {name: torch.zeros(spec.shape, dtype=spec.dtype) for name, spec in specs.items()}
        for shard in self.source.shards(rank):
            value = model[shard.tensor]
            for dim, (start, size) in enumerate(zip(shard.global_offset, shard.shape)):
                value = value.narrow(dim, start, size)
            shard_view(buffers[shard.local], shard).copy_(value)
        return buffers

    def expected(self, weights: Sequence[Tensors]) -> list[Tensors]:
        """Return the parameters that every engine rank must hold, by the resharding executor, with zero padding."""
        filled = [
            {n: torch.zeros(s.shape, dtype=s.dtype) for n, s in self.layout.local_specs(rank).items()}
            for rank in range(self.layout.num_ranks)
        ]
        execute_in_memory(self.reshard, weights, filled)
        return filled

    def holds(self, engine: SimulatedEngine, index: int, expected: Sequence[Tensors]) -> bool:
        """Return True if every byte of an engine is right."""
        size = self.layout.tensor_parallel
        return all(
            torch.equal(parameter, expected[index * size + number][name])
            for number, model in enumerate(engine.models)
            for name, parameter in model.named_parameters()
        )

    def updates(
        self,
        engines: Sequence[Any],
        directory: Path,
        timeouts: SyncTimeouts,
        *,
        peers: Sequence[Any] | None = None,
        message_timeout_s: float = 10.0,
        session: str = "s",
        transport_of: Callable[..., Any] = SharedMemoryTransport,
        full_interval: int = 1,
    ) -> list[WeightSync]:
        """Return one WeightSync a rank, sharing the given controls; an engine replaced in the list is a restarted one."""
        all_ranks = Rendezvous(self.size)
        per_node = [Rendezvous(self.nodes.ranks_per_node) for _ in range(self.nodes.num_nodes)]
        result = []
        for rank in range(self.size):
            led = [engine for engine, leader in enumerate(self.leaders) if leader == rank]
            handles = EngineHandles(self.leaders, LiveControls(engines, led))
            node = self.nodes.node_of(rank)
            transport = transport_of(
                self.plan,
                handles,
                rank,
                self.nodes,
                ThreadCoordination(per_node[node], rank - self.nodes.ranks_of(node)[0]),
                peers=None if peers is None else peers[rank],
                directory=directory,
                message_timeout_s=message_timeout_s,
                grace_s=timeouts.grace_s,
            )
            coordination = ThreadCoordination(all_ranks, rank)
            sync = WeightSync(
                self.plan, handles, transport, coordination, timeouts, session, full_interval=full_interval
            )
            result.append(sync)
        return result


class LiveControls(Mapping[int, Any]):
    """engine -> its current process: a restarted engine replaces the dead one in the list."""

    def __init__(self, engines: Sequence[Any], led: Sequence[int]) -> None:
        self._engines, self._led = engines, led

    def __getitem__(self, engine: int) -> Any:
        return self._engines[engine]

    def __iter__(self) -> Iterator[int]:
        return iter(self._led)

    def __len__(self) -> int:
        return len(self._led)


def small_architecture(tied: bool = False, **changes: Any) -> ModelArchitecture:
    """A Qwen2 of a few thousand elements whose vocabulary size is not divisible."""
    config = {
        "model_type": "qwen2",
        "vocab_size": 131,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
        **changes,
    }
    return parse_architecture(config)


PATIENT = SyncTimeouts(30, 30, 30, 30, 60, 30, 15)
