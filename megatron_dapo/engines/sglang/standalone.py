"""Servers of one process, with the weights that a directory holds: for commands that train nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from megatron_dapo.engines.sglang.client import SglangClient, Timeouts
from megatron_dapo.engines.sglang.engine import SglangEngine, SglangEngineSettings
from megatron_dapo.engines.sglang.keys import read_key
from megatron_dapo.engines.sglang.server import AttachedServer, SglangServer
from megatron_dapo.engines.sglang.server_settings import ServerSettings


@contextmanager
def started(settings: Sequence[ServerSettings]) -> Iterator[list[SglangServer]]:
    """Start servers side by side, wait until each serves its directory, and end them afterwards.

    EngineStartError, with the first error of its log, if one does not come up.
    """
    with ExitStack() as stack:
        servers = []
        for index, one in enumerate(settings):
            servers.append(SglangServer.start(one, index))
            stack.callback(servers[-1].kill)
        for server in servers:
            server.wait_until_healthy()
        yield servers


@contextmanager
def serving_engine(
    servers: Sequence[AttachedServer], max_in_flight: int, vocab_size: int, timeouts: Timeouts
) -> Iterator[SglangEngine]:
    """Return an engine over servers that are up and have their weights, as policy version 0."""
    clients = [SglangClient(server.url, read_key(server.key_file), timeouts) for server in servers]
    for client in clients:
        client.update_weight_version(0)  # every answer names it: a server that restarts would be found
    longest = min(client.max_length() for client in clients)
    with SglangEngine(clients, SglangEngineSettings(longest, vocab_size, max_in_flight)) as engine:
        engine.set_policy_version(0)
        yield engine
