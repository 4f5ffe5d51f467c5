"""Sends this rank's heartbeats to its node's watcher, and exits when the watcher says so.

    rank                                                watcher of the node (watch.watcher)
    connect                 --- process id, 2 files -->  reads the page, waits on the pidfd
    phase, progress         --- page (shared memory) ->  what the rank does, up to date even at a SIGKILL
    fail(error)             --- record --------------->  the verdict comes before any output of this rank
    SIGUSR1: Python stacks  --- file in memory ------->  even while native code holds the GIL
    exit, with code         <-- verdict ---------------

The rank's only extra thread samples twice a second what the main thread waits for. It reads the thread's frames, so no
collective or wait needs instrumentation. Without a watcher (on systems other than Linux, in unit tests) the same
object reports to stderr and failure.json.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from megatron_dapo.files.durable import identity_of
from megatron_dapo.files.linux import start_helper
from megatron_dapo.watch.evidence import read_text
from megatron_dapo.watch.failure import EXIT_CODE, Failure, failure_of, first_line, write_failures
from megatron_dapo.watch.verdict import BOUNDED, COLLECTIVE, WatchLimits
from megatron_dapo.watch.watched_rank import MESSAGE_BYTES, STATUS_BYTES, StatusPage

if TYPE_CHECKING:
    from megatron_dapo.files.process import FileProcess
    from megatron_dapo.parallel.coordination import Progress

logger = logging.getLogger(__name__)

_SAMPLE_S = 0.5
_LOOP_SAMPLES = 4
_CONNECT_S = 20.0  # the watcher starts in 0.2 s; the machine may be busy
_VERDICT_S = 15.0  # a failing rank ends after this long even if its watcher does not answer
_WRITE_S = 5.0
_LAST_S = 0.3  # The main thread may print between the verdict and the exit.
_MAX_GROUPS = 48  # groups whose sequence numbers are reported
_DETAIL_CHARS = 12_000

# Waits of the main thread by the innermost frame whose module, or package, is listed. (Not its file: in an
# environment in /opt/torch, or in a checkout named megatron_dapo, every library's path contains such a name.)
# COLLECTIVE: for other ranks. BOUNDED: for something outside this process, with a deadline that names it. Silence
# anywhere else is a hang of this rank.
WAITS = (
    ("megatron_dapo.engines.sglang", BOUNDED, "an answer of an SGLang server"),
    ("megatron_dapo.rewards", BOUNDED, "verifiers"),
    ("megatron_dapo.environments", BOUNDED, "environments"),
    ("megatron_dapo.bridge", BOUNDED, "the weight sync of an engine"),
    ("megatron_dapo.rollout.async_collector", BOUNDED, "the collecting thread"),
    ("megatron_dapo.watch.heartbeat", BOUNDED, "the watcher"),
    ("megatron_dapo.checkpoints.memory_copies", BOUNDED, "the keeper of checkpoints in memory"),
    ("megatron_dapo.files.process", BOUNDED, "the file process"),
    ("megatron_dapo.checkpoints.save", BOUNDED, "the copy of a checkpoint"),
    ("megatron_dapo.parallel.coordination", COLLECTIVE, ""),
    ("megatron_dapo.launch.lifetime", COLLECTIVE, "rank 0"),
    ("megatron_dapo.reshard.execution", COLLECTIVE, ""),
    ("torch", COLLECTIVE, ""),
    ("megatron.core", COLLECTIVE, ""),
    ("subprocess", BOUNDED, "a child process"),
)


@dataclass(frozen=True)
class Place:
    rank: int
    world_size: int
    local_rank: int
    node_rank: int
    num_nodes: int
    run_id: str  # differs between runs and between starts of one run
    leader: tuple[str, int]  # host and UDP port of node 0's watcher
    attempt: int = 1  # number of this start, as far as the launcher knows


class Heartbeat:
    """Heartbeats of this process. `connect` it to a watcher, or leave it unwatched."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.attempt = 1
        self.run_directory: Path | None = None
        self._phases: list[str] = ["start"]
        self._raised_in = ""  # phase in which an error was raised
        self._deadline_s = float("inf")
        self._progress: Progress | None = None
        self._socket: socket.socket | None = None
        self._page: StatusPage | None = None
        self._sample: dict[str, Any] = {}
        self._beats = 0
        self._last_bounded = (-_LOOP_SAMPLES - 1, "")  # sample in which the main thread was in a bounded wait, and where
        self._verdict = threading.Event()
        self._is_closed = threading.Event()
        self._exit_code, self._culprit = EXIT_CODE, -1
        self._has_warned = self._has_reported = False
        self.file_process: FileProcess | None = None  # the watcher looks at it when this rank is silent
        self.place: Place | None = None
        self.is_on_gpu = False  # collectives run on a GPU, where waiting for them looks like work
        self.train_step: Callable[[], int] = lambda: -1  # shown to the node's sampler
        self._seconds: dict[str, tuple[float, float]] = {}  # phase -> (wall time, work)
        self._clocks, self._turn_lock = _clocks(), threading.Lock()
        self._page_file = -1
        self._sampler = ""  # address of the sampler, until it has this rank's page
        self._node = socket.gethostname()

    @property
    def phase_name(self) -> str:
        """The innermost open phase, or the one that raised the current error."""
        return self._raised_in or self._phases[-1]

    @contextmanager
    def phase(self, name: str, progress: Progress | None = None, deadline_s: float = float("inf")) -> Iterator[None]:
        """Report `name` as this rank's phase, and fail after `deadline_s` without progress.

        Entering it counts as progress, and so does `progress.mark()`; at half time a warning names the phase. In a
        nested phase, the inner name is reported.
        """
        before = self._progress, self._deadline_s
        self._progress, self._deadline_s = progress or before[0], deadline_s
        if self._progress is not None:
            self._progress.mark()
        self._turn()
        self._phases.append(name)
        self._raised_in = ""
        self._write_page()
        try:
            yield
        except BaseException:
            self._raised_in = self._raised_in or name
            raise
        finally:
            self._turn()
            self._phases.pop()
            self._progress, self._deadline_s = before
            if self._progress is not None:
                self._progress.mark()
            self._write_page()

    def show_to_sampler(self, address: str) -> None:
        """Hand this rank's page to the sampler of its node at that abstract socket, once it listens."""
        self._sampler = address

    def _turn(self) -> None:
        """Add the time since the last call to the current phase."""
        with self._turn_lock:
            before, self._clocks = self._clocks, _clocks()
            elapsed, worked = self._seconds.get(self._phases[-1], (0.0, 0.0))
            elapsed, worked = (
                total + now - then for total, now, then in zip((elapsed, worked), self._clocks, before, strict=True)
            )
            self._seconds[self._phases[-1]] = round(elapsed, 3), round(worked, 3)

    def describe(self, run_directory: Path, attempt: int, limits: WatchLimits | None = None) -> None:
        """Tell the watcher where records go, who may read them (by this process's umask), its limits, and the number of
        this start."""
        self.run_directory, self.attempt = run_directory, attempt
        umask = os.umask(0o077)  # the umask can only be read by setting it
        os.umask(umask)
        # Looked up while the directory still answers: the watcher checks whether that disk writes, and that its records
        # go into this directory.
        identity = identity_of(run_directory.stat()) if run_directory.exists() else (0, 0)
        place = {"directory": str(run_directory.absolute()), "identity": identity}
        self._send({"kind": "run", **place, "attempt": attempt, "umask": umask, "limits": asdict(limits or WatchLimits())})

    # The watcher

    def connect(self, place: Place) -> None:
        """Start the node's watcher on its first rank, connect to it, and start sending heartbeats.

        Raises RuntimeError if the watcher does not start. It needs Linux; other systems get no watcher.
        """
        if not sys.platform.startswith("linux"):
            self._start_thread()
            return
        address = f"\0megatron-dapo-{os.getuid()}-{place.run_id}-{place.node_rank}"
        self.place, self.attempt = place, place.attempt
        if place.local_rank == 0:
            _start_watcher(place, address)
        self._socket = _connected(address)
        self._socket.settimeout(_SAMPLE_S)
        stacks, page = os.memfd_create("stacks"), os.memfd_create("page")
        os.ftruncate(page, STATUS_BYTES)
        self._page = StatusPage(page, is_writable=True)
        hello = {"kind": "hello", "rank": place.rank, "pid": os.getpid(), "node": self._node}
        socket.send_fds(self._socket, [json.dumps(hello).encode()], [page, stacks])
        self._page_file = page
        # A SIGSEGV leaves its stack there as well. The descriptor stays open for the life of the process.
        faulthandler.enable(file=stacks)
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        self._write_page()
        self._start_thread()

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        thread.start()

        def end() -> None:
            # A thread that returns from torch's C++ code after the interpreter has ended aborts the process ("terminate
            # called without an active exception"), and `_look` asks torch for its process groups' counters.
            self.close()
            if self._socket is not None:
                with suppress(OSError):  # disconnected before
                    self._socket.shutdown(socket.SHUT_RD)
            thread.join(2 * _SAMPLE_S)

        atexit.register(end)

    def close(self, is_complete: bool = False) -> None:
        """Tell the watcher that this process ends, in good order if `is_complete`."""
        if not self._is_closed.is_set():
            self._is_closed.set()
            self._send({"kind": "bye", "is_complete": is_complete})

    def disconnect(self) -> None:
        """Disconnect from the watcher, which forgets this process. Call `close` first."""
        if self._socket is not None:
            self._socket.close()

    def fail(self, error: BaseException) -> int:
        """Report an error that ends this rank, wait for the verdict on the run, and return this rank's exit code.

        This rank prints nothing before the watcher has printed the culprit.
        """
        failure = failure_of(self.rank, error, self.phase_name, self._node)
        # A launcher that ends its other workers must not cut this one's report short.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if not self._report(failure) or not self._verdict.wait(_VERDICT_S):
            self._report_without_watcher(failure)
        elif self._culprit != self.rank:  # the culprit's line is printed already, and its traceback is in failure.json
            say(f"rank {self.rank} ({self._node}): as a consequence: {failure.message}\n")
        return self._exit_code if self._verdict.is_set() else failure.exit_code

    def _report(self, failure: Failure) -> bool:
        self._has_reported = True
        failure = replace(failure, attempt=self.attempt, detail=failure.detail[-_DETAIL_CHARS:])
        return self._send({"kind": "failure", "failure": asdict(failure)})

    def _report_without_watcher(self, failure: Failure) -> None:
        """Print and write a failure if there is no watcher or it does not answer."""
        failure = replace(failure, attempt=self.attempt)
        # stderr first, as files may hang.
        say(f"{failure.detail}\n{first_line(failure)}\n")
        directory = self.run_directory
        if directory is not None:
            write = threading.Thread(
                target=lambda: write_failures(directory, [failure], f"rank_{self.rank}"), daemon=True
            )
            write.start()
            write.join(_WRITE_S)

    def _send(self, message: Mapping[str, Any]) -> bool:
        try:
            if self._socket is not None:
                self._socket.send(json.dumps(message).encode()[:MESSAGE_BYTES])
            return self._socket is not None
        except OSError:
            return False

    # The thread

    def _beat(self) -> None:
        while not self._is_closed.is_set():
            message = self._receive()
            if message is None:
                self._look()
            elif not message and not self._is_closed.is_set():
                say(f"rank {self.rank}: the watcher of {self._node} has ended; without it no hang is noticed\n")
                os._exit(EXIT_CODE)
            elif message:
                self._obey(json.loads(message))

    def _receive(self) -> bytes | None:
        """Return the next message, b"" if the watcher has ended, None if none came for a while."""
        if self._socket is None:
            time.sleep(_SAMPLE_S)
            return None
        try:
            return self._socket.recv(MESSAGE_BYTES)
        except TimeoutError:
            return None
        except OSError:
            return b""

    def _obey(self, order: Mapping[str, Any]) -> None:
        if order["kind"] == "dump":
            self._send({"kind": "dump", "text": flight_record()})
        elif order["kind"] == "verdict":
            self._exit_code, self._culprit = int(order["exit_code"]), int(order["culprit"])
            self._verdict.set()
            # The main thread may be in `fail`, which prints and exits; otherwise it hangs or its work is futile.
            time.sleep(_LAST_S)
            os._exit(self._exit_code)

    def _look(self) -> None:
        """Sample what the main thread does, and enforce the phase's deadline."""
        wait, doing = waiting_for(sys._current_frames().get(threading.main_thread().ident or 0))
        if wait == BOUNDED:
            self._last_bounded = (self._beats, doing)
        elif not wait and self._beats - self._last_bounded[0] <= _LOOP_SAMPLES:
            wait, doing = BOUNDED, self._last_bounded[1]  # a loop of waits is one: between two, the thread is elsewhere
        self._sample = {"wait": wait, "doing": doing, **_sequence_numbers()}
        self._beats += 1
        self._turn()
        self._write_page()
        if self._sampler and self._page_file >= 0 and _handed_over(self._sampler, self.rank, self._page_file):
            os.close(self._page_file)
            self._sampler, self._page_file = "", -1
        if self._progress is None or self._has_reported:
            return
        idle_s, deadline_s = self._progress.idle_s, self._deadline_s
        message = f"no progress for {idle_s:.1f} s (limit {deadline_s:g} s), in {doing}"
        if idle_s > deadline_s:
            self._expire(Failure(self.rank, "deadline", message, self._node, self.phase_name, stacks()))
        elif idle_s < deadline_s / 2:
            self._has_warned = False  # Warn again at the next silence.
        elif not self._has_warned:
            self._has_warned = True
            logger.warning("rank %d, phase %s: %s", self.rank, self.phase_name, message)

    def _expire(self, failure: Failure) -> None:
        """End this rank at its deadline: the main thread cannot be woken."""
        timer = threading.Timer(_VERDICT_S, os._exit, [EXIT_CODE])
        timer.daemon = True
        timer.start()
        if not self._report(failure):
            self._report_without_watcher(failure)
            os._exit(EXIT_CODE)

    def _write_page(self) -> None:
        if self._page is None:
            return
        page = {"phase": self.phase_name, "beats": self._beats, "is_on_gpu": self.is_on_gpu, **self._sample}
        page["progress"] = self._progress.count if self._progress is not None else 0
        page["step"], page["seconds"] = self.train_step(), dict(self._seconds)
        if self.file_process is not None:
            page["file_process"] = [self.file_process.pid, self.file_process.doing]
        self._page.write(page)


@contextmanager
def watched_alone(phase: str) -> Iterator[None]:
    """Have a watcher end this process if it hangs in the body; for commands of one process."""
    heartbeat = Heartbeat()
    heartbeat.connect(Place(0, 1, 0, 0, 1, f"{os.getpid()}-{time.time_ns()}", ("127.0.0.1", 0)))
    try:
        with heartbeat.phase(phase):
            yield
    finally:
        # The command prints its errors itself. Without the connection the watcher exits.
        heartbeat.close(is_complete=True)
        heartbeat.disconnect()


def _start_watcher(place: Place, address: str) -> None:
    start_helper(
        "megatron_dapo.watch.watcher",
        json.dumps({**asdict(place), "address": address[1:]}),
        stdout=sys.__stderr__,
        stderr=None,  # this rank's
        start_new_session=True,  # a launcher that kills its workers' process groups must not kill the watcher
    )


def _connected(address: str) -> socket.socket:
    end = time.monotonic() + _CONNECT_S
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(address)
            return connection
        except OSError as error:
            connection.close()
            if time.monotonic() > end:
                raise RuntimeError(
                    f"the watcher of node {socket.gethostname()} did not answer within {_CONNECT_S:g} s ({error}); its first "
                    "rank starts it: see that rank's log"
                ) from None
            time.sleep(0.02)


def _handed_over(address: str, rank: int, page: int) -> bool:
    """Return True once the sampler at an abstract socket has a rank's page."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(_SAMPLE_S)
            connection.connect(f"\0{address}")
            socket.send_fds(connection, [json.dumps({"rank": rank}).encode()], [page])
            return True
    except OSError:
        return False


def _clocks() -> tuple[float, float]:
    """Return the time, and how long the main thread has been on a CPU or waiting for one, in seconds.

    On a crowded or throttled node, a rank waits for a CPU in phases in which ranks of other nodes wait for it.
    """
    work = read_text("/proc/self/schedstat").split()[:2]
    return time.monotonic(), sum(map(int, work)) / 1e9


def waiting_for(frame: FrameType | None) -> tuple[str, str]:
    """Return the kind of wait of a thread's innermost listed frame ("" if none), and where the thread is."""
    innermost = ""
    while frame is not None:
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        here = f"{function} ({'/'.join(file.split('/')[-2:])}:{frame.f_lineno})"
        innermost = innermost or here
        module = str(frame.f_globals.get("__name__", ""))
        for package, kind, name in WAITS:
            if module == package or module.startswith(f"{package}."):
                return kind, f"{name}: {here}" if name else here
        if module.startswith("megatron_dapo."):
            return "", here
        frame = frame.f_back
    return "", innermost


def _sequence_numbers() -> dict[str, Any]:
    """Return how many collectives this rank has entered, by process group and in total; nothing before torch is loaded.

    NCCL counts like gloo when the host enters a collective, before the communicator exists and without asking the device
    (ProcessGroupNCCL::collective increments seqCollective_). Neither counts messages between two ranks.
    """
    # Read from torch's own counters, never imported here: the rank may not have started torch.distributed.
    # The main thread may be importing it right now; then it has no groups yet.
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    if world is None:
        return {}
    groups = {}
    for group in list(world.pg_map):
        try:
            groups[_name_of(group)] = group._get_sequence_number_for_group()
        except RuntimeError:  # a backend without such counters
            continue
    newest = sorted(groups.items(), key=lambda item: -item[1])[:_MAX_GROUPS]
    return {"groups": dict(newest), "sequence": sum(groups.values())}


def _name_of(group: Any) -> str:
    """Return a name that all members of a process group share, with its description if it was created with one."""
    purpose = getattr(group, "group_desc", "undefined")
    return group.group_name if purpose in ("", "undefined") else f"{group.group_name} ({purpose})"


def flight_record(num_entries: int = 20) -> str:
    """Return the newest entries of torch's flight recorder as lines, "" if torch has none."""
    module = sys.modules.get("torch._C._distributed_c10d")
    lines = []
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump = getattr(module, name, None)
        try:
            entries = json.loads(dump())["entries"] if dump else []
        except Exception as error:  # any error: this is a last look at a run that has failed
            entries = [{"profiling_name": f"{name}: {error}"}]
        for entry in entries[-num_entries:]:
            lines.append(
                f"{entry.get('profiling_name')} seq {entry.get('collective_seq_id')} group {entry.get('process_group')} "
                f"{entry.get('state')}"
            )
    return "\n".join(lines)


def stacks() -> str:
    """Return the Python stacks of all threads. Unlike faulthandler's, writing them releases the GIL if the write hangs."""
    import traceback

    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames().items()
    return "\n".join(
        f"thread {names.get(number, number)}:\n{''.join(traceback.format_stack(frame))}" for number, frame in frames
    )


def say(text: str) -> None:
    """Write to stderr by its descriptor: the lock of sys.stderr may be held by a thread that hangs."""
    try:
        os.write(2, text.encode("utf-8", errors="replace"))
    except OSError:
        pass
