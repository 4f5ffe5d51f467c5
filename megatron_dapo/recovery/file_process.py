"""The file process of a rank: it does the rank's work on files, so that a file system that hangs holds it and not the rank.

    rank: FileProcess                              file process: main
    run(function, arguments)   --- socket: JSON ->  calls the function by its name
    write(path, chunks)        --- shared memory -> hashes and writes one part while the rank copies the next
    result, or the same error  <-- socket: JSON --

The rank waits on the socket, where a signal or the watcher's word can end it. The kernel kills the file process when its
rank dies, however it dies; if it is held by the file system then, it dies before its next operation. It starts by its file
and imports the standard library alone.
"""

from __future__ import annotations

import importlib
import json
import logging
import mmap
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FunctionType
from typing import Any

from megatron_dapo.engines.sglang.processes import end_with_parent
from megatron_dapo.recovery.durable_files import FileEntry, Files, OpenFile
from megatron_dapo.recovery.evidence import FILE_PROCESS

_NUM_PARTS = 16  # of the shared memory: one is written while the next are filled
_MEMORY_BYTES = 1 << 26
_END_S = 2.0  # to end in good order; one that the kernel holds is left to it


class FileProcess(Files):
    """Writes files in a process of its own. Threads may share it: requests are done in the order in which they come."""

    IS_POSSIBLE = sys.platform.startswith("linux")

    def __init__(self) -> None:
        """Start the process; the calling thread has to live as long as this one's process, as the main thread does."""
        self._socket, theirs = socket.socketpair()
        self._answers = self._socket.makefile("rb")
        memory = os.memfd_create("files")
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]  # holds for files in memory too
        size = min(_MEMORY_BYTES, limit) if limit != resource.RLIM_INFINITY else _MEMORY_BYTES
        os.ftruncate(memory, size)  # pages exist once they are used
        self._memory, self._part_bytes = mmap.mmap(memory, size), size // _NUM_PARTS
        descriptors = theirs.fileno(), memory
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-m", "megatron_dapo.recovery.file_process", *map(str, descriptors)],
            cwd="/",
            env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
            pass_fds=descriptors,
            # A process that the kernel holds must not hold the log open, whose reader may wait for its end.
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        theirs.close()
        os.close(memory)
        self._sending, self._receiving, self._writing = threading.Lock(), threading.Lock(), threading.Lock()
        self._number = 0
        self._pending: dict[int, str] = {}  # number of a request -> what it does, the oldest first
        self._replies: dict[int, dict[str, Any]] = {}

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def doing(self) -> str:
        """Name of the operation under way with its file, "" if there is none."""
        return next(iter(list(self._pending.values())), "")

    def run(self, function: FunctionType, *arguments: Any) -> Any:
        """Return function(*arguments) as the file process computes it; its errors are raised here."""
        target = next((str(each) for each in arguments if isinstance(each, Path)), "")
        request = {"do": "call", "function": [function.__module__, function.__qualname__], "arguments": arguments}
        return self._result(self._send(request, f"{function.__name__.lstrip('_')} {target}"))

    def write(self, path: Path, chunks: Iterable[bytes | memoryview], mode: str = "w") -> FileEntry:
        """Write chunks to a file, see `OpenFile`. Each is copied once, and hashed and written by the file process."""
        doing = f"write {path}"
        with self._writing:
            sent = deque([self._send({"do": "open", "path": path, "mode": mode}, doing)])
            is_whole = False
            try:
                self._copy(chunks, doing, sent)
                is_whole = True
            finally:
                sent.append(self._send({"do": "close", "is_whole": is_whole}, doing))
                *_, entry = map(self._result, sent)
        return FileEntry(**entry)

    def close(self) -> None:
        """End the process, once it has answered all requests, or soon."""
        with suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)  # also wakes a thread that waits for an answer
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _copy(self, chunks: Iterable[bytes | memoryview], doing: str, sent: deque[int]) -> None:
        """Copy chunks into the shared memory, part by part; `sent` are the requests without an answer yet."""
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

    def _send_part(self, part: int, num_bytes: int, doing: str, sent: deque[int]) -> None:
        start = part * self._part_bytes
        sent.append(self._send({"do": "part", "start": start, "end": start + num_bytes}, doing))
        while len(sent) >= _NUM_PARTS:  # the next part is filled once it has been written
            self._result(sent.popleft())

    def _send(self, request: Mapping[str, Any], doing: str) -> int:
        """Send a request and return its number. Raises RuntimeError if the process has ended."""
        with self._sending:
            self._number += 1
            text = json.dumps({"number": self._number, **request}, default=_encoded)
            self._pending[self._number] = doing
            try:
                self._socket.sendall(text.encode() + b"\n")
            except OSError as error:
                raise self._lost() from error
            return self._number

    def _result(self, number: int) -> Any:
        """Wait for the answer to a request."""
        with self._receiving:
            while number not in self._replies:
                try:
                    line = self._answers.readline()
                except ConnectionResetError:  # it died with requests unread
                    line = b""
                if not line:
                    raise self._lost()
                reply = json.loads(line)
                self._pending.pop(reply["number"])
                for name, level, message in reply["log"]:
                    logging.getLogger(name).log(level, "%s", message)
                self._replies[reply["number"]] = reply
            reply = self._replies.pop(number)
        if "error" in reply:
            raise _error(reply["error"])
        return reply["result"]

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
    """Return the error that a description is of."""
    module, name = description["type"]
    try:
        error = getattr(importlib.import_module(module), name)(*description["arguments"])
    except Exception:  # any type may want other arguments
        error = None
    return error if isinstance(error, Exception) else RuntimeError(description["text"])


# The file process


class _Log(logging.Handler):
    """Keeps what is logged for the rank, whose handlers print it."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[tuple[str, int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append((record.name, record.levelno, record.getMessage()))


class _Server:
    """Does one request after the other."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memoryview(memory)
        self._file: OpenFile | None = None
        self._problem: Exception | None = None  # of the file that is being written, told when it is closed

    def do(self, request: Mapping[str, Any]) -> Any:
        kind = request["do"]
        if kind == "call":
            module, name = request["function"]
            return getattr(importlib.import_module(module), name)(*request["arguments"])
        try:
            if kind == "open":
                self._file = self._problem = None
                self._file = OpenFile(request["path"], request["mode"])
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


def main() -> None:
    """Serve the rank that has started this process, until it closes its socket or dies."""
    # A launcher that ends its job sends these to every process; the rank has still to save its state.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    rank = os.getppid()
    end_with_parent()
    Path("/proc/self/comm").write_text(FILE_PROCESS, encoding="ascii")
    connection = socket.socket(fileno=int(sys.argv[1]))
    server, log = _Server(mmap.mmap(int(sys.argv[2]), 0)), _Log()
    logging.basicConfig(level=logging.INFO, handlers=[log])
    for line in connection.makefile("rb"):
        if os.getppid() != rank:
            return
        request = json.loads(line, object_hook=_decoded)
        try:
            reply = {"result": server.do(request)}
        except Exception as error:  # whatever it is, it is the rank's
            reply = {"error": _described(error)}
        reply |= {"number": request["number"], "log": log.records}
        connection.sendall(json.dumps(reply, default=str).encode() + b"\n")
        log.records.clear()


if __name__ == "__main__":
    main()
