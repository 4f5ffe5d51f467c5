"""Waits have a name, a half-time warning and an end; progress postpones the end, and a hung disk does not."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megatron_dapo.parallel.coordination import Progress, collective_timeout
from megatron_dapo.recovery.deadlines import EXIT_CODE, watch

ROOT = str(Path(__file__).resolve().parents[3])


def test_watch_is_silent_when_the_work_is_done(caplog: pytest.LogCaptureFixture) -> None:
    expired: list[str] = []
    before = threading.active_count()
    with caplog.at_level(logging.WARNING), watch("quick", 5.0, expired.append):
        pass
    assert (caplog.text, expired, threading.active_count()) == ("", [], before)


def test_watch_warns_at_half_time_and_expires(caplog: pytest.LogCaptureFixture) -> None:
    expired = threading.Event()
    messages: list[str] = []

    def on_expired(message: str) -> None:
        messages.append(message)
        expired.set()

    with caplog.at_level(logging.WARNING), watch("rank 3, phase train", 0.3, on_expired):
        assert expired.wait(20)
    assert "waiting for rank 3, phase train: no progress for" in caplog.text and "limit 0.3 s" in messages[0]


def test_progress_postpones_the_deadline_for_as_long_as_it_comes(caplog: pytest.LogCaptureFixture) -> None:
    """The block lasts four times the limit; only when progress stops does it expire, and it warns again before."""
    progress, expired, messages = Progress(), threading.Event(), []

    def on_expired(message: str) -> None:
        messages.append(time.monotonic())
        expired.set()

    with caplog.at_level(logging.WARNING), watch("phase generate", 1.0, on_expired, progress):
        end = time.monotonic() + 4.0
        while time.monotonic() < end:
            time.sleep(0.05)
            progress.mark()
        assert not messages
        last = time.monotonic()
        assert expired.wait(20) and messages[0] - last > 0.9
    assert caplog.text.count("waiting for phase generate") == 1


def test_time_before_the_block_does_not_count() -> None:
    progress, messages = Progress(), []
    time.sleep(0.3)
    with watch("phase", 0.25, messages.append, progress):
        time.sleep(0.05)
    assert not messages


def test_watch_ends_with_the_error_of_its_block() -> None:
    with pytest.raises(KeyError), watch("work", 5.0, lambda message: None):
        raise KeyError("x")


def test_groups_time_out_after_the_watchdog() -> None:
    for seconds in (1.0, 1800.0):
        assert collective_timeout(seconds) > seconds * 1.9


HANG = """
import sys, time
from functools import partial
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from megatron_dapo.recovery import deadlines
deadlines._REPORT_S = float(sys.argv[3])
def stuck_in_here():
    time.sleep(60)
with deadlines.watch("rank 3, phase train", 0.4, partial(deadlines.exit_with_stacks, Path(sys.argv[2]), 3)):
    stuck_in_here()
"""


def hang(output_dir: Path, report_s: float = 20.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", HANG, ROOT, str(output_dir), str(report_s)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_hang_exits_with_stacks_and_a_failure_record(tmp_path: Path) -> None:
    done = hang(tmp_path)
    assert done.returncode == EXIT_CODE
    assert "stuck_in_here" in done.stderr and "stuck_in_here" in (tmp_path / "stacks_rank_3.txt").read_text()
    assert "waiting for rank 3, phase train" in done.stderr.splitlines()[-1]
    failure = json.loads((tmp_path / "failure.json").read_text())
    assert failure["rank"] == 3 and failure["kind"] == "deadline" and "phase train" in failure["message"]


def test_a_hung_file_system_does_not_keep_the_process(tmp_path: Path) -> None:
    """A FIFO without a reader stands in: opening it to write blocks, as a write to a dead NFS server does."""
    os.mkfifo(tmp_path / "stacks_rank_3.txt")
    began = time.monotonic()
    done = hang(tmp_path, report_s=1.5)
    assert done.returncode == EXIT_CODE and time.monotonic() - began < 30
    assert "stuck_in_here" in done.stderr and "waiting for rank 3" in done.stderr.splitlines()[-1]
