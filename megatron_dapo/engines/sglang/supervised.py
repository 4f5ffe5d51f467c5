"""Servers of this node's supervisor, as the trainer sees them: started by it, or taken over from an attempt that failed.

    Supervision.connect -> SupervisorClient -> SupervisedServer, one a slot -> wait_until_healthy

A server is taken over in the state of one that has just started: nothing of the last attempt is generated, nothing is
paused, all its memory is there. Its weights may be half of one version and half of another; the first weight sync of the
attempt overwrites and verifies all of them. A server that has other settings, does not answer or ended in between is
replaced.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from megatron_dapo.affinity import all_cpus
from megatron_dapo.engines.sglang.client import EngineError, SglangClient, Timeouts
from megatron_dapo.engines.sglang.keys import read_key
from megatron_dapo.engines.sglang.served import EngineStartError, Expectation, ServerInfo, checked, open_http
from megatron_dapo.engines.sglang.server import AttachedServer
from megatron_dapo.engines.sglang.server_settings import ServerSettings
from megatron_dapo.engines.sglang.supervisor import settings_to_json
from megatron_dapo.files.linux import require_same_user

logger = logging.getLogger(__name__)

_PACKAGE_ROOT = Path(__file__).resolve().parents[3]
_MODULE = "megatron_dapo.engines.sglang.supervisor"
_CONNECT_S = 120.0  # under Slurm both start at the same time
_POLL_S = 0.05
# For a kept server to answer. Its scheduler may still wait for weights of a trainer that is dead.
_TAKE_OVER_S = 75.0


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
        self._lock = threading.Lock()  # of a request and its answer: engines are controlled by several threads
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
        self._supervisor, self._settings, self._slot = supervisor, settings_to_json(settings), slot
        self._start(fresh=False)

    def is_alive(self) -> bool:
        """Return True if all its processes run, whether they answer or not."""
        return bool(self._supervisor.ask("state", slot=self._slot)["is_alive"])

    def wait_until_healthy(self) -> ServerInfo:
        """Take the server over if it was kept, else wait until it generates; then check what it serves.

        EngineStartError, and no process left, if it fails. One that cannot be taken over is replaced.
        """
        if self._has_served:
            try:
                return self._take_over()
            except (EngineError, EngineStartError, httpx.HTTPError, ValueError) as error:
                logger.warning("server %d was kept and is started anew: %s", self.index, error)
                self._start(fresh=True)
        try:
            info = super().wait_until_healthy()
        except EngineStartError as error:
            description = f"{error}; {self.exit_reason()}"
            self.kill()
            raise EngineStartError(description) from error
        self._supervisor.ask("serves", slot=self._slot)
        return info

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
        found = self._supervisor.ask("start", **request)
        self.url, self.pid, self._has_served, self._released = (
            found["url"],
            int(found["pid"]),
            bool(found["has_served"]),
            found["released"],
        )

    def _take_over(self) -> ServerInfo:
        """Bring the server into the state of one that has just started. Its weights stay what they are."""
        if self._released is None:
            raise EngineStartError("the trainer died while it released or took back memory, and no call tells which")
        client = SglangClient(self.url, read_key(self.key_file), Timeouts(control_s=_TAKE_OVER_S))
        try:
            client.abort()
            if self._released:
                self.remember_released(None)
                client.resume_memory(self._released)
                self.remember_released([])
            client.resume()
            client.server_info()  # by way of its scheduler, which may be busy with the last weight sync
            version = client.weight_version
        finally:
            client.close()
        with open_http(self.url, self.key_file) as http:
            self.info = checked(self.url, http, self.expectation)
        logger.info("server %d (process %d, %s) was kept with version %s", self.index, self.pid, self.url, version)
        return self.info

    def _require_running(self) -> None:
        if not self.is_alive():
            raise EngineStartError(f"engine {self.index} at {self.url} has ended")
