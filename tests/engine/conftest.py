"""Real SGLang servers: their interpreter, tiny models to serve, and factories that leave no server behind."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_dapo.engines.sglang.keys import create_key
from megatron_dapo.engines.sglang.server import SglangServer
from megatron_dapo.engines.sglang.server_settings import ServerSettings
from megatron_dapo.engines.sglang.versions import api_version_of

# Tests import the modules next to them and those of simulated trainers.
DIRECTORY = Path(__file__).parent
sys.path[:0] = [str(DIRECTORY), str(DIRECTORY.parent / "distributed")]

# A secret of the environment that tests start in: no engine may see it.
os.environ["WANDB_API_KEY"] = secrets.token_hex(16)
VOCAB_SIZE = 300
# The host may be busy with other tests: starting takes about ten seconds of two cores.
START_TIMEOUT_S = 400.0


@pytest.fixture(scope="session")
def engine_python(repository: Path) -> Path:
    """Interpreter of the engines' environment: MEGATRON_DAPO_ENGINE_PYTHON, else the one that make installs."""
    python = Path(os.environ.get("MEGATRON_DAPO_ENGINE_PYTHON", repository / ".venv-sglang" / "bin" / "python"))
    if not python.is_file():
        pytest.skip(f"no SGLang environment at {python}: run make test-engine, which installs it")
    return python


@pytest.fixture(scope="session")
def labels_tokens(engine_python: Path) -> bool:
    """True if the environment's SGLang labels each token with the weights that sampled it."""
    program = "import importlib.metadata as metadata; print(metadata.version('sglang'))"
    done = subprocess.run([engine_python, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    return api_version_of(done.stdout.strip()).labels_tokens


def _save_tiny_model(directory: Path, *, is_tied: bool) -> Path:
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
    with torch.no_grad():  # far from uniform, with nonzero biases: wrong weights must show
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.mul_(4.0)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 directory with random float32 weights and tied embeddings (hidden 64, 4 layers, 4 heads, 2 KV heads)."""
    return _save_tiny_model(tmp_path_factory.mktemp("tiny_tied"), is_tied=True)


@pytest.fixture(scope="session")
def tiny_model_untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a separate head."""
    return _save_tiny_model(tmp_path_factory.mktemp("tiny_untied"), is_tied=False)


@pytest.fixture(scope="session")
def moe_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE directory with random float32 weights: 2 layers, 8 experts, 2 of them a token."""
    from fp8_world import save_model

    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 2, "head_dim": 16, **experts}
    return save_model(tmp_path_factory.mktemp("moe"), "qwen3_moe", vocab_size=VOCAB_SIZE, **sizes)


@pytest.fixture(scope="session")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The API key of the servers that `server_factory` starts."""
    return create_key(tmp_path_factory.mktemp("key"))


class Servers:
    """Starts servers and ends those it started."""

    def __init__(self, python: Path, key_file: Path, logs: Callable[[], Path]) -> None:
        self._python, self._key_file, self._logs = python, key_file, logs
        self._started: list[SglangServer] = []
        self._shared: dict[tuple[Any, ...], SglangServer] = {}

    def start(self, model_path: Path, *, wait: bool = True, **fields: Any) -> SglangServer:
        settings = ServerSettings(
            **{
                "python": self._python,
                "model_path": model_path,
                "key_file": self._key_file,
                "log_dir": self._logs(),
                "start_timeout_s": START_TIMEOUT_S,
                **fields,
            }
        )
        self._started.append(SglangServer.start(settings, index=len(self._started)))
        if wait:
            self._started[-1].wait_until_healthy()
        return self._started[-1]

    def shared(self, model_path: Path, number: int = 0, *, wait: bool = True, **fields: Any) -> SglangServer:
        """Return the running server of these settings, or start one."""
        key = (model_path, number, *sorted(fields.items()))
        if key not in self._shared or not self._shared[key].is_alive():
            self._shared[key] = self.start(model_path, wait=wait, **fields)
        return self._shared[key]

    def kill(self) -> None:
        for server in self._started:
            server.kill()


@pytest.fixture(scope="module")
def server_factory(
    engine_python: Path, key_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., SglangServer]]:
    """`server_factory(model_path, **fields of ServerSettings)`: a started, healthy server, killed after the module."""
    servers = Servers(engine_python, key_file, lambda: tmp_path_factory.mktemp("engine_logs"))
    yield servers.start
    servers.kill()


@pytest.fixture(scope="session")
def shared_servers(engine_python: Path, key_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Servers that several modules use. One that a test has killed is replaced at its next use."""
    servers = Servers(engine_python, key_file, lambda: tmp_path_factory.mktemp("engine_logs"))
    yield servers
    servers.kill()


@pytest.fixture(scope="session")
def filled_server(shared_servers: Servers) -> Callable[..., SglangServer]:
    """`filled_server(model_path, tensor_parallel)`: a server with random weights; each trainer has a separate session."""

    def server(model_path: Path, tensor_parallel: int = 1) -> SglangServer:
        fields = {"tensor_parallel": tensor_parallel, "random_weights": True, "max_total_tokens": 4096}
        return shared_servers.shared(model_path, **fields)

    return server


@pytest.fixture(scope="session")
def expert_world() -> Callable[[int], Any]:
    """`expert_world(directory, tensor_parallel)`: two pipeline stages of two expert-parallel ranks, and an engine."""
    from sync_simulation import World

    from megatron_dapo.models.config_json import read_architecture
    from megatron_dapo.parallel.layout import ParallelLayout

    def world(directory: Path, tensor_parallel: int) -> World:
        layout = ParallelLayout(4, pipeline=2, expert=2)
        return World(read_architecture(directory), layout, tensor_parallel=tensor_parallel, bucket_bytes=64 << 10)

    return world


@pytest.fixture(scope="session")
def seeded_servers(shared_servers: Servers, moe_model: Path, expert_world: Callable[..., Any]) -> Callable[[int], list[Any]]:
    """`seeded_servers(count)`: servers of `moe_model` that honor seeds and answer with experts, with a context of 512 tokens.

    They start with random weights, and expert-parallel trainer ranks have brought them the directory's.
    """
    from synced_server import SyncedServer

    synced: dict[int, SyncedServer] = {}

    def servers(count: int) -> list[SyncedServer]:
        fields = {"seeded": True, "routing": True, "random_weights": True, "context_length": 512, "wait": False}
        for number, server in enumerate([shared_servers.shared(moe_model, n, **fields) for n in range(count)]):
            if server.info is None:  # just started, within its start timeout
                server.wait_until_healthy()
                synced[number] = SyncedServer(server, moe_model, expert_world(moe_model, 1))
                assert synced[number].gap(1.0) > 0.1, "it does not serve noise"
                report = synced[number].update(1, 1.0)
                assert report.is_complete, report.describe()
        return [synced[number] for number in range(count)]

    return servers
