"""Waits have a name, a half-time warning and an end."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megatron_dapo.recovery.deadlines import EXIT_CODE, Deadline, DeadlineError, watch

ROOT = str(Path(__file__).resolve().parents[3])


def test_polled_deadline_warns_once_and_raises(caplog: pytest.LogCaptureFixture) -> None:
    now = [100.0]
    deadline = Deadline("completions", 10.0, clock=lambda: now[0])
    with caplog.at_level(logging.WARNING):
        for moment in (101.0, 104.9):
            now[0] = moment
            deadline.check(lambda: "ids 3, 4")
        assert caplog.text == ""
        for moment in (105.0, 108.0):
            now[0] = moment
            deadline.check(lambda: "ids 3, 4")
    assert caplog.text.count("waiting for completions since 5.0 s (limit 10.0 s): ids 3, 4") == 1
    assert deadline.remaining == 2.0
    now[0] = 111.0
    with pytest.raises(DeadlineError, match="completions since 11.0 s .* ids 3"):
        deadline.check(lambda: "ids 3, 4")
    assert deadline.remaining == 0.0


def test_watch_is_silent_when_the_work_is_done(caplog: pytest.LogCaptureFixture) -> None:
    expired: list[str] = []
    before = threading.active_count()
    with caplog.at_level(logging.WARNING), watch("quick", 5.0, lambda: "", expired.append):
        pass
    assert (caplog.text, expired, threading.active_count()) == ("", [], before)


def test_watch_warns_at_half_time_and_expires(caplog: pytest.LogCaptureFixture) -> None:
    expired = threading.Event()
    messages: list[str] = []

    def on_expired(message: str) -> None:
        messages.append(message)
        expired.set()

    with caplog.at_level(logging.WARNING), watch("all-reduce", 0.3, lambda: "ranks 2, 5", on_expired):
        assert expired.wait(20)
    assert "waiting for all-reduce" in caplog.text and "ranks 2, 5" in messages[0] and "limit 0.3 s" in messages[0]


def test_watch_ends_with_the_error_of_its_block() -> None:
    with pytest.raises(KeyError), watch("work", 5.0, lambda: "", lambda message: None):
        raise KeyError("x")


def test_a_broken_description_does_not_hide_the_wait() -> None:
    messages: list[str] = []
    with watch("broken", 0.05, lambda: str(1 // 0), messages.append):
        while not messages:
            time.sleep(0.01)
    assert "waiting for broken" in messages[0] and "ZeroDivisionError" in messages[0]


def test_a_hang_exits_with_stacks_and_a_failure_record(tmp_path: Path) -> None:
    code = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from megatron_dapo.recovery.deadlines import exit_with_stacks, watch
def stuck_in_here():
    time.sleep(60)
with watch("a lost rank", 0.4, lambda: "rank 1", exit_with_stacks(Path(sys.argv[2]), rank=3)):
    stuck_in_here()
"""
    command = [sys.executable, "-c", code, ROOT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == EXIT_CODE
    assert "stuck_in_here" in done.stderr and "stuck_in_here" in (tmp_path / "stacks_rank_3.txt").read_text()
    assert "waiting for a lost rank" in done.stderr.splitlines()[-1]
    failure = json.loads((tmp_path / "failure.json").read_text())
    assert failure["rank"] == 3 and failure["kind"] == "deadline" and "rank 1" in failure["message"]
