"""The sandbox's processes, started by `rewards.sandbox.sandbox` as `python -I runner.py`. Standard library only.

    worker (rewards.verifiers.code) -> template: one process, waits with everything imported, never runs a program
        -> a job, one response: outer, makes the namespaces -> runner, their process 1 -> a process for each test

    worker -> template   {"program": text, "tests": [...], limits}                                        a line per job
    template -> worker   {"isolation": ..., "missing": [...]}                                             once
    runner -> worker     {"test": n, "status": ..., "stdout": ..., "result": ..., "stderr": ...}, {"end": status}

The runner has the same user as the programs, but they cannot trace it or, since it is process 1 of its namespace, send
it signals. It knows the inputs but not the expected outputs. Between tests it kills all other processes of the
namespace.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

_DIRECTORY = Path(__file__).resolve().parent
_TICK_S = 0.02  # interval of the checks of the memory of all processes of a test
_STDERR_BYTES = 2000
_RESULT_BYTES = 2**20
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def _import_file(name: str, path: Path) -> Any:
    """Import a file by its path, because isolated mode cannot find this package otherwise."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


kernel = _import_file("kernel", _DIRECTORY / "kernel.py")
supervisor = _import_file("supervisor", _DIRECTORY.parents[1] / "workers" / "supervisor.py")


def readable_paths() -> tuple[str, ...]:
    """Return the paths that programs may read: system libraries, this interpreter and its packages."""
    own = {os.path.realpath(path) for path in (sys.prefix, sys.base_prefix, sys.exec_prefix)} | {sys.prefix}
    own |= {path for path in sys.path if os.path.isdir(path)}
    paths = [*_SYSTEM, *sorted(own)]
    # A directory below another one is already included. Never allow the whole system or a home directory.
    above = [path for path in paths if path not in ("/", os.path.expanduser("~")) and os.path.lexists(path)]
    return tuple(path for path in above if not any(path != other and path.startswith(f"{other}/") for other in above))


# ---- the template


def main() -> None:
    """Serve jobs until the worker closes the pipe."""
    os.umask(0o077)
    # The worker's CPU time limit is for one answer, but this process serves them all.
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    jobs, replies = os.fdopen(os.dup(0), "rb"), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    isolation, missing = _probe()
    _send(replies, {"isolation": isolation, "missing": missing})
    for line in jobs:
        status = _in_child(lambda line=line: _run_isolated(json.loads(line), isolation, replies))
        supervisor.end_descendants(os.getpid())
        _send(replies, {"end": status})


def _send(descriptor: int, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(descriptor, data) :]


def _in_child(work: Any) -> int:
    """Call `work` in a forked process that dies with this one; return its exit code."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
            code = work() or 0
        except OSError:
            code = 3
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _probe() -> tuple[str, list[str]]:
    """Return the kind of isolation, and the parts that this kernel or site does not allow."""
    missing = []
    has_calls = _in_child(lambda: kernel.restrict_calls(True)) == 0
    if not has_calls:
        missing.append("a filter of system calls (seccomp)")
    if _in_child(lambda: _isolate("namespaces", ".", 1, lambda: None)) == 0:
        return ("namespaces and seccomp" if has_calls else "namespaces"), missing
    missing.insert(0, "namespaces")
    if has_calls and _in_child(lambda: kernel.restrict_files(["/usr"], tempfile.gettempdir())) == 0:
        return "landlock and seccomp", missing
    return "none", [*missing, "limits of files (Landlock)"]


# ---- isolation of one job


def _run_isolated(job: dict[str, Any], isolation: str, replies: int) -> int:
    """Run a job's tests under the given isolation and return an exit code."""
    if isolation.startswith("namespaces"):
        return _isolate("namespaces", "/tmp", job["workspace_mb"], lambda: _run_tests(job, isolation, replies))
    workspace = tempfile.mkdtemp(prefix="megatron-dapo-sandbox-")
    try:
        return _in_child(lambda: _beside_others(job, isolation, workspace, replies))
    finally:
        shutil.rmtree(workspace, ignore_errors=True)


def _isolate(kind: str, workspace: str, workspace_mb: int, work: Any) -> int:
    """Call `work` as process 1 of new namespaces with a separate root directory, as a user without capabilities."""
    is_root = os.getuid() == 0
    if is_root:
        try:
            kernel.unshare(kernel.NAMESPACES)
        except OSError:  # root of a container without CAP_SYS_ADMIN
            kernel.become(kernel.UNPRIVILEGED)
            kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # otherwise root owns its user namespace's id maps
            is_root = False
    if not is_root:
        uid, gid = os.getuid(), os.getgid()
        kernel.unshare(kernel.NAMESPACES | kernel.CLONE_NEWUSER)
        kernel.enter_user_namespace(uid, gid)
    uid = kernel.UNPRIVILEGED if is_root else os.getuid()

    def inside() -> int:
        # A signal to the caller's process group crosses namespaces, so the verifier process must be in another group.
        os.setsid()
        kernel.enter_root(readable_paths(), workspace_mb, uid)
        if is_root:
            kernel.become(kernel.UNPRIVILEGED)
            # The kernel counts a user's processes per user namespace, so only this job's processes count here.
            kernel.unshare(kernel.CLONE_NEWUSER)
        _become_untouchable()
        os.chdir(workspace)
        return work() or 0

    return _in_child(inside)


def _beside_others(job: dict[str, Any], isolation: str, workspace: str, replies: int) -> int:
    """Run the tests without namespaces: Landlock restricts files, and programs start no second process."""
    if os.getuid() == 0:
        os.chown(workspace, kernel.UNPRIVILEGED, kernel.UNPRIVILEGED)
        kernel.become(kernel.UNPRIVILEGED)
    _become_untouchable()
    os.chdir(workspace)
    if isolation.startswith("landlock"):
        kernel.restrict_files(readable_paths(), workspace)
    return _run_tests(job, isolation, replies)


def _become_untouchable() -> None:
    kernel.drop_capabilities()
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    # Process 1 only gets signals that it has a handler for, and Python has one for SIGINT.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL if os.getpid() == 1 else signal.SIG_IGN)


# ---- tests


def _run_tests(job: dict[str, Any], isolation: str, replies: int) -> int:
    end = time.monotonic() + job["budget_s"]
    for number, test in enumerate(job["tests"]):
        seconds = min(job["wall_s"], end - time.monotonic())
        outcome = {"status": "budget"} if seconds <= 0 else _run_test(job, test, seconds, isolation, replies)
        _send(replies, {"test": number, **outcome})
        if outcome["status"] == "budget":
            break
    return 0


def _run_test(
    job: dict[str, Any], test: dict[str, Any], seconds: float, isolation: str, replies: int
) -> dict[str, Any]:
    """Run the program once in a separate process and return its output and how it ended."""
    pipes = {name: os.pipe() for name in ("stdout", "stderr", "result")}
    control, script = os.pipe(), test.get("asserts", "")
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            os.close(replies)
            _limit(job, isolation)
            _become_program(test, pipes, control, job["program"])
        finally:
            os._exit(1)
    for _, write in pipes.values():
        os.close(write)
    os.close(control[0])
    reads = {pipes[name][0]: name for name in pipes}
    found = {name: bytearray() for name in pipes}
    limits = {"stdout": job["output_bytes"], "stderr": _STDERR_BYTES, "result": _RESULT_BYTES}
    token = os.urandom(16).hex()
    status, end, code = "", time.monotonic() + seconds, None
    while not status:
        for descriptor in select.select(list(reads), [], [], _TICK_S)[0]:
            name = reads[descriptor]
            chunk = os.read(descriptor, 65536)
            found[name] += chunk
            if name == "stderr":
                del found[name][: -limits[name]]
            elif len(found[name]) > limits[name]:
                status = "output"
            if not chunk:
                del reads[descriptor]
            if name == "result" and script and found[name] == b"ready\n":
                _answer(control[1], json.dumps({"asserts": script, "token": token}).encode() + b"\n")
                script = ""
        if code is None:
            ended, wait_status = os.waitpid(child, os.WNOHANG)
            code = os.waitstatus_to_exitcode(wait_status) if ended else None
        if code is not None and (not reads or not select.select(list(reads), [], [], 0)[0]):
            status = "ended"
        elif time.monotonic() > end:
            status = "time"
        elif _resident_bytes(child) > job["memory_mb"] * 2**20:
            status = "memory"
    _end_all(child, code)
    for descriptor in (*(read for read, _ in pipes.values()), control[1]):
        os.close(descriptor)
    texts = {name: bytes(found[name]).decode(errors="replace") for name in found}
    has_passed = test.get("asserts") is not None and texts["result"] == f"ready\n{token}\n"
    if test.get("asserts") is not None:
        texts["result"] = "passed" if has_passed else ""
    return {"status": "time" if code == -signal.SIGXCPU else status, "code": code, **texts}


def _answer(descriptor: int, line: bytes) -> None:
    try:
        os.write(descriptor, line)
    except OSError:  # the program is gone
        pass


def _end_all(child: int, code: int | None) -> None:
    """Kill every other process of the namespace or, without one, the program, which could start no other process."""
    if os.getpid() == 1:
        try:
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            pass
    elif code is None:
        os.kill(child, signal.SIGKILL)
    try:
        while True:
            os.waitpid(-1, 0)
    except ChildProcessError:
        pass


def _resident_bytes(child: int) -> int:
    """Return the memory of all processes of the namespace or, without one, of the program."""
    pids = (
        [pid for pid in os.listdir("/proc") if pid.isdigit()]
        if os.getpid() == 1 and os.path.isdir("/proc/1")
        else [str(child)]
    )
    total = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/statm", encoding="ascii") as stream:
                total += int(stream.read().split()[1]) * _PAGE
        except OSError:  # it has ended, or /proc is not readable
            continue
    return total


def _limit(job: dict[str, Any], isolation: str) -> None:
    seconds = max(1, round(job["cpu_s"]))
    limits = {
        resource.RLIMIT_AS: job["memory_mb"] * 2**20,
        resource.RLIMIT_FSIZE: job["file_mb"] * 2**20,
        resource.RLIMIT_NOFILE: job["max_files"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    if isolation.startswith("namespaces"):  # Without one, the kernel counts all of the user's processes.
        limits[resource.RLIMIT_NPROC] = job["max_processes"] + 1  # + 1: the runner
    for limited, value in limits.items():
        hard = resource.getrlimit(limited)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limited, (value, value))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    if "seccomp" in isolation:
        kernel.restrict_calls(isolation.startswith("namespaces"))


# ---- inside the program's process


def _become_program(
    test: dict[str, Any], pipes: dict[str, tuple[int, int]], control: tuple[int, int], program: str
) -> None:
    """Run the program in this process as `python solution.py` would; never return."""
    stdin = tempfile.TemporaryFile(dir=".")
    stdin.write(test.get("stdin", "").encode())
    stdin.seek(0)
    sources = (stdin.fileno(), pipes["stdout"][1], pipes["stderr"][1], pipes["result"][1], control[0])
    # Move them out of the way first: one may have the number that another one needs.
    moved = [fcntl.fcntl(source, fcntl.F_DUPFD, 24) for source in sources]
    for descriptor, source in enumerate(moved):
        os.dup2(source, descriptor)
    os.closerange(5, 4096)
    os.environ.clear()
    os.environ.update(
        PATH="/usr/bin:/bin", HOME=os.getcwd(), LANG="C.UTF-8", OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1"
    )
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    sys.stdin, sys.stdout, sys.stderr = (
        open(fd, mode, encoding="utf-8", newline=None) for fd, mode in ((0, "r"), (1, "w"), (2, "w"))
    )
    vars(sys).update(__stdin__=sys.stdin, __stdout__=sys.stdout, __stderr__=sys.stderr)
    Path("solution.py").write_text(program, encoding="utf-8", errors="replace")
    sys.argv, sys.path[:0] = ["solution.py"], [os.getcwd()]
    code = 0
    try:
        _execute(test, program)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        code = code or 1
    os._exit(code & 0xFF)


def _execute(test: dict[str, Any], program: str) -> None:
    """Run the program as `__main__`, then call one of its functions or run asserts in its namespace."""
    is_called = "call" in test
    module = type(sys)("__main__" if not is_called else "solution")
    module.__file__ = "solution.py"
    sys.modules[module.__name__] = module
    exec(compile(program, "solution.py", "exec"), module.__dict__)
    if is_called:
        function = _function(module, test["call"]["name"])
        result = function(*test["call"]["arguments"])
        os.write(3, json.dumps(result, default=_plain).encode()[:_RESULT_BYTES])
    elif "asserts" in test:
        os.write(3, b"ready\n")
        message = json.loads(os.fdopen(4, "rb").readline())
        exec(compile(message["asserts"], "tests.py", "exec"), module.__dict__)
        os.write(3, message["token"].encode() + b"\n")


def _function(module: Any, name: str) -> Any:
    if not hasattr(module, name) and hasattr(module, "Solution"):
        return getattr(module.Solution(), name)
    return getattr(module, name)


def _plain(value: Any) -> Any:
    """Convert sets and library scalars to JSON values."""
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return value.tolist() if hasattr(value, "tolist") else str(value)


if __name__ == "__main__":
    main()
