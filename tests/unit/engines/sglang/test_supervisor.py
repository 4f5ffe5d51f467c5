"""Servers that outlive the trainer, with a small script in place of the engine: kept, taken over, replaced, and ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stand_in_engine import running

from megatron_dapo.engines.sglang import supervisor
from megatron_dapo.engines.sglang.client import ColocatedClient
from megatron_dapo.engines.sglang.keys import create_key
from megatron_dapo.engines.sglang.server import EngineStartError
from megatron_dapo.engines.sglang.supervisor import SupervisedServer, Supervision, SupervisorClient, SupervisorGone

KEEP_S = 60.0


class Launcher:
    """A process that stands in for torchrun's agent, and the attempts it starts."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        self.supervision = Supervision(f"test {self.process.pid}", self.process.pid)

    def attempt(self, keep_s: float = KEEP_S, num_servers: int = 1) -> SupervisorClient:
        return self.supervision.connect(self.directory, num_servers, keep_s)


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    made = Launcher(tmp_path)
    yield made
    made.process.kill()
    made.process.wait()
    address = made.supervision.address(tmp_path)
    assert waited(lambda: not listens(address)), "the supervisor outlives its launcher"


def listens(address: str) -> bool:
    try:
        SupervisorClient(address, 1).__exit__(RuntimeError)
        return True
    except (OSError, SupervisorGone):
        return False


def waited(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def fail(attempt: SupervisorClient) -> None:
    """Leave as a trainer leaves that has failed; one that is killed leaves its connection broken in the same way."""
    attempt.__exit__(RuntimeError)


def finish(attempt: SupervisorClient) -> None:
    attempt.__exit__(None)


def serving(attempt: SupervisorClient, settings: Any, slot: int = 0) -> SupervisedServer:
    server = SupervisedServer(attempt, settings, slot, slot)
    server.wait_until_healthy()
    return server


def calls(settings: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return the paths and bodies of the engine's POST requests."""
    lines = Path(f"{settings.python}.calls").read_text().splitlines()
    return [(path, json.loads(body or "{}")) for path, _, body in (line.partition(" ") for line in lines)]


def test_a_server_that_had_been_restarted_is_kept() -> None:
    """The next attempt counts restarts from 0 again, and knows no cache of an earlier server."""
    kept = SimpleNamespace(url="http://kept", pid=7, meeting="", is_alive=lambda: True)
    settings = {"dtype": "float32", "num_restarts": 2, "replaced_cache_tokens": 500}
    keeper = supervisor.Supervisor(KEEP_S)
    keeper._slots[0] = supervisor._Slot(kept, settings, has_served=True)
    found = keeper.start(0, 0, {**settings, "num_restarts": 0, "replaced_cache_tokens": None}, fresh=False)
    assert (found["url"], found["has_served"]) == ("http://kept", True)


def test_the_next_attempt_takes_the_server_over_and_the_end_of_the_run_ends_it(
    launcher: Launcher, settings: Any
) -> None:
    some = settings()
    first = launcher.attempt()
    before = serving(first, some)
    assert first.num_kept == 0 and before.is_alive() and before.info.vocab_size == 300
    fail(first)
    second = launcher.attempt()
    after = serving(second, some)
    assert second.num_kept == 1 and (after.pid, after.url) == (before.pid, before.url)
    assert after.info.api_version == before.info.api_version
    assert [path for path, _ in calls(some)] == ["/abort_request", "/continue_generation"]
    finish(second)
    assert not running([after.pid]), "it ends before the trainer does"
    assert waited(lambda: not listens(launcher.supervision.address(launcher.directory)), 30.0)


@pytest.mark.parametrize("how", ["settings", "dead", "key", "silent"])
def test_a_server_that_cannot_be_used_is_replaced(
    launcher: Launcher, settings: Any, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    some = settings()
    first = launcher.attempt()
    before = serving(first, some)
    fail(first)
    if how == "settings":
        some = settings(max_running_requests=64)
    elif how == "dead":
        os.kill(before.pid, signal.SIGKILL)
    elif how == "key":
        create_key(some.key_file.parent)
    else:
        monkeypatch.setattr(supervisor, "_TAKE_OVER_S", 0.5)
        os.kill(before.pid, signal.SIGSTOP)
    second = launcher.attempt()
    after = serving(second, some)
    assert after.pid != before.pid and after.is_alive() and not running([before.pid])
    finish(second)


def test_servers_beyond_those_of_the_attempt_end(launcher: Launcher, settings: Any) -> None:
    some = settings()
    first = launcher.attempt(num_servers=2)
    both = [serving(first, some, slot) for slot in (0, 1)]
    fail(first)
    second = launcher.attempt(num_servers=1)
    assert second.num_kept == 1 and running([server.pid for server in both]) == [both[0].pid]
    finish(second)


@pytest.mark.parametrize(("released", "resumed"), [([], []), (["kv_cache", "weights"], ["kv_cache", "weights"])])
def test_memory_that_a_server_has_released_comes_back(
    launcher: Launcher, settings: Any, released: list[str], resumed: list[str]
) -> None:
    some = settings()
    first = launcher.attempt()
    before = serving(first, some)
    client = ColocatedClient(before.url, None)
    client.remember = before.remember_released
    if released:
        client.sleep()
    fail(first)
    second = launcher.attempt()
    assert serving(second, some).pid == before.pid
    assert [tag for path, body in calls(some) if "resume_memory" in path for tag in body["tags"]] == resumed
    # One whose trainer died while it changed is in a state that no call tells.
    server = serving(second, some)
    server.remember_released(None)
    fail(second)
    third = launcher.attempt()
    assert serving(third, some).pid != before.pid
    finish(third)


def test_servers_end_when_no_trainer_comes_for_some_time(launcher: Launcher, settings: Any) -> None:
    attempt = launcher.attempt(keep_s=1.0)
    server = serving(attempt, settings())
    time.sleep(1.5)
    assert server.is_alive(), "a trainer is connected"
    fail(attempt)
    assert waited(lambda: not running([server.pid]), 30.0)


def test_servers_end_with_the_launcher(launcher: Launcher, settings: Any) -> None:
    attempt = launcher.attempt()
    server = serving(attempt, settings())
    launcher.process.kill()
    launcher.process.wait()
    assert waited(lambda: not running([server.pid]), 30.0)
    with pytest.raises(SupervisorGone):
        server.is_alive()


def test_a_signal_ends_servers_only_without_a_trainer(launcher: Launcher, settings: Any) -> None:
    attempt = launcher.attempt()
    server = serving(attempt, settings())
    [process] = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _is_supervisor(pid, launcher)]
    assert "torch" not in Path(f"/proc/{process}/maps").read_text(), "it has no use for 1.2 s and 200 MB"
    os.kill(process, signal.SIGTERM)
    time.sleep(1.0)
    assert server.is_alive()
    fail(attempt)
    assert waited(lambda: not running([server.pid]), 30.0)


def _is_supervisor(pid: int, launcher: Launcher) -> bool:
    try:
        return launcher.supervision.address(launcher.directory).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def test_one_that_does_not_start_names_the_first_cause_and_leaves_nothing(launcher: Launcher, settings: Any) -> None:
    attempt = launcher.attempt()
    server = SupervisedServer(attempt, settings({"fail": True}), 0, 0)
    with pytest.raises(EngineStartError, match="ended with exit code 3(?s:.*)ValueError: the first error"):
        server.wait_until_healthy()
    assert not running([server.pid])
    with pytest.raises(ValueError, match="missing cannot be run"):
        SupervisedServer(attempt, settings(python=launcher.directory / "missing"), 0, 0)
    finish(attempt)


def test_settings_travel_whole(settings: Any) -> None:
    some = settings(gpus=(3,), more_arguments=("--a", "b"), more_environment=("X",))
    assert supervisor._settings_from_json(supervisor.settings_to_json(some)) == some


def test_another_user_is_refused(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = launcher.attempt()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PermissionError, match="the other end belongs to user"):
        SupervisorClient(launcher.supervision.address(launcher.directory), 1)
    monkeypatch.undo()
    finish(attempt)
