"""Workers of one node meet only on loopback, without a store that unpickles what anyone sends it, and one signal stops
them."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_dapo.bridge.protocol.arena import is_running
from megatron_dapo.launch.local import _Forwarder, launch_workers

WORKER = """
import json, os, sys, psutil
from pathlib import Path
import torch.distributed as dist
dist.init_process_group("gloo")
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
agent = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode().split("\\0")
ends = psutil.Process(os.getppid()).net_connections()
stores = [end.laddr.ip for end in ends if end.status == psutil.CONN_LISTEN]
Path(sys.argv[1], f"{dist.get_rank()}.json").write_text(json.dumps([[os.environ[name] for name in names], agent, stores]))
dist.barrier()
dist.destroy_process_group()
"""


def test_a_signal_before_there_are_workers_is_remembered(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    forward = _Forwarder(process, tmp_path)
    forward(signal.SIGTERM, None)
    assert process.wait() == -signal.SIGKILL and forward.ended_by == signal.SIGTERM


def test_workers_meet_on_loopback_at_a_port_that_no_other_process_can_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, found = subprocess.Popen, []

    def start_late(command: list[str], **options: Any) -> subprocess.Popen:
        [port] = [int(part.partition("=")[2]) for part in command if part.startswith("--master-port=")]
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        found.append(port)
        return start(command, **options)

    (tmp_path / "small_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("megatron_dapo.launch.local.subprocess.Popen", start_late)
    assert launch_workers("small_worker", [str(tmp_path)], 2, tmp_path / "run") == 0
    for rank in ("0", "1"):
        facts, agent, stores = json.loads((tmp_path / f"{rank}.json").read_text())
        assert facts == [rank, "2", rank, "127.0.0.1"]
        assert "--rdzv-backend=static" in agent and "--standalone" not in agent
        assert stores == ["127.0.0.1"]
    with socket.socket() as after:  # The port is free at the end.
        after.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        after.bind(("127.0.0.1", found[0]))


SIGNALED = """
import os, signal, sys, time
from pathlib import Path
directory = Path(sys.argv[1])
(directory / "run" / "workers").mkdir(parents=True, exist_ok=True)
signal.signal(signal.SIGTERM, lambda number, frame: open(directory / "signals", "a").write("x"))
(directory / "run" / "workers" / "0.pid").write_text(str(os.getpid()))
while True:
    time.sleep(0.05)
"""
LAUNCHER = """
import sys
from pathlib import Path
from megatron_dapo.launch import local
local.ONE_REQUEST_S = 2.0
sys.exit(local.launch_workers("signaled_worker", [sys.argv[1]], 1, Path(sys.argv[1]) / "run"))
"""


def test_signals_sent_together_are_one_and_a_later_one_ends_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "signaled_worker.py").write_text(SIGNALED)
    root = Path(__file__).resolve().parents[3]
    monkeypatch.setenv("PYTHONPATH", f"{root}:{tmp_path}")
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(tmp_path)])
    pid, signals, end = tmp_path / "run" / "workers" / "0.pid", tmp_path / "signals", time.monotonic() + 60.0
    try:
        while not (pid.is_file() and pid.read_text()):
            assert time.monotonic() < end and launcher.poll() is None
            time.sleep(0.05)
        for _ in range(3):
            launcher.send_signal(signal.SIGTERM)
            time.sleep(0.2)
        assert signals.read_text() == "x" and launcher.poll() is None
        time.sleep(2.0)
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(timeout=20) == 128 + signal.SIGKILL
        assert signals.read_text() == "x"
        while is_running(int(pid.read_text())):
            assert time.monotonic() < end
            time.sleep(0.05)
    finally:
        launcher.kill()
        launcher.wait()
