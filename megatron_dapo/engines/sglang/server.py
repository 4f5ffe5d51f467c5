"""SGLang servers, started here (one process tree each) or given by their URL, and the check of what they serve.

    settings -> SglangServer.start (returns at once) -> wait_until_healthy (checks what is served) -> ... -> stop

A server ends with the process that started it, however that dies. What goes wrong at the start is an EngineStartError
within `start_timeout_s`; its last line is the first error in the server's log. Servers given by URL are never stopped.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from megatron_dapo.affinity import all_cpus
from megatron_dapo.config.sglang_schema import UpdatePause
from megatron_dapo.engines.sglang import protocol
from megatron_dapo.engines.sglang.drafting import TOKENIZER, drafting_problem, write_tokenizer
from megatron_dapo.engines.sglang.keys import read_key
from megatron_dapo.engines.sglang.ports import ReservedPort, reserve_port
from megatron_dapo.engines.sglang.processes import ProcessTree, remove_leftovers
from megatron_dapo.engines.sglang.server_settings import (
    DTYPE_NAMES,
    WEIGHT_LOADER,
    Meeting,
    ServerSettings,
    command,
    environment,
)
from megatron_dapo.engines.sglang.versions import ApiVersion, api_version_of, newest, require_labels, supported_range
from megatron_dapo.models.families import language_model_fields
from megatron_dapo.untrusted import one_line, read_json

logger = logging.getLogger(__name__)
# One line a question would drown the run's own log.
logging.getLogger("httpx").setLevel(logging.WARNING)

_POLL_S = 0.1
# A question after its health that stays unanswered is asked again: the process that holds the port may not be the server.
_HEALTH_S = 15.0
_CALL_S = 60.0
_IMPOSSIBLE_TOKEN = 1 << 40


class EngineStartError(RuntimeError):
    """A server ended, did not come up in time, or serves something else than expected."""


@dataclass(frozen=True)
class Expectation:
    """The model and mode a server must serve.

    `seeded`: its deterministic mode is on. `routing`: it can return experts. `update_pause`: a pause that its labels must bear.
    `drafts`: it verifies drafts by sampling. `max_support`: most ids that a token is drawn from and that it must record.
    """

    architecture: str
    vocab_size: int
    dtype: str
    tensor_parallel: int
    seeded: bool = False
    routing: bool = False
    update_pause: UpdatePause = "abort"
    drafts: bool = False
    max_support: int = 0

    @classmethod
    def of(cls, settings: ServerSettings) -> Expectation:
        """Read the expectation from the model's config.json. Raise ValueError if it lacks a field."""
        file = settings.model_path / "config.json"
        try:
            config = language_model_fields(read_json(file))
            architecture, vocab_size = str(config["architectures"][0]), int(config["vocab_size"])
        except (OSError, ValueError, ArithmeticError, LookupError, TypeError) as error:
            raise ValueError(
                f"{file}: cannot read architectures and vocab_size from it ({one_line(repr(error))}); model_path must be a "
                "Hugging Face checkpoint directory"
            ) from error
        dtype, tensor_parallel = DTYPE_NAMES[settings.dtype], settings.tensor_parallel
        modes = settings.seeded, settings.routing, settings.update_pause, settings.draft_tokens > 0, settings.max_support
        return cls(architecture, vocab_size, dtype, tensor_parallel, *modes)


@dataclass(frozen=True)
class ServerInfo:
    """A healthy server's description of itself."""

    api_version: ApiVersion
    model_path: str
    architecture: str
    vocab_size: int
    dtype: str
    tensor_parallel: int
    max_total_tokens: int
    attention_backend: str
    sampling_backend: str
    seeded: bool
    routing: bool
    overlaps: bool
    weight_loaders: tuple[str, ...]
    max_support: int = 0  # most ids that it records of a token; 0: it records none
    drafting_problem: str = ""  # reason its drafts would change what is sampled, or that there are none


def open_http(url: str, key_file: Path) -> httpx.Client:
    """Connections to a server, with its key."""
    # No proxy from the environment: the key goes only to the engine.
    headers = {"Authorization": f"Bearer {read_key(key_file)}"}
    return httpx.Client(base_url=url, headers=headers, timeout=_CALL_S, trust_env=False)


class AttachedServer:
    """A server given by its URL: watched and used, never stopped."""

    answers = True  # False: the part of a server on its second or a later node
    meeting = ""  # its parts on other nodes meet it here (`Meeting`)
    is_kept = False  # started by an earlier attempt

    def __init__(
        self, url: str, key_file: Path, expectation: Expectation, index: int = 0, timeout_s: float = 60.0
    ) -> None:
        """`timeout_s`: until it is healthy."""
        self.url, self.key_file, self.expectation, self.index = url.rstrip("/"), key_file, expectation, index
        self.timeout_s = timeout_s
        self.info: ServerInfo | None = None

    def is_alive(self) -> bool:
        """Return True if it answers within 5 s (only the HTTP process does: a paused engine answers as well)."""
        with open_http(self.url, self.key_file) as http:
            return _answers(http, "/model_info", 5.0)

    def wait_until_healthy(self) -> ServerInfo:
        """Wait until it generates, then check what it serves. EngineStartError if it fails."""
        with self._healthy() as http:
            self.info = checked(self.url, http, self.expectation)
        return self.info

    def wait_until_joined(self) -> None:
        """Wait until this part of a server has met the other parts. EngineStartError if it fails."""
        with self._healthy():
            pass

    @contextmanager
    def _healthy(self) -> Iterator[httpx.Client]:
        """Connections to it once it is healthy. EngineStartError if it fails, or what is done with them."""
        try:
            with open_http(self.url, self.key_file) as http:
                self._wait_for_health(http, time.monotonic() + self.timeout_s)
                yield http
        except (EngineStartError, httpx.HTTPError, ValueError) as error:
            raise EngineStartError(self._describe(str(error) or repr(error))) from error

    def stop(self) -> None:
        """Do nothing: the server belongs to its own operator."""

    def exit_reason(self) -> str:
        return self._describe("it was not started here: its log is with its operator")

    def _wait_for_health(self, http: httpx.Client, deadline: float) -> None:
        while not _answers(http, "/health", min(_HEALTH_S, max(_POLL_S, deadline - time.monotonic()))):
            self._require_running()
            if time.monotonic() > deadline:
                raise EngineStartError(f"it is not healthy after {self.timeout_s:g} s")
            time.sleep(_POLL_S)

    def _require_running(self) -> None:
        """Raise EngineStartError once its processes have ended, if they are known."""

    def _describe(self, what: str) -> str:
        return f"engine {self.index} at {self.url}: {what}"


class SglangServer(AttachedServer):
    """A server started by this run, the leader of its own process session."""

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
        host = f"[{settings.url_host}]" if ":" in settings.url_host else settings.url_host  # IPv6 in brackets
        url = f"http://{host}:{ports[0].number}"
        super().__init__(url, settings.key_file, expectation, index, settings.start_timeout_s)
        self.answers = settings.node_rank == 0
        self.meeting = settings.meeting or str(_meeting(settings, ports) or "")
        self.settings, self.log = settings, log
        self._process, self._ports, self._scratch = process, ports, scratch
        self._tree = ProcessTree(process)
        self._started = time.monotonic()
        self._is_closed = False

    @classmethod
    def start(cls, settings: ServerSettings, index: int = 0) -> SglangServer:
        """Spawn the server and return without waiting for it. ValueError for settings no server can start with."""
        expectation = Expectation.of(settings)
        read_key(settings.key_file)  # a key that cannot be read is refused here and not in the server's log
        remove_leftovers()
        leads_parts = settings.num_nodes > 1 and settings.node_rank == 0
        ports = tuple(reserve_port(settings.host) for _ in range(3 if leads_parts else 2))
        scratch = Path(tempfile.mkdtemp(prefix="sglang-"))
        try:
            log = _new_log(settings.log_dir, index, settings.node_rank)
            if settings.draft_tokens:
                write_tokenizer(scratch / TOKENIZER, expectation.vocab_size)
            process = _spawn(settings, ports, scratch, log)
        except BaseException:
            _discard(ports, scratch)
            raise
        return cls(settings, index, expectation, process, ports, log, scratch)

    @property
    def pid(self) -> int:
        """Process id of the server's main process."""
        return self._process.pid

    def pids(self) -> list[int]:
        """Return the process ids of the server."""
        return [] if self._is_closed else self._tree.pids()

    def is_alive(self) -> bool:
        """Return True if the main process and all of SGLang's workers run, whether they answer or not."""
        return not self._is_closed and self._tree.exit_code is None and self._tree.ended_worker() is None

    @contextmanager
    def _healthy(self) -> Iterator[httpx.Client]:
        """See `AttachedServer`. No process is left if it fails."""
        try:
            with super()._healthy() as http:
                yield http
        except BaseException:
            self.kill()
            raise

    def record(self) -> None:
        """Remember its processes. Once it is healthy, all of SGLang's workers are there."""
        self._tree.record()

    def stop(self) -> None:
        """End it. It holds nothing worth saving, so it is killed rather than asked, which takes it seconds."""
        self.kill()

    def kill(self) -> None:
        """End every process of it at once. RuntimeError if one stays (uninterruptible in the kernel)."""
        if self._is_closed:
            return
        remaining = self._tree.kill(timeout_s=30.0)
        if remaining:
            raise RuntimeError(f"engine {self.index}: processes {remaining} do not end after SIGKILL")
        self._is_closed = True
        if self._process.stdin is not None:
            self._process.stdin.close()
        _discard(self._ports, self._scratch)

    def exit_reason(self) -> str:
        """Describe how it ended, with the end of its log and, last, the first error in it."""
        worker = self._tree.ended_worker()
        if self._tree.exit_code is not None:
            return self._describe(self._exit_text())
        return self._describe("it runs" if worker is None else f"its worker process {worker.pid} has ended")

    def _wait_for_health(self, http: httpx.Client, deadline: float) -> None:
        super()._wait_for_health(http, self._started + self.timeout_s)
        self.record()

    def _require_running(self) -> None:
        if self._tree.exit_code is not None:
            raise EngineStartError(self._exit_text())

    def _exit_text(self) -> str:
        code = self._tree.exit_code
        assert code is not None, "it runs"
        return f"it ended with exit code {code}" if code >= 0 else f"it ended with signal {-code}"

    def _describe(self, what: str) -> str:
        age = time.monotonic() - self._started
        return (
            f"engine {self.index} (process {self.pid}, {self.url}), {age:.1f} s after its start: {what}; "
            f"{exit_reason(self.log)}"
        )


def _spawn(
    settings: ServerSettings, ports: tuple[ReservedPort, ...], scratch: Path, log: Path
) -> subprocess.Popen[bytes]:
    variables = environment(settings, scratch, os.environ)
    numbers = [port.hand_over() for port in ports]
    with open(log, "ab") as stream:
        try:
            with all_cpus():
                return subprocess.Popen(
                    command(settings, numbers[0], numbers[1], scratch, _meeting(settings, ports)),
                    env=variables,
                    cwd=scratch,
                    stdin=subprocess.PIPE,  # never written to: it closes when this process ends, see processes.end_with_starter
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # `ProcessTree` finds its processes by their session
                )
        except OSError as error:
            raise ValueError(f"engine python {settings.python} cannot be run: {error.strerror}") from error


def _meeting(settings: ServerSettings, ports: Sequence[ReservedPort]) -> Meeting | None:
    """Return where the parts of a server on several nodes meet: on the first node at two of its ports."""
    if settings.meeting:
        return Meeting.parse(settings.meeting)
    return Meeting(settings.url_host, ports[1].number, ports[2].number) if settings.num_nodes > 1 else None


def _new_log(directory: Path, index: int, node_rank: int = 0) -> Path:
    """A new file for every start: the log of a server that died stays."""
    directory.mkdir(parents=True, exist_ok=True)
    attempt, name = 0, f"engine_{index}{f'_node_{node_rank}' if node_rank else ''}"
    while True:
        path = directory / f"{name}{f'.{attempt}' if attempt else ''}.log"
        try:
            path.touch(mode=0o644, exist_ok=False)
            return path
        except FileExistsError:
            attempt += 1


def _discard(ports: tuple[ReservedPort, ...], scratch: Path) -> None:
    for port in ports:
        port.release()
    shutil.rmtree(scratch, ignore_errors=True)


def _answers(http: httpx.Client, path: str, timeout_s: float) -> bool:
    try:
        return http.get(path, timeout=timeout_s).status_code == 200
    except httpx.HTTPError:
        return False


def checked(url: str, http: httpx.Client, expectation: Expectation) -> ServerInfo:
    """Return the server's description. Raise EngineStartError if it is not as expected."""
    api_version = api_version_of(str(_json(http, "/server_info").get("version")))
    require_labels(api_version, expectation.update_pause)
    info = (_server_info if api_version.is_tested else _probed_info)(url, http, api_version)
    found, wanted = vars(info), vars(expectation)
    names = ("architecture", "vocab_size", "dtype", "tensor_parallel")
    wrong = [f"{name} {found[name]}, not {wanted[name]}" for name in names if found[name] != wanted[name]]
    if expectation.seeded and not info.seeded:
        wrong.append("no seeds per request: start it with --enable-deterministic-inference")
    if expectation.routing and not info.routing:
        wrong.append("no experts in its answers: start it with --enable-return-routed-experts")
    if expectation.max_support > info.max_support:
        wrong.append(
            f"it records up to {info.max_support} ids that a token was drawn from, and rollout.top_k is {expectation.max_support}: "
            "use SGLang 0.5.21 or newer with a larger --sampling-mask-max-tokens, or rollout.top_p = 1.0 and rollout.top_k = 0"
        )
    if expectation.update_pause == "in_place" and info.overlaps:
        wrong.append("it launches batches ahead of a pause: start it with --disable-overlap-schedule")
    if expectation.drafts and info.drafting_problem:
        wrong.append(info.drafting_problem)
    if WEIGHT_LOADER not in info.weight_loaders:
        wrong.append(f"no way to update its weights: start it with --custom-weight-loader {WEIGHT_LOADER}")
    if wrong:
        raise EngineStartError(f"it serves another model than expected ({info.model_path}): {'; '.join(wrong)}")
    logger.info(
        "%s: SGLang %s, attention %s, sampling %s, a cache of %d tokens",
        url,
        info.api_version.version,
        info.attention_backend,
        info.sampling_backend,
        info.max_total_tokens,
    )
    return info


def _probed_info(url: str, http: httpx.Client, api_version: ApiVersion) -> ServerInfo:
    """`_server_info` of a version newer than those tested. EngineStartError if the protocol probe fails."""
    version = api_version.version
    try:
        info = _server_info(url, http, api_version)
        problems = protocol.problems(http, info.vocab_size)
    except (EngineStartError, httpx.HTTPError, ValueError, LookupError) as error:
        problems = [str(error) or repr(error)]
    if problems:
        raise EngineStartError(
            f"SGLang {version} is newer than what is tested, {supported_range()}, and fails the protocol probe: "
            f"{'; '.join(problems)}; install sglang=={newest()} in the engine's environment"
        )
    _warn_untested(version)
    return info


@functools.cache
def _warn_untested(version: str) -> None:
    """Warn once a process, not for each server."""
    logger.warning(
        "SGLang %s is newer than what is tested, %s; the protocol probe passed, so it is used", version, supported_range()
    )


def _server_info(url: str, http: httpx.Client, api_version: ApiVersion) -> ServerInfo:
    server, model = _json(http, "/server_info"), _json(http, "/model_info")
    try:
        return ServerInfo(
            api_version=api_version,
            model_path=str(model["model_path"]),
            architecture=str((model.get("architectures") or ["unknown"])[0]),
            vocab_size=_vocab_size(http),
            dtype=DTYPE_NAMES.get(str(server["dtype"]), str(server["dtype"])),
            tensor_parallel=int(server["tp_size"]),
            max_total_tokens=int(server["max_total_num_tokens"]),
            attention_backend=str(server.get("attention_backend")),
            sampling_backend=str(server.get("sampling_backend")),
            seeded=bool(server.get("enable_deterministic_inference")),
            routing=bool(server.get("enable_return_routed_experts")),
            overlaps=not server.get("disable_overlap_schedule"),
            weight_loaders=tuple(server.get("custom_weight_loader") or ()),
            max_support=int(server.get("sampling_mask_max_tokens") or 0),
            drafting_problem=drafting_problem(server),
        )
    except (KeyError, TypeError) as error:
        raise EngineStartError(f"{url} does not answer like a SGLang server: {error!r}") from error


def _vocab_size(http: httpx.Client) -> int:
    """Return the vocabulary in use: no endpoint reports it, but the refusal of a token beyond it does. Nothing is generated."""
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


# The log of a server

_TRACEBACK = "Traceback (most recent call last)"
_PREFIX = re.compile(r"^\[[^\]]*\]\s*")  # [date time TP0]
_ERROR_LINE = re.compile(r"\b(?:[A-Z]\w*(?:Error|Exception)\b|error:|ERROR\b|fatal|Fatal|terminate called|crashed)")
_HARMLESS = re.compile(r"Ignore import error|Warning:|warnings\.warn")
_MAX_BYTES = 16 << 20  # read from the start: the first error is what the others follow from
_NUM_LINES = 20


def exit_reason(log: Path) -> str:
    """Return the last lines of `log` and, at the end, the first error in it."""
    lines = _lines(log)
    if not lines:
        return f"its log {log} is empty"
    tail = "\n".join(f"  | {line}" for line in lines[-_NUM_LINES:])
    return f"its log {log} ends with:\n{tail}\nfirst cause: {first_cause(lines)}"


def first_cause(lines: Sequence[str]) -> str:
    """Return the exception of the first traceback, or the first line with an error, or the last line."""
    errors = (line for line in lines if _ERROR_LINE.search(line) and not _HARMLESS.search(line))
    for cause in (_exceptions(lines), errors, reversed(lines)):
        found = next((line for line in cause if line.strip()), None)
        if found is not None:
            return _PREFIX.sub("", found).strip()
    return "none in the log"


def _exceptions(lines: Sequence[str]) -> Iterator[str]:
    """Yield the line that ends each traceback: the first one after it that is not indented."""
    inside = False
    for line in lines:
        if _TRACEBACK in line:
            inside = True
        elif inside and line.strip() and not line[0].isspace():
            inside = False
            yield line


def _lines(log: Path) -> list[str]:
    try:
        with open(log, "rb") as stream:
            return stream.read(_MAX_BYTES).decode("utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
