"""Starts stock SGLang servers, one process tree each, and ends them whatever state they are in.

    settings -> SglangServer.start (returns at once) -> wait_until_healthy (checks what is served) -> ... -> stop

A server ends with the process that started it, however that dies. What goes wrong at the start is an EngineStartError
within `start_timeout_s`; its last line is the first error in the server's log. External servers are attached to by
their URL and are never stopped from here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from megatron_dapo.affinity import all_cpus
from megatron_dapo.engines.sglang.keys import read_key
from megatron_dapo.engines.sglang.ports import ReservedPort, reserve_port
from megatron_dapo.engines.sglang.processes import ProcessTree, remove_leftovers
from megatron_dapo.engines.sglang.served import EngineStartError, Expectation, ServerInfo, checked, open_http
from megatron_dapo.engines.sglang.server_log import exit_reason
from megatron_dapo.engines.sglang.server_settings import ServerSettings, command, environment

_POLL_S = 0.1
# A question after its health that stays unanswered is asked again: the process that holds the port may not be the server.
_HEALTH_S = 15.0


class SglangServer:
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
        self.settings, self.index, self.key_file, self.log = settings, index, settings.key_file, log
        host = f"[{settings.url_host}]" if ":" in settings.url_host else settings.url_host  # IPv6 in brackets
        self.url = f"http://{host}:{ports[0].number}"
        self.info: ServerInfo | None = None
        self._expectation, self._process, self._ports, self._scratch = expectation, process, ports, scratch
        self._tree = ProcessTree(process)
        self._started = time.monotonic()
        self._is_closed = False

    @classmethod
    def start(cls, settings: ServerSettings, index: int = 0) -> SglangServer:
        """Spawn the server and return without waiting for it. ValueError for settings no server can start with."""
        expectation = Expectation.of(settings)
        read_key(settings.key_file)  # a key that cannot be read is refused here and not in the server's log
        remove_leftovers()
        ports = (reserve_port(settings.host), reserve_port(settings.host))
        scratch = Path(tempfile.mkdtemp(prefix="sglang-"))
        try:
            log = _new_log(settings.log_dir, index)
            process = _spawn(settings, ports, scratch, log)
        except BaseException:
            _discard(ports, scratch)
            raise
        return cls(settings, index, expectation, process, ports, log, scratch)

    @staticmethod
    def attach(
        url: str, key_file: Path, expectation: Expectation, index: int = 0, timeout_s: float = 60.0
    ) -> AttachedServer:
        """Return a server that this run did not start."""
        return AttachedServer(url.rstrip("/"), key_file, expectation, index, timeout_s)

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

    def wait_until_healthy(self) -> ServerInfo:
        """Wait until it generates, then check what it serves. EngineStartError, and no process left, if it fails."""
        try:
            with open_http(self.url, self.key_file) as http:
                self._wait_for_health(http)
                self.record()
                self.info = checked(self.url, http, self._expectation)
        except (EngineStartError, httpx.HTTPError, ValueError) as error:
            description = self._describe(str(error) or repr(error))
            self.kill()
            raise EngineStartError(description) from error
        except BaseException:
            self.kill()
            raise
        return self.info

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
            f"{exit_reason(self.log)}"
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
        """Return True if it answers within 5 s (only the HTTP process does: a paused engine answers as well)."""
        with open_http(self.url, self.key_file) as http:
            return _answers(http, "/model_info", 5.0)

    def wait_until_healthy(self) -> ServerInfo:
        """Wait until it generates, at most `timeout_s`, then check what it serves."""
        deadline = time.monotonic() + self.timeout_s
        with open_http(self.url, self.key_file) as http:
            while not _answers(http, "/health", min(_HEALTH_S, max(_POLL_S, deadline - time.monotonic()))):
                self._require_running()
                if time.monotonic() > deadline:
                    problem = f"is not healthy after {self.timeout_s:g} s"
                    raise EngineStartError(f"engine {self.index} at {self.url} {problem}")
                time.sleep(_POLL_S)
            try:
                self.info = checked(self.url, http, self.expectation)
            except (EngineStartError, httpx.HTTPError, ValueError) as error:
                raise EngineStartError(f"engine {self.index} at {self.url}: {error}") from error
        return self.info

    def stop(self) -> None:
        """Do nothing: the server belongs to its own operator."""

    def exit_reason(self) -> str:
        return f"engine {self.index} at {self.url} was not started here: its log is with its operator"

    def _require_running(self) -> None:
        """Raise EngineStartError once its processes have ended, if they are known."""


def _spawn(
    settings: ServerSettings, ports: tuple[ReservedPort, ...], scratch: Path, log: Path
) -> subprocess.Popen[bytes]:
    variables = environment(settings, scratch, os.environ)
    numbers = [port.hand_over() for port in ports]
    with open(log, "ab") as stream:
        try:
            with all_cpus():
                return subprocess.Popen(
                    command(settings, numbers[0], numbers[1], scratch),
                    env=variables,
                    cwd=scratch,
                    stdin=subprocess.PIPE,  # never written to: it closes when this process ends, see processes.end_with_starter
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # `ProcessTree` finds its processes by their session
                )
        except OSError as error:
            raise ValueError(f"engine python {settings.python} cannot be run: {error.strerror}") from error


def _new_log(directory: Path, index: int) -> Path:
    """A new file for every start: the log of a server that died stays."""
    directory.mkdir(parents=True, exist_ok=True)
    attempt = 0
    while True:
        path = directory / f"engine_{index}{f'.{attempt}' if attempt else ''}.log"
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


def _exit_text(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {-code}"
