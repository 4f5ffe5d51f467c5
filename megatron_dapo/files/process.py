"""The file process of a rank: it does the rank's file operations, so a hanging file system blocks it, not the rank.

    rank: FileProcess                              file process: main
    run(function, arguments)   --- socket: JSON ->  calls the function by its name
    write(path, chunks)        --- shared memory -> hashes and writes one part while the rank copies the next
    start(function, arguments) --- socket: JSON ->  calls the function in a thread, while other requests go on
    result, or the same error  <-- socket: JSON --

`copy_memory` is a second shared memory, as large as a rank's part of a checkpoint; started functions read it.

The rank waits on the socket, where a signal or the watcher can end it. The kernel kills the file process when its
rank dies, for any reason; if the file system is blocking it at that time, it dies before its next operation. It imports
only the standard library, and isal for checksums.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import mmap
import os
import resource
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from megatron_dapo.files.durable import FILE_PROCESS, FileEntry, Files, OpenFile, Work
from megatron_dapo.files.linux import end_with_parent, ignore_launcher_signals, start_helper

_NUM_PARTS = 16  # parts of the shared memory: one is written while the next ones are filled
_MEMORY_BYTES = 1 << 26
_END_S = 2.0  # limit of a clean exit; a process blocked in the kernel is abandoned


class FileProcess(Files):
    """Writes files in a separate process. Threads may share it: it handles requests in order of arrival."""

    IS_POSSIBLE = sys.platform.startswith("linux")

    def __init__(self) -> None:
        """Start the process; the calling thread must live as long as this process, as the main thread does."""
        self._socket, theirs = socket.socketpair()
        memory = os.memfd_create("files")
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]  # applies to files in memory too
        size = min(_MEMORY_BYTES, limit) if limit != resource.RLIM_INFINITY else _MEMORY_BYTES
        os.ftruncate(memory, size)  # pages are allocated on first use
        self._memory, self._part_bytes = mmap.mmap(memory, size), size // _NUM_PARTS
        self._copy_file, self._copy_bytes = os.memfd_create("checkpoint"), 0
        descriptors = theirs.fileno(), memory, self._copy_file
        isal = importlib.util.find_spec("isal")
        packages = [str(Path(isal.origin).parents[1])] if isal is not None and isal.origin is not None else []
        self._process = start_helper(
            "megatron_dapo.files.process", *map(str, descriptors), packages=packages, pass_fds=descriptors
        )
        theirs.close()
        os.close(memory)
        self._sending, self._writing = threading.Lock(), threading.Lock()
        self._number = 0
        # Request number -> what it does, and its answer, oldest first.
        self._pending: dict[int, tuple[str, Future[Any]]] = {}
        threading.Thread(target=self._read, name="file process", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def doing(self) -> str:
        """The current operation and its file, "" if there is none."""
        return next((doing for doing, _ in list(self._pending.values())), "")

    def hold(self, *directories: Path) -> None:
        self._send({"do": "hold", "directories": directories}, "hold").result()

    def require_held(self) -> None:
        self._send({"do": "require_held"}, "require_held").result()

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return function(*arguments) computed in the file process; its errors are raised here."""
        return self._request("call", function, arguments).result()

    def start(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Begin function(work, *arguments) in a thread of the file process; `work` is a `Work` with `copy_memory`."""
        return self._request("start", function, arguments, copy_bytes=self._copy_bytes)

    def cancel(self, job: Future[Any]) -> None:
        """Have a started function end early, with an error, and wait for that; it may be done already."""
        number = next((number for number, (_, answer) in list(self._pending.items()) if answer is job), None)
        if number is not None:
            self._send({"do": "cancel", "job": number}, "cancel").result()
        job.exception()  # waits

    def _request(self, kind: str, function: Callable[..., Any], arguments: tuple[Any, ...], **more: int) -> Future[Any]:
        """Send a request to call a function of a module."""
        target = next((str(each) for each in arguments if isinstance(each, Path)), "")
        named = [function.__module__, function.__qualname__]
        request = {"do": kind, "function": named, "arguments": arguments, **more}
        return self._send(request, f"{function.__name__.lstrip('_')} {target}")

    def copy_memory(self, num_bytes: int) -> mmap.mmap:
        """Return shared memory of at least `num_bytes`, the same one at each call; it grows to the largest request.

        It is freed with both processes, however they end. Raises OSError (EFBIG) beyond a limit on the size of files.
        """
        if num_bytes > self._copy_bytes:
            os.ftruncate(self._copy_file, num_bytes)
            self._copy_bytes = num_bytes
        return mmap.mmap(self._copy_file, max(self._copy_bytes, 1))

    def write(
        self, path: Path, chunks: Iterable[bytes | memoryview], mode: str = "w", sizes: Sequence[int] = ()
    ) -> FileEntry:
        """Write chunks to a file, see `OpenFile`. Each is copied once, and hashed and written by the file process."""
        doing = f"write {path}"
        with self._writing:
            sent = deque([self._send({"do": "open", "path": path, "mode": mode, "sizes": sizes}, doing)])
            is_whole = False
            try:
                self._copy(chunks, doing, sent)
                is_whole = True
            finally:
                sent.append(self._send({"do": "close", "is_whole": is_whole}, doing))
                *_, entry = [answer.result() for answer in sent]
        return FileEntry(**entry)

    def close(self) -> None:
        """End the process after it has answered all requests, or after a short wait."""
        with suppress(OSError):  # the process has ended already
            self._socket.shutdown(socket.SHUT_RDWR)  # also ends the thread that reads answers
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _copy(self, chunks: Iterable[bytes | memoryview], doing: str, sent: deque[Future[Any]]) -> None:
        """Copy chunks into the shared memory, part by part; `sent`: the unanswered requests."""
        part = used = 0
        for chunk in chunks:
            view = memoryview(chunk).cast("B")
            while view:
                if used == self._part_bytes:
                    self._send_part(part, used, doing, sent)
                    part, used = (part + 1) % _NUM_PARTS, 0
                count = min(len(view), self._part_bytes - used)
                start = part * self._part_bytes + used
                self._memory[start : start + count] = view[:count]
                view, used = view[count:], used + count
        self._send_part(part, used, doing, sent)

    def _send_part(self, part: int, num_bytes: int, doing: str, sent: deque[Future[Any]]) -> None:
        start = part * self._part_bytes
        sent.append(self._send({"do": "part", "start": start, "end": start + num_bytes}, doing))
        while len(sent) >= _NUM_PARTS:  # a part is refilled only after it has been written
            sent.popleft().result()

    def _send(self, request: Mapping[str, Any], doing: str) -> Future[Any]:
        """Send a request; the result is that of its answer, or its error. Raises RuntimeError if the process has ended."""
        with self._sending:
            self._number += 1
            text = json.dumps({"number": self._number, **request}, default=_encoded)
            answer = Future[Any]()
            self._pending[self._number] = doing, answer
            try:
                self._socket.sendall(text.encode() + b"\n")
            except OSError as error:
                raise self._lost() from error
            return answer

    def _read(self) -> None:
        """Receive answers until the process closes its socket or dies; then the rest fail."""
        with suppress(OSError):  # it died with unread requests, or after `close`
            for line in self._socket.makefile("rb"):
                reply = json.loads(line)
                for name, level, message in reply["log"]:
                    logging.getLogger(name).log(level, "%s", message)
                _, answer = self._pending.pop(reply["number"])
                if "error" in reply:
                    answer.set_exception(_error(reply["error"]))
                else:
                    answer.set_result(reply["result"])
        error = self._lost()
        for _, answer in list(self._pending.values()):
            answer.set_exception(error)

    def _lost(self) -> RuntimeError:
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return RuntimeError(f"the file process {self.pid} of this rank has closed its socket")
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return RuntimeError(f"the file process {self.pid} of this rank {how} at {self.doing or 'no work'}")


# Paths and errors as JSON


def _encoded(value: object) -> object:
    if isinstance(value, Path):
        return {_PATH: str(value.absolute())}  # the file process works in "/"
    raise TypeError(f"a {type(value).__name__} is no argument for a file process")


_PATH = "__path__"


def _decoded(document: dict[str, Any]) -> Any:
    return Path(document[_PATH]) if document.keys() == {_PATH} else document


def _described(error: Exception) -> dict[str, Any]:
    names = [error.filename, None, error.filename2] if isinstance(error, OSError) and error.errno else []
    arguments = [*(error.args[:2] if names else error.args), *names]
    return {"type": [type(error).__module__, type(error).__qualname__], "arguments": arguments, "text": repr(error)}


def _error(description: Mapping[str, Any]) -> Exception:
    module, name = description["type"]
    try:
        error = getattr(importlib.import_module(module), name)(*description["arguments"])
    except Exception:  # the type may need other arguments
        error = None
    return error if isinstance(error, Exception) else RuntimeError(description["text"])


# The file process


class _Log(logging.Handler):
    """Keeps what is logged for the rank, whose handlers print it."""

    def __init__(self) -> None:
        super().__init__()
        self._records: list[tuple[str, int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append((record.name, record.levelno, record.getMessage()))

    def taken(self) -> list[tuple[str, int, str]]:
        with self.lock or nullcontext():
            taken, self._records = self._records, []
        return taken


class _Server:
    """Does one request after the other; each started job has its thread."""

    def __init__(self, connection: socket.socket, memory: mmap.mmap, copy: int) -> None:
        self._connection, self._sending = connection, threading.Lock()
        self._memory, self._copy = memoryview(memory), copy
        self._log = _Log()
        self._files = Files()  # knows the held directories
        self._file: OpenFile | None = None
        self._problem: Exception | None = None  # the first error of the file being written; reported when it is closed
        self._cancelled: dict[int, threading.Event] = {}  # request number -> event of a started function
        logging.basicConfig(level=logging.INFO, handlers=[self._log])

    def do(self, request: Mapping[str, Any]) -> None:
        """Handle a request and answer it, or start its function."""
        if request["do"] == "start":
            self._cancelled[request["number"]] = threading.Event()
            threading.Thread(target=self._answer, args=(request, self._do_job), daemon=True).start()
        else:
            self._answer(request, self._do)

    def _answer(self, request: Mapping[str, Any], do: Callable[[Mapping[str, Any]], Any]) -> None:
        try:
            if request["do"] in ("call", "start", "open"):
                self._files.require_held()
            reply = {"result": do(request)}
        except Exception as error:  # any error is sent to the rank
            reply = {"error": _described(self._cause_of(error))}
        with self._sending:
            reply |= {"number": request["number"], "log": self._log.taken()}
            self._connection.sendall(json.dumps(reply, default=str).encode() + b"\n")

    def _cause_of(self, error: Exception) -> Exception:
        """Return the loss of a held directory if there is one, which an error while files are written follows from."""
        try:
            self._files.require_held()
        except Exception as cause:
            return cause
        return error

    def _do_job(self, request: Mapping[str, Any]) -> Any:
        number, num_bytes = request["number"], request["copy_bytes"]
        memory = mmap.mmap(self._copy, num_bytes) if num_bytes else b""
        try:
            return _function(request)(Work(memoryview(memory), self._cancelled[number]), *request["arguments"])
        finally:
            del self._cancelled[number]

    def _do(self, request: Mapping[str, Any]) -> Any:
        kind = request["do"]
        if kind in ("hold", "require_held"):
            return getattr(self._files, kind)(*request.get("directories", ()))
        if kind == "call":
            return _function(request)(*request["arguments"])
        if kind == "cancel":
            if request["job"] in self._cancelled:
                self._cancelled[request["job"]].set()
            return None
        try:
            if kind == "open":
                self._file = self._problem = None
                self._file = OpenFile(request["path"], request["mode"], request["sizes"])
            elif kind == "part" and self._file is not None and self._problem is None:
                self._file.write(self._memory[request["start"] : request["end"]])
        except OSError as error:
            self._problem = error
        return self._close(request["is_whole"]) if kind == "close" else None

    def _close(self, is_whole: bool) -> dict[str, Any] | None:
        file, self._file = self._file, None
        try:
            if self._problem is not None and is_whole:
                raise self._problem
            return file.finish().to_json() if file is not None and is_whole else None
        finally:
            if file is not None:
                file.close()


def _function(request: Mapping[str, Any]) -> Callable[..., Any]:
    module, name = request["function"]
    return getattr(importlib.import_module(module), name)


def main() -> None:
    """Serve the rank that has started this process, until it closes its socket or dies."""
    ignore_launcher_signals()  # the rank still has to save its state
    rank = os.getppid()
    end_with_parent()
    Path("/proc/self/comm").write_text(FILE_PROCESS, encoding="ascii")
    connection = socket.socket(fileno=int(sys.argv[1]))
    server = _Server(connection, mmap.mmap(int(sys.argv[2]), 0), int(sys.argv[3]))
    for line in connection.makefile("rb"):
        if os.getppid() != rank:
            return
        server.do(json.loads(line, object_hook=_decoded))


if __name__ == "__main__":
    main()
