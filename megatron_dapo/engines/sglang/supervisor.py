"""The supervisor of a node's SGLang servers: they outlive the trainer's processes that fail, and the next ones take them over.

    trainer rank --- connection: a JSON object a line, and an answer ---> supervisor ---> SglangServer of each slot

The first rank of a node starts it under torchrun, the batch script under Slurm (`run/worker.py --keep-servers`). It stays
while a trainer is connected and `keep_s` longer. It ends its servers and itself when a trainer says that the run is over,
when its launcher has ended, and after SIGTERM as soon as no trainer is connected. If it is killed, its servers end by
themselves (`processes.end_with_starter`). `supervised.py` is the trainer's side.
"""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_dapo.engines.sglang.server import SglangServer
from megatron_dapo.engines.sglang.server_settings import ServerSettings
from megatron_dapo.files.linux import require_same_user

_TICK_S = 0.2
_FIRST_TRAINER_S = 600.0  # until the first trainer connects: it may import from a slow file system
_BIND_S = 30.0  # for a predecessor to end
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
        self.is_told_to_end = False  # by a signal
        self._slots: dict[int, _Slot] = {}
        self._lock = threading.Lock()  # of everything here
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
        return {"url": server.url, "pid": server.pid, "has_served": kept.has_served, "released": kept.released}

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
        stack.callback(supervisor.close)  # before the name is free for a successor
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


if __name__ == "__main__":
    supervise(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
