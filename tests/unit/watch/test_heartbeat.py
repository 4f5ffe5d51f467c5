"""Phases have a deadline on lack of progress, and the main thread's own frames tell what it waits for."""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_dapo.parallel.coordination import Progress, collective_timeout
from megatron_dapo.watch import heartbeat as module
from megatron_dapo.watch.failure import EXIT_CODE, Failure, read_failure
from megatron_dapo.watch.heartbeat import WAITS, Heartbeat, waiting_for
from megatron_dapo.watch.verdict import BOUNDED, COLLECTIVE

ROOT = str(Path(__file__).resolve().parents[3])


class Unwatched(Heartbeat):
    """Keeps the deadline's record instead of ending the process."""

    def __init__(self) -> None:
        super().__init__(3)
        self.expired: list[Failure] = []

    def _expire(self, failure: Failure) -> None:
        self.expired.append(failure)
        self._has_reported = True


@pytest.fixture
def heartbeat(monkeypatch: pytest.MonkeyPatch) -> Iterator[Unwatched]:
    monkeypatch.setattr(module, "_SAMPLE_S", 0.02)
    heartbeat = Unwatched()
    thread = threading.Thread(target=heartbeat._beat)
    thread.start()
    yield heartbeat
    heartbeat.close()
    thread.join()


class Idle(Progress):
    """Progress that came as long ago as the test says."""

    idle_s = 0.0

    def mark(self) -> None:
        self.count += 1
        self.idle_s = 0.0


def test_a_phase_warns_at_half_time_and_expires(caplog: pytest.LogCaptureFixture) -> None:
    """Progress postpones the deadline for as long as it comes, and the next silence gets a warning too."""
    heartbeat, progress = Unwatched(), Idle()
    with caplog.at_level(logging.WARNING), heartbeat.phase("train", progress, deadline_s=10.0):
        for idle_s, num_warnings in ((4.0, 0), (6.0, 1), (9.0, 1), (1.0, 1), (9.9, 2)):
            progress.idle_s = idle_s
            heartbeat._look()
            assert caplog.text.count("rank 3, phase train: no progress for") == num_warnings and not heartbeat.expired
        progress.idle_s = 10.1
        heartbeat._look()
    [failure] = heartbeat.expired
    assert (failure.rank, failure.cause, failure.phase, failure.exit_code) == (3, "deadline", "train", EXIT_CODE)
    assert "limit 10 s" in failure.message and "in test_a_phase_warns_at_half_time_and_expires" in failure.detail


def test_time_before_the_phase_and_between_phases_does_not_count() -> None:
    heartbeat, progress = Unwatched(), Idle()
    for name in ("train", "score"):
        progress.idle_s = 99.0
        heartbeat._look()
        with heartbeat.phase(name, progress, deadline_s=10.0):
            heartbeat._look()
            assert heartbeat.phase_name == name
    progress.idle_s = 99.0
    heartbeat._look()
    assert not heartbeat.expired and heartbeat.phase_name == "start"


def test_the_phase_of_an_error_is_the_innermost_that_it_left() -> None:
    heartbeat = Heartbeat()
    with pytest.raises(KeyError), heartbeat.phase("train_actor"), heartbeat.phase("checkpoint"):
        raise KeyError("x")
    assert heartbeat.phase_name == "checkpoint"
    with heartbeat.phase("score"):
        assert heartbeat.phase_name == "score"


def test_groups_time_out_after_the_watchdog() -> None:
    for seconds in (1.0, 1800.0):
        assert collective_timeout(seconds) > seconds * 1.9


def frames_of(*modules: str):
    """Return the innermost of nested frames, one in each module, outermost first, of an environment in /opt/torch."""
    inner: Any = sys._getframe
    for name in reversed(modules):
        code = {"__name__": name, "inner": inner}
        file = f"/opt/torch/megatron_dapo/lib/{name.replace('.', '/')}.py"
        exec(compile("def wait(inner=inner):\n    return inner()\n", file, "exec"), code)
        inner = code["wait"]
    return inner()


@pytest.mark.parametrize(
    ("modules", "kind", "place"),
    [
        (("megatron_dapo.trainer.loop", "torch.distributed.distributed_c10d"), COLLECTIVE, "distributed_c10d"),
        (("megatron_dapo.trainer.loop", "megatron.core.distributed.ddp"), COLLECTIVE, "ddp.py"),
        (("megatron_dapo.trainer.loop", "megatron_dapo.rewards.pool.pool", "threading"), BOUNDED, "verifiers"),
        (("megatron_dapo.trainer.start_engines", "megatron_dapo.engines.sglang.server", "httpcore"), BOUNDED, "SGLang"),
        (("megatron_dapo.trainer.loop", "subprocess"), BOUNDED, "a child process"),
        (("megatron_dapo.trainer.loop", "megatron_dapo.files.process", "socket"), BOUNDED, "file process"),
        (("megatron_dapo.trainer.loop", "megatron_dapo.checkpoints.save", "threading"), BOUNDED, "checkpoint"),
        # torch is outside here: the rank waits in its own code, which torch has called.
        (("torch.utils._contextlib", "megatron_dapo.trainer.updater", "threading"), "", "updater.py"),
        (("own_script",), "", "own_script.py"),
    ],
)
def test_the_innermost_known_frame_tells_the_wait(modules: tuple[str, ...], kind: str, place: str) -> None:
    found, doing = waiting_for(frames_of(*modules))
    assert found == kind and place in doing


def test_a_loop_of_bounded_waits_is_one_until_it_has_been_left(monkeypatch: pytest.MonkeyPatch) -> None:
    heartbeat = Unwatched()
    samples = ["", "w", "", "w", "", "", "", "", "", ""]
    seen = []
    for sample in samples:
        place = (BOUNDED, "an environment: poll") if sample else ("", "_look (watch/signals.py:124)")
        monkeypatch.setattr(module, "waiting_for", lambda frame, place=place: place)
        heartbeat._look()
        seen.append("w" if heartbeat._sample["wait"] == BOUNDED else "")
        assert heartbeat._sample["doing"].startswith("an environment" if seen[-1] else "_look")
    assert seen == ["", "w", "w", "w", "w", "w", "w", "w", "", ""]


@pytest.mark.parametrize("name", [name for name, _, _ in WAITS])
def test_the_modules_of_waits_exist(name: str) -> None:
    """A module that moved without this list would turn its waits into hangs."""
    assert importlib.util.find_spec(name) is not None


def test_sequence_numbers_count_collectives_by_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of NCCL as well: torch's counter is the host's, which never asks the device."""

    class Group:
        def __init__(self, name: str, purpose: str, count: int) -> None:
            self.group_name, self.group_desc, self.count = name, purpose, count

        def _get_sequence_number_for_group(self) -> int:
            if self.count < 0:
                raise RuntimeError("this backend has no counter")
            return self.count

    groups = [Group("0", "default_pg", 3), Group("7", "undefined", 5), Group("9", "", -1)]
    distributed = types.ModuleType("distributed_c10d")
    distributed._world = types.SimpleNamespace(pg_map=dict.fromkeys(groups))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", distributed)
    assert module._sequence_numbers() == {"groups": {"7": 5, "0 (default_pg)": 3}, "sequence": 8}


def test_beats_continue_while_torch_is_being_imported(heartbeat: Unwatched, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread looks at a module of which the main thread has so far made the first lines."""
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", types.ModuleType("distributed_c10d"))
    before = heartbeat._beats
    end = time.monotonic() + 30.0
    while heartbeat._beats < before + 3:
        assert time.monotonic() < end, "no beat"
        time.sleep(0.02)


EXPIRE = """
import sys, threading, time
from pathlib import Path
from megatron_dapo.parallel.coordination import Progress
from megatron_dapo.watch.heartbeat import Heartbeat
def stuck_in_here():
    time.sleep(60)
heartbeat = Heartbeat(3)
heartbeat.describe(Path(sys.argv[1]), 2)
threading.Thread(target=heartbeat._beat, daemon=True).start()
with heartbeat.phase("train", Progress(), deadline_s=0.6):
    stuck_in_here()
"""


def test_without_a_watcher_a_deadline_ends_the_process_with_its_stacks(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXPIRE, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
    )
    assert done.returncode == EXIT_CODE and "stuck_in_here" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("first failure: attempt 2, rank 3 (")
    assert read_failure(tmp_path).cause == "deadline"


EVALUATE = """
import sys, time
from megatron_dapo.watch.heartbeat import watched_alone
for _ in range(2):
    with watched_alone("evaluate"):
        time.sleep(1.2)
print("done", flush=True)
time.sleep(1.5)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the watcher reads Linux's /proc and pidfds")
def test_a_command_of_one_process_has_a_watcher_while_it_works() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", EVALUATE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    )
    with process:
        assert process.stdout is not None and process.stdout.readline() == b"done\n"
        assert process.wait(30) == 0 and process.stderr is not None and process.stderr.read() == b""


IN_TORCH_AT_EXIT = """
import time
import torch.distributed as dist
from megatron_dapo.watch import heartbeat
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
group = dist.group.WORLD

def look(self):
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        group._get_sequence_number_for_group()

heartbeat.Heartbeat._look = look
with heartbeat.watched_alone("evaluate"):
    time.sleep(0.6)
"""


def test_a_process_ends_in_order_while_its_heartbeat_is_in_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IN_TORCH_AT_EXIT], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
    )
    assert (done.returncode, done.stderr) == (0, "")
