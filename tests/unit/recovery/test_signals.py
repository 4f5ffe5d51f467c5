"""Signals: the first requests a stop, the second ends the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dapo.recovery.signals import StopRequest

ROOT = str(Path(__file__).resolve().parents[3])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_first_signal_sets_the_flag(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested and stop.signal_name == number.name
    assert signal.getsignal(number) is before


def test_second_signal_ends_the_process() -> None:
    code = """
import sys, time
sys.path.insert(0, sys.argv[1])
from megatron_dapo.recovery.signals import StopRequest
with StopRequest() as stop:
    print("ready", flush=True)
    while not stop.requested:
        time.sleep(0.01)
    print("asked", flush=True)
    time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", code, ROOT], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "asked\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == -signal.SIGINT
    process.stdout.close()
