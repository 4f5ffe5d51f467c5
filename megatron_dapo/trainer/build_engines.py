"""Builds a run's engines from the configuration: starts them first, and connects them once the actor is built."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from megatron_dapo.bridge.protocol.description import specs_from_json, specs_to_json
from megatron_dapo.bridge.protocol.peer_group import LOOPBACK, Address, PeerGroup, RendezvousStore, meet
from megatron_dapo.bridge.served_parameters import served_parameters
from megatron_dapo.bridge.sources import SOURCES, WeightSource, expected_layouts
from megatron_dapo.bridge.sync_plan import EngineLayout, SyncPlan, plan_sync
from megatron_dapo.bridge.transports.disk import DiskTransport
from megatron_dapo.bridge.transports.local import local_weight_sync
from megatron_dapo.bridge.transports.p2p import P2PSettings, P2PTransport
from megatron_dapo.bridge.transports.shared_memory import SharedMemoryTransport
from megatron_dapo.bridge.weight_sync import EngineHandles, SyncTimeouts, Transport, WeightSync
from megatron_dapo.checkpoints.export import export_to_huggingface
from megatron_dapo.checkpoints.layouts.megatron import MegatronLayout
from megatron_dapo.checkpoints.layouts.sglang import SglangLayout, sglang_layout
from megatron_dapo.config.schema import Config
from megatron_dapo.engines.base import CollectiveEngine, PrefixReuse
from megatron_dapo.engines.distributed_embedded import DistributedEmbeddedEngine
from megatron_dapo.engines.embedded import EmbeddedEngine, EmbeddedEngineSettings
from megatron_dapo.engines.sglang.client import ColocatedClient, EngineError, SglangClient, Timeouts
from megatron_dapo.engines.sglang.cluster import SglangEngines, SharedDevice
from megatron_dapo.engines.sglang.engine import SglangEngine, SglangEngineSettings
from megatron_dapo.engines.sglang.keys import create_key, read_key
from megatron_dapo.engines.sglang.ports import listen_address, require_reachable
from megatron_dapo.engines.sglang.served import Expectation
from megatron_dapo.engines.sglang.server import AttachedServer, SglangServer
from megatron_dapo.engines.sglang.server_settings import ServerSettings
from megatron_dapo.engines.sglang.servers import ExternalServers, ReadyServer, Servers, StartedServers
from megatron_dapo.engines.sglang.supervised import SupervisedServer, SupervisorClient
from megatron_dapo.megatron.actor import MegatronActor
from megatron_dapo.megatron.model_config import DTYPES
from megatron_dapo.models.config_json import read_architecture
from megatron_dapo.parallel.coordination import collective_timeout, coordinate, default_store
from megatron_dapo.parallel.nodes import node_topology
from megatron_dapo.parallel.rank0_commands import Rank0Commands
from megatron_dapo.plan.memory import SPARE_POSITIONS
from megatron_dapo.reshard.execution import Buffers
from megatron_dapo.reshard.layout import Layout, TensorSpec
from megatron_dapo.trainer.topology import RunTopology
from megatron_dapo.types import Completion, GenerationRequest, RoutingShape

Result = TypeVar("Result")

MEBIBYTE = 1 << 20


class Publisher(Protocol):
    """Publishes the trainer's weights to the engines."""

    def publish(self, version: int) -> None:
        """Serve the current weights as `version`, verified before its first token is generated. Collective."""


@dataclass(frozen=True)
class Engines:
    """One rank's view of the run's engines."""

    engine: CollectiveEngine
    publisher: Publisher
    servers: SglangEngines | None = None  # if the engines are separate processes
    # Inside it, the trainer's parameters have the servers' quantized values. None if servers hold them as trained.
    # Collective.
    as_served: Callable[[], AbstractContextManager[None]] | None = None


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


def start_engines(config: Config, topology: RunTopology, commands: Rank0Commands, stack: ExitStack) -> EngineBuilder:
    """Begin starting this rank's engines; `stack` stops them. Collective over the world.

    Only the policy's ranks have engines. Engines have no weights before the first `publish`.
    """
    return _BUILDERS[config.rollout.engine](config, topology, commands, stack)


def build_local_engine(config: Config, model_dir: Path) -> EmbeddedEngine:
    """Return an embedded engine in this process for the architecture of `model_dir`, without weights."""
    settings = EmbeddedEngineSettings(
        max_slots=config.rollout.slots_per_rank,
        max_length=config.longest_sequence,
        dtype=DTYPES[config.model.dtype],
        device="cuda" if torch.cuda.is_available() else "cpu",
    )
    return EmbeddedEngine.from_directory(model_dir, settings, trust_remote_code=config.model.trust_remote_code)


class EngineBuilder:
    """Embedded engines live in the trainer's processes, so nothing starts before the actor."""

    def __init__(self, config: Config, topology: RunTopology, commands: Rank0Commands, stack: ExitStack) -> None:
        self._config = config
        self._topology = topology
        self._ranks = topology.policy
        self._commands = commands

    def connect(self, actor: MegatronActor | None) -> Engines:
        """Return the engines with weight sync from this rank's part of the actor, which may be None. Collective."""
        if actor is None:
            nothing = NoEngine(self._commands)
            return Engines(nothing, nothing)
        return self._connect(actor)

    def _connect(self, actor: MegatronActor) -> Engines:
        config, ranks = self._config, self._ranks
        assert ranks.coordination is not None, "ranks with an actor hold the policy"
        local = build_local_engine(config, config.model.path)
        engine = DistributedEmbeddedEngine(local, ranks.coordination, self._commands)
        weights = WeightSource(actor, ranks.rank, ranks.coordination)
        sync = local_weight_sync(actor.tensors, engine, ranks.group, ranks.coordination, weights=weights)
        return Engines(engine, sync)


class SglangBuilder(EngineBuilder):
    """SGLang servers (started on every node or given by URL), their clients, generation and weight sync.

    Servers start up while the actor is built. Servers on the trainer's GPUs must be up and asleep before that, because
    SGLang sizes its KV cache by the memory that is free when it starts.
    """

    def __init__(self, config: Config, topology: RunTopology, commands: Rank0Commands, stack: ExitStack) -> None:
        super().__init__(config, topology, commands, stack)
        ranks = self._ranks
        names = topology.coordination.gather(socket.gethostname())
        self._nodes = node_topology(names[: ranks.num_ranks])
        timeout_s, progress = collective_timeout(config.run.wait_timeout_seconds), topology.coordination.progress
        self._key_file = Path(config.sglang.api_key_file or config.run.output_dir / "engine.key")
        self._supervisor = self._join_supervisor(stack)
        # Servers kept from the last attempt know its key. Servers of a node lost since then are replaced.
        are_kept = self._supervisor is not None and self._supervisor.num_kept > 0
        if topology.rank == 0 and not config.sglang.api_key_file and not are_kept:
            create_key(config.run.output_dir)
        topology.coordination.barrier("the servers' API key")
        if ranks.is_member:
            assert ranks.coordination is not None, "members have one"
            self._coordination = ranks.coordination
            node_ranks = self._nodes.ranks_of(self._nodes.node_of(ranks.rank))
            self._node_group = coordinate(node_ranks, timeout_s, progress)
            self._processes_here = names.count(names[ranks.rank])  # on this node, including the critic's
            self._start(stack)

    def _join_supervisor(self, stack: ExitStack) -> SupervisorClient | None:
        """Connect to the supervisor of this node's servers if the run has one, on the rank that starts the servers."""
        config, ranks, supervision = self._config, self._ranks, self._topology.supervision
        leads = ranks.is_member and self._nodes.ranks_of(self._nodes.node_of(ranks.rank))[0] == ranks.rank
        if not leads or supervision is None or not config.keeps_servers:
            return None
        client = supervision.connect(config.run.output_dir, config.sglang.servers_per_node, config.sglang.keep_seconds)
        stack.push(client.__exit__)
        return client

    def _start(self, stack: ExitStack) -> None:
        self._architecture = read_architecture(self._config.model.path)
        # Raises ValueError before anything starts if servers cannot hold the model in these shards.
        self._expected_engine().shards(0)
        self._servers = self._build_servers()
        stack.callback(self._servers.close)
        self._device = self._shared_device()
        self._engines = SglangEngines(
            self._servers, self._ranks.rank, self._client, self._coordination, self._commands, self._device
        )
        stack.callback(self._engines.close)
        if self._device is not None:
            self._engines.wait_until_healthy()
            self._engines.sleep()

    def _connect(self, actor: MegatronActor) -> Engines:
        weights = SOURCES[self._config.sglang.quantization](actor, self._ranks.rank, self._coordination)
        engine = self._engine if self._ranks.rank == 0 else None
        self._engines.attach(partial(self._weight_sync, actor, weights), engine, weights.current)
        return Engines(
            self._engines, self._engines, self._engines, weights.as_served if weights.needs_description else None
        )

    @property
    def _device_type(self) -> str:
        return "cuda" if torch.cuda.is_available() else "cpu"

    @property
    def _shares_devices(self) -> bool:
        return self._device_type == "cuda" and self._config.sglang.placement == "colocated"

    def _own_address(self) -> str:
        """Return the address at which the run's other nodes reach this one; loopback if there are no other nodes."""
        if self._nodes.num_nodes == 1 and not self._config.sglang.urls:
            return LOOPBACK
        return Address(self._topology.rendezvous_host, 1).local_host()

    # Servers

    def _build_servers(self) -> Servers:
        sglang, rank = self._config.sglang, self._ranks.rank
        if sglang.urls:
            return ExternalServers(self._attach, len(sglang.urls), rank, self._coordination)
        per_node, restarts = sglang.servers_per_node, sglang.max_restarts
        return StartedServers(self._spawn, self._nodes, rank, per_node, restarts, self._coordination)

    def _attach(self, index: int) -> AttachedServer:
        sglang = self._config.sglang
        expectation = Expectation.of(self._server_settings(0))
        return SglangServer.attach(sglang.urls[index], self._key_file, expectation, index, sglang.start_timeout_seconds)

    def _spawn(
        self, index: int, local_index: int, num_restarts: int, cache_tokens: int | None
    ) -> SglangServer | SupervisedServer:
        settings = replace(
            self._server_settings(local_index),
            # Servers with equal seeds would draw the same numbers for the same row and step of their batches.
            random_seed=(self._config.run.seed + index) % (1 << 31),
            num_restarts=num_restarts,
            replaced_cache_tokens=cache_tokens,
        )
        if self._supervisor is not None:
            return SupervisedServer(self._supervisor, settings, index, local_index)
        return SglangServer.start(settings, index)

    def _server_settings(self, local_index: int) -> ServerSettings:
        """Return the settings of the server with index `local_index` on its node."""
        sglang = self._config.sglang
        # The trainer's processes take a node's first GPUs; disaggregated servers take the GPUs after them.
        first = local_index * sglang.tp_size + (self._processes_here if sglang.placement == "disaggregated" else 0)
        address = listen_address(sglang.host, self._own_address())
        require_reachable(address, sglang.host, self._nodes.num_nodes)
        settings = server_settings(self._config, self._key_file, self._config.run.output_dir / "engines", first)
        return replace(
            settings,
            host=address.bind,
            advertised_host=address.advertised,
            memory_saver=self._shares_devices,
            quantization=sglang.quantization,
            random_weights=True,  # the first weight sync, which is verified, replaces them
        )

    def _client(self, server: ReadyServer) -> SglangClient:
        make = ColocatedClient if self._shares_devices else SglangClient
        api_version = self._servers.api_version(server.index)
        name = f"{server.index} ({server.url})"
        client = make(server.url, read_key(self._key_file), client_timeouts(self._config), api_version, name=name)
        own = self._servers.own(server.index)
        if isinstance(client, ColocatedClient) and isinstance(own, SupervisedServer):
            client.remember = own.remember_released
        return client

    def _shared_device(self) -> SharedDevice | None:
        """Return this rank's GPU if servers share the trainer's GPUs, and None otherwise."""
        if not self._shares_devices:
            return None
        sglang = self._config.sglang
        node, local_rank = divmod(self._ranks.rank, self._nodes.ranks_per_node)
        slot, server_rank = divmod(local_rank, sglang.tp_size)
        if slot >= sglang.servers_per_node:  # no server's rank is on this GPU
            return SharedDevice(0, sglang.weight_sync_timeout_seconds)
        num_bytes = sum(spec.num_bytes for spec in self._expected_engine().local_specs(server_rank).values())
        server = node * sglang.servers_per_node + slot
        return SharedDevice(num_bytes, sglang.weight_sync_timeout_seconds, server)

    # Generation, on rank 0

    def _engine(self, clients: Sequence[SglangClient]) -> SglangEngine:
        """Return the engine over all servers. ValueError if a server would truncate the run's longest sequences."""
        config, longest = self._config, min(client.max_length() for client in clients)
        if longest < config.longest_sequence:
            raise ValueError(
                f"a server holds at most {longest} tokens of one sequence, prompt and response of this run are up to "
                f"{config.longest_sequence}: raise sglang.max_total_tokens or sglang.mem_fraction_static, or shorten them"
            )
        sizes, experts = self._architecture, self._architecture.experts
        routing = (
            RoutingShape(sizes.num_layers, experts.num_experts_per_token, experts.num_experts) if experts is not None else None
        )
        settings = SglangEngineSettings(
            longest,
            sizes.vocab_size,
            config.sglang.max_running_requests,
            abort_s=config.sglang.abort_timeout_seconds,
            routing=routing,
        )
        return SglangEngine(clients, settings)

    # Weight sync

    def _engine_layout(self, num_engines: int) -> SglangLayout:
        """Return the layout of engines that hold the model in its native type."""
        config, sglang = self._config, self._config.sglang
        return sglang_layout(
            self._architecture,
            sglang.tp_size,
            DTYPES[config.model.dtype],
            num_engines,
            expert_parallel=sglang.ep_size,
            device=self._device_type,
        )

    def _expected_engine(self) -> EngineLayout:
        """Return the layout that one engine will have, before it exists."""
        return expected_layouts(self._config.sglang.quantization, self._engine_layout(1))[1]

    def _weight_sync(
        self, actor: MegatronActor, weights: WeightSource, controls: dict[int, SglangClient]
    ) -> WeightSync:
        """Return the weight sync over the configured transport, given clients of the servers that this rank leads."""
        sglang = self._config.sglang
        described = self._describe(controls) if weights.needs_description else ()
        layouts = weights.layouts(self._engine_layout(len(self._servers.leaders)), described)
        handles = EngineHandles(self._servers.leaders, controls)
        sync_plan, transport = self._TRANSPORTS[sglang.weight_sync_transport](self, handles, *layouts)
        seconds = sglang.weight_sync_timeout_seconds
        timeouts = SyncTimeouts(
            pause_s=seconds, flush_s=seconds, session_s=seconds, transfer_s=seconds, resume_s=seconds
        )
        release_cache = self._device.make_room_for_cache if self._device else None
        return WeightSync(sync_plan, handles, transport, self._coordination, timeouts, release_cache=release_cache)

    def _describe(self, controls: Mapping[int, SglangClient]) -> list[dict[str, TensorSpec]]:
        """Return the parameters of the first server, which rank 0 leads. ValueError on all ranks without an answer."""
        answer: dict[str, Any] | None = None
        if self._ranks.rank == 0:
            sglang = self._config.sglang
            try:
                found = served_parameters(
                    controls[0],
                    sglang.tp_size,
                    host=self._own_address(),
                    timeout_s=sglang.weight_sync_timeout_seconds,
                )
                answer = {"ranks": [specs_to_json(specs) for specs in found]}
            except (ValueError, EngineError) as error:  # the other ranks are waiting for the broadcast
                answer = {"problem": str(error)}
        answer = self._coordination.broadcast(answer)
        if "problem" in answer:
            raise ValueError(answer["problem"])
        return [specs_from_json(specs) for specs in answer["ranks"]]

    def _plan(self, source: Layout, engines: EngineLayout, **places: int) -> SyncPlan:
        bucket_bytes = self._config.sglang.weight_sync_bucket_mb * MEBIBYTE
        return plan_sync(source, engines, bucket_bytes, ranks_per_node=self._nodes.ranks_per_node, **places)

    def _shared_memory(
        self, handles: EngineHandles, source: Layout, engines: EngineLayout
    ) -> tuple[SyncPlan, Transport]:
        # With slots on GPUs, an engine rank gets what it can from the trainer rank next to it.
        in_host_memory = self._config.sglang.shared_memory == "host"
        per_node = self._config.sglang.servers_per_node if in_host_memory else 1
        sync_plan = self._plan(source, engines, engines_per_node=per_node)
        assert self._node_group is not None, "shared memory is between ranks of one node"
        transport = SharedMemoryTransport(
            sync_plan,
            handles,
            self._ranks.rank,
            self._nodes,
            self._node_group,
            peers=self._join_peers() if self._nodes.num_nodes > 1 else None,
            message_timeout_s=self._config.sglang.weight_sync_timeout_seconds,
            device=slot_device(self._config.sglang.shared_memory),
        )
        return sync_plan, transport

    def _join_peers(self) -> PeerGroup:
        """Return the group of all trainer ranks, which carries shards to engines on other nodes."""
        name = self._coordination.broadcast(RendezvousStore.new_name() if self._ranks.rank == 0 else None)
        return meet(
            default_store(),
            name,
            self._ranks.rank,
            self._ranks.num_ranks,
            timeout_s=self._config.sglang.start_timeout_seconds,
            host=self._own_address(),
        )

    def _p2p(self, handles: EngineHandles, source: Layout, engines: EngineLayout) -> tuple[SyncPlan, Transport]:
        # Trainer and engine ranks form one group, with the engines' ranks after the trainer's.
        sync_plan = self._plan(source, engines, rank_offset=self._ranks.num_ranks)
        settings = P2PSettings(host=self._own_address(), backend="nccl" if self._device_type == "cuda" else "gloo")
        return sync_plan, P2PTransport(sync_plan, handles, self._coordination, settings)

    def _disk(self, handles: EngineHandles, source: Layout, engines: EngineLayout) -> tuple[SyncPlan, Transport]:
        assert isinstance(source, MegatronLayout), "checkpoints hold the trained weights; the validator refuses others"
        config, group = self._config, self._ranks.group

        def export(directory: Path, sources: Buffers) -> None:
            export_to_huggingface(directory, config.model.path, source, sources, group)

        sync_plan, directory = self._plan(source, engines), config.run.output_dir / "weights"
        return sync_plan, DiskTransport(sync_plan, handles, directory, export, self._coordination)

    _TRANSPORTS = {"shared_memory": _shared_memory, "p2p": _p2p, "disk": _disk}


def server_settings(config: Config, key_file: Path, log_dir: Path, first_gpu: int) -> ServerSettings:
    """Return the settings of a server that listens on loopback and has the weights of model.path.

    `first_gpu`: index on this node of the first of the server's sglang.tp_size GPUs.
    """
    sglang, cuda = config.sglang, torch.cuda.is_available()
    # A server on a CPU would otherwise take a fixed number of tokens, whatever it needs.
    on_cpu = None if cuda else sglang.max_running_requests * (config.longest_sequence + SPARE_POSITIONS)
    return ServerSettings(
        python=engine_python(config),
        model_path=config.model.path,
        key_file=key_file,
        log_dir=log_dir,
        device="cuda" if cuda else "cpu",
        tensor_parallel=sglang.tp_size,
        dtype=config.model.dtype,
        max_running_requests=sglang.max_running_requests,
        max_total_tokens=sglang.max_total_tokens or on_cpu,
        memory_fraction=sglang.mem_fraction_static if cuda else None,
        attention_backend=sglang.attention_backend,
        sampling_backend=sglang.sampling_backend,
        prefill_cuda_graph=sglang.prefill_cuda_graph,
        seeded=sglang.enable_deterministic_inference,
        routing=config.rollout.routing_replay,
        random_seed=config.run.seed % (1 << 31),
        start_timeout_s=sglang.start_timeout_seconds,
        more_arguments=("--ep-size", str(sglang.ep_size)) if sglang.ep_size > 1 else (),
        gpus=tuple(range(first_gpu, first_gpu + sglang.tp_size)) if cuda else (),
        more_environment=sglang.environment,
    )


def client_timeouts(config: Config) -> Timeouts:
    """Return the deadlines for calls to a server."""
    sglang = config.sglang
    seconds = sglang.weight_sync_timeout_seconds
    return Timeouts(generate_s=sglang.request_timeout_seconds, control_s=seconds, flush_s=seconds, update_s=seconds)


def engine_python(config: Config) -> Path:
    """Return the interpreter of SGLang's environment."""
    # Do not resolve the path: a virtual environment's interpreter is a link, and only the link finds its packages.
    return Path(config.sglang.python or sys.executable).absolute()


def slot_device(where: str) -> torch.device:
    """Return the device of this rank's slots in shared memory. ValueError if there is no such device."""
    if where == "host":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(
            'sglang.shared_memory = "device" takes memory of a GPU, and torch sees none here; set it to "host", or start '
            "on GPUs with a CUDA build of torch"
        )
    return torch.device("cuda", torch.cuda.current_device())


_BUILDERS: dict[str, type[EngineBuilder]] = {"embedded": EngineBuilder, "sglang": SglangBuilder}
