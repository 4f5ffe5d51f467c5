"""A headless Chromium by the WebDriver protocol."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from launcher import free_port

WAIT_S = 120.0
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the protocol's name of an element's identifier
ARGUMENTS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1400,1400")


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        try:
            if result := condition():
                return result
        except httpx.TransportError:
            pass  # not up yet
        time.sleep(0.1)
    raise AssertionError(f"{what}: not within {WAIT_S:g} s")


class Browser:
    """One window."""

    def __init__(self, profile: Path) -> None:
        """Start it, or skip if there is no chromedriver."""
        driver = shutil.which("chromedriver")
        if driver is None:
            pytest.skip("no chromedriver: apt-get install --no-install-recommends chromium-driver")
        port = free_port()
        self._process = subprocess.Popen([driver, f"--port={port}"], stdout=subprocess.DEVNULL, start_new_session=True)
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=WAIT_S, trust_env=False)
        wait_for(lambda: self._http.get("/status").json()["value"]["ready"], "chromedriver")
        options = {"args": [*ARGUMENTS, f"--user-data-dir={profile}"]}
        always = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        answer = self._http.post("/session", json={"capabilities": {"alwaysMatch": always}}).json()["value"]
        self._session = f"/session/{answer['sessionId']}"

    def open(self, url: str) -> None:
        self._call("/url", url=url)

    def run(self, script: str, *arguments: Any) -> Any:
        """Return what a script's `return` gives."""
        return self._call("/execute/sync", script=script, args=list(arguments))

    def console(self) -> list[str]:
        """Return what the console has got since the last call."""
        return [entry["message"] for entry in self._call("/se/log", type="browser")]

    def type(self, selector: str, text: str) -> None:
        self._call(f"/element/{self._find(selector)}/value", text=text)

    def click(self, selector: str) -> None:
        self._call(f"/element/{self._find(selector)}/click")

    def _find(self, selector: str) -> str:
        return self._call("/element", using="css selector", value=selector)[ELEMENT]

    def _call(self, path: str, **body: Any) -> Any:
        answer = self._http.post(self._session + path, json=body).json()["value"]
        assert not (isinstance(answer, dict) and "error" in answer), answer
        return answer

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._http.close()
