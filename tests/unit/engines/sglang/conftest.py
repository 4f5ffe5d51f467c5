"""Fake servers, started and ended by fixtures."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fake_server import FakeServer


@pytest.fixture
def make_server() -> Iterator[Callable[..., FakeServer]]:
    """make_server(**options) -> a running FakeServer."""
    servers: list[FakeServer] = []

    def make(**options: Any) -> FakeServer:
        servers.append(FakeServer(**options).start())
        return servers[-1]

    yield make
    for server in servers:
        server.kill()


@pytest.fixture
def server(make_server: Callable[..., FakeServer]) -> FakeServer:
    return make_server()
