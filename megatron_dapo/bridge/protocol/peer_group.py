"""Point-to-point groups of processes that share no default process group: trainer ranks and the ranks of an engine.

    place = RendezvousStore()                                        # one process; the others get place.address
    group = join(place.address, name, rank, size, timeout_s=30)   # every member
    group.send(tensor, to=3).wait(deadline)

Imports torch alone, so that it runs in an engine's process as well. Messages between two members arrive in the order in
which they were sent. A member that is gone, late or closed makes `wait` raise PeerError in all that talk to it; such a
group is of no more use: close it and join another one under a new name.

The store and gloo's connections have no authentication of their own. They listen on the given host alone (loopback
unless a caller names an interface); what arrives must be checked against what an authenticated channel announced.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

LOOPBACK = "127.0.0.1"
_SHORTEST_WAIT_S = 0.001  # a timeout of zero means "for ever" to the backends
_POLL_INTERVAL_S = 0.0005
_LOOK_INTERVAL_S = 0.5
DATA_TAG, ANSWER_TAG, _NEVER_SENT_TAG = 0, 1, 2


class PeerError(RuntimeError):
    """A member of the group is gone, late, or never came."""


@dataclass(frozen=True)
class Address:
    """Where members meet."""

    host: str
    port: int

    def local_host(self) -> str:
        """The address of this machine that faces the meeting place: where the other members can reach it.

        Loopback where the meeting place is on loopback. Nothing is sent to find out.
        """
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((self.host, self.port))
            return str(probe.getsockname()[0])


class RendezvousClient:
    """A short text that one process leaves at the meeting place for others, under a key used once."""

    def __init__(self, address: Address, timeout_s: float) -> None:
        """PeerError where nobody answers at the address within `timeout_s`."""
        self._store = _connect(address, timeout_s)

    def put(self, key: str, text: str) -> None:
        try:
            self._store.set(key, text)
        except RuntimeError as error:
            raise PeerError(f"{key!r} could not be written: {_first_line(error)}") from error

    def get(self, key: str, timeout_s: float) -> str:
        """Waits until somebody has left it. PeerError after `timeout_s`."""
        try:
            self._store.set_timeout(timedelta(seconds=max(_SHORTEST_WAIT_S, timeout_s)))
            return self._store.get(key).decode()
        except RuntimeError as error:
            raise PeerError(f"no text under {key!r} within {timeout_s:g} s: {_first_line(error)}") from error


class RendezvousStore:
    """The key-value store through which members find each other's addresses. It lives in one process, on one host."""

    def __init__(self, host: str = LOOPBACK, timeout_s: float = 60.0) -> None:
        """Listens on `host` alone, on a port the operating system chooses. OSError where the host is not this machine."""
        listener = socket.create_server((host, 0))
        self.address = Address(host, listener.getsockname()[1])
        # The store takes the socket over: no moment in which another process could take the port.
        self._store = dist.TCPStore(
            host,
            self.address.port,
            None,
            True,
            timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    @staticmethod
    def new_name() -> str:
        """A name for a group that nobody guesses and that no earlier group had."""
        return secrets.token_hex(16)


class Pending:
    """A message under way. Its tensor must not change before `wait` returned; the group keeps it alive until then."""

    def __init__(self, group: PeerGroup, peer: int, work: Any, what: str, tensor: torch.Tensor) -> None:
        self.peer = peer
        self.work = work
        self.what = what
        self._group = group
        self._tensor = tensor

    def wait(self, deadline: float) -> None:
        """`PeerGroup.wait` for this message."""
        self._group.wait([self], deadline)


class PeerGroup:
    """One member's end of a group."""

    def __init__(self, group: Any, name: str, rank: int, size: int, backend: str) -> None:
        self.name = name
        self.rank = rank
        self.size = size
        self.backend = BACKENDS[backend]
        # A gloo connection stalls, reports behind it included, when the buffer of a message it reads is given up.
        self.under_way: set[Pending] = set()
        self._group = group

    @property
    def device(self) -> torch.device:
        """Where tensors must be."""
        return torch.device(self.backend.device)

    def send(self, tensor: torch.Tensor, to: int, tag: int = DATA_TAG) -> Pending:
        """Starts sending a contiguous tensor. Messages of one tag arrive in the order they left, and gloo ends the
        process where one is longer than what it is received into; NCCL knows no tags."""
        return self._start("send", tensor, to, tag, f"{tensor.nbytes} bytes to member {to}")

    def receive(self, tensor: torch.Tensor, source: int, tag: int = DATA_TAG) -> Pending:
        """Starts receiving exactly `tensor.nbytes` bytes into a contiguous tensor."""
        return self._start("recv", tensor, source, tag, f"{tensor.nbytes} bytes from member {source}")

    def _start(self, operation: str, tensor: torch.Tensor, peer: int, tag: int, what: str) -> Pending:
        assert tensor.is_contiguous(), f"{what}: the tensor of shape {tuple(tensor.shape)} is not contiguous"
        assert 0 <= peer < self.size and peer != self.rank, f"member {self.rank} of {self.size} has no peer {peer}"
        group = self._group  # another thread may close it
        if group is None:
            raise PeerError(f"{what}: the group is closed")
        try:
            work = getattr(group, operation)([tensor.detach()], peer, tag)
        except RuntimeError as error:
            raise PeerError(f"{what}: {_first_line(error)}") from error
        pending = Pending(self, peer, work, what, tensor)
        self.under_way.add(pending)
        return pending

    def wait(self, messages: Sequence[Pending], deadline: float) -> None:
        """Returns when all messages have left or arrived; PeerError at `deadline` (of time.monotonic) or on a failure."""
        self.backend.wait(self, messages, deadline)
        self.under_way.difference_update(messages)

    def check(self, message: Pending) -> None:
        """PeerError where the connection of a message is lost."""
        group = self._group
        if group is None:
            raise PeerError(f"{message.what}: the group is closed")
        try:
            # Nobody sends it; where the connection is lost it cannot be asked for.
            group.recv([torch.zeros(1, dtype=torch.uint8, device=self.device)], message.peer, _NEVER_SENT_TAG)
        except RuntimeError as error:
            raise _failed(message, error) from error

    def close(self) -> None:
        """Closes the connections: whoever waits for this member fails at once. Harmless when repeated."""
        group, self._group = self._group, None
        if group is not None:
            self.backend.close(group, self.rank, self.size)
            self.under_way.clear()


def join(
    address: Address,
    name: str,
    rank: int,
    size: int,
    *,
    timeout_s: float,
    backend: str = "gloo",
    host: str = "",
) -> PeerGroup:
    """Member `rank` of the `size` members of the group `name`; returns when all are connected.

    `host`: this machine's address on which the other members reach it (gloo; NCCL chooses its own network); by default
    the one that faces the meeting place. `backend`: one of BACKENDS; "nccl" is for CUDA tensors, connects on the first message of a pair, and has not run yet: it needs
    two GPUs. PeerError where not all came within `timeout_s`; ValueError for an unknown backend.
    """
    if backend not in BACKENDS:
        raise ValueError(f"peer group: backend {backend!r} is not one of {', '.join(sorted(BACKENDS))}")
    timeout = timedelta(seconds=max(_SHORTEST_WAIT_S, timeout_s))
    make = BACKENDS[backend].make
    store = _connect(address, timeout_s)
    try:
        group = make(dist.PrefixStore(name, store), rank, size, timeout, host or address.local_host())
    except RuntimeError as error:
        raise PeerError(
            f"member {rank} of {size} did not meet the others at {address.host}:{address.port} "
            f"within {timeout_s:g} s: {_first_line(error)}"
        ) from error
    return PeerGroup(group, name, rank, size, backend)


def _connect(address: Address, timeout_s: float) -> dist.Store:
    timeout = timedelta(seconds=max(_SHORTEST_WAIT_S, timeout_s))
    try:
        return dist.TCPStore(address.host, address.port, None, False, timeout, wait_for_workers=False)
    except RuntimeError as error:
        raise PeerError(
            f"nobody answers at the meeting place {address.host}:{address.port} within {timeout_s:g} s: "
            f"{_first_line(error)}"
        ) from error


def _gloo(store: dist.Store, rank: int, size: int, timeout: timedelta, host: str) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    return dist.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: dist.Store, rank: int, size: int, timeout: timedelta, host: str) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


def _failed(message: Pending, error: RuntimeError) -> PeerError:
    return PeerError(f"{message.what}: {_first_line(error)}")


def _wait_gloo(group: PeerGroup, messages: Sequence[Pending], deadline: float) -> None:
    """gloo forgets a message that it is writing at the moment in which the connection breaks: its wait lasts to the
    deadline, and nothing wakes it (one that is made in shards would break all connections at the end of the first). So
    another thread waits, and this one looks now and then whether the connections are there."""
    ended = threading.Event()
    failures: list[PeerError] = []

    def wait() -> None:
        for message in messages:
            try:
                message.work.wait(timedelta(seconds=max(_SHORTEST_WAIT_S, deadline - time.monotonic())))
            except RuntimeError as error:
                failures.append(_failed(message, error))
                break
        ended.set()

    threading.Thread(target=wait, name="peer-wait", daemon=True).start()
    while not ended.wait(_LOOK_INTERVAL_S):
        for message in {message.peer: message for message in messages}.values():
            group.check(message)
    if failures:
        raise failures[0]


def _wait_nccl(group: PeerGroup, messages: Sequence[Pending], deadline: float) -> None:
    """NCCL's own wait only orders streams; a deadline for the host needs the work to be watched."""
    start = time.monotonic()
    for message in messages:
        try:
            while not message.work.is_completed():
                if time.monotonic() > deadline:
                    raise RuntimeError(f"timed out after {time.monotonic() - start:.1f} s")
                time.sleep(_POLL_INTERVAL_S)
            message.work.wait()
        except RuntimeError as error:
            raise _failed(message, error) from error


def _close_gloo(group: Any, rank: int, size: int) -> None:
    """Connections live as long as any message that was started, so that giving up the group does not close them. A wait
    that times out does: gloo then breaks all connections of this member. A connection that is broken already fails at
    once and tells the others nothing, so that one wait would not do."""
    for peer in range(size):
        if peer != rank:
            with contextlib.suppress(RuntimeError):
                never_sent = group.recv([torch.zeros(1, dtype=torch.uint8)], peer, _NEVER_SENT_TAG)
                never_sent.wait(timedelta(seconds=_SHORTEST_WAIT_S))


def _close_nccl(group: Any, rank: int, size: int) -> None:
    group.abort()


@dataclass(frozen=True)
class Backend:
    """How a member is made, waits and closes, and where its tensors are."""

    make: Callable[[dist.Store, int, int, timedelta, str], Any]
    wait: Callable[[PeerGroup, Sequence[Pending], float], None]
    close: Callable[[Any, int, int], None]
    device: str


BACKENDS: Mapping[str, Backend] = {
    "gloo": Backend(_gloo, _wait_gloo, _close_gloo, "cpu"),
    "nccl": Backend(_nccl, _wait_nccl, _close_nccl, "cuda"),
}


def _first_line(error: Exception) -> str:
    """The reason without the place in the library's source and its advice."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[[^\]]*\] *", "", line).split(" This is typically")[0][:300]
