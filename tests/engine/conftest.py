"""Real SGLang servers: their interpreter, tiny models to serve, and a factory that leaves no server behind."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_dapo.engines.sglang.keys import create_key
from megatron_dapo.engines.sglang.server import SglangServer
from megatron_dapo.engines.sglang.server_settings import ServerSettings

VOCAB_SIZE = 300
# The machine may be busy with other tests: starting takes about ten seconds of two cores.
START_TIMEOUT_S = 280.0


@pytest.fixture(scope="session")
def engine_python(repository: Path) -> Path:
    """Interpreter of the engines' environment: MEGATRON_DAPO_ENGINE_PYTHON, else the one that make installs."""
    python = Path(os.environ.get("MEGATRON_DAPO_ENGINE_PYTHON", repository / ".venv-sglang" / "bin" / "python"))
    if not python.is_file():
        pytest.skip(f"no SGLang environment at {python}: run make test-engine, which installs it")
    return python


def _save_tiny_model(folder: Path, *, is_tied: bool) -> Path:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=is_tied,
        bos_token_id=1,
        eos_token_id=2,
        dtype="float32",
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():  # far from uniform, and biases that are not zero: wrong weights must show
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.mul_(4.0)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 folder with random float32 weights and tied embeddings (hidden 64, 4 layers, 4 heads, 2 KV heads)."""
    return _save_tiny_model(tmp_path_factory.mktemp("tiny_tied"), is_tied=True)


@pytest.fixture(scope="session")
def tiny_model_untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a head of its own."""
    return _save_tiny_model(tmp_path_factory.mktemp("tiny_untied"), is_tied=False)


@pytest.fixture(scope="session")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The API key of the servers that `server_factory` starts."""
    return create_key(tmp_path_factory.mktemp("key"))


@pytest.fixture(scope="module")
def server_factory(
    engine_python: Path, key_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., SglangServer]]:
    """`server_factory(model_path, **fields of ServerSettings)`: a started, healthy server, killed after the module."""
    servers: list[SglangServer] = []

    def start(model_path: Path, *, wait: bool = True, **fields: Any) -> SglangServer:
        settings = ServerSettings(
            **{
                "python": engine_python,
                "model_path": model_path,
                "key_file": key_file,
                "log_folder": tmp_path_factory.mktemp("engine_logs"),
                "start_timeout_s": START_TIMEOUT_S,
                **fields,
            }
        )
        servers.append(SglangServer.start(settings, index=len(servers)))
        if wait:
            servers[-1].wait_until_healthy()
        return servers[-1]

    yield start
    for server in servers:
        server.kill()
