"""The engine of `episodes.py --chaos --engine-python PATH`: a stock SGLang server that is killed, and restarted as in a run."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from episode_chaos import Every
from served_episodes import TINY

from megatron_dapo.bridge.weight_sync import EngineState, EngineSyncReport, SyncReport
from megatron_dapo.engines.base import PrefixReuse
from megatron_dapo.engines.sglang.client import EngineError, SglangClient
from megatron_dapo.engines.sglang.cluster import SglangEngines
from megatron_dapo.engines.sglang.engine import SglangEngine, SglangEngineSettings
from megatron_dapo.engines.sglang.keys import create_key, read_key
from megatron_dapo.engines.sglang.server import SglangServer
from megatron_dapo.engines.sglang.server_settings import ServerSettings
from megatron_dapo.engines.sglang.servers import Part, ReadyServer, StartedServers
from megatron_dapo.parallel.coordination import Coordination
from megatron_dapo.parallel.nodes import NodeTopology
from megatron_dapo.types import Completion, GenerationRequest

NUM_EPISODES = 300  # 8 turns each: a server is killed in one of 200 turns
EVERY = Every(updates=60, resumes=120, kills=75, server_kills=25)
TINY_EPISODES, TINY_EVERY = 32, Every(updates=12, resumes=16, kills=15, server_kills=20)
_RESTARTS = 1000  # an hour


class _Relabelled:
    """Stands in for the weight sync: a server has the weights of its directory, and an update gives them the next version."""

    def __init__(self, controls: Mapping[int, SglangClient]) -> None:
        self.transport = self
        self._controls = controls

    def close(self) -> None:
        """Nothing is open."""

    def update(self, version: int, weights: object) -> SyncReport:
        return self.update_engines(sorted(self._controls), version, weights)

    def update_engines(self, engines: Sequence[int], version: int, weights: object) -> SyncReport:
        reports = {}
        for index in engines:
            client, reason = self._controls[index], ""
            try:
                client.pause()
                client.flush_cache()
                client.update_weight_version(version)
                client.resume()
            except EngineError as error:
                reason = str(error)
            state = EngineState.UNSERVED if reason else EngineState.SERVING
            reports[index] = EngineSyncReport(state, None if reason else version, reason)
        return SyncReport(version, reports, 0, 0.0)


class KilledServer:
    """A `ChaosEngine`: `SglangEngines` over one server, which `kill` kills."""

    def __init__(self, engines: SglangEngines, engine: list[SglangEngine], started: list[SglangServer]) -> None:
        self._engines, self._engine, self._started = engines, engine, started
        self._draw = random.Random(2)

    @property
    def num_unfinished(self) -> int:
        return self._engines.num_unfinished

    @property
    def policy_version(self) -> int:
        return self._engines.policy_version

    @property
    def prefix_reuse(self) -> PrefixReuse:
        return self._engines.prefix_reuse

    @property
    def num_sampled(self) -> int:
        return self._engine[0].statistics.num_tokens

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._engines.submit(requests)

    def poll(self) -> list[Completion]:
        return self._engines.poll()

    def abort(self) -> list[Completion]:
        return self._engines.abort()

    def wake(self) -> None:
        self._engines.wake()

    def update(self) -> None:
        self._engines.publish(self.policy_version + 1)

    def kill(self) -> None:
        """Kill one of the server's processes with SIGKILL: its leader, its scheduler, ..."""
        os.kill(self._draw.choice(self._started[-1].pids()), signal.SIGKILL)


@contextmanager
def killed_server(python: Path, directory: Path) -> Iterator[KilledServer]:
    """Start a server of the quickstart's model."""
    settings = ServerSettings(
        python=python.absolute(),
        model_path=TINY.model,
        key_file=create_key(directory),
        log_dir=directory / "logs",
        max_total_tokens=TINY.in_flight * TINY.context,
        start_timeout_s=600.0,
    )
    started: list[SglangServer] = []
    engine: list[SglangEngine] = []

    def start(part: Part) -> SglangServer:
        fields = replace(settings, num_restarts=part.num_restarts, replaced_cache_tokens=part.cache_tokens)
        started.append(SglangServer.start(fields, part.index))
        return started[-1]

    def connect(server: ReadyServer) -> SglangClient:
        return SglangClient(server.url, read_key(settings.key_file), name=f"server {server.index}")

    def build_engine(clients: Sequence[SglangClient]) -> SglangEngine:
        vocab_size = started[-1].expectation.vocab_size
        engine.append(SglangEngine(clients, SglangEngineSettings(clients[0].max_length(), vocab_size)))
        return engine[0]

    servers = StartedServers(start, NodeTopology(1, 1), 0, 1, _RESTARTS, Coordination())
    engines = SglangEngines(servers, 0, connect, Coordination())
    try:
        relabelled: Any = _Relabelled
        engines.attach(relabelled, build_engine, dict)
        engines.publish(0)
        yield KilledServer(engines, engine, started)
    finally:
        engines.close()
