"""The keeper of a node's copies of checkpoints: files in its memory, which outlive the processes of a run.

    file process of a rank  --- UNIX socket: create, a descriptor back, complete --->  keeper of the node
                            --- TCP: put, then the file's bytes -------------------->  keeper of the peer node
    rank that loads         --- UNIX socket: find, a descriptor back --------------->  keeper of the node
    keeper of another node  --- TCP: get, the file's bytes back -------------------->  keeper that has the file

The files have no name (O_TMPFILE in /dev/shm): the kernel frees them when the last process that holds one ends, for any
reason. A complete copy is found by the name, size and hash in the manifest of a committed checkpoint: a copy that no
manifest lists is never read. The keeper exits when the run is over, or `keep_s` after the last trainer rank has gone.
It is not a child of the run's launcher and imports only the standard library. `memory_copies` is the other side.
"""

from __future__ import annotations

import errno
import hmac
import json
import mmap
import os
import secrets
import select
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import Any

from megatron_dapo.files.linux import ignore_launcher_signals, require_same_user

SHARED_MEMORY = "/dev/shm"
MESSAGE_BYTES = 1 << 14  # limit of one request or answer
_MAX_CONNECTIONS = 256  # over TCP
_CONNECT_S, _SILENCE_S = 3.0, 10.0  # limits for another keeper, whose node may be lost
_LOST_S = 60.0  # A keeper that did not answer is asked again after this.
_TICK_S = 0.2
_FIRST_RANK_S = 600.0  # The first trainer rank may import from a slow file system.


@dataclass(frozen=True)
class CopyId:
    """Identity of a copy: a file of the checkpoint of a step, as its manifest names it."""

    step: int
    name: str
    size: int
    sha256: str

    @classmethod
    def of(cls, request: Mapping[str, Any]) -> CopyId:
        """Read the identity from a request. Raises KeyError, TypeError or ValueError if there is none."""
        return cls(int(request["step"]), str(request["name"]), int(request["size"]), str(request["sha256"]))


class CopyStore:
    """The copies that a keeper holds. Threads may share it. Descriptors belong to the store."""

    def __init__(self, limit_bytes: int, directory: str = SHARED_MEMORY) -> None:
        """`limit_bytes`: bound on all copies; 0: as much as `directory`, a tmpfs, has room for."""
        self.limit_bytes = limit_bytes
        self._directory = directory
        self._lock = threading.Lock()
        self._copies: dict[CopyId, int] = {}
        self._unfinished: dict[CopyId, int] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all copies, unfinished ones included."""
        return sum(copy.size for copies in (self._copies, self._unfinished) for copy in list(copies))

    def create(self, copy: CopyId) -> int:
        """Return the descriptor of a file of the copy's size, to write to. OSError (ENOSPC) if there is no room."""
        with self._lock:
            self._drop(copy.step, copy.name)
            if copy.size < 0 or self.limit_bytes and self.num_bytes + copy.size > self.limit_bytes:
                used = f"{self.num_bytes / 2**20:.0f} MiB of {self.limit_bytes / 2**20:.0f} MiB are taken"
                raise OSError(errno.ENOSPC, f"a copy of {copy.size / 2**20:.0f} MiB is beyond the limit: {used}")
            descriptor = os.open(self._directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            self._unfinished[copy] = descriptor
        try:
            if copy.size:
                os.posix_fallocate(
                    descriptor, 0, copy.size
                )  # writing to a full tmpfs through a mapping would raise SIGBUS
        except OSError as error:
            self.discard(copy)
            raise OSError(
                error.errno, f"{self._directory} has no room for a copy of {copy.size / 2**20:.0f} MiB"
            ) from None
        return descriptor

    def complete(self, copy: CopyId) -> None:
        """Make a fully written copy available. Raises KeyError if it was discarded meanwhile."""
        with self._lock:
            self._copies[copy] = self._unfinished.pop(copy)

    def discard(self, copy: CopyId) -> None:
        """Free a copy that was not completed, if there is one."""
        with self._lock:
            descriptor = self._unfinished.pop(copy, -1)
        if descriptor >= 0:
            os.close(descriptor)

    def find(self, copy: CopyId) -> int:
        """Return a new descriptor of a whole copy, -1 if there is none."""
        with self._lock:
            descriptor = self._copies.get(copy, -1)
            return os.dup(descriptor) if descriptor >= 0 else -1

    def keep_only(self, step: int) -> None:
        with self._lock:
            for copy in [copy for copy in self._copies if copy.step != step]:
                os.close(self._copies.pop(copy))

    def _drop(self, step: int, name: str) -> None:
        """Free what an earlier attempt saved under the same name and step."""
        for copies in (self._copies, self._unfinished):
            for copy in [copy for copy in copies if (copy.step, copy.name) == (step, name)]:
                os.close(copies.pop(copy))


class Keeper:
    """Holds copies for trainer ranks and answers their requests."""

    def __init__(self, copies: CopyStore, keep_s: float) -> None:
        self.copies, self.keep_s = copies, keep_s
        self.token = ""  # the run's; nothing is received or sent over TCP before it is known
        self.address = ""  # host and port of the TCP socket
        self.is_over = False
        self._lock = threading.Lock()
        self._num_ranks = 0
        self._alone_since = time.monotonic() + max(0.0, _FIRST_RANK_S - keep_s)
        self._fetching = threading.Lock()
        self._lost: dict[str, float] = {}  # keepers that did not answer, and when

    @property
    def is_done(self) -> bool:
        """True if the copies are no longer needed."""
        with self._lock:
            return self.is_over or self._num_ranks == 0 and time.monotonic() - self._alone_since > self.keep_s

    def rank_comes(self, token: str, keep_s: float, limit_bytes: int) -> None:
        """Note a trainer rank of the node, with the settings of its attempt."""
        with self._lock:
            self._num_ranks += 1
            self.token, self.keep_s, self.copies.limit_bytes = token, keep_s, limit_bytes

    def rank_goes(self) -> None:
        """Note the end of a trainer rank, or of its connection."""
        with self._lock:
            self._num_ranks -= 1
            self._alone_since = time.monotonic()

    def find(self, copy: CopyId, keepers: list[str]) -> tuple[int, str]:
        """Return a descriptor of a copy and who had it: this "node", or a "peer" of `keepers`, from which it was fetched.

        -1 and "" if none has it, none answers, or this keeper has no room.
        """
        with self._fetching:  # ranks of a node may want the same file
            if (descriptor := self.copies.find(copy)) >= 0:
                return descriptor, "node"
            for address in keepers:
                if address != self.address and time.monotonic() - self._lost.get(address, -_LOST_S) >= _LOST_S:
                    try:
                        self._fetch(copy, address)
                    except (ConnectionError, TimeoutError, ValueError):
                        self._lost[address] = time.monotonic()  # its node may be lost
                    except OSError:
                        continue
                if (descriptor := self.copies.find(copy)) >= 0:
                    return descriptor, "peer"
        return -1, ""

    def _fetch(self, copy: CopyId, address: str) -> None:
        """Fetch a copy from another keeper into this one, if it has it."""
        with RemoteKeeper(address, self.token) as remote:
            if not remote.ask("get", copy)["is_there"]:
                return
            descriptor = self.copies.create(copy)
            try:
                receive(remote.stream, descriptor, copy.size)
                self.copies.complete(copy)
            finally:
                self.copies.discard(copy)


# ---- between keepers, over TCP


class RemoteKeeper:
    """A connection to the keeper of another node. OSError or ValueError if it does not answer or refuses."""

    def __init__(self, address: str, token: str) -> None:
        host, _, port = address.rpartition(":")
        try:
            self.socket = socket.create_connection((host, int(port)), _CONNECT_S)
        except OSError as error:  # no route, no name, no listener
            raise ConnectionError(f"{address}: {error}") from None
        self.socket.settimeout(_SILENCE_S)
        self.stream: BufferedIOBase = self.socket.makefile("rb")
        self._token = token

    def __enter__(self) -> RemoteKeeper:
        return self

    def __exit__(self, *rest: object) -> None:
        self.stream.close()
        self.socket.close()

    def ask(self, operation: str, copy: CopyId) -> dict[str, Any]:
        """Send the request of this connection and return the answer."""
        nonce = self.stream.readline(MESSAGE_BYTES).strip()
        request = {"do": operation, "proof": _proof(self._token, nonce), **copy.__dict__}
        self.socket.sendall(json.dumps(request).encode() + b"\n")
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Return the next answer. OSError with its text if it is an error."""
        line = self.stream.readline(MESSAGE_BYTES)
        if not line:
            raise ConnectionError("it refused the request")
        answer = json.loads(line)
        if "error" in answer:
            raise OSError(errno.ENOSPC, answer["error"])
        return answer


def _proof(token: str, nonce: bytes) -> str:
    return hmac.new(token.encode(), nonce, "sha256").hexdigest()


def receive(stream: BufferedIOBase, descriptor: int, size: int) -> None:
    """Read `size` bytes of a stream into a file. ConnectionError if it ends early."""
    if not size:
        return
    with mmap.mmap(descriptor, size) as memory, memoryview(memory) as view:
        done = 0
        while done < size:
            with view[done:] as rest:
                count = stream.readinto(rest)
            if not count:
                raise ConnectionError(f"{done} of {size} bytes came")
            done += count


class _Listener(socketserver.ThreadingTCPServer):
    """Connections of other nodes' keepers and file processes."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, keeper: Keeper) -> None:
        self.keeper = keeper
        self.slots = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        super().__init__((host, 0), _Remote)
        keeper.address = f"{host}:{self.server_address[1]}"

    def verify_request(self, request: Any, client_address: object) -> bool:
        return self.slots.acquire(blocking=False)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore it: a lost node leaves a broken connection."""


class _Remote(socketserver.StreamRequestHandler):
    """One connection from another node: one request."""

    timeout = _SILENCE_S

    def handle(self) -> None:
        server: _Listener = self.server  # type: ignore[assignment]
        try:
            self._answer(server.keeper)
        finally:
            server.slots.release()

    def _answer(self, keeper: Keeper) -> None:
        nonce = secrets.token_hex(16).encode()
        self.wfile.write(nonce + b"\n")
        request = json.loads(self.rfile.readline(MESSAGE_BYTES))
        if not keeper.token or not hmac.compare_digest(str(request["proof"]), _proof(keeper.token, nonce)):
            return
        copy = CopyId.of(request)
        if request["do"] == "get":
            self._give(keeper, copy)
        elif request["do"] == "put":
            self._take(keeper, copy)

    def _give(self, keeper: Keeper, copy: CopyId) -> None:
        descriptor = keeper.copies.find(copy)
        self._say({"is_there": descriptor >= 0})
        if descriptor < 0:
            return
        with open(descriptor, "rb") as file:
            self.connection.sendfile(file)

    def _take(self, keeper: Keeper, copy: CopyId) -> None:
        try:
            descriptor = keeper.copies.create(copy)
        except OSError as error:
            self._say({"error": error.strerror})
            return
        self._say({})
        try:
            receive(self.rfile, descriptor, copy.size)
            keeper.copies.complete(copy)
        finally:
            keeper.copies.discard(copy)
        self._say({})

    def _say(self, answer: Mapping[str, Any]) -> None:
        self.wfile.write(json.dumps(answer).encode() + b"\n")


# ---- with processes of the node, over a UNIX socket


class _Local:
    """One connection from a process of this node. Copies it did not complete are discarded at its end."""

    def __init__(self, connection: socket.socket, keeper: Keeper) -> None:
        self._connection, self._keeper = connection, keeper
        self._is_rank = False
        self._begun: set[CopyId] = set()

    def serve(self) -> None:
        try:
            with self._connection, suppress(OSError):
                while text := self._connection.recv(MESSAGE_BYTES):
                    answer, descriptor = self._answer(text)
                    if descriptor < 0:
                        self._connection.send(json.dumps(answer).encode())
                        continue
                    try:
                        socket.send_fds(self._connection, [json.dumps(answer).encode()], [descriptor])
                    finally:
                        os.close(descriptor)
        finally:
            for copy in self._begun:
                self._keeper.copies.discard(copy)
            if self._is_rank:
                self._keeper.rank_goes()

    def _answer(self, text: bytes) -> tuple[dict[str, Any], int]:
        """Return the answer to a request, and a descriptor that goes with it or -1."""
        try:
            return self._do(json.loads(text))
        except OSError as error:
            return {"error": error.strerror or str(error)}, -1
        except (ValueError, KeyError, TypeError) as error:
            return {"error": f"bad request: {error!r}"}, -1

    def _do(self, request: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
        keeper, kind = self._keeper, request["do"]
        if kind == "join":
            if not self._is_rank:
                self._is_rank = True
                keeper.rank_comes(request["token"], float(request["keep_s"]), int(request["limit_bytes"]))
            return {"address": keeper.address}, -1
        if kind == "committed":
            keeper.copies.keep_only(int(request["step"]))
        elif kind == "end":
            keeper.is_over = True
        elif kind == "state":
            return {"num_bytes": keeper.copies.num_bytes, "pid": os.getpid()}, -1
        elif kind == "create":
            copy = CopyId.of(request)
            descriptor = keeper.copies.create(copy)
            self._begun.add(copy)
            return {}, os.dup(descriptor)
        elif kind == "complete":
            self._begun.discard(copy := CopyId.of(request))
            keeper.copies.complete(copy)
        elif kind == "find":
            descriptor, source = keeper.find(CopyId.of(request), [str(each) for each in request["keepers"]])
            return {"source": source}, descriptor
        else:
            raise ValueError(f"do = {kind!r}")
        return {}, -1


def keep(name: str, host: str, keep_s: float, limit_bytes: int) -> None:
    """Keep copies until they are no longer needed; return at once if the node has a keeper of this name already.

    name: of the abstract UNIX socket. host: address of the node, on which other nodes reach its TCP socket.
    """
    keeper = Keeper(CopyStore(limit_bytes), keep_s)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind("\0" + name)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return
        raise
    remote = _Listener(host, keeper)
    threading.Thread(target=remote.serve_forever, kwargs={"poll_interval": _TICK_S}, daemon=True).start()
    listener.listen(256)
    while not keeper.is_done:
        if not select.select([listener], [], [], _TICK_S)[0]:
            continue
        connection, _ = listener.accept()
        try:
            require_same_user(connection)
        except PermissionError:
            connection.close()
            continue
        threading.Thread(target=_Local(connection, keeper).serve, daemon=True).start()


def main() -> None:
    """Detach from the run's launcher, and keep copies as the command line says."""
    ignore_launcher_signals()
    # An orphan in a separate session, so that a launcher that ends its descendants does not find it.
    if os.fork():
        os._exit(0)
    os.setsid()
    os.chdir("/")
    Path("/proc/self/comm").write_text("memory keeper", encoding="ascii")
    name, host, keep_s, limit_bytes = sys.argv[1:]
    keep(name, host, float(keep_s), int(limit_bytes))


if __name__ == "__main__":
    main()
