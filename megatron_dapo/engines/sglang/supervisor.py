"""The supervisor of a node's SGLang servers: they outlive the trainer's processes that fail, and the next ones take them over.

    trainer rank: SupervisorClient, a SupervisedServer a slot --- JSON lines ---> Supervisor ---> SglangServer of each slot

The first rank of a node starts it under torchrun, the batch script under Slurm (`run/worker.py --keep-servers`). It stays
while a trainer is connected and `keep_s` longer. It ends its servers and itself when a trainer says that the run is over,
when its launcher has ended, and after SIGTERM as soon as no trainer is connected. If it is killed, its servers end by
themselves (`processes.end_with_starter`).

A server is taken over in the state of one that has just started: nothing of the last attempt is generated, nothing is
paused, all its memory is there. Its weights may be half of one version and half of another; the first weight sync of the
attempt overwrites and verifies all of them. A server that has other settings, does not answer or ended in between is
replaced.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import select
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from megatron_dapo.affinity import all_cpus
from megatron_dapo.engines.sglang.client import EngineError, SglangClient, Timeouts
from megatron_dapo.engines.sglang.keys import read_key
from megatron_dapo.engines.sglang.server import (
    AttachedServer,
    EngineStartError,
    Expectation,
    ServerInfo,
    SglangServer,
    checked,
    open_http,
)
from megatron_dapo.engines.sglang.server_settings import ServerSettings
from megatron_dapo.files.linux import require_same_user

logger = logging.getLogger(__name__)

_PACKAGE_ROOT = Path(__file__).resolve().parents[3]
_MODULE = "megatron_dapo.engines.sglang.supervisor"
_CONNECT_S = 120.0  # under Slurm both start at the same time
_POLL_S = 0.05
# For a kept server to answer. Its scheduler may still wait for weights of a trainer that is dead.
_TAKE_OVER_S = 75.0
_TICK_S = 0.2
_FIRST_TRAINER_S = 600.0  # The first trainer may import from a slow file system.
_BIND_S = 30.0  # A predecessor may still hold the name.
_PATHS = ("python", "model_path", "key_file", "log_dir")
_OF_A_RESTART = ("num_restarts", "replaced_cache_tokens")  # settings that do not tell a kept server from the one wanted


def settings_to_json(settings: ServerSettings) -> dict[str, Any]:
    """Return settings as JSON types. Equal settings give equal documents."""
    return json.loads(json.dumps(asdict(settings), default=str))


def _settings_from_json(document: Mapping[str, Any]) -> ServerSettings:
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in document.items()}
    return ServerSettings(**values | {name: Path(values[name]) for name in _PATHS})


def _lasting(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in _OF_A_RESTART}


@dataclass
class _Slot:
    """A server of this node and what trainers have told of it."""

    server: SglangServer
    settings: Mapping[str, Any]
    has_served: bool = False  # it was healthy once
    released: list[str] | None = field(default_factory=list)  # memory that it has released; None: unknown


class Supervisor:
    """Starts servers for trainers and keeps them in between. Each public method from `open` on answers one request."""

    def __init__(self, keep_s: float) -> None:
        self.keep_s = keep_s
        self.is_over = False
        self.is_told_to_end = False  # A signal came.
        self._slots: dict[int, _Slot] = {}
        self._lock = threading.Lock()  # guards all fields
        self._num_trainers = 0
        self._alone_since = time.monotonic() + max(0.0, _FIRST_TRAINER_S - keep_s)

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        """Carry out a request and return its answer, None from the end on; `error` in it says that it failed."""
        arguments = dict(request)
        try:
            with self._lock:
                return None if self.is_over else _REQUESTS[arguments.pop("op")](self, **arguments) or {}
        except (ValueError, OSError, RuntimeError) as error:
            return {"error": str(error), "is_value": isinstance(error, ValueError)}

    def trainer_comes(self) -> None:
        with self._lock:
            self._num_trainers += 1

    def trainer_goes(self) -> None:
        with self._lock:
            self._num_trainers -= 1
            self._alone_since = time.monotonic()

    @property
    def is_done(self) -> bool:
        """True if servers are not to be kept any longer."""
        is_late = time.monotonic() - self._alone_since > self.keep_s
        return self.is_over or self._num_trainers == 0 and (self.is_told_to_end or is_late)

    def close(self) -> None:
        """End all servers."""
        with self._lock:
            self.end()

    # Requests

    def open(self, num_servers: int) -> dict[str, Any]:
        """End the servers beyond the first `num_servers`, which the trainer does not ask for; count those that have served."""
        for slot in [slot for slot in self._slots if slot >= num_servers]:
            self.kill(slot)
        return {"num_kept": sum(each.has_served and each.server.is_alive() for each in self._slots.values())}

    def start(self, slot: int, index: int, settings: Mapping[str, Any], fresh: bool) -> dict[str, Any]:
        """Describe the server of a slot; start one if there is none with these settings, or if it is to be a fresh one."""
        kept = self._slots.get(slot)
        if fresh or kept is None or _lasting(kept.settings) != _lasting(settings) or not kept.server.is_alive():
            self.kill(slot)
            kept = self._slots[slot] = _Slot(SglangServer.start(_settings_from_json(settings), index), settings)
        server = kept.server
        about = {"url": server.url, "pid": server.pid, "meeting": server.meeting}
        return {**about, "has_served": kept.has_served, "released": kept.released}

    def state(self, slot: int, with_reason: bool = False) -> dict[str, Any]:
        """Tell whether a server runs, and if asked how it ended."""
        server = self._slots[slot].server if slot in self._slots else None
        is_alive = server is not None and server.is_alive()
        return {"is_alive": is_alive, "reason": server.exit_reason() if server and with_reason else ""}

    def serves(self, slot: int) -> None:
        """Note that a server is healthy, with all its processes."""
        self._slots[slot].has_served = True
        self._slots[slot].server.record()

    def released(self, slot: int, tags: list[str] | None) -> None:
        """Note which memory a server has released; None while that changes."""
        self._slots[slot].released = tags

    def kill(self, slot: int) -> None:
        """End the server of a slot, if there is one."""
        if slot in self._slots:
            self._slots[slot].server.kill()
            del self._slots[slot]

    def end(self) -> None:
        """End all servers, then the supervisor."""
        self.is_over = True
        for slot in list(self._slots):
            self.kill(slot)


_REQUESTS: dict[str, Callable[..., dict[str, Any] | None]] = {
    "open": Supervisor.open,
    "start": Supervisor.start,
    "state": Supervisor.state,
    "serves": Supervisor.serves,
    "released": Supervisor.released,
    "kill": Supervisor.kill,
    "end": Supervisor.end,
}


class _Listener(socketserver.ThreadingUnixStreamServer):
    """Connections of trainers on an abstract socket, which leaves no file behind."""

    daemon_threads = True

    def __init__(self, name: str, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        super().__init__("\0" + name, _Trainer)

    def verify_request(self, request: Any, client_address: object) -> bool:
        try:
            require_same_user(request)
        except PermissionError:
            return False
        return True

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: a trainer that was killed leaves a broken connection."""


class _Trainer(socketserver.StreamRequestHandler):
    """The connection of one trainer rank. It breaks however that dies."""

    def handle(self) -> None:
        supervisor = self.server.supervisor  # type: ignore[attr-defined]
        supervisor.trainer_comes()
        try:
            for line in self.rfile:
                answer = supervisor.answer(json.loads(line))
                if answer is None:
                    break
                self.wfile.write(json.dumps(answer).encode() + b"\n")
        finally:
            supervisor.trainer_goes()


def supervise(name: str, launcher: int, keep_s: float) -> None:
    """Supervise servers until they are no longer needed.

    name: of the abstract socket. launcher: process with whose end the run is over; 0 or 1 for one that cannot be seen.
    """
    supervisor = Supervisor(keep_s)

    def remember(signum: int, frame: object) -> None:
        supervisor.is_told_to_end = True

    # Launchers signal every process of a job; a trainer that is connected decides about its servers itself.
    signal.signal(signal.SIGTERM, remember)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    with ExitStack() as stack:
        try:
            ends = [os.pidfd_open(launcher)] if launcher > 1 else []
        except ProcessLookupError:
            return
        listener = _listen(name, supervisor)
        stack.callback(listener.server_close)
        stack.callback(supervisor.close)  # It runs before the name is free for a successor.
        threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": _TICK_S}, daemon=True).start()
        while not supervisor.is_done and not select.select(ends, [], [], _TICK_S)[0]:
            pass


def _listen(name: str, supervisor: Supervisor) -> _Listener:
    end = time.monotonic() + _BIND_S
    while True:
        try:
            return _Listener(name, supervisor)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > end:
                raise
        time.sleep(_TICK_S)


# The trainer's side


class SupervisorGone(RuntimeError):
    """The supervisor of this node's servers has ended, or did not come up."""


@dataclass(frozen=True)
class Supervision:
    """The launcher of a run that starts failed processes again, so that servers are worth keeping in between.

    name: differs between runs; the same in all attempts that share servers. launcher: the process on this node with whose end the run is
    over; 0 if the supervisors are started by the launcher (a step of the batch job) and not by the trainer.
    """

    name: str
    launcher: int = 0

    def address(self, run_directory: Path) -> str:
        """Return the name of the supervisor's abstract socket on every node."""
        text = f"{self.name}|{run_directory.resolve()}"
        return f"megatron-dapo-servers-{os.getuid()}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def connect(self, run_directory: Path, num_servers: int, keep_s: float) -> SupervisorClient:
        """Connect to this node's supervisor, started if that is the trainer's task. SupervisorGone if it does not answer."""
        address, end = self.address(run_directory), time.monotonic() + _CONNECT_S
        process: subprocess.Popen[bytes] | None = None
        while True:
            try:
                return SupervisorClient(address, num_servers)
            except (OSError, SupervisorGone) as error:
                if time.monotonic() > end:
                    raise SupervisorGone(
                        f"no supervisor of servers answers after {_CONNECT_S:g} s ({error}): see the log of its step "
                        "(--keep-servers), or set sglang.keep_seconds = 0 to do without one"
                    ) from None
            if self.launcher and (process is None or process.poll() is not None):
                process = _start(address, self.launcher, keep_s)
            time.sleep(_POLL_S)


def _start(address: str, launcher: int, keep_s: float) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(filter(None, (str(_PACKAGE_ROOT), os.environ.get("PYTHONPATH", ""))))
    with all_cpus():
        return subprocess.Popen(
            [sys.executable, "-m", _MODULE, address, str(launcher), str(keep_s)],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=sys.__stderr__,
            start_new_session=True,  # torchrun ends the sessions of its workers
        )


class SupervisorClient:
    """A connection to this node's supervisor. While it is open, servers are kept. Leave it as a context manager is left."""

    def __init__(self, address: str, num_servers: int) -> None:
        """Connect. OSError if nothing listens; SupervisorGone if it is about to end."""
        self._socket = socket.socket(socket.AF_UNIX)
        self._lock = threading.Lock()  # held from a request to its answer: engines are controlled by several threads
        try:
            self._socket.connect("\0" + address)
            require_same_user(self._socket)
            self._stream = self._socket.makefile("rwb")
            self.num_kept = int(self.ask("open", num_servers=num_servers)["num_kept"])
        except BaseException:
            self._close()
            raise

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Return the answer to a request. ValueError or RuntimeError if it failed, SupervisorGone if none comes."""
        try:
            with self._lock:
                self._stream.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
                self._stream.flush()
                line = self._stream.readline()
        except OSError as error:
            raise SupervisorGone(f"the supervisor of this node's servers is gone: {error}") from None
        if not line:
            raise SupervisorGone("the supervisor of this node's servers has ended; its servers end with it")
        answer = json.loads(line)
        if "error" in answer:
            raise (ValueError if answer["is_value"] else RuntimeError)(answer["error"])
        return answer

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """End the servers at the end of a run; leave them to the next attempt after a failure."""
        try:
            if kind is None:
                self.ask("end")
        except SupervisorGone as error:
            logger.warning("%s", error)
        finally:
            self._close()

    def _close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # only closing would wait for the stream's end
        self._socket.close()


class SupervisedServer(AttachedServer):
    """A server that the supervisor started, in this attempt or in one before."""

    def __init__(self, supervisor: SupervisorClient, settings: ServerSettings, index: int, slot: int) -> None:
        """Find the server of a slot of this node, or have it started; do not wait for it. ValueError for bad settings."""
        super().__init__("", settings.key_file, Expectation.of(settings), index, settings.start_timeout_s)
        self.answers = settings.node_rank == 0
        self._supervisor, self._settings, self._slot = supervisor, settings_to_json(settings), slot
        self._start(fresh=False)

    def is_alive(self) -> bool:
        """Return True if all its processes run, whether they answer or not."""
        return bool(self._supervisor.ask("state", slot=self._slot)["is_alive"])

    def wait_until_healthy(self) -> ServerInfo:
        """Take the server over if it was kept, else wait until it generates; then check what it serves.

        EngineStartError, and no process left, if it fails. One that cannot be taken over is replaced, if it has no parts on
        other nodes: these end with it, and the attempt that finds them gone replaces all.
        """
        if self.is_kept:
            try:
                return self._take_over()
            except (EngineError, EngineStartError, httpx.HTTPError, ValueError) as error:
                if self.meeting:
                    self.kill()
                    raise EngineStartError(self._describe(f"it was kept and cannot be taken over: {error}")) from error
                logger.warning("server %d was kept and is started anew: %s", self.index, error)
                self.start_anew()
        return super().wait_until_healthy()

    @contextmanager
    def _healthy(self) -> Iterator[httpx.Client]:
        """See `AttachedServer`. No process is left if it fails."""
        try:
            with super()._healthy() as http:
                yield http
        except EngineStartError as error:
            description = f"{error}; {self.exit_reason()}"
            self.kill()
            raise EngineStartError(description) from error
        self._supervisor.ask("serves", slot=self._slot)

    def start_anew(self) -> None:
        """Replace it, if it was kept or not, by a fresh one."""
        self._start(fresh=True)

    def kill(self) -> None:
        """End every process of it at once."""
        self._supervisor.ask("kill", slot=self._slot)

    def exit_reason(self) -> str:
        """Describe how it ended, with the end of its log and, last, the first error in it."""
        return str(self._supervisor.ask("state", slot=self._slot, with_reason=True)["reason"])

    def remember_released(self, tags: Sequence[str] | None) -> None:
        """Remember which memory it has released; None while that changes."""
        self._supervisor.ask("released", slot=self._slot, tags=tags)

    def _start(self, fresh: bool) -> None:
        request = {"slot": self._slot, "index": self.index, "settings": self._settings, "fresh": fresh}
        answer = self._supervisor.ask("start", **request)
        self.url, self.pid, self.meeting = answer["url"], int(answer["pid"]), answer["meeting"]
        self.is_kept, self._released = bool(answer["has_served"]), answer["released"]

    def _take_over(self) -> ServerInfo:
        """Bring the server into the state of one that has just started. Its weights stay what they are."""
        if self._released is None:
            raise EngineStartError("the trainer died while it released or took back memory, and no call reports which")
        client = SglangClient(self.url, read_key(self.key_file), Timeouts(control_s=_TAKE_OVER_S))
        client.abort()
        if self._released:
            self.remember_released(None)
            client.resume_memory(self._released)
            self.remember_released([])
        client.resume()
        client.server_info()  # The scheduler answers it, which may be busy with the last weight sync.
        version = client.weight_version
        with open_http(self.url, self.key_file) as http:
            self.info = checked(self.url, http, self.expectation)
        logger.info("server %d (process %d, %s) was kept with version %s", self.index, self.pid, self.url, version)
        return self.info

    def _require_running(self) -> None:
        if not self.is_alive():
            raise EngineStartError("it has ended")


if __name__ == "__main__":
    supervise(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
