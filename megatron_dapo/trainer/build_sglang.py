"""SGLang servers, the plan of deliveries to them, and the transport, from the configuration."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_dapo.bridge.protocol.description import specs_from_json, specs_to_json
from megatron_dapo.bridge.protocol.peer_group import LOOPBACK, Address, PeerGroup, RendezvousStore, join
from megatron_dapo.bridge.served_parameters import served_parameters
from megatron_dapo.bridge.sources import SOURCES, WeightSource, expected_layouts
from megatron_dapo.bridge.sync_plan import EngineLayout, SyncPlan
from megatron_dapo.bridge.transports.base import GroupCoordinator
from megatron_dapo.bridge.transports.disk import DiskTransport
from megatron_dapo.bridge.transports.p2p import P2PSettings, P2PTransport
from megatron_dapo.bridge.transports.shared_memory import SharedMemoryTransport
from megatron_dapo.bridge.weight_sync import EngineHandles, SyncTimeouts, Transport, WeightSync
from megatron_dapo.checkpoints.architecture import ModelArchitecture
from megatron_dapo.checkpoints.export import export_to_huggingface
from megatron_dapo.checkpoints.megatron_layout import MegatronLayout
from megatron_dapo.checkpoints.sglang_layout import SglangLayout, sglang_layout
from megatron_dapo.config.schema import Config
from megatron_dapo.engines.sglang.client import ColocatedClient, EngineError, SglangClient, Timeouts
from megatron_dapo.engines.sglang.cluster import SglangEngines, SharedDevice
from megatron_dapo.engines.sglang.engine import SglangEngine, SglangEngineSettings
from megatron_dapo.engines.sglang.frontend import DirectFrontend, Frontend, RouterFrontend
from megatron_dapo.engines.sglang.keys import create_key, read_key
from megatron_dapo.engines.sglang.ports import listen_address, require_reachable
from megatron_dapo.engines.sglang.router import RoutedClient, RouterSettings, SglangRouter
from megatron_dapo.engines.sglang.served import Expectation
from megatron_dapo.engines.sglang.server import AttachedServer, SglangServer
from megatron_dapo.engines.sglang.server_settings import ServerSettings
from megatron_dapo.engines.sglang.servers import ExternalServers, ReadyServer, Servers, StartedServers
from megatron_dapo.launch.environment import rendezvous_host
from megatron_dapo.megatron.actor import MegatronActor
from megatron_dapo.megatron.model_config import DTYPES
from megatron_dapo.parallel.coordination import Coordination, collective_timeout
from megatron_dapo.parallel.nodes import NodeTopology, host_names, node_topology
from megatron_dapo.parallel.rank0_commands import Rank0Commands
from megatron_dapo.parallel.rank_set import RankSet
from megatron_dapo.reshard.execution import Buffers
from megatron_dapo.reshard.layout import Layout, ShiftedLayout, TensorSpec
from megatron_dapo.reshard.planner import plan
from megatron_dapo.trainer.driven_engine import Engines
from megatron_dapo.trainer.elsewhere import without_engines

MEBIBYTE = 1 << 20
# SGLang keeps a few positions of a sequence free; a server that is short of them cuts responses silently.
SPARE_POSITIONS = 16


@dataclass(frozen=True)
class _Site:
    """Where this process stands among those that hold the policy, and the groups deliveries are agreed on in."""

    config: Config
    part: RankSet
    nodes: NodeTopology
    processes_here: int  # on this machine, those of the critic included
    coordination: Coordination
    node: dist.ProcessGroup
    key_file: Path

    @property
    def rank(self) -> int:
        return self.part.rank

    @property
    def num_ranks(self) -> int:
        return self.part.num_ranks

    @property
    def device(self) -> str:
        return "cuda" if torch.cuda.is_available() else "cpu"


def start_sglang(
    config: Config, part: RankSet, commands: Rank0Commands, stack: ExitStack
) -> Callable[[MegatronActor | None], Engines]:
    """Spawn this machine's servers, or find those given by URL; see `build_engines.start_engines`. Collective."""
    site = _site(config, part)
    if site is None:
        return lambda actor: without_engines(commands)
    architecture = ModelArchitecture.from_directory(config.model.path)
    # ValueError before anything starts where servers cannot hold the model cut like this.
    _expected(site, architecture).shards(0)
    servers = _servers(site)
    stack.callback(servers.close)
    device = _shared_gpu(site, architecture)
    engines = SglangEngines(servers, site.rank, partial(_client, site, servers), site.coordination, commands, device)
    stack.callback(engines.close)
    if device is not None:
        # SGLang sizes its KV cache by the memory that is free at its start: the actor is built after that.
        engines.wait_until_healthy()
        engines.sleep()

    def connect(actor: MegatronActor | None) -> Engines:
        assert actor is not None, "ranks with servers hold the policy"
        weights = SOURCES[config.sglang.quantization](actor, site.rank, site.coordination.group)
        engines.attach(
            partial(_update, site, servers, actor, weights, device),
            partial(_frontend, site, architecture.vocab_size) if site.rank == 0 else None,
            weights.current,
        )
        sleep = engines.sleep if device else None
        as_served = weights.as_served if weights.needs_description else None
        return Engines(engines, engines, engines, engines.recover, sleep, as_served)

    return connect


def _site(config: Config, part: RankSet) -> _Site | None:
    """None on ranks that are not of `part`. Every process of the world makes all groups."""
    names = host_names()
    nodes = node_topology(names[: part.num_ranks])
    timeout = timedelta(seconds=collective_timeout(config.run.wait_timeout_seconds))
    groups = [
        dist.new_group(list(nodes.ranks_of(node)), backend="gloo", timeout=timeout) for node in range(nodes.num_nodes)
    ]
    key_file = Path(config.sglang.api_key_file) if config.sglang.api_key_file else config.run.output_dir / "engine.key"
    if part.world_rank == 0 and not config.sglang.api_key_file:
        create_key(config.run.output_dir)
    dist.barrier()
    if not part.is_member:
        return None
    assert part.coordination is not None, "members have one"
    processes_here = names.count(names[part.rank])
    return _Site(config, part, nodes, processes_here, part.coordination, groups[nodes.node_of(part.rank)], key_file)


def _expected(site: _Site, architecture: ModelArchitecture) -> EngineLayout:
    """One engine, as it will be."""
    return expected_layouts(site.config.sglang.quantization, _engines(site, architecture, 1))[1]


def _engines(site: _Site, architecture: ModelArchitecture, number: int) -> SglangLayout:
    """Engines that hold the model in its own type."""
    config, sglang = site.config, site.config.sglang
    return sglang_layout(
        architecture,
        sglang.tp_size,
        DTYPES[config.model.dtype],
        number,
        expert_parallel=sglang.ep_size,
        device=site.device,
    )


# ---- servers


def _servers(site: _Site) -> Servers:
    sglang = site.config.sglang
    if sglang.urls:
        expectation = Expectation.of(_settings(site, place=0))
        attach = partial(_attach, site, expectation)
        return ExternalServers(attach, len(sglang.urls), site.rank, site.coordination)
    budget = sglang.max_restarts
    return StartedServers(
        partial(_spawn, site), site.nodes, site.rank, sglang.servers_per_node, budget, site.coordination
    )


def _attach(site: _Site, expectation: Expectation, index: int) -> AttachedServer:
    sglang = site.config.sglang
    return SglangServer.attach(sglang.urls[index], site.key_file, expectation, index, sglang.start_timeout_seconds)


def _spawn(site: _Site, index: int, place: int) -> SglangServer:
    return SglangServer.start(_settings(site, place), index)


def _settings(site: _Site, place: int) -> ServerSettings:
    """Settings of the `place`-th server of a machine."""
    config, sglang = site.config, site.config.sglang
    cuda = site.device == "cuda"
    first = place * sglang.tp_size + (site.processes_here if sglang.placement == "disaggregated" else 0)
    address = listen_address(sglang.host, _own_address(site))
    require_reachable(address, sglang.host, site.nodes.num_nodes)
    # A server on a CPU would take a fixed number whatever it needs.
    on_cpu = None if cuda else sglang.max_running_requests * (config.longest_sequence + SPARE_POSITIONS)
    return ServerSettings(
        python=_python(config),
        model_path=config.model.path,
        key_file=site.key_file,
        log_dir=config.run.output_dir / "engines",
        device=site.device,
        tensor_parallel=sglang.tp_size,
        dtype=config.model.dtype,
        host=address.bind,
        advertised_host=address.advertised,
        max_running_requests=sglang.max_running_requests,
        max_total_tokens=sglang.max_total_tokens or on_cpu,
        memory_fraction=sglang.mem_fraction_static if cuda else None,
        memory_saver=_shares_devices(site),
        seeded=sglang.enable_deterministic_inference,
        quantization=sglang.quantization,
        random_weights=True,  # the first weight sync fills them, and is checked
        random_seed=config.run.seed % (1 << 31),
        start_timeout_s=sglang.start_timeout_seconds,
        more_arguments=("--ep-size", str(sglang.ep_size)) if sglang.ep_size > 1 else (),
        gpus=tuple(range(first, first + sglang.tp_size)) if cuda else (),
    )


def _python(config: Config) -> Path:
    """The servers' interpreter. Not resolved: an environment's is a link, and the link makes it that environment's."""
    return Path(config.sglang.python or sys.executable).absolute()


def _client(site: _Site, servers: Servers, server: ReadyServer) -> SglangClient:
    name = f"{server.index} ({server.url})"
    api_version = servers.api_version(server.index)
    kind = ColocatedClient if _shares_devices(site) else SglangClient
    return kind(server.url, read_key(site.key_file), _timeouts(site.config), api_version, name=name)


def _shares_devices(site: _Site) -> bool:
    return site.device == "cuda" and site.config.sglang.placement == "colocated"


def _shared_gpu(site: _Site, architecture: ModelArchitecture) -> SharedDevice | None:
    """Return this rank's GPU if servers share the trainer's GPUs, else None."""
    if not _shares_devices(site):
        return None
    sglang = site.config.sglang
    place, num_bytes = site.rank % site.nodes.ranks_per_node, 0
    if place < sglang.servers_per_node * sglang.tp_size:  # a server's rank is on this device
        shard = _expected(site, architecture).local_specs(place % sglang.tp_size)
        num_bytes = sum(spec.num_bytes for spec in shard.values())
    return SharedDevice(num_bytes, sglang.weight_sync_timeout_seconds)


def _timeouts(config: Config) -> Timeouts:
    sglang = config.sglang
    return Timeouts(
        generate_s=sglang.request_timeout_seconds,
        control_s=sglang.weight_sync_timeout_seconds,
        flush_s=sglang.weight_sync_timeout_seconds,
        update_s=sglang.weight_sync_timeout_seconds,
    )


def _frontend(site: _Site, vocab_size: int, clients: Mapping[int, SglangClient]) -> Frontend:
    """Rank 0's way to the servers. ValueError where one would cut the run's longest sequences."""
    longest = min(client.max_length() for client in clients.values())
    build = partial(_engine, site, vocab_size, longest)
    if not site.config.sglang.router:
        return DirectFrontend(clients, partial(build, site.config.sglang.max_running_requests))
    # One connection to the router for everything its servers can run.
    in_flight = site.config.sglang.max_running_requests * len(clients)
    return RouterFrontend(clients, partial(build, in_flight), partial(_start_router, site), partial(_routed, site))


def _start_router(site: _Site, urls: Sequence[str]) -> SglangRouter:
    settings = RouterSettings(_python(site.config), site.key_file, site.config.run.output_dir / "engines")
    return SglangRouter.start(settings, urls)


def _routed(site: _Site, url: str, clients: Sequence[SglangClient]) -> RoutedClient:
    return RoutedClient(url, read_key(site.key_file), clients, _timeouts(site.config))


def _engine(
    site: _Site, vocab_size: int, longest: int, max_in_flight: int, clients: Sequence[SglangClient]
) -> SglangEngine:
    config = site.config
    if longest < config.longest_sequence:
        raise ValueError(
            f"a server holds at most {longest} tokens of one sequence, prompt and response of this run are up to "
            f"{config.longest_sequence}: raise sglang.max_total_tokens or sglang.mem_fraction_static, or shorten them"
        )
    return SglangEngine(clients, SglangEngineSettings(longest, vocab_size, max_in_flight))


# ---- weight updates


def _update(
    site: _Site,
    servers: Servers,
    actor: MegatronActor,
    weights: WeightSource,
    device: SharedDevice | None,
    controls: dict[int, SglangClient],
) -> WeightSync:
    """The state machine of updates over the configured transport."""
    engines = _engines(site, actor.architecture, len(servers.leaders))
    pair = weights.layouts(engines, _describe(site, controls) if weights.needs_description else ())
    handles = EngineHandles(servers.leaders, controls)
    sync_plan, transport = _TRANSPORTS[site.config.sglang.weight_sync_transport](site, handles, *pair)
    seconds = site.config.sglang.weight_sync_timeout_seconds
    timeouts = SyncTimeouts(pause_s=seconds, flush_s=seconds, session_s=seconds, transfer_s=seconds, resume_s=seconds)
    release_cache = device.release_cache if device else None
    return WeightSync(
        sync_plan, handles, transport, GroupCoordinator(site.coordination.group), timeouts, release_cache=release_cache
    )


def _describe(site: _Site, controls: Mapping[int, SglangClient]) -> list[dict[str, TensorSpec]]:
    """The parameters of the first server, which rank 0 leads. ValueError on every rank where it does not tell."""
    told: dict[str, Any] = {}
    if site.rank == 0:
        seconds = site.config.sglang.weight_sync_timeout_seconds
        try:
            found = served_parameters(
                controls[0], site.config.sglang.tp_size, host=_own_address(site), timeout_s=seconds
            )
            told = {"ranks": [specs_to_json(specs) for specs in found]}
        except (ValueError, EngineError) as error:  # told to every rank instead of leaving them to wait
            told = {"problem": str(error)}
    told = site.coordination.broadcast(told if site.rank == 0 else None)
    if "problem" in told:
        raise ValueError(told["problem"])
    return [specs_from_json(specs) for specs in told["ranks"]]


def _bucket_bytes(site: _Site) -> int:
    return site.config.sglang.weight_sync_bucket_mb * MEBIBYTE


def _by_memory(
    site: _Site, handles: EngineHandles, source: Layout, engines: EngineLayout
) -> tuple[SyncPlan, Transport]:
    reshard = plan(source, engines, ranks_per_node=site.nodes.ranks_per_node)
    sync_plan = SyncPlan(reshard, engines, _bucket_bytes(site))
    peers = _all_ranks(site) if site.nodes.num_nodes > 1 else None
    transport = SharedMemoryTransport(
        sync_plan,
        handles,
        site.rank,
        site.nodes,
        GroupCoordinator(site.node),
        peers=peers,
        message_timeout_s=site.config.sglang.weight_sync_timeout_seconds,
        device=_shared_device(site.config.sglang.shared_memory),
    )
    return sync_plan, transport


def _shared_device(where: str) -> torch.device:
    """Where the slots of this rank lie. ValueError where there is no such device."""
    if where == "host":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(
            'sglang.shared_memory = "device" takes memory of a GPU, and torch sees none here; set it to "host", or start '
            "on GPUs with a CUDA build of torch"
        )
    return torch.device("cuda", torch.cuda.current_device())


def _all_ranks(site: _Site) -> PeerGroup:
    """All trainer ranks, for parts whose machine is another than the engine's."""
    place = RendezvousStore(_own_address(site)) if site.rank == 0 else None
    facts = [place.address.host, place.address.port, place.new_name()] if place else None
    host, port, name = site.coordination.broadcast(facts)
    timeout = site.config.sglang.start_timeout_seconds
    return join(Address(host, port), name, site.rank, site.num_ranks, timeout_s=timeout)


def _own_address(site: _Site) -> str:
    """Of this machine, where the others of the run reach it; loopback where there are no others."""
    if site.nodes.num_nodes == 1 and not site.config.sglang.urls:
        return LOOPBACK
    return Address(rendezvous_host(), 1).local_host()


def _by_peers(site: _Site, handles: EngineHandles, source: Layout, engines: EngineLayout) -> tuple[SyncPlan, Transport]:
    offset = site.num_ranks
    reshard = plan(source, ShiftedLayout(engines, offset), ranks_per_node=site.nodes.ranks_per_node)
    sync_plan = SyncPlan(reshard, engines, _bucket_bytes(site), rank_offset=offset)
    settings = P2PSettings(host=_own_address(site), backend="nccl" if site.device == "cuda" else "gloo")
    return sync_plan, P2PTransport(sync_plan, handles, GroupCoordinator(site.coordination.group), settings)


def _by_disk(site: _Site, handles: EngineHandles, source: Layout, engines: EngineLayout) -> tuple[SyncPlan, Transport]:
    config = site.config
    sync_plan = SyncPlan(plan(source, engines, ranks_per_node=site.nodes.ranks_per_node), engines, _bucket_bytes(site))

    def export(directory: Path, sources: Buffers) -> None:
        export_to_huggingface(directory, config.model.path, source, sources, site.part.group)

    assert isinstance(source, MegatronLayout), "a folder holds the trained weights, config refuses others"
    folder = config.run.output_dir / "weights"
    return sync_plan, DiskTransport(sync_plan, handles, folder, export, GroupCoordinator(site.coordination.group))


_TRANSPORTS: dict[str, Callable[..., tuple[SyncPlan, Transport]]] = {
    "shared_memory": _by_memory,
    "p2p": _by_peers,
    "disk": _by_disk,
}
