"""Fake servers, started and ended by fixtures."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fake_server import FakeServer
from stand_in_engine import ENGINE

from megatron_dapo.engines.sglang.keys import create_key
from megatron_dapo.engines.sglang.server_settings import ServerSettings


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


@pytest.fixture
def settings(tmp_path: Path) -> Callable[..., ServerSettings]:
    """settings(behavior, **fields): settings of a server whose interpreter is the script with that behavior."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"architectures": ["Qwen2ForCausalLM"], "vocab_size": 300}))

    def make(behavior: dict[str, Any] | None = None, **fields: Any) -> ServerSettings:
        script = tmp_path / "engine.py"
        script.write_text(ENGINE.format(python=sys.executable, behavior=json.dumps(behavior or {})))
        script.chmod(0o700)
        return ServerSettings(
            **{
                "python": script,
                "model_path": model,
                "key_file": create_key(tmp_path),
                "log_dir": tmp_path / "logs",
                "start_timeout_s": 60.0,
                **fields,
            }
        )

    return make
