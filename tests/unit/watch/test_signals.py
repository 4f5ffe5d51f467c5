"""Signals: the first requests a stop, those that come with it change nothing, a later one ends the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_dapo.watch.failure import EXIT_CODE
from megatron_dapo.watch.signals import Stopped, StopRequest

ROOT = str(Path(__file__).resolve().parents[3])


def wait_for_request(stop: StopRequest) -> None:
    end = time.monotonic() + 60.0
    while not stop.requested:
        assert time.monotonic() < end, "the signal was not noted"
        time.sleep(0.001)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_first_signal_sets_the_flag(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopRequest() as stop:
        stop.check()
        assert not stop.requested
        os.kill(os.getpid(), number)
        wait_for_request(stop)
        assert stop.signal_name == number.name
        with pytest.raises(Stopped, match=number.name):
            stop.check()
    assert signal.getsignal(number) is before


def test_another_rank_s_signal_is_a_request_as_well() -> None:
    class Store(dict):
        def set(self, key: str, value: str) -> None:
            self[key] = value

        def check(self, keys: list[str]) -> bool:
            return all(key in self for key in keys)

    store = Store()
    silent = StopRequest()
    silent.share(store)
    with StopRequest() as told:
        told.share(store)
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for_request(told)
    wait_for_request(silent)
    with pytest.raises(Stopped, match="another rank"):
        silent.check()


def test_time_left_is_that_of_the_job_or_of_the_notice() -> None:
    assert StopRequest().seconds_left == float("inf")
    assert StopRequest(time.time() + 60).seconds_left == pytest.approx(60, abs=10)
    with StopRequest(time.time() + 3600, notice_s=20.0) as stop:
        assert stop.seconds_left == 20.0
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for_request(stop)
        time.sleep(0.2)
        assert 0.0 < stop.seconds_left < 19.9


# The main thread waits in native code that no Python handler interrupts: a lock of C, held by nobody who would release it.
WAITING = """
import ctypes, sys
sys.path.insert(0, sys.argv[1])
from megatron_dapo.watch import signals
signals.ONE_REQUEST_S = 4.0
import logging
logging.basicConfig(stream=sys.stdout, format="%(message)s")
with signals.StopRequest():
    print("ready", flush=True)
    libc = ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)
"""


def test_a_signal_is_noted_in_native_code_and_one_sent_later_ends_it_at_once() -> None:
    process = subprocess.Popen([sys.executable, "-c", WAITING, ROOT], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline().startswith("SIGTERM: stopping")
        process.send_signal(signal.SIGTERM)  # a sender that signals a group and its members
        time.sleep(0.5)
        assert process.poll() is None, "the second of two signals sent together ended the process"
        time.sleep(4.0)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == EXIT_CODE
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
