"""Connects a run's engines to the actor: the weight sync, and generation on rank 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from megatron_dapo.bridge.protocol.description import specs_from_json, specs_to_json
from megatron_dapo.bridge.protocol.peer_group import PeerGroup, RendezvousStore, meet
from megatron_dapo.bridge.served_parameters import served_parameters
from megatron_dapo.bridge.sources import SOURCES, AdapterSource, WeightSource
from megatron_dapo.bridge.sync_plan import EngineLayout, SyncPlan, plan_sync
from megatron_dapo.bridge.transports.adapters import AdapterTransport
from megatron_dapo.bridge.transports.disk import DiskTransport
from megatron_dapo.bridge.transports.local import local_weight_sync
from megatron_dapo.bridge.transports.p2p import P2PSettings, P2PTransport
from megatron_dapo.bridge.transports.shared_memory import SharedMemoryTransport
from megatron_dapo.bridge.weight_sync import EngineHandles, SyncTimeouts, Transport, WeightSync
from megatron_dapo.checkpoints.export import export_to_huggingface
from megatron_dapo.checkpoints.formats.peft import AdapterDescription
from megatron_dapo.checkpoints.layouts.lora import LoraLayout
from megatron_dapo.checkpoints.layouts.megatron import MegatronLayout
from megatron_dapo.config.schema import Config
from megatron_dapo.engines.base import CollectiveEngine, PrefixReuse
from megatron_dapo.engines.distributed_embedded import DistributedEmbeddedEngine
from megatron_dapo.engines.sglang.client import EngineError, SglangClient
from megatron_dapo.engines.sglang.cluster import SglangEngines
from megatron_dapo.engines.sglang.engine import SglangEngine, SglangEngineSettings
from megatron_dapo.megatron.actor import MegatronActor
from megatron_dapo.models.config_json import read_architecture
from megatron_dapo.parallel.coordination import default_store
from megatron_dapo.parallel.rank0_commands import Rank0Commands
from megatron_dapo.parallel.rank_set import RankSet
from megatron_dapo.reshard.execution import Buffers
from megatron_dapo.reshard.layout import Layout, TensorSpec
from megatron_dapo.rounding import MIB
from megatron_dapo.trainer.recorder import Phases
from megatron_dapo.trainer.start_engines import RunServers, build_local_engine
from megatron_dapo.trainer.turns import DuePublisher, SharedBase
from megatron_dapo.types import Completion, GenerationRequest, RoutingShape

Result = TypeVar("Result")


class Publisher(Protocol):
    """Publishes the trainer's weights to the engines."""

    def publish(self, version: int) -> None:
        """Serve the current weights as `version`, verified before its first token is generated. Collective."""


@dataclass(frozen=True)
class Engines:
    """One rank's view of the run's engines."""

    engine: CollectiveEngine
    publisher: Publisher
    servers: SglangEngines | None = None  # None: the engine runs in the trainer's processes
    # Inside it, the trainer's parameters have the servers' quantized values. None if servers hold them as trained.
    # Collective.
    as_served: Callable[[], AbstractContextManager[None]] | None = None
    num_places: int = 0  # requests that keep the servers busy


class NoEngine:
    """`CollectiveEngine` and `Publisher` on a rank without an engine."""

    policy_version = -1
    num_unfinished = 0
    prefix_reuse = PrefixReuse()

    def __init__(self, commands: Rank0Commands) -> None:
        self._commands = commands

    def run_on_rank0(self, body: Callable[[], Result]) -> Result | None:
        """Wait for rank 0 as ranks with engines do; its commands require nothing of this rank."""
        return self._commands.run_on_rank0(body)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        raise AssertionError("rank 0 submits")

    def poll(self) -> list[Completion]:
        raise AssertionError("rank 0 polls")

    def abort(self) -> list[Completion]:
        raise AssertionError("rank 0 aborts")

    def publish(self, version: int) -> None:
        """Do nothing: only the policy's ranks send weights, to their own engines."""


def connect_engines(
    config: Config,
    ranks: RankSet,
    commands: Rank0Commands,
    run: RunServers | None,
    actor: MegatronActor | None,
    turns: tuple[SharedBase, Phases] | None = None,
) -> Engines:
    """Return the engines with a weight sync from this rank's part of the actor. Collective.

    `ranks`: those that hold the policy. `run`: what `start_engines` returned. `turns`: what several runs of this process share, and this
    run's phases. Engines have no weights before the first `publish`.
    """
    if actor is None:
        nothing = NoEngine(commands)
        return Engines(nothing, nothing)
    assert ranks.coordination is not None, "ranks with an actor hold the policy"
    if run is None:
        local = build_local_engine(config, config.model.path, turns[0].engine if turns else None)
        engine = DistributedEmbeddedEngine(local, ranks.coordination, commands)
        weights = WeightSource(actor, ranks.rank, ranks.coordination)
        sync = local_weight_sync(actor.tensors, engine, ranks.group, ranks.coordination, weights=weights)
        if turns is None:
            return Engines(engine, sync)
        publisher = DuePublisher(sync, *turns)
        engine.prepare, turns[0].engine = publisher.bring, local
        return Engines(engine, publisher)
    make_source = AdapterSource if config.model.lora.serves_adapters else SOURCES[config.sglang.quantization]
    source = make_source(actor, ranks.rank, ranks.coordination)
    run.engines.attach(
        lambda controls: _weight_sync(run, source, controls),
        (lambda clients: sglang_engine(config, clients)) if ranks.rank == 0 else None,
        source.current,
    )
    as_served = source.as_served if source.needs_description else None
    num_places = len(run.servers.leaders) * config.sglang.max_running_requests
    return Engines(run.engines, run.engines, run.engines, as_served, num_places)


def sglang_engine(config: Config, clients: Sequence[SglangClient]) -> SglangEngine:
    """Return the engine over all servers. ValueError if a server would truncate the run's longest sequences."""
    longest = min(client.max_length() for client in clients)
    if longest < config.longest_sequence:
        raise ValueError(
            f"a server holds at most {longest} tokens of one sequence, prompt and response of this run are up to "
            f"{config.longest_sequence}: raise sglang.max_total_tokens or sglang.mem_fraction_static, or shorten them"
        )
    sizes, routing = read_architecture(config.model.path), None
    if sizes.experts is not None:
        routing = RoutingShape(sizes.num_layers, sizes.experts.num_experts_per_token, sizes.experts.num_experts)
    settings = SglangEngineSettings(
        longest,
        sizes.vocab_size,
        config.sglang.max_running_requests,
        abort_s=config.sglang.abort_timeout_seconds,
        routing=routing,
        update_pause=config.sglang.update_pause,
        draft_corpus_tokens=config.sglang.draft_corpus_tokens if config.sglang.drafting != "off" else 0,
        draft_age=config.sglang.draft_age,
    )
    return SglangEngine(clients, settings)


def _weight_sync(run: RunServers, weights: WeightSource, controls: dict[int, SglangClient]) -> WeightSync:
    """Return the weight sync over the configured transport, given clients of the servers that this rank leads."""
    sglang = run.place.config.sglang
    described = _describe(run, controls) if weights.needs_description else ()
    layouts = weights.layouts(run.place.engine_layout(len(run.servers.leaders)), described)
    handles = EngineHandles(run.servers.leaders, controls)
    adapters = run.place.config.model.lora.serves_adapters
    connect = _adapters if adapters else _TRANSPORTS[sglang.weight_sync_transport]
    sync_plan, transport = connect(run, handles, *layouts)
    seconds = sglang.weight_sync_timeout_seconds
    timeouts = SyncTimeouts(pause_s=seconds, flush_s=seconds, session_s=seconds, transfer_s=seconds, resume_s=seconds)
    release_cache = run.device.make_room_for_cache if run.device else None
    keeps_cache = sglang.update_pause == "in_place"
    return WeightSync(
        sync_plan,
        handles,
        transport,
        run.coordination,
        timeouts,
        release_cache=release_cache,
        keeps_cache=keeps_cache,
        full_interval=sglang.weight_sync_full_interval,
    )


def _describe(run: RunServers, controls: Mapping[int, SglangClient]) -> list[dict[str, TensorSpec]]:
    """Return the parameters of the first server, which rank 0 leads. ValueError on all ranks without an answer."""
    answer: dict[str, Any] | None = None
    if run.place.ranks.rank == 0:
        sglang = run.place.config.sglang
        try:
            parameters = served_parameters(
                controls[0],
                sglang.tp_size,
                host=run.place.own_address(),
                timeout_s=sglang.weight_sync_timeout_seconds,
            )
            answer = {"ranks": [specs_to_json(specs) for specs in parameters]}
        except (ValueError, EngineError) as error:  # the other ranks are waiting for the broadcast
            answer = {"problem": str(error)}
    answer = run.coordination.broadcast(answer)
    if "problem" in answer:
        raise ValueError(answer["problem"])
    return [specs_from_json(specs) for specs in answer["ranks"]]


# ---- transports


def _plan(run: RunServers, source: Layout, engines: EngineLayout, **ranks: int) -> SyncPlan:
    bucket_bytes = run.place.config.sglang.weight_sync_bucket_mb * MIB
    return plan_sync(source, engines, bucket_bytes, ranks_per_node=run.place.nodes.ranks_per_node, **ranks)


def _shared_memory(
    run: RunServers, handles: EngineHandles, source: Layout, engines: EngineLayout
) -> tuple[SyncPlan, Transport]:
    sglang, nodes = run.place.config.sglang, run.place.nodes
    # With slots on GPUs, an engine rank gets what it can from the trainer rank next to it.
    per_node = sglang.servers_per_node if sglang.shared_memory == "host" else 1
    if sglang.weight_sync_full_interval > 1 and nodes.num_nodes > 1:
        raise ValueError(
            f"sglang.weight_sync_full_interval = {sglang.weight_sync_full_interval}: changes do not pass between the "
            f'{nodes.num_nodes} nodes through shared memory; set it to 1, or sglang.weight_sync_transport = "p2p"'
        )
    sync_plan = _plan(run, source, engines, engines_per_node=per_node)
    assert run.node_group is not None, "shared memory is between ranks of one node"
    transport = SharedMemoryTransport(
        sync_plan,
        handles,
        run.place.ranks.rank,
        nodes,
        run.node_group,
        peers=_join_peers(run) if nodes.num_nodes > 1 else None,
        message_timeout_s=sglang.weight_sync_timeout_seconds,
        device=slot_device(sglang.shared_memory),
    )
    return sync_plan, transport


def _join_peers(run: RunServers) -> PeerGroup:
    """Return the group of all trainer ranks, which carries shards to engines on other nodes."""
    ranks = run.place.ranks
    name = run.coordination.broadcast(RendezvousStore.new_name() if ranks.rank == 0 else None)
    return meet(
        default_store(),
        name,
        ranks.rank,
        ranks.num_ranks,
        timeout_s=run.place.config.sglang.start_timeout_seconds,
        host=run.place.own_address(),
    )


def _p2p(
    run: RunServers, handles: EngineHandles, source: Layout, engines: EngineLayout
) -> tuple[SyncPlan, Transport]:
    # Trainer and engine ranks form one group, with the engines' ranks after the trainer's.
    sync_plan = _plan(run, source, engines, rank_offset=run.place.ranks.num_ranks)
    backend = "nccl" if run.place.device_type == "cuda" else "gloo"
    settings = P2PSettings(host=run.place.own_address(), backend=backend)
    return sync_plan, P2PTransport(sync_plan, handles, run.coordination, settings)


def _disk(
    run: RunServers, handles: EngineHandles, source: Layout, engines: EngineLayout
) -> tuple[SyncPlan, Transport]:
    assert isinstance(source, MegatronLayout), "checkpoints hold the trained weights; the validator refuses others"
    config, group = run.place.config, run.place.ranks.group

    def export(directory: Path, sources: Buffers) -> None:
        export_to_huggingface(directory, config.model.path, source, sources, group)

    sync_plan, directory = _plan(run, source, engines), config.run.output_dir / "weights"
    return sync_plan, DiskTransport(sync_plan, handles, directory, export, run.coordination)


def _adapters(
    run: RunServers, handles: EngineHandles, source: Layout, engines: EngineLayout
) -> tuple[SyncPlan, Transport]:
    config = run.place.config
    lora, path = config.model.lora, str(config.model.path)
    assert isinstance(source, LoraLayout), "only adapters are synced"
    document = AdapterDescription(lora.rank, lora.alpha, source.targets, path, "").peft_config()
    sync_plan = _plan(run, source, engines)
    return sync_plan, AdapterTransport(sync_plan, handles, source, document, run.place.ranks.group)


_TRANSPORTS = {"shared_memory": _shared_memory, "p2p": _p2p, "disk": _disk}


def slot_device(memory: str) -> torch.device:
    """Return the device of this rank's slots in shared memory. ValueError if there is no such device."""
    if memory == "host":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(
            'sglang.shared_memory = "device" takes memory of a GPU, and torch sees none here; set it to "host", or start '
            "on GPUs with a CUDA build of torch"
        )
    return torch.device("cuda", torch.cuda.current_device())
