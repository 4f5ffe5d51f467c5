"""The sandbox on programs that misbehave. `benchmarks/rewards.py` has a hundred of them, also as an ordinary user."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from megatron_dapo.rewards.sandbox.sandbox import Sandbox, SandboxLimits

LIMITS = SandboxLimits(cpu_s=2.0, memory_mb=256, max_processes=8, file_mb=4, workspace_mb=8, output_bytes=65536)


@pytest.fixture(scope="module")
def sandbox():
    sandbox = Sandbox(LIMITS)
    yield sandbox
    sandbox.close()


def run(sandbox: Sandbox, program: str, stdin: str = "") -> dict:
    [outcome] = sandbox.run(program, [{"stdin": stdin}], budget_s=30.0)
    return dict(outcome)


def test_a_program_runs_as_a_script_would(sandbox: Sandbox) -> None:
    program = """
import sys, collections, dataclasses, json
@dataclasses.dataclass
class Point:
    x: int
if __name__ == "__main__":
    print(input(), sys.stdin.read().split(), Point(3), len(sys.argv), file=sys.stdout)
    print("err", file=sys.stderr)
    sys.exit(7)
"""
    found = run(sandbox, program, "first\nsecond third\n")
    assert found["stdout"] == "first ['second', 'third'] Point(x=3) 1\n"
    assert (found["status"], found["code"], found["stderr"]) == ("ended", 7, "err\n")


def test_threads_and_processes_within_the_limit_work(sandbox: Sandbox) -> None:
    program = """
import subprocess, sys, threading
thread = threading.Thread(target=lambda: print("thread", flush=True)); thread.start(); thread.join()
print(subprocess.run([sys.executable, "-c", "print(6 * 7)"], capture_output=True, text=True).stdout)
"""
    assert run(sandbox, program)["stdout"] == "thread\n42\n\n"


def test_nothing_of_the_machine_can_be_read_or_written(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s3cret")
    program = f"""
import os
print(os.getuid(), dict(os.environ).keys() - {{"PATH", "HOME", "LANG", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "LC_CTYPE"}})
for path in ({str(tmp_path / "secret")!r}, "/etc/shadow", "/etc/passwd", "/proc/1/environ", os.path.expanduser("~root/.bashrc")):
    try:
        print("READ", path, open(path).read())
    except OSError:
        pass
for path in ({str(tmp_path / "new")!r}, "/new", "/usr/new", "/dev/new", "/proc/sys/kernel/core_pattern", {sys.prefix + "/new"!r}):
    try:
        open(path, "w").write("x"); print("WROTE", path)
    except OSError:
        pass
open("own", "w").write("x"); print(sorted(os.listdir(".")))
"""
    found = run(sandbox, program)
    uid = 65534 if os.getuid() == 0 else os.getuid()
    # An environment below /tmp keeps its place in the workspace, which is /tmp there.
    there = {Path(path).parts[2] for path in (sys.prefix, os.path.realpath(sys.prefix)) if path.startswith("/tmp/")}
    assert found["stdout"] == f"{uid} set()\n{sorted({'solution.py', 'own', *there})}\n"
    assert "READ" not in found["stdout"] and "WROTE" not in found["stdout"]
    assert not (tmp_path / "new").exists()


def test_no_network(sandbox: Sandbox) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    reached = []
    threading.Thread(target=lambda: reached.append(server.accept()), daemon=True).start()
    program = f"""
import socket
for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, socket.AF_NETLINK):
    try:
        socket.socket(family); print("SOCKET", family)
    except OSError as error:
        print(error.errno)
socket.create_connection(("127.0.0.1", {server.getsockname()[1]}))
"""
    found = run(sandbox, program)
    server.close()
    assert found["stdout"] == "13\n" * 4 and found["code"] == 1 and not reached


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("while True: pass", "time"),
        ("import time; time.sleep(600)", "time"),
        ("import signal, time\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError): pass\ntime.sleep(600)", "time"),
        ("while True: print('x' * 1000)", "output"),
        ("x = bytearray(1 << 30)", "ended"),
        ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", "time"),
        ("import os\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        import time; time.sleep(600)", "ended"),
        ("import os\nfor n in range(4):\n    if os.fork() == 0:\n        x = b'x' * (150 << 20); import time; time.sleep(600)\nimport time; time.sleep(600)", "memory"),
        ("import os, signal\nos.kill(os.getppid(), signal.SIGKILL); os.kill(1, signal.SIGKILL); os.kill(-1, signal.SIGKILL)\nprint(1)", "ended"),
        ("open('big', 'wb').write(bytes(100 << 20))", "ended"),
        ("for n in range(10**6): open(f'f{n}', 'wb').write(bytes(1 << 20))", "ended"),
        ("import ctypes; ctypes.string_at(0)", "ended"),
        ("import os; os.closerange(0, 100); os._exit(0)", "ended"),
    ],
)  # fmt: skip
def test_programs_that_misbehave_end_in_time_and_leave_nothing(sandbox: Sandbox, program: str, status: str) -> None:
    start = time.monotonic()
    found = run(sandbox, program)
    assert time.monotonic() - start < 20.0
    assert found["status"] == status
    # The same sandbox serves the next program.
    assert run(sandbox, "print(input())", "next")["stdout"] == "next\n"
    children = Path(f"/proc/{sandbox._process.pid}/task/{sandbox._process.pid}/children").read_text().split()
    assert children == []


def test_tests_after_the_budget_get_no_turn(sandbox: Sandbox) -> None:
    outcomes = sandbox.run("import time; time.sleep(600)", [{"stdin": ""}] * 5, budget_s=5.0)
    assert [outcome["status"] for outcome in outcomes] == ["time", "time"]


def test_a_sandbox_whose_processes_were_killed_starts_again(sandbox: Sandbox) -> None:
    run(sandbox, "print(1)")
    sandbox._process.kill()
    sandbox._process.wait()
    assert run(sandbox, "print(2)")["stdout"] == "2\n"
