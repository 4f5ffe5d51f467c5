"""Rank 0's way to the servers: directly, or through SGLang's router."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from megatron_dapo.engines.sglang.client import SglangClient
from megatron_dapo.engines.sglang.engine import SglangEngine
from megatron_dapo.engines.sglang.router import RoutedClient, SglangRouter

logger = logging.getLogger(__name__)

# Clients the engine chooses from -> the engine.
BuildEngine = Callable[[Sequence[SglangClient]], SglangEngine]


class DirectFrontend:
    """The engine balances over the servers by itself."""

    def __init__(self, clients: Mapping[int, SglangClient], build: BuildEngine) -> None:
        self.engine = build([clients[index] for index in sorted(clients)])

    def dead(self) -> Mapping[int, str]:
        """Return the servers that generation has found dead, and why."""
        return self.engine.failed_servers

    def lose(self, index: int, reason: str) -> None:
        """Send nothing more to server `index`, which is gone."""
        self.engine.mark_failed(index, reason)

    def serve(self, version: int, clients: Mapping[int, SglangClient]) -> None:
        """Generate with policy `version`, which all servers serve, verified; those that were lost are back as `clients`."""
        self.engine.set_policy_version(version)
        for index in self.engine.failed_servers:
            self.engine.restore(index, clients[index])

    def close(self) -> None:
        self.engine.close()


class RouterFrontend:
    """The router balances. A dead server leaves its rotation; the trainer's ranks find it by its process."""

    def __init__(
        self,
        clients: Mapping[int, SglangClient],
        build: BuildEngine,
        start: Callable[[Sequence[str]], SglangRouter],
        routed: Callable[[str, Sequence[SglangClient]], RoutedClient],
    ) -> None:
        """`start` spawns a router in front of some URLs; `routed` is the client of it."""
        self._start = start
        self._routed = routed
        self._clients = dict(clients)
        self._lost: set[int] = set()
        self._router = self._started()
        self.engine = build([self._client()])

    def dead(self) -> Mapping[int, str]:
        return {}

    def lose(self, index: int, reason: str) -> None:
        self._lost.add(index)
        if self._router.is_alive() and self._clients[index].url in self._router.workers():
            self._router.remove_worker(self._clients[index].url)

    def serve(self, version: int, clients: Mapping[int, SglangClient]) -> None:
        self._clients = dict(clients)
        if not self._router.is_alive():
            logger.warning("the router has ended and is started again; %s", self._router.exit_reason())
            self._router = self._started()
        else:
            for index in sorted(self._lost):
                self._router.add_worker(clients[index].url)
            self._router.wait_until_healthy(len(clients))
        self._lost.clear()
        self.engine.set_policy_version(version)
        for index in self.engine.failed_servers:
            self.engine.restore(index, self._client())

    def close(self) -> None:
        self.engine.close()
        self._router.stop()

    def _started(self) -> SglangRouter:
        router = self._start([client.url for client in self._clients.values()])
        router.wait_until_healthy(len(self._clients))
        return router

    def _client(self) -> RoutedClient:
        return self._routed(self._router.url, list(self._clients.values()))


Frontend = DirectFrontend | RouterFrontend
