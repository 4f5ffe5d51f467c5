"""Starts a run's engines, before the actor is built; `trainer.connect_engines` gives them its weights."""

from __future__ import annotations

import socket
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatron_dapo.bridge.protocol.peer_group import LOOPBACK, Address
from megatron_dapo.bridge.sources import expected_layouts
from megatron_dapo.bridge.sync_plan import EngineLayout
from megatron_dapo.checkpoints.layouts.sglang import SglangLayout, sglang_layout
from megatron_dapo.config.model_schema import LoraConfig
from megatron_dapo.config.schema import Config
from megatron_dapo.engines.embedded import EmbeddedEngine, EmbeddedEngineSettings
from megatron_dapo.engines.sglang.client import ColocatedClient, SglangClient, Timeouts
from megatron_dapo.engines.sglang.cluster import SglangEngines, SharedDevice
from megatron_dapo.engines.sglang.keys import create_key, read_key
from megatron_dapo.engines.sglang.ports import listen_address, require_reachable
from megatron_dapo.engines.sglang.server import AttachedServer, Expectation, SglangServer
from megatron_dapo.engines.sglang.server_settings import ServerSettings
from megatron_dapo.engines.sglang.servers import Part, ReadyServer, Servers, StartedServers
from megatron_dapo.engines.sglang.supervisor import SupervisedServer, SupervisorClient
from megatron_dapo.megatron.model_config import DTYPES
from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.models.config_json import read_architecture
from megatron_dapo.models.lora import chosen_targets
from megatron_dapo.parallel.coordination import Coordination, collective_timeout, coordinate
from megatron_dapo.parallel.nodes import NodeTopology, node_topology
from megatron_dapo.parallel.rank0_commands import Rank0Commands
from megatron_dapo.parallel.rank_set import RankSet
from megatron_dapo.plan.memory import SPARE_POSITIONS
from megatron_dapo.trainer.topology import RunTopology

_ADAPTER = "policy"  # name of the LoRA adapter that generates

@dataclass(frozen=True)
class ServerPlace:
    """The nodes of a run's servers, and what each server of this node gets from the configuration."""

    config: Config
    ranks: RankSet  # ranks that hold the policy and lead servers
    nodes: NodeTopology
    rendezvous_host: str
    key_file: Path
    processes_here: int = 0  # the run's processes on this node, including the critic's
    supervisor: SupervisorClient | None = None  # client of this node's supervisor, on the rank that starts servers

    @property
    def device_type(self) -> str:
        return "cuda" if torch.cuda.is_available() else "cpu"

    @property
    def shares_devices(self) -> bool:
        return self.device_type == "cuda" and self.config.sglang.placement == "colocated"

    def own_address(self) -> str:
        """Return the address at which the run's other nodes reach this one; loopback if there are no other nodes."""
        if self.nodes.num_nodes == 1 and not self.config.sglang.urls:
            return LOOPBACK
        return Address(self.rendezvous_host, 1).local_host()

    def servers(self, coordination: Coordination) -> Servers:
        """Start the run's servers, or attach to those that are given by URL. Collective."""
        sglang, rank = self.config.sglang, self.ranks.rank
        if sglang.urls:
            attached = {index: self.attach(index) for index in range(len(sglang.urls))} if rank == 0 else {}
            return Servers([0] * len(sglang.urls), attached, coordination)
        per_node, restarts = sglang.servers_per_node, sglang.max_restarts
        return StartedServers(
            self.spawn, self.nodes, rank, per_node, restarts, coordination, sglang.nodes_per_server
        )

    def attach(self, index: int) -> AttachedServer:
        """Return the server at the URL with that index."""
        sglang = self.config.sglang
        expectation = Expectation.of(self.settings(0))
        return AttachedServer(sglang.urls[index], self.key_file, expectation, index, sglang.start_timeout_seconds)

    def spawn(self, part: Part) -> SglangServer | SupervisedServer:
        """Start a server of this node, or its part of one."""
        here = self.settings(part.slot)
        settings = replace(
            here,
            gpus=here.gpus[: self.config.sglang.ranks_per_node],
            # Servers with equal seeds would draw the same numbers for the same row and step of their batches.
            random_seed=(self.config.run.seed + part.index) % (1 << 31),
            num_restarts=part.num_restarts,
            replaced_cache_tokens=part.cache_tokens,
            num_nodes=self.config.sglang.nodes_per_server,
            node_rank=part.node_rank,
            meeting=part.meeting,
        )
        if self.supervisor is not None:
            return SupervisedServer(self.supervisor, settings, part.index, part.slot)
        return SglangServer.start(settings, part.index)

    def settings(self, local_index: int) -> ServerSettings:
        """Return the settings of the server with index `local_index` on its node."""
        config, sglang = self.config, self.config.sglang
        # The trainer's processes take a node's first GPUs; disaggregated servers take the GPUs after them.
        first = local_index * sglang.ranks_per_node + (self.processes_here if sglang.placement == "disaggregated" else 0)
        address = listen_address(sglang.host, self.own_address())
        require_reachable(address, sglang.host, self.nodes.num_nodes)
        settings, lora = server_settings(config, self.key_file, config.run.output_dir / "engines", first), config.model.lora
        # The first weight sync, which is verified, replaces random weights; those next to adapters are read from model.path.
        is_synced, architecture = not lora.serves_adapters, read_architecture(config.model.path)
        more = architecture.serving.synced if is_synced else _adapter_arguments(lora, architecture, settings.device)
        return replace(
            settings,
            host=address.bind,
            advertised_host=address.advertised,
            memory_saver=self.shares_devices,
            quantization=sglang.quantization,
            random_weights=is_synced,
            more_arguments=(*settings.more_arguments, *more),
        )

    def client(self, servers: Servers, server: ReadyServer) -> SglangClient:
        """Return this rank's client of a ready server."""
        make = ColocatedClient if self.shares_devices else SglangClient
        api_version = servers.api_version(server.index)
        client = make(
            server.url,
            read_key(self.key_file),
            client_timeouts(self.config),
            api_version,
            name=f"{server.index} ({server.url})",
            update_pause=self.config.sglang.update_pause,
            adapter=_ADAPTER if self.config.model.lora.serves_adapters else "",
        )
        own = servers.own(server.index)
        if isinstance(client, ColocatedClient) and isinstance(own, SupervisedServer):
            client.remember = own.remember_released
        return client

    def engine_layout(self, num_engines: int) -> SglangLayout:
        """Return the layout of engines that hold the model in its native type."""
        config, sglang = self.config, self.config.sglang
        return sglang_layout(
            served_architecture(config.model.path, self.device_type),
            sglang.tp_size,
            DTYPES[config.model.dtype],
            num_engines,
            expert_parallel=sglang.ep_size,
            device=self.device_type,
        )

    def expected_engine(self) -> EngineLayout:
        """Return the layout that one engine will have, before it exists."""
        return expected_layouts(self.config.sglang.quantization, self.engine_layout(1))[1]

    def shared_device(self) -> SharedDevice | None:
        """Return this rank's GPU if servers share the trainer's GPUs, and None otherwise."""
        if not self.shares_devices:
            return None
        sglang = self.config.sglang
        node, local_rank = divmod(self.ranks.rank, self.nodes.ranks_per_node)
        slot, server_rank = divmod(local_rank, sglang.tp_size)
        if slot >= sglang.servers_per_node:  # no server's rank is on this GPU
            return SharedDevice(0, sglang.weight_sync_timeout_seconds)
        num_bytes = sum(spec.num_bytes for spec in self.expected_engine().local_specs(server_rank).values())
        server = node * sglang.servers_per_node + slot
        return SharedDevice(num_bytes, sglang.weight_sync_timeout_seconds, server)


@dataclass(frozen=True)
class RunServers:
    """The servers of a run, as a rank of the policy sees them."""

    place: ServerPlace
    servers: Servers
    engines: SglangEngines
    device: SharedDevice | None
    coordination: Coordination  # the policy's ranks
    node_group: Coordination | None  # the policy's ranks on this node


def start_engines(
    config: Config, topology: RunTopology, commands: Rank0Commands, stack: ExitStack
) -> RunServers | None:
    """Begin starting the run's servers, which `stack` stops. Collective over the world.

    Returns None on ranks without servers: embedded engines live in the trainer's processes, and the critic's ranks have
    none.
    """
    if config.rollout.engine != "sglang":
        return None
    ranks = topology.policy
    names = topology.coordination.gather(socket.gethostname())
    nodes = node_topology(names[: ranks.num_ranks])
    key_file = Path(config.sglang.api_key_file or config.run.output_dir / "engine.key")
    supervisor = _join_supervisor(config, topology, nodes, stack)
    # Servers kept from the last attempt know its key. Servers of a node lost since then are replaced.
    are_kept = supervisor is not None and supervisor.num_kept > 0
    if topology.rank == 0 and not config.sglang.api_key_file and not are_kept:
        create_key(config.run.output_dir)
    topology.coordination.barrier("the servers' API key")
    if not ranks.is_member:
        return None
    assert ranks.coordination is not None, "members have one"
    timeout_s, progress = collective_timeout(config.run.wait_timeout_seconds), topology.coordination.progress
    node_group = coordinate(nodes.ranks_of(nodes.node_of(ranks.rank)), timeout_s, progress)
    processes_here = names.count(names[ranks.rank])
    place = ServerPlace(config, ranks, nodes, topology.rendezvous_host, key_file, processes_here, supervisor)
    return start_servers(place, ranks.coordination, node_group, commands, stack)


def start_servers(
    place: ServerPlace,
    coordination: Coordination,
    node_group: Coordination | None,
    commands: Rank0Commands,
    stack: ExitStack,
) -> RunServers:
    """Begin starting the servers of `place`, which come up while the actor is built.

    Servers on the trainer's GPUs are up and asleep at the end, because SGLang sizes its KV cache by the memory that is
    free when it starts. ValueError, before anything starts, if servers cannot hold the model in these shards.
    """
    place.expected_engine().shards(0)
    servers = place.servers(coordination)
    stack.callback(servers.close)
    device, rank = place.shared_device(), place.ranks.rank
    engines = SglangEngines(
        servers, rank, lambda server: place.client(servers, server), coordination, commands, device
    )
    stack.callback(engines.close)
    if device is not None:
        engines.wait_until_healthy()
        engines.sleep()
    return RunServers(place, servers, engines, device, coordination, node_group)


def _join_supervisor(
    config: Config, topology: RunTopology, nodes: NodeTopology, stack: ExitStack
) -> SupervisorClient | None:
    """Connect to the supervisor of this node's servers if the run has one, on the rank that starts the servers."""
    ranks, supervision = topology.policy, topology.supervision
    leads = ranks.is_member and nodes.ranks_of(nodes.node_of(ranks.rank))[0] == ranks.rank
    if not leads or supervision is None or not config.keeps_servers:
        return None
    client = supervision.connect(config.run.output_dir, config.sglang.servers_per_node, config.sglang.keep_seconds)
    stack.push(client.__exit__)
    return client


def build_local_engine(config: Config, model_dir: Path, lender: EmbeddedEngine | None = None) -> EmbeddedEngine:
    """Return an embedded engine in this process for the architecture of `model_dir`, without weights, or with those of `lender`."""
    settings = EmbeddedEngineSettings(
        max_slots=config.rollout.slots_per_rank,
        max_length=config.longest_sequence,
        dtype=DTYPES[config.model.dtype],
        device="cuda" if torch.cuda.is_available() else "cpu",
    )
    trusts = config.model.trust_remote_code
    return EmbeddedEngine.from_directory(model_dir, settings, trust_remote_code=trusts, lender=lender)


def server_settings(config: Config, key_file: Path, log_dir: Path, first_gpu: int) -> ServerSettings:
    """Return the settings of a server of one node that listens on loopback and has the weights of model.path.

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
        max_support=config.rollout.top_k if config.rollout.is_restricted else 0,
        update_pause=sglang.update_pause,
        draft_tokens=sglang.draft_tokens if sglang.drafting != "off" else 0,
        draft_corpus_tokens=sglang.draft_corpus_tokens,
        random_seed=config.run.seed % (1 << 31),
        start_timeout_s=sglang.start_timeout_seconds,
        more_arguments=("--ep-size", str(sglang.ep_size)) if sglang.ep_size > 1 else (),
        gpus=tuple(range(first_gpu, first_gpu + sglang.tp_size)) if cuda else (),
        more_environment=sglang.environment,
    )


def served_architecture(path: Path, device: str) -> ModelArchitecture:
    """Read the architecture that SGLang is to serve. ValueError if it cannot on this kind of device."""
    architecture = read_architecture(path)
    if device == "cpu" and not architecture.serving.on_cpu:
        raise ValueError(
            f"rollout.engine: SGLang cannot serve a {architecture.model_type} on a CPU: its attention there has no sinks; run "
            'servers on GPUs, or set rollout.engine = "embedded"'
        )
    return architecture


def _adapter_arguments(lora: LoraConfig, architecture: ModelArchitecture, device: str) -> tuple[str, ...]:
    """Return SGLang's arguments for a server that holds adapters next to its weights."""
    # One adapter at a time; SGLang counts requests without one as another.
    sizes = ("--max-lora-rank", str(lora.rank), "--max-loras-per-batch", "2", "--max-loaded-loras", "2")
    backend = ("--lora-backend", "torch_native") if device == "cpu" else ()
    return ("--enable-lora", *sizes, *backend, "--lora-target-modules", *chosen_targets(architecture.shapes(), lora.targets))


def client_timeouts(config: Config) -> Timeouts:
    """Return the deadlines for calls to a server."""
    sglang = config.sglang
    seconds = sglang.weight_sync_timeout_seconds
    return Timeouts(generate_s=sglang.request_timeout_seconds, control_s=seconds, flush_s=seconds, update_s=seconds)


def engine_python(config: Config) -> Path:
    """Return the interpreter of SGLang's environment."""
    # Do not resolve the path: a virtual environment's interpreter is a link, and only the link finds its packages.
    return Path(config.sglang.python or sys.executable).absolute()


