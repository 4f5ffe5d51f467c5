"""Starts stock SGLang servers, one process tree each, and ends them whatever state they are in.

    settings -> SglangServer.start (returns at once) -> wait_until_healthy (checks what is served) -> ... -> stop

A server ends with the process that started it, however that dies. What goes wrong at the start is an EngineStartError
within `start_timeout_s`; its last line is the first error in the server's log. Servers that somebody else runs are
attached to by their URL and are never stopped from here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import httpx

from megatron_dapo.engines.sglang.keys import read_key
from megatron_dapo.engines.sglang.ports import ReservedPort, reserve_port
from megatron_dapo.engines.sglang.processes import ProcessTree
from megatron_dapo.engines.sglang.server_log import last_words
from megatron_dapo.engines.sglang.versions import Dialect, dialect_of

WEIGHT_LOADER = "megatron_dapo.engines.sglang.weight_loader.load"
_PACKAGE_ROOT = Path(__file__).resolve().parents[3]
_DTYPES = {"float32": "float32", "float": "float32", "float16": "float16", "half": "float16", "bfloat16": "bfloat16"}
Quantization = Literal["none", "fp8"]
# What takes the place of fields of the folder's config.json.
_MODEL_OVERRIDES = {
    "none": None,
    "fp8": json.dumps(
        {
            "quantization_config": {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "weight_block_size": [128, 128],
            }
        }
    ),
}
# What the trainer's launcher set for the trainer's processes must not reach the engine's.
_NOT_INHERITED = re.compile(
    r"PYTHON|VIRTUAL_ENV|TORCHELASTIC|SGLANG_|SLURM_|TMPDIR$"
    r"|(?:LOCAL_|GROUP_)?(?:RANK|WORLD_SIZE)$|MASTER_(?:ADDR|PORT)$"
)
_POLL_S = 0.1
_CALL_S = 60.0
# A question after its health that stays unanswered is asked again: whoever holds the port may not be the server.
_HEALTH_S = 15.0
_IMPOSSIBLE_TOKEN = 1 << 40


class EngineStartError(RuntimeError):
    """A server that ended, did not come up in time, or serves something else than was asked for."""


@dataclass(frozen=True)
class ServerSettings:
    """One server. What may differ between the servers of a run is the cores or GPUs they get."""

    python: Path
    """Interpreter of the environment SGLang is installed in."""
    model_path: Path
    """Hugging Face folder. Its weights are not read with `random_weights`."""
    key_file: Path
    log_folder: Path
    device: Literal["cpu", "cuda"] = "cpu"
    tensor_parallel: int = 1
    dtype: str = "float32"
    host: str = "127.0.0.1"
    """Address to listen on: loopback, or that of one interface."""
    max_running_requests: int = 128
    max_total_tokens: int | None = None
    """Tokens the KV cache holds; None: as many as fit into `memory_fraction` (a GPU), 65,536 (a CPU)."""
    context_length: int | None = None
    """Longest prompt + response; None: what the model's config.json allows."""
    memory_fraction: float | None = None
    """Share of the device's memory for weights and KV cache; None: SGLang's choice on a GPU, 0.3 on a CPU."""
    memory_saver: bool = False
    """Let weights and KV cache be released and resumed (engines that share a GPU with the trainer)."""
    seeded: bool = False
    """Tokens depend on the request's seed and not on what else runs in the batch (SGLang's deterministic mode)."""
    quantization: Quantization = "none"
    """fp8: linear layers in e4m3 with a scale for every 128 x 128 values, whatever the folder's config.json says."""
    random_weights: bool = False
    """Start with random weights instead of the folder's: for engines that are filled by a first update."""
    random_seed: int = 0
    start_timeout_s: float = 300.0
    gpus: tuple[int, ...] = ()
    """GPUs of this server, one a rank; empty: the first ones visible."""
    more_arguments: tuple[str, ...] = ()
    """Further arguments for SGLang's server."""

    def __post_init__(self) -> None:
        if self.tensor_parallel < 1 or self.max_running_requests < 1:
            raise ValueError(
                f"tensor_parallel {self.tensor_parallel}, max_running_requests {self.max_running_requests}: "
                "must be at least 1"
            )
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(_DTYPES)}")
        if self.host in ("0.0.0.0", "::", ""):
            raise ValueError(f"host {self.host!r} means every interface: name the one the engine may be reached on")
        if self.quantization not in _MODEL_OVERRIDES:
            raise ValueError(f"quantization {self.quantization!r} is not one of {', '.join(_MODEL_OVERRIDES)}")
        if self.quantization != "none" and self.device == "cuda" and self.dtype in ("float32", "float"):
            raise ValueError("FP8 on a GPU takes activations of 16 bits, not float32: set model.dtype = bfloat16")
        if self.gpus and len(self.gpus) != self.tensor_parallel:
            raise ValueError(f"gpus {self.gpus}: {len(self.gpus)} for tensor_parallel {self.tensor_parallel}")


@dataclass(frozen=True)
class Expectation:
    """What a server has to serve. `seeded`: its deterministic mode is on."""

    architecture: str
    vocab_size: int
    dtype: str
    tensor_parallel: int
    seeded: bool = False

    @classmethod
    def of(cls, settings: ServerSettings) -> Expectation:
        """From the model folder's config.json. ValueError where it does not say."""
        file = settings.model_path / "config.json"
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
            architecture, vocab_size = str(config["architectures"][0]), int(config["vocab_size"])
        except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
            raise ValueError(
                f"{file}: cannot tell architectures and vocab_size from it ({error!r}); model_path must be a "
                "Hugging Face model folder"
            ) from error
        return cls(architecture, vocab_size, _DTYPES[settings.dtype], settings.tensor_parallel, settings.seeded)


@dataclass(frozen=True)
class ServerInfo:
    """What a healthy server says about itself."""

    dialect: Dialect
    model_path: str
    architecture: str
    vocab_size: int
    dtype: str
    tensor_parallel: int
    max_total_tokens: int
    seeded: bool
    weight_loaders: tuple[str, ...]


class EngineServer(Protocol):
    """A server, ours or not."""

    index: int
    url: str
    key_file: Path

    def is_alive(self) -> bool: ...

    def wait_until_healthy(self) -> ServerInfo: ...

    def stop(self) -> None: ...

    def kill(self) -> None: ...

    def last_words(self) -> str: ...


class SglangServer:
    """A server of ours: leader of a process session of its own."""

    def __init__(
        self,
        settings: ServerSettings,
        index: int,
        expectation: Expectation,
        process: subprocess.Popen[bytes],
        ports: tuple[ReservedPort, ...],
        log: Path,
        scratch: Path,
    ) -> None:
        """See `start`."""
        self.settings, self.index, self.key_file, self.log = settings, index, settings.key_file, log
        self.url = _url(settings.host, ports[0].number)
        self.info: ServerInfo | None = None
        self._expectation, self._process, self._ports, self._scratch = expectation, process, ports, scratch
        self._tree = ProcessTree(process)
        self._started = time.monotonic()
        self._is_closed = False

    @classmethod
    def start(cls, settings: ServerSettings, index: int = 0) -> SglangServer:
        """Spawn the server and return without waiting for it. ValueError for settings no server can start with."""
        expectation = Expectation.of(settings)
        read_key(settings.key_file)
        ports = (reserve_port(settings.host), reserve_port(settings.host))
        scratch = Path(tempfile.mkdtemp(prefix="sglang-"))
        log = _new_log(settings.log_folder, index)
        try:
            process = _spawn(settings, ports, scratch, log)
        except OSError as error:
            _discard(ports, scratch)
            raise ValueError(f"engine python {settings.python} cannot be run: {error.strerror}") from error
        return cls(settings, index, expectation, process, ports, log, scratch)

    @staticmethod
    def attach(
        url: str, key_file: Path, expectation: Expectation, index: int = 0, timeout_s: float = 60.0
    ) -> AttachedServer:
        """A server that somebody else runs."""
        return AttachedServer(url.rstrip("/"), key_file, expectation, index, timeout_s)

    @property
    def pid(self) -> int:
        """Of the server's main process."""
        return self._process.pid

    def pids(self) -> list[int]:
        """Of all its processes."""
        return [] if self._is_closed else self._tree.pids()

    def is_alive(self) -> bool:
        """Whether the main process and all of SGLang's workers run. Says nothing about whether they answer."""
        return not self._is_closed and self._tree.exit_code is None and self._tree.ended_worker() is None

    def wait_until_healthy(self) -> ServerInfo:
        """Wait until it generates, then check what it serves. EngineStartError, and no process left, where it fails."""
        try:
            with _http(self.url, self.key_file) as http:
                self._wait_for_health(http)
                self._tree.record()
                self.info = _checked(self.url, http, self._expectation, WEIGHT_LOADER)
        except (EngineStartError, httpx.HTTPError, ValueError) as error:
            words = self._describe(str(error) or repr(error))
            self.kill()
            raise EngineStartError(words) from error
        except BaseException:
            self.kill()
            raise
        return self.info

    def stop(self) -> None:
        """End it. It holds nothing worth saving, so it is killed rather than asked, which takes it seconds."""
        self.kill()

    def kill(self) -> None:
        """End every process of it at once. RuntimeError where one stays (uninterruptible in the kernel)."""
        if self._is_closed:
            return
        stubborn = self._tree.kill(timeout_s=30.0)
        if stubborn:
            raise RuntimeError(f"engine {self.index}: processes {stubborn} do not end after SIGKILL")
        self._is_closed = True
        if self._process.stdin is not None:
            self._process.stdin.close()
        _discard(self._ports, self._scratch)

    def last_words(self) -> str:
        """How it ended, the end of its log and, last, the first error in it."""
        code, worker = self._tree.exit_code, self._tree.ended_worker()
        if code is not None:
            return self._describe(f"it ended with {_exit_text(code)}")
        return self._describe("it runs" if worker is None else f"its worker process {worker.pid} has ended")

    def _wait_for_health(self, http: httpx.Client) -> None:
        deadline = self._started + self.settings.start_timeout_s
        while not _answers(http, "/health", min(_HEALTH_S, max(_POLL_S, deadline - time.monotonic()))):
            if self._tree.exit_code is not None:
                raise EngineStartError(f"it ended with {_exit_text(self._tree.exit_code)}")
            if time.monotonic() > deadline:
                raise EngineStartError(f"it does not answer; start_timeout_s is {self.settings.start_timeout_s:g}")
            time.sleep(_POLL_S)

    def _describe(self, what: str) -> str:
        age = time.monotonic() - self._started
        return (
            f"engine {self.index} (process {self.pid}, {self.url}), {age:.1f} s after its start: {what}; "
            f"{last_words(self.log)}"
        )


@dataclass
class AttachedServer:
    """A server given by its URL: watched and used, never stopped."""

    url: str
    key_file: Path
    expectation: Expectation
    index: int = 0
    timeout_s: float = 60.0
    info: ServerInfo | None = field(default=None, init=False)

    def is_alive(self) -> bool:
        """Whether it answers within 5 s (the HTTP process alone: a paused engine answers as well)."""
        with _http(self.url, self.key_file) as http:
            return _answers(http, "/model_info", 5.0)

    def wait_until_healthy(self) -> ServerInfo:
        """As for a server of ours, within `timeout_s`."""
        deadline = time.monotonic() + self.timeout_s
        with _http(self.url, self.key_file) as http:
            while not _answers(http, "/health", min(_HEALTH_S, max(_POLL_S, deadline - time.monotonic()))):
                if time.monotonic() > deadline:
                    raise EngineStartError(
                        f"engine {self.index} at {self.url} is not healthy after {self.timeout_s:g} s"
                    )
                time.sleep(_POLL_S)
            try:
                self.info = _checked(self.url, http, self.expectation, WEIGHT_LOADER)
            except (EngineStartError, httpx.HTTPError, ValueError) as error:
                raise EngineStartError(f"engine {self.index} at {self.url}: {error}") from error
        return self.info

    def stop(self) -> None:
        """It goes on: somebody else runs it."""

    def kill(self) -> None:
        """It goes on: somebody else runs it."""

    def last_words(self) -> str:
        return f"engine {self.index} at {self.url} was not started here: its log is with whoever runs it"


def command(settings: ServerSettings, port: int, rendezvous_port: int, scratch: Path) -> list[str]:
    """The command line of a server. It holds no secret."""
    arguments = {
        "api-key-file": settings.key_file.resolve(),
        "scratch": scratch,
        "model-path": settings.model_path.resolve(),
        "host": settings.host,
        "port": port,
        "nccl-port": rendezvous_port,
        "tp-size": settings.tensor_parallel,
        "dtype": settings.dtype,
        "device": settings.device,
        "max-running-requests": settings.max_running_requests,
        "max-total-tokens": settings.max_total_tokens,
        "context-length": settings.context_length,
        "mem-fraction-static": settings.memory_fraction,
        "random-seed": settings.random_seed,
        "load-format": "dummy" if settings.random_weights else None,
        "custom-weight-loader": WEIGHT_LOADER,
        "grammar-backend": "none",
        "json-model-override-args": _MODEL_OVERRIDES[settings.quantization],
    }
    # Token ids in, token ids out: the server needs no tokenizer.
    switches = ["skip-tokenizer-init", "skip-server-warmup"]
    if settings.seeded:
        switches.append("enable-deterministic-inference")
    if settings.memory_saver:
        switches.append("enable-memory-saver")
    if settings.device == "cpu":
        arguments |= _cpu_arguments(settings)
        switches += ["disable-cuda-graph", "disable-overlap-schedule", "sleep-on-idle"]
    valued = [text for name, value in arguments.items() if value is not None for text in (f"--{name}", str(value))]
    return [
        str(settings.python), "-m", "megatron_dapo.engines.sglang.serve",
        *valued, *(f"--{name}" for name in switches), *settings.more_arguments,
    ]  # fmt: skip


def environment(settings: ServerSettings, scratch: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """What the server's processes find in their environment."""
    kept = {name: value for name, value in inherited.items() if not _NOT_INHERITED.match(name)}
    kept |= {
        "PYTHONPATH": str(_PACKAGE_ROOT),
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(scratch),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        # A server whose scheduler has crashed would hang for 65 s, to write dumps, before its connections break.
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "false",
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "false",
    }
    if _is_loopback(settings.host):
        kept["GLOO_SOCKET_IFNAME"] = "lo"
    if settings.gpus:
        kept["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, settings.gpus))
    return kept | (_cpu_environment(settings) if settings.device == "cpu" else {})


def _cpu_arguments(settings: ServerSettings) -> dict[str, Any]:
    return {
        "attention-backend": "torch_native",
        "sampling-backend": "pytorch",
        "mem-fraction-static": settings.memory_fraction or 0.3,
        "max-total-tokens": settings.max_total_tokens or 65536,
    }


def _cpu_environment(settings: ServerSettings) -> dict[str, str]:
    variables = {
        "SGLANG_USE_CPU_ENGINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        # Two threads on the tiny products of a small model were 40 times slower than one.
        "OMP_NUM_THREADS": "1",
        # Compiling the sampler takes longer than it ever saves on a CPU.
        "TORCHDYNAMO_DISABLE": "1",
    }
    if settings.tensor_parallel > 1:
        # SGLang wants one list of cores a rank where the ranks outnumber the memory nodes.
        num_cores = os.cpu_count() or 1
        cores = (str(rank % num_cores) for rank in range(settings.tensor_parallel))
        variables["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(cores)
    return variables


def _spawn(
    settings: ServerSettings, ports: tuple[ReservedPort, ...], scratch: Path, log: Path
) -> subprocess.Popen[bytes]:
    numbers = [port.hand_over() for port in ports]
    with open(log, "ab") as stream:
        return subprocess.Popen(
            command(settings, numbers[0], numbers[1], scratch),
            env=environment(settings, scratch, os.environ),
            cwd=scratch,
            stdin=subprocess.PIPE,  # never written to: it closes when this process ends, see serve.end_with_starter
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _new_log(folder: Path, index: int) -> Path:
    """A file of its own for every start: the log of the one that died stays."""
    folder.mkdir(parents=True, exist_ok=True)
    attempt = 0
    while True:
        path = folder / f"engine_{index}{f'.{attempt}' if attempt else ''}.log"
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        except FileExistsError:
            attempt += 1
        else:
            return path


def _discard(ports: tuple[ReservedPort, ...], scratch: Path) -> None:
    for port in ports:
        port.release()
    shutil.rmtree(scratch, ignore_errors=True)


def _http(url: str, key_file: Path) -> httpx.Client:
    # No proxy from the environment: the key goes to the engine alone.
    headers = {"Authorization": f"Bearer {read_key(key_file)}"}
    return httpx.Client(base_url=url, headers=headers, timeout=_CALL_S, trust_env=False)


def _answers(http: httpx.Client, path: str, timeout_s: float) -> bool:
    try:
        return http.get(path, timeout=timeout_s).status_code == 200
    except httpx.HTTPError:
        return False


def _checked(url: str, http: httpx.Client, expectation: Expectation, weight_loader: str) -> ServerInfo:
    """What the server says it serves. EngineStartError where that is not what was asked for."""
    info = _server_info(url, http)
    pairs = {
        "architecture": (info.architecture, expectation.architecture),
        "vocab_size": (info.vocab_size, expectation.vocab_size),
        "dtype": (info.dtype, expectation.dtype),
        "tensor_parallel": (info.tensor_parallel, expectation.tensor_parallel),
    }
    wrong = [f"{name} {found}, not {wanted}" for name, (found, wanted) in pairs.items() if found != wanted]
    if expectation.seeded and not info.seeded:
        wrong.append("no seeds per request: start it with --enable-deterministic-inference")
    if weight_loader not in info.weight_loaders:
        wrong.append(f"no way to update its weights: start it with --custom-weight-loader {weight_loader}")
    if wrong:
        raise EngineStartError(f"it serves another model than was asked for ({info.model_path}): {'; '.join(wrong)}")
    return info


def _server_info(url: str, http: httpx.Client) -> ServerInfo:
    server, model = _json(http, "/server_info"), _json(http, "/model_info")
    try:
        return ServerInfo(
            dialect=dialect_of(str(server["version"])),
            model_path=str(model["model_path"]),
            architecture=str((model.get("architectures") or ["unknown"])[0]),
            vocab_size=_vocab_size(http),
            dtype=_DTYPES.get(str(server["dtype"]), str(server["dtype"])),
            tensor_parallel=int(server["tp_size"]),
            max_total_tokens=int(server["max_total_num_tokens"]),
            seeded=bool(server.get("enable_deterministic_inference")),
            weight_loaders=tuple(server.get("custom_weight_loader") or ()),
        )
    except (KeyError, TypeError) as error:
        raise EngineStartError(f"{url} does not answer like a SGLang server: {error!r}") from error


def _vocab_size(http: httpx.Client) -> int:
    """The vocabulary in use. No endpoint tells it, but the refusal of a token beyond it does; nothing is generated."""
    body = {
        "input_ids": [0],
        "sampling_params": {"max_new_tokens": 1},
        "return_logprob": True,
        "token_ids_logprob": [_IMPOSSIBLE_TOKEN],
    }
    answer = http.post("/generate", json=body)
    match = re.search(r"valid range is \[0, (\d+)\)", answer.text)
    if match is None:
        raise EngineStartError(
            f"cannot tell its vocabulary: /generate answers {answer.status_code} {answer.text[:200]}"
        )
    return int(match.group(1))


def _json(http: httpx.Client, path: str) -> dict[str, Any]:
    answer = http.get(path)
    if answer.status_code == 401:
        raise EngineStartError(f"it refuses the key ({path} answers 401): it was started with another one")
    try:
        document = answer.json() if answer.status_code == 200 else None
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise EngineStartError(f"{path} answers {answer.status_code} {answer.text[:200]!r}")
    return document


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _exit_text(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {-code}"
