"""Copies of a run's checkpoints in the memory of its nodes, from the side of ranks and their file processes.

    save    file process   its files -> keeper of the node, and the keeper of the node's peer
    commit  rank           the copies of older checkpoints are freed, on all nodes
    load    rank           each file from memory of the node, of another node, or from storage

Storage comes first: files are copied only once they are on disk, and a copy is used only if a committed checkpoint's
manifest lists it by size and hash. A failed copy is logged as a warning, and the run continues with storage.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_dapo.checkpoints.memory_keeper import MESSAGE_BYTES, CopyId, RemoteKeeper
from megatron_dapo.files.durable import FileEntry
from megatron_dapo.files.linux import local_host, require_same_user, start_helper

if TYPE_CHECKING:
    from megatron_dapo.config.schema import CheckpointConfig

logger = logging.getLogger(__name__)

_CONNECT_S = 20.0  # limit for a keeper's start
_ANSWER_S = 600.0  # the keeper may fetch a large file first
_POLL_S = 0.05
_SEND_BYTES = 1 << 22
NODE, PEER, STORAGE = "node", "peer", "storage"  # sources of a file


@dataclass(frozen=True)
class KeeperSettings:
    """A node's keeper: the name of its socket, the node's address, seconds to live without a rank, and maximum bytes
    (0: any)."""

    name: str
    host: str
    keep_s: float
    limit_bytes: int

    @classmethod
    def of(
        cls, config: CheckpointConfig, checkpoint_directory: Path, num_nodes: int, rendezvous_host: str
    ) -> KeeperSettings:
        """Return the settings of this node's keeper in a run of `num_nodes` nodes, with rank 0 on `rendezvous_host`."""
        # The name is the same on every node.
        digest = hashlib.sha256(str(checkpoint_directory.resolve()).encode()).hexdigest()
        name = f"megatron-dapo-copies-{os.getuid()}-{digest[:16]}"
        host = local_host((rendezvous_host, 1)) if num_nodes > 1 else "127.0.0.1"
        return cls(name, host, config.memory_copies_seconds, int(config.memory_copies_gib * (1 << 30)))

    def start(self) -> None:
        """Start the keeper, which exits at once if the node already has one."""
        arguments = (self.name, self.host, str(self.keep_s), str(self.limit_bytes))
        environment = {"PATH": os.environ.get("PATH", "")}
        start_helper("megatron_dapo.checkpoints.memory_keeper", *arguments, environment=environment).wait()

    def connect(self) -> KeeperClient:
        """Connect to the keeper, started if there is none. OSError if it does not answer."""
        end, is_started = time.monotonic() + _CONNECT_S, False
        while True:
            try:
                return KeeperClient(self.name)
            except OSError:
                if time.monotonic() > end:
                    raise
            if not is_started:
                self.start()
                is_started = True
            time.sleep(_POLL_S)


class KeeperClient:
    """A connection to the keeper of this node. Threads may share it."""

    def __init__(self, name: str) -> None:
        """Connect. OSError if no keeper of this user listens."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        try:
            self._socket.settimeout(_ANSWER_S)
            self._socket.connect("\0" + name)
            require_same_user(self._socket)
        except BaseException:
            self._socket.close()
            raise

    def ask(self, operation: str, **arguments: Any) -> tuple[dict[str, Any], int]:
        """Return the answer to a request, and a descriptor that came with it or -1. OSError if it failed."""
        with self._lock:
            try:
                self._socket.send(json.dumps({"do": operation, **arguments}).encode())
                text, descriptors, _, _ = socket.recv_fds(self._socket, MESSAGE_BYTES, 1)
            except OSError:
                self._socket.close()  # a late answer would be taken for the answer to the next request
                raise
        if not text:
            raise ConnectionError("the keeper of this node's copies has ended")
        answer = json.loads(text)
        if "error" in answer:
            raise OSError(answer["error"])
        return answer, descriptors[0] if descriptors else -1

    def wait_for_end(self) -> None:
        self._socket.settimeout(None)
        with suppress(OSError):
            self._socket.recv(MESSAGE_BYTES)

    def close(self) -> None:
        """Disconnect from the keeper, which exits after its time to live without a rank."""
        self._socket.close()


# ---- in the file process


@dataclass(frozen=True)
class CopyTargets:
    """Keepers that get a copy of what a rank saves. An address is host:port."""

    name: str  # the node's keeper
    own: str  # its address
    peer: str = ""  # address of the keeper of the node's peer; "" for none
    token: str = ""

    @property
    def keepers(self) -> list[str]:
        return [address for address in (self.own, self.peer) if address]


def keep_copies(targets: CopyTargets, step: int, files: Sequence[tuple[FileEntry, memoryview]]) -> str:
    """Send the contents of files to the keepers; return why that failed, or "" on success.

    The peer gets its copies even if the node's keeper has no room.
    """
    problems = []
    copies = [(CopyId(step, entry.name, entry.size, entry.sha256), content) for entry, content in files]
    try:
        client = KeeperClient(targets.name)
        try:
            for copy, content in copies:
                _keep_here(client, copy, content)
        finally:
            client.close()
    except OSError as error:
        problems.append(f"of this node: {error}")
    try:
        for copy, content in copies if targets.peer else ():
            _keep_there(targets, copy, content)
    except (OSError, ValueError) as error:
        problems.append(f"of the peer {targets.peer}: {error}")
    return "; ".join(problems)


def _keep_here(client: KeeperClient, copy: CopyId, content: memoryview) -> None:
    _, descriptor = client.ask("create", **asdict(copy))
    try:
        done = 0
        while done < len(content):
            done += os.pwrite(descriptor, content[done : done + _SEND_BYTES], done)
    finally:
        os.close(descriptor)
    client.ask("complete", **asdict(copy))


def _keep_there(targets: CopyTargets, copy: CopyId, content: memoryview) -> None:
    with RemoteKeeper(targets.peer, targets.token) as remote:
        remote.ask("put", copy)
        for start in range(0, len(content), _SEND_BYTES):
            remote.socket.sendall(content[start : start + _SEND_BYTES])
        remote.answer()


# ---- in the rank


class MemoryCopies:
    """The copies of one rank's node. Every rank of a run with copies has one, even if its keeper does not answer."""

    def __init__(self, settings: KeeperSettings, token: str) -> None:
        self._client: KeeperClient | None = None
        self.address = ""  # address of the node's keeper
        self.targets: CopyTargets | None = None  # set by `use_peer`
        self.loaded: dict[str, dict[str, int]] = {}  # source -> file -> bytes, of the last load
        self._settings, self._token = settings, token
        self._descriptors: list[int] = []
        self._warned, self._is_read = "", True
        try:
            self._client = settings.connect()
            limits = {"keep_s": settings.keep_s, "limit_bytes": settings.limit_bytes}
            self.address = self._client.ask("join", token=token, **limits)[0]["address"]
        except OSError as error:
            self.warn(f"the keeper of this node does not answer: {error}")

    def use_peer(self, address: str) -> None:
        """Set the keeper of the peer, "" for none; from now on saves are copied."""
        if self.address:
            self.targets = CopyTargets(self._settings.name, self.address, address, self._token)

    def warn(self, problem: str) -> None:
        """Log a problem, once per uninterrupted cause; "" means it is over."""
        if problem and problem != self._warned:
            logger.warning("checkpoints are not copied to memory: %s", problem)
        self._warned = problem

    def committed(self, step: int) -> None:
        """Free the copies of all checkpoints except `step`, which is in place."""
        self._tell("committed", step=step)

    def end(self) -> None:
        """End the keeper of the node: the run is over."""
        self._tell("end")

    def close(self) -> None:
        """Disconnect from the keeper, which retains its copies for the next attempt."""
        self.release()
        if self._client is not None:
            self._client.close()

    def begin_load(self, from_memory: bool = True) -> None:
        """Forget where files of the last load came from. `from_memory`: False to read only storage."""
        self.release()
        self._is_read = from_memory
        self.loaded = {NODE: {}, PEER: {}, STORAGE: {}}

    def path(self, step: int, entry: FileEntry) -> Path | None:
        """Return where to read a file of a checkpoint in memory, None if only storage has it. Open it before `release`."""
        source, descriptor = "", -1
        if self._is_read and self._client is not None and entry.keepers:
            copy = CopyId(step, entry.name, entry.size, entry.sha256)
            try:
                answer, descriptor = self._client.ask("find", keepers=list(entry.keepers), **asdict(copy))
                source = answer["source"]
            except OSError as error:
                self.warn(f"file {entry.name} of step {step} is read from storage: {error}")
        if descriptor >= 0:
            self._descriptors.append(descriptor)
        self.loaded.setdefault(source or STORAGE, {})[entry.name] = entry.size
        return Path(f"/proc/self/fd/{descriptor}") if descriptor >= 0 else None

    def release(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _tell(self, operation: str, **arguments: Any) -> None:
        if self._client is not None:
            with suppress(OSError):  # the keeper has exited: nothing is left to free
                self._client.ask(operation, **arguments)


# ---- which node keeps copies for which


def peers_of(replicas: Sequence[frozenset[str]]) -> list[int]:
    """Return the node that keeps the copies of each node: a permutation without fixed points, or a single node itself.

    replicas: for every node, the model replicas that its ranks hold parts of. Nodes of one replica are placed together
    and are more often lost together, with a switch, a rack or a power supply. So all nodes take the peer at the same
    distance, the one at which the fewest pairs share a replica, and among these the one nearest to half of the nodes.
    """
    count = len(replicas)
    if count < 2:
        return list(range(count))

    def badness(distance: int) -> tuple[int, int]:
        shared = sum(not replicas[node].isdisjoint(replicas[(node + distance) % count]) for node in range(count))
        return shared, abs(2 * distance - count)

    distance = min(range(1, count), key=badness)
    return [(node + distance) % count for node in range(count)]
