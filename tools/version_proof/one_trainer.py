"""A stock SGLang server as the engine of a run whose only trainer process holds given tensors: publishing without training."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from megatron_dapo.bridge.sync_plan import plan_sync
from megatron_dapo.bridge.transports.shared_memory import SharedMemoryTransport
from megatron_dapo.bridge.weight_sync import EngineHandles, WeightSync
from megatron_dapo.checkpoints.layouts.megatron import megatron_layout
from megatron_dapo.checkpoints.layouts.sglang import sglang_layout
from megatron_dapo.config.sglang_schema import UpdatePause
from megatron_dapo.engines.sglang.client import SglangClient, Timeouts
from megatron_dapo.engines.sglang.cluster import SglangEngines
from megatron_dapo.engines.sglang.engine import SglangEngine, SglangEngineSettings
from megatron_dapo.engines.sglang.keys import read_key
from megatron_dapo.engines.sglang.server import SglangServer
from megatron_dapo.engines.sglang.server_settings import ServerSettings
from megatron_dapo.engines.sglang.servers import Part, ReadyServer, StartedServers
from megatron_dapo.models.config_json import read_architecture
from megatron_dapo.parallel.coordination import Coordination
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.parallel.nodes import NodeTopology
from megatron_dapo.reshard.layout import shard_view

BUCKET_BYTES = 16 << 20
MAX_RESTARTS = 8
_NODES = NodeTopology(1, 1)


class OneTrainer:
    """One trainer process in Megatron's layout and its server; `stack` ends the server.

    Args:
        settings: of the server, which starts with random weights.
        update_pause: the mode of weight syncs.
        transport_of: makes the transport, with the arguments of SharedMemoryTransport.
    """

    def __init__(
        self,
        settings: ServerSettings,
        update_pause: UpdatePause,
        stack: ExitStack,
        transport_of: Callable[..., SharedMemoryTransport] = SharedMemoryTransport,
        timeouts: Timeouts | None = None,
    ) -> None:
        self._settings, self._update_pause = settings, update_pause
        self._transport_of, self._timeouts = transport_of, timeouts
        self._dtype = getattr(torch, settings.dtype)
        self.architecture = read_architecture(settings.model_path)
        self._layout = megatron_layout(self.architecture, ParallelLayout(1), self._dtype)
        self._buffers = {n: torch.zeros(shape, dtype=self._dtype) for n, shape in self._layout.local_shapes(0).items()}
        self._pending: deque[Mapping[str, torch.Tensor]] = deque()
        self._coordination = Coordination(None)
        self.server: SglangServer | None = None
        self._clients: list[SglangClient] = []
        self._engine: SglangEngine | None = None
        self._sync: WeightSync | None = None
        servers = StartedServers(self._start, _NODES, 0, 1, MAX_RESTARTS, self._coordination)
        stack.callback(servers.close)
        self._servers = servers
        self.engines = SglangEngines(servers, 0, self._connect, self._coordination)
        stack.callback(self.engines.close)
        self.engines.attach(self._build_update, self._build_engine, self._weights)

    def hold(self, *versions: Mapping[str, torch.Tensor]) -> None:
        """Make Hugging Face tensors the trainer's weights; of several, each attempt of a weight sync sends the next."""
        self._pending.extend(versions)

    def set_update_pause(self, update_pause: UpdatePause) -> None:
        """Change the mode of later weight syncs. No request may be under way."""
        assert self._sync is not None and self._engine is not None, "a version was published"
        self._update_pause = update_pause
        self._sync.keeps_cache = update_pause == "in_place"
        self._engine.settings = replace(self._engine.settings, update_pause=update_pause)
        for client in self._clients:
            client.update_pause = update_pause

    def _weights(self) -> dict[str, torch.Tensor]:
        if self._pending:
            tensors = self._pending.popleft()
            for shard in self._layout.shards(0):
                value = tensors[shard.tensor]
                for dim, (start, size) in enumerate(zip(shard.global_offset, shard.shape, strict=True)):
                    value = value.narrow(dim, start, size)
                shard_view(self._buffers[shard.local], shard).copy_(value)
        return self._buffers

    def _start(self, part: Part) -> SglangServer:
        self.server = SglangServer.start(self._settings, part.index)
        return self.server

    def _connect(self, server: ReadyServer) -> SglangClient:
        client = SglangClient(
            server.url,
            read_key(self._settings.key_file),
            self._timeouts,
            self._servers.api_version(server.index),
            update_pause=self._update_pause,
        )
        self._clients.append(client)
        return client

    def _build_update(self, controls: dict[int, SglangClient]) -> WeightSync:
        engines = sglang_layout(self.architecture, self._settings.tensor_parallel, self._dtype, 1, device="cpu")
        sync_plan = plan_sync(self._layout, engines, BUCKET_BYTES, ranks_per_node=1)
        handles = EngineHandles([0], controls)
        transport: Any = self._transport_of(sync_plan, handles, 0, _NODES, self._coordination, message_timeout_s=300.0)
        keeps_cache = self._update_pause == "in_place"
        self._sync = WeightSync(sync_plan, handles, transport, self._coordination, keeps_cache=keeps_cache)
        return self._sync

    def _build_engine(self, clients: Sequence[SglangClient]) -> SglangEngine:
        sizes = SglangEngineSettings(
            max_length=clients[0].max_length(),
            vocab_size=self.architecture.vocab_size,
            max_in_flight=self._settings.max_running_requests,
            poll_wait_s=0.05,
            update_pause=self._update_pause,
        )
        self._engine = SglangEngine(clients, sizes)
        return self._engine
