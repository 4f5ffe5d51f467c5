"""Servers, weight syncs and generation of a run together, with fake servers and a fake weight sync."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megatron_dapo.engines.sglang.servers as servers_module
from megatron_dapo.engines.sglang import cluster
from megatron_dapo.engines.sglang.client import ColocatedClient
from megatron_dapo.engines.sglang.cluster import SglangEngines, SharedDevice
from megatron_dapo.engines.sglang.engine import AllEnginesGone
from megatron_dapo.engines.sglang.servers import Part, ReadyServer, Servers, ServersFailed, StartedServers
from megatron_dapo.parallel.coordination import Coordination
from megatron_dapo.parallel.nodes import NodeTopology
from megatron_dapo.parallel.rank0_commands import Rank0Commands
from megatron_dapo.trainer.start_engines import start_servers


@pytest.fixture(scope="module", autouse=True)
def single_process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Server:
    """A process that lives until it is killed."""

    answers, meeting, is_kept = True, "", False

    def __init__(self, index: int, attempt: int) -> None:
        self.index, self.url, self.alive, self.problem = index, f"http://server-{index}.{attempt}", True, ""

    def is_alive(self) -> bool:
        return self.alive

    def wait_until_healthy(self) -> Any:
        if self.problem:
            raise RuntimeError(self.problem)
        return SimpleNamespace(api_version=None, max_total_tokens=1000 + self.index)

    def exit_reason(self) -> str:
        return f"server {self.index} was killed"

    def kill(self) -> None:
        self.alive = False

    stop = kill


@dataclass
class Node:
    """Starts servers and records all of them."""

    started: list[Server] = field(default_factory=list)
    problem: str = ""
    restarts: list[tuple[int, int, int | None]] = field(default_factory=list)

    def start(self, part: Part) -> Server:
        assert part.slot == part.index, "one node holds all servers here"
        self.restarts.append((part.index, part.num_restarts, part.cache_tokens))
        server = Server(part.index, sum(other.index == part.index for other in self.started))
        server.problem = self.problem
        self.started.append(server)
        return server

    def newest(self, index: int) -> Server:
        return [server for server in self.started if server.index == index][-1]


class Engine:
    """Rank 0's engine: polls return one response, or raise once all servers are lost."""

    def __init__(self, clients: Sequence[Any]) -> None:
        self.clients = list(clients)
        self.failed_servers: dict[int, str] = {}
        self.version = -1
        self.num_unfinished = 1

    def mark_failed(self, index: int, reason: str) -> None:
        self.failed_servers = {**self.failed_servers, index: reason}

    def restore(self, index: int, client: Any) -> None:
        self.failed_servers = {other: reason for other, reason in self.failed_servers.items() if other != index}
        self.clients[index] = client

    def set_policy_version(self, version: int) -> None:
        self.version = version

    def poll(self) -> list[Any]:
        if len(self.failed_servers) == len(self.clients):
            raise AllEnginesGone("all servers are gone")
        return ["a response"]

    def close(self) -> None:
        pass


class Update:
    """Weight syncs that fail on request."""

    def __init__(self, controls: dict[int, Any]) -> None:
        self.controls = controls
        self.transport = SimpleNamespace(close=lambda: None)
        self.synced: list[tuple[str, int]] = []
        self.failing: list[dict[int, str]] = []  # failures of the next syncs

    def update(self, version: int, sources: Mapping[str, torch.Tensor]) -> Any:
        return self.update_engines(sorted(self.controls), version, sources)

    def update_engines(self, engines: Sequence[int], version: int, sources: Mapping[str, torch.Tensor]) -> Any:
        failures = self.failing.pop(0) if self.failing else {}
        self.synced += [(self.controls[e].url, version) for e in engines if e not in failures]
        return SimpleNamespace(failures=failures)


@dataclass
class World:
    node: Node
    engines: SglangEngines
    updates: list[Update]
    built: list[Engine]

    @property
    def update(self) -> Update:
        return self.updates[0]

    @property
    def engine(self) -> Engine:
        return self.built[0]


def make_world(num_servers: int = 2, budget: int = 3) -> World:
    node, updates, built = Node(), [], []

    def connect(server: ReadyServer) -> Any:
        return SimpleNamespace(url=server.url)

    def build_update(controls: dict[int, Any]) -> Update:
        updates.append(Update(controls))
        return updates[-1]

    def build_engine(clients: Sequence[Any]) -> Engine:
        built.append(Engine(clients))
        return built[-1]

    servers = StartedServers(node.start, NodeTopology(1, 1), 0, num_servers, budget, Coordination())
    engines = SglangEngines(servers, 0, connect, Coordination())
    engines.attach(build_update, build_engine, dict)
    return World(node, engines, updates, built)


def test_first_version_waits_for_the_servers_and_fills_all() -> None:
    world = make_world()
    world.engines.publish(0)
    assert world.update.synced == [("http://server-0.0", 0), ("http://server-1.0", 0)]
    assert world.engines.policy_version == 0 and world.engines.poll() == ["a response"]


def test_a_server_that_fails_to_start_ends_the_run_with_its_reason() -> None:
    world = make_world()
    world.node.newest(1).problem = "no such model"
    with pytest.raises(ServersFailed, match="server 1: no such model"):
        world.engines.publish(0)


def test_dead_server_is_replaced_before_the_update() -> None:
    world = make_world()
    world.engines.publish(0)
    world.node.newest(1).alive = False
    world.engines.publish(1)
    assert world.update.synced[2:] == [("http://server-0.0", 1), ("http://server-1.1", 1)]
    assert world.engine.version == 1 and not world.engine.failed_servers
    assert [client.url for client in world.engine.clients] == ["http://server-0.0", "http://server-1.1"]


def test_a_server_lost_by_generation_is_replaced_although_its_process_runs() -> None:
    world = make_world()
    world.engines.publish(0)
    world.engine.mark_failed(0, "it hangs")
    world.engines.publish(1)
    assert not world.node.started[0].alive and world.update.controls[0].url == "http://server-0.1"


def test_a_failed_sync_is_repeated_to_a_fresh_server() -> None:
    world = make_world()
    world.engines.publish(0)
    world.update.failing = [{1: "checksums differ"}, {1: "it died"}]
    world.engines.publish(1)
    assert world.update.synced[2:] == [("http://server-0.0", 1), ("http://server-1.2", 1)]
    assert world.engines.policy_version == 1


def test_a_server_that_ends_in_a_sync_is_lost_for_the_reason_in_its_log() -> None:
    world = make_world(budget=0)
    world.engines.wait_until_healthy()
    update = world.engines._build_update(world.engines._controls)

    def end(version: int, sources: Any) -> Any:
        world.node.newest(1).alive = False
        return SimpleNamespace(failures={1: "connection lost before the answer"})

    update.update = end  # type: ignore[method-assign]
    world.engines._update = update  # type: ignore[assignment]
    with pytest.raises(ServersFailed, match="root cause: server 1 was killed"):
        world.engines.publish(0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock of restarts that stands until a test moves `now`, in seconds."""
    clock = SimpleNamespace(now=1e5)
    monkeypatch.setattr(servers_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_beyond_the_budget_the_first_root_cause_is_named(clock: SimpleNamespace) -> None:
    world = make_world(budget=1)
    world.engines.publish(0)
    world.update.failing = [{1: "checksums differ"}, {1: "it died"}]
    message = "server 1.*2 restarts of it within an hour are more than sglang.max_restarts 1.*root cause: it died"
    with pytest.raises(ServersFailed, match=message):
        world.engines.publish(1)
    assert world.engines.policy_version == 0


def test_the_budget_is_each_servers_and_an_hours(clock: SimpleNamespace) -> None:
    """Losses that a long run of many servers meets now and then do not end it."""
    world = make_world(num_servers=3, budget=1)
    world.engines.publish(0)
    for version in range(1, 6):
        for index in range(3):
            world.node.newest(index).alive = False
        world.engines.publish(version)
        clock.now += 3601.0
    world.node.newest(2).alive = False
    world.engines.publish(6)
    clock.now += 3599.0
    world.node.newest(2).alive = False
    with pytest.raises(ServersFailed, match="server 2 is lost and 2 restarts"):
        world.engines.publish(7)


def test_a_server_that_never_serves_is_not_restarted_forever(clock: SimpleNamespace) -> None:
    world = make_world(budget=3)
    world.engines.publish(0)

    def fail(engines: Sequence[int], version: int, sources: Any) -> Any:
        clock.now += 1900.0
        return SimpleNamespace(failures={0: "it hangs"})

    world.update.update_engines = fail  # type: ignore[method-assign]
    with pytest.raises(ServersFailed, match="server 0 is lost and 4 restarts"):
        world.engines.publish(1)


def test_a_replaced_server_is_told_its_number_and_the_first_ones_cache() -> None:
    """Its seed differs from its predecessor's, and its cache, sized next to the trainer, is no larger than the first."""
    world = make_world()
    world.engines.publish(0)
    world.update.failing = [{1: "checksums differ"}, {1: "it died"}]
    world.engines.publish(1)
    assert world.node.restarts == [(0, 0, None), (1, 0, None), (1, 1, 1001), (1, 2, 1001)]


def test_lost_servers_are_restarted_at_the_served_version() -> None:
    world = make_world()
    world.engines.publish(0)
    world.engines.publish(1)

    def body() -> list[Any]:
        for index in (0, 1):
            world.node.newest(index).alive = False
            world.engine.mark_failed(index, "killed")
        assert world.engines.poll() == []  # nothing finished, but the servers are back
        return world.engines.poll()

    assert world.engines.run_on_rank0(body) == ["a response"]
    assert world.update.synced[-2:] == [("http://server-0.1", 1), ("http://server-1.1", 1)]


def test_a_collecting_thread_waits_for_the_main_thread_to_restart_servers() -> None:
    world = make_world(num_servers=1)
    world.engines.publish(0)
    world.node.newest(0).alive = False
    world.engine.mark_failed(0, "killed")
    seen: list[Any] = []

    def collect() -> None:
        while not seen:
            seen.extend(world.engines.poll())

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while thread.is_alive() and time.monotonic() < deadline:
        world.engines.run_on_rank0(world.engines.recover)
        time.sleep(0.01)
    assert seen == ["a response"] and len(world.node.started) == 2


def test_external_servers_are_never_replaced_nor_ended() -> None:
    server = Server(0, 0)
    servers = Servers([0], {0: server}, Coordination())
    assert servers.ready() == [ReadyServer(0, server.url, leader=0)]
    server.alive = False
    lost = servers.dead({})
    with pytest.raises(ServersFailed, match="given by sglang.urls, is lost; .* server 0 was killed"):
        servers.replace(lost)


class SleepingClient(ColocatedClient):
    """Records the requests to a server on the trainer's device."""

    def __init__(self, events: list[str]) -> None:
        self.events, self.url = events, "http://server"

    def sleep(self) -> None:
        self.events.append("release memory")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record of the device's events in order: torch.cuda and the barriers note their calls."""
    seen: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append("empty cache"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (seen.append("read free memory"), (0, 0))[1])
    monkeypatch.setattr(Coordination, "barrier", lambda self, waiting_for: seen.append("barrier"))
    return seen


def engines_on_the_trainers_device(events: list[str], expected_bytes: int = 0) -> SglangEngines:
    class NotedUpdate(Update):
        def update_engines(self, *args: Any) -> Any:
            events.append("wake weights")
            return super().update_engines(*args)

    node = Node()

    def start(part: Part) -> Server:
        events.append("start")
        return node.start(part)

    servers = StartedServers(start, NodeTopology(1, 1), 0, 1, 3, Coordination())
    device = SharedDevice(expected_bytes, 0.0, server=0)
    engines = SglangEngines(servers, 0, lambda server: SleepingClient(events), Coordination(), device=device)
    engines.offload_models = lambda: events.append("offload models")
    engines.attach(NotedUpdate, Engine, lambda: (events.append("onload weights"), {})[1])
    return engines


SLEEP = ["read free memory", "barrier", "release memory", "barrier", "read free memory"]
WAKE = ["onload weights", "empty cache", "barrier", "wake weights"]
REPLACE = ["offload models", "empty cache", "barrier", "start", *SLEEP]


def test_every_rank_empties_its_cache_before_a_server_wakes(events: list[str]) -> None:
    engines = engines_on_the_trainers_device(events)
    engines.publish(0)
    assert events == ["start", *WAKE]


def test_a_lost_server_is_replaced_while_no_model_is_on_the_device(events: list[str]) -> None:
    """It sizes its KV cache by the memory that it finds free, and sleeps until its weights come, as at the start."""
    engines = engines_on_the_trainers_device(events)
    engines.publish(0)
    events.clear()
    engines._servers.own(0).kill()
    engines.publish(1)
    assert events == [*REPLACE, *WAKE]


def test_models_leave_the_device_again_before_a_server_that_failed_in_a_sync_is_replaced(events: list[str]) -> None:
    engines = engines_on_the_trainers_device(events)
    engines.publish(0)
    events.clear()
    engines._update.failing = [{0: "checksums differ"}]
    engines.publish(1)
    assert events == [*WAKE, *REPLACE, *WAKE]


def test_models_leave_the_device_after_a_restart_amid_generation(events: list[str]) -> None:
    engines = engines_on_the_trainers_device(events)
    engines.publish(0)
    events.clear()
    engines._servers.own(0).kill()
    engines.run_on_rank0(lambda: engines._commands.command("restart"))
    assert events == [*REPLACE, *WAKE, "offload models"]


def test_free_memory_is_read_before_any_rank_releases_some(events: list[str]) -> None:
    """A late rank would otherwise count memory that servers released as free before, and wait in vain."""
    engines = engines_on_the_trainers_device(events)
    engines.wait_until_healthy()
    engines.sleep()
    assert events == ["start", *SLEEP]


def test_memory_that_a_server_does_not_release_is_an_error_with_both_numbers(events: list[str]) -> None:
    engines = engines_on_the_trainers_device(events, expected_bytes=7)
    engines.wait_until_healthy()
    with pytest.raises(MemoryError, match="released 0 bytes .* 7"):
        engines.sleep()


def test_a_server_wakes_up_only_where_its_memory_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of 7 bytes and a cache of 20 come back one after the other, and other processes may have taken their memory."""
    free: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free[0] if len(free) == 1 else free.pop(0), 0))
    device = SharedDevice(7, 0.0)
    monkeypatch.setattr(cluster, "_WORKSPACE_BYTES", 3)
    free[:] = [40]
    assert device.wait_for_memory(before=10) == 30
    free[:] = [6]
    with pytest.raises(MemoryError, match="6 bytes .* needs 7 for its weights"):
        device.make_room_for_weights()
    device.make_room_for_weights()  # A retry finds the server awake.
    free[:] = [19]
    with pytest.raises(MemoryError, match="19 bytes .* needs 20 for its cache"):
        device.make_room_for_cache()
    free[:] = [40]
    device.wait_for_memory(before=10)
    device.timeout_s = 10.0
    free[:] = [6, 30]  # released a moment later
    device.make_room_for_weights()
    device.make_room_for_cache()


def test_servers_of_shared_devices_sleep_before_the_actor_is_built(
    events: list[str],
) -> None:
    """SGLang sizes its KV cache by the free memory it finds, so nothing of the trainer may be on the device yet."""
    server = Server(0, 0)
    server.wait_until_healthy = lambda: (events.append("healthy"), Server.wait_until_healthy(server))[1]
    servers = StartedServers(lambda part: server, NodeTopology(1, 1), 0, 1, 3, Coordination())
    place = SimpleNamespace(
        ranks=SimpleNamespace(rank=0),
        expected_engine=lambda: SimpleNamespace(shards=lambda index: None),
        servers=lambda coordination: servers,
        shared_device=lambda: SharedDevice(0, 0.0),
        client=lambda servers, server: SleepingClient(events),
    )
    with ExitStack() as stack:
        start_servers(place, Coordination(), None, Rank0Commands(Coordination()), stack)
        assert events == ["healthy", "read free memory", "barrier", "release memory", "barrier"]


def test_a_failing_command_is_raised_once_and_ends_the_loop() -> None:
    calls = []

    def fail(command: dict[str, Any]) -> None:
        calls.append(command["facts"])
        raise ValueError("no")

    lead = Rank0Commands(Coordination())
    lead.handlers["x"] = fail
    with pytest.raises(ValueError, match="no"):
        lead.run_on_rank0(lambda: lead.command("x", facts=3))
    assert calls == [3] and lead.run_on_rank0(lambda: 7) == 7


def test_a_finished_response_postpones_the_deadlines() -> None:
    world = make_world()
    world.engines.publish(0)
    progress = world.engines._coordination.progress
    progress._at -= 100.0
    assert world.engines.poll() == ["a response"] and progress.idle_s < 50
    assert not world.engines.recover()  # no response since


def test_the_main_thread_reports_what_a_collecting_thread_finished() -> None:
    """A collecting thread must not communicate with other ranks."""
    world = make_world()
    world.engines.publish(0)
    progress = world.engines._coordination.progress
    progress._at -= 100.0
    thread = threading.Thread(target=world.engines.poll)
    thread.start()
    thread.join()
    assert progress.idle_s > 50
    assert world.engines.recover() and progress.idle_s < 50 and not world.engines.recover()
