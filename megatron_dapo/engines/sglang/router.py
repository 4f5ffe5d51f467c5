"""SGLang's router in front of several servers, where it is installed and configured.

    engine -> RoutedClient.generate -> router -> the less loaded of two servers
                          .abort    -> every server

The router takes over the choice of a server; everything that steers servers (abort, pause, weights) goes straight to
them. A server that stops answering leaves the rotation within seconds; what it was working on comes back as an HTTP 500
and is sent again. Without the router the engine balances by itself (`SglangEngine` with one client a server), which
also keeps the responses of one prompt together; that is the default.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import httpx

from megatron_dapo.engines.sglang.client import EngineError, EngineGone, EngineHttpError, SglangClient, Timeouts
from megatron_dapo.engines.sglang.keys import read_key
from megatron_dapo.engines.sglang.ports import ReservedPort, reserve_port
from megatron_dapo.engines.sglang.server_log import exit_reason
from megatron_dapo.engines.sglang.server_settings import allowed_environment

_PACKAGE_ROOT = Path(__file__).resolve().parents[3]
_MODULE = "megatron_dapo.engines.sglang.serve_router"
_POLL_S = 0.1


class RouterStartError(RuntimeError):
    """The router ended, or did not find its servers in time."""


@dataclass(frozen=True)
class RouterSettings:
    """The router's process."""

    python: Path  # of the environment sglang_router is installed in
    key_file: Path  # the servers' key: the router asks for it and hands it on
    log_dir: Path
    host: str = "127.0.0.1"
    start_timeout_s: float = 120.0


def is_installed(python: Path) -> bool:
    """Return True if the environment of `python` has SGLang's router."""
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('sglang_router') is None)"
    return subprocess.run([str(python), "-c", code], check=False, capture_output=True, timeout=60).returncode == 0


class SglangRouter:
    """A router started by this run. It ends with the process that started it."""

    def __init__(self, settings: RouterSettings, process: subprocess.Popen[bytes], ports: Sequence[ReservedPort]):
        """See `start`."""
        self.settings = settings
        self.url = f"http://{settings.host}:{ports[0].number}"
        self._process, self._ports = process, ports
        self._log = settings.log_dir / "router.log"
        headers = httpx.Headers({"Authorization": f"Bearer {read_key(settings.key_file)}"})
        self._http = httpx.Client(base_url=self.url, headers=headers, trust_env=False, timeout=10.0)

    @classmethod
    def start(cls, settings: RouterSettings, workers: Sequence[str]) -> SglangRouter:
        """Spawn it in front of the servers with these URLs, which must be healthy. ValueError where it cannot work."""
        if len(workers) < 2:
            raise ValueError(f"router: {len(workers)} servers to choose from, it needs at least 2; leave it out")
        if not is_installed(settings.python):
            raise ValueError(
                f"router: sglang_router is not installed for {settings.python}; install it there (pip install "
                "sglang-router==0.3.2), or leave the router out: the engine balances by itself"
            )
        ports = (reserve_port(settings.host), reserve_port("127.0.0.1"))
        settings.log_dir.mkdir(parents=True, exist_ok=True)
        command = [
            str(settings.python), "-m", _MODULE, "--api-key-file", str(settings.key_file.resolve()),
            "--host", settings.host, "--port", str(ports[0].hand_over()), "--metrics-port", str(ports[1].hand_over()),
            *workers,
        ]  # fmt: skip
        with open(settings.log_dir / "router.log", "ab") as log:
            process = subprocess.Popen(
                command,
                env={**allowed_environment(os.environ), "PYTHONPATH": str(_PACKAGE_ROOT)},
                stdin=subprocess.PIPE,  # never written to: it closes when this process ends
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return cls(settings, process, ports)

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait_until_healthy(self, num_workers: int) -> None:
        """Until `num_workers` servers are in the rotation. RouterStartError, and no process left, where that fails."""
        deadline = time.monotonic() + self.settings.start_timeout_s
        while (healthy := self._count_healthy()) < num_workers:
            if not self.is_alive() or time.monotonic() > deadline:
                problem = (
                    f"only {healthy} of {num_workers} servers in its rotation after {self.settings.start_timeout_s:g} s"
                    if self.is_alive()
                    else f"it ended with exit code {self._process.returncode}"
                )
                self.stop()
                raise RouterStartError(f"router {self.url}: {problem}; {self.exit_reason()}")
            time.sleep(_POLL_S)

    def workers(self) -> dict[str, bool]:
        """Return the servers' URLs and whether each is in the rotation."""
        return {worker["url"]: bool(worker["is_healthy"]) for worker in self._list()}

    def add_worker(self, url: str) -> None:
        """Bring a server into the rotation once the router has found it, e.g. one that was restarted and updated."""
        body = {"url": url, "api_key": read_key(self.settings.key_file)}
        self._http.post("/workers", json=body).raise_for_status()

    def remove_worker(self, url: str) -> None:
        """Remove a server. ValueError if the router does not have it."""
        identities = [worker["id"] for worker in self._list() if worker["url"] == url]
        if not identities:
            raise ValueError(f"router {self.url} has no server {url}; there are {', '.join(self.workers())}")
        self._http.delete(f"/workers/{identities[0]}").raise_for_status()

    def stop(self) -> None:
        """End it; requests on their way through it are lost."""
        self._process.kill()
        self._process.wait(timeout=30)
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._http.close()
        for port in self._ports:
            port.release()

    def exit_reason(self) -> str:
        """The end of its log and, last, the first error in it."""
        return exit_reason(self._log)

    def _list(self) -> list[dict[str, Any]]:
        return self._http.get("/workers").raise_for_status().json()["workers"]

    def _count_healthy(self) -> int:
        try:
            return sum(self.workers().values())
        except (httpx.HTTPError, KeyError, ValueError):
            return 0


class RoutedClient(SglangClient):
    """Client of a router, which the engine sees as one server. Aborts go to the servers behind it."""

    def __init__(self, url: str, key: str | None, workers: Sequence[SglangClient], timeouts: Timeouts | None = None):
        super().__init__(url, key, timeouts, name=f"router {url}")
        self.workers = list(workers)

    def is_fatal(self, error: EngineError) -> bool:
        """The router answers 5xx for a server it has lost and is healthy itself."""
        return super().is_fatal(error) and not isinstance(error, EngineHttpError)

    def abort(self, rid: str | None = None) -> None:
        """Straight to the servers; those that are gone have nothing left to abort."""
        for worker in self.workers:
            try:
                worker.abort(rid)
            except EngineGone:
                continue

    async def probe(self, http: aiohttp.ClientSession) -> None:
        """EngineError where the router is gone or has no healthy server left."""
        body = await self.get(http, "/workers", self.timeouts.health_s)
        with self._errors("GET /workers", self.timeouts.health_s):
            workers = json.loads(body).get("workers", [])
        if not any(worker.get("is_healthy") for worker in workers):
            problem = f"none of its {len(workers)} servers is healthy; see their logs"
            raise EngineGone(self.name, "GET /workers", problem)
