"""Point-to-point groups of processes that share no default process group: trainer ranks and the ranks of an engine.

    store = RendezvousStore()                                        # one process; the others get store.address
    group = join(store.address, name, rank, size, timeout_s=30)      # every member
    group.send(tensor, to=3).wait(deadline)

`meet` makes a group of many members through a store that they have already; its members connect when they need it.

Messages of one tag between two members arrive in the order they were sent. A member that is gone, late or closed makes
`wait` raise PeerError in all that exchange with it; such a group is of no more use: close it and join another one under a
new name.

A group always has gloo connections. With the "nccl" backend they carry control messages only, and bytes (DATA_TAG) take
NCCL: its operations on a pair of ranks ignore tags and run one after the other, so that a reply awaited there would block
the bytes sent after it.

The store and gloo's connections are not authenticated. They listen only on the given host (loopback
unless a caller names an interface); what arrives must be checked against what an authenticated channel announced.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_dapo.bridge.protocol.nccl_settings import agreed_settings, difference
from megatron_dapo.device_thread import device_thread

LOOPBACK = "127.0.0.1"
_SHORTEST_WAIT_S = 0.001  # a timeout of zero means "forever" to the backends
_POLL_INTERVAL_S = 0.0005
_LOOK_INTERVAL_S = 0.5  # interval of the looks at the connections of messages in flight
# Tags keep replies and bytes of one pair of members apart.
DATA_TAG, ACKNOWLEDGE_TAG, _NEVER_SENT_TAG, REPLY_TAG, _GREETING_TAG, SIZE_TAG = 0, 1, 2, 3, 4, 5


class PeerError(RuntimeError):
    """A member of the group is gone, late, or never came."""


@dataclass(frozen=True)
class Address:
    """Host and port of a rendezvous store."""

    host: str
    port: int

    def local_host(self) -> str:
        """Return the address of this node that faces the store, on which the other members can reach it.

        Loopback if the store is on loopback.
        """
        # Connecting a UDP socket selects the route and sends nothing.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((self.host, self.port))
            return str(probe.getsockname()[0])


class RendezvousClient:
    """Access to short texts in a rendezvous store, each under a key that is used once."""

    def __init__(self, address: Address, timeout_s: float) -> None:
        """Raise PeerError if no store answers at the address within `timeout_s`."""
        self._store = _connect(address, timeout_s)

    def put(self, key: str, text: str) -> None:
        try:
            self._store.set(key, text)
        except RuntimeError as error:
            raise PeerError(f"{key!r} could not be written: {_first_line(error)}") from error

    def get(self, key: str, timeout_s: float) -> str:
        """Wait until the text is there. Raise PeerError after `timeout_s`."""
        try:
            self._store.set_timeout(timedelta(seconds=max(_SHORTEST_WAIT_S, timeout_s)))
            return self._store.get(key).decode()
        except RuntimeError as error:
            raise PeerError(f"no text under {key!r} within {timeout_s:g} s: {_first_line(error)}") from error


class RendezvousStore:
    """The key-value store through which members find each other's addresses. It lives in one process, on one host."""

    def __init__(self, host: str = LOOPBACK, timeout_s: float = 60.0) -> None:
        """Listen on a free port of `host` only. Raise OSError if the host is not this node."""
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
        """Return a new name for a group that cannot be guessed."""
        return secrets.token_hex(16)


class Pending:
    """A message in flight. Its tensor must not change before `wait` returned; the group keeps it alive until then."""

    def __init__(self, group: PeerGroup, peer: int, work: Any, what: str, tensor: torch.Tensor, tag: int) -> None:
        self.peer = peer
        self.work = work
        self.what = what
        self.tag = tag
        self._group = group
        self._tensor = tensor

    def wait(self, deadline: float) -> None:
        """`PeerGroup.wait` for this message."""
        self._group.wait([self], deadline)


class PeerGroup:
    """One member's end of a group. `data`: what carries bytes; the gloo connections themselves if None."""

    def __init__(self, control: Any, name: str, rank: int, size: int, data: Any = None, device: str = "cpu") -> None:
        self.name = name
        self.rank = rank
        self.size = size
        self.device = torch.device(device)  # device of tensors sent with DATA_TAG
        # A gloo connection stalls, including the replies queued after it, once the buffer of a message it reads is freed.
        self.in_flight: set[Pending] = set()
        self.connected = set(range(size)) - {rank}  # members to which there may be a connection
        self._control = control
        self._data = data
        self._batch: list[Pending] | None = None

    def send(self, tensor: torch.Tensor, to: int, tag: int = DATA_TAG) -> Pending:
        """Start sending a contiguous tensor. gloo ends the process if it is longer than the receiver's tensor."""
        return self._start("send", tensor, to, tag, f"{tensor.nbytes} bytes to member {to}")

    def receive(self, tensor: torch.Tensor, source: int, tag: int = DATA_TAG) -> Pending:
        """Start receiving exactly `tensor.nbytes` bytes into a contiguous tensor."""
        return self._start("recv", tensor, source, tag, f"{tensor.nbytes} bytes from member {source}")

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Start the bytes sent and received inside together. Both ends must batch the same messages.

        NCCL runs the operations of a batch at once. Outside of a batch they would run one after the other, so that two
        senders to one engine rank, or two messages of a bucket, would wait for each other.
        """
        if self._data is None:
            yield
            return
        data, self._batch = self._data, []
        data._start_coalescing()
        try:
            yield
        finally:
            messages, self._batch = self._batch, None
            work = data._end_coalescing()
            for message in messages:
                message.work = work

    def _start(self, operation: str, tensor: torch.Tensor, peer: int, tag: int, what: str) -> Pending:
        assert tensor.is_contiguous(), f"{what}: the tensor of shape {tuple(tensor.shape)} is not contiguous"
        assert 0 <= peer < self.size and peer != self.rank, f"member {self.rank} of {self.size} has no peer {peer}"
        # Read once: another thread may close the group.
        group = self._data if tag == DATA_TAG and self._data is not None else self._control
        if self._control is None:
            raise PeerError(f"{what}: the group is closed")
        self.connected.add(peer)
        try:
            work = getattr(group, operation)([tensor.detach()], peer, tag)
        except RuntimeError as error:
            raise PeerError(f"{what}: {_first_line(error)}") from error
        pending = Pending(self, peer, work, what, tensor, tag)
        if self._batch is not None and tag == DATA_TAG:
            self._batch.append(pending)
        self.in_flight.add(pending)
        return pending

    def wait(self, messages: Sequence[Pending], deadline: float) -> None:
        """Wait until all messages have left or arrived. Raise PeerError at `deadline` (of time.monotonic) or on a failure."""
        bytes_apart = [message for message in messages if self._data is not None and message.tag == DATA_TAG]
        if bytes_apart:
            self._poll(bytes_apart, deadline)
        self._wait_gloo([message for message in messages if message not in bytes_apart], deadline)
        self.in_flight.difference_update(messages)

    def check(self, message: Pending) -> None:
        """Raise PeerError if the connection of a message is lost."""
        group = self._control
        if group is None:
            raise PeerError(f"{message.what}: the group is closed")
        try:
            # No member ever sends it. On a lost connection the receive cannot even be started.
            group.recv([torch.zeros(1, dtype=torch.uint8)], message.peer, _NEVER_SENT_TAG)
        except RuntimeError as error:
            raise _failed(message, error) from error

    def close(self) -> None:
        """Close the connections: members that wait for this one fail at once. A second call does nothing."""
        control, self._control = self._control, None
        if control is not None:
            if self._data is not None:
                self._data.abort()
            _close_gloo(control, self.connected)
            self.in_flight.clear()

    def _wait_gloo(self, messages: Sequence[Pending], deadline: float) -> None:
        """Wait in another thread and check the connections meanwhile.

        gloo forgets a message that it is writing when the connection breaks: the wait lasts to its deadline, and nothing
        wakes it. Waiting in short turns would break all connections at the end of the first.
        """
        if not messages:
            return
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

        device_thread(wait, name="peer-wait").start()
        while not ended.wait(_LOOK_INTERVAL_S):
            self._check_all(messages)
        if failures:
            raise failures[0]

    def _poll(self, messages: Sequence[Pending], deadline: float) -> None:
        """Wait for bytes on NCCL, whose own wait orders streams and has no deadline for the host."""
        start = looked = time.monotonic()
        for message in messages:
            try:
                while not message.work.is_completed():
                    now = time.monotonic()
                    if now > deadline:
                        raise RuntimeError(f"timed out after {now - start:.1f} s")
                    if now - looked > _LOOK_INTERVAL_S:
                        looked = now
                        self._check_all(messages)
                    time.sleep(_POLL_INTERVAL_S)
                message.work.wait()
            except RuntimeError as error:
                raise error if isinstance(error, PeerError) else _failed(message, error) from error

    def _check_all(self, messages: Sequence[Pending]) -> None:
        for message in {message.peer: message for message in messages}.values():
            self.check(message)


def join(
    address: Address,
    name: str,
    rank: int,
    size: int,
    *,
    timeout_s: float,
    backend: str = "gloo",
    host: str = "",
    peers: Iterable[int] | None = None,
) -> PeerGroup:
    """Join the group `name` as member `rank` of `size`; return when this one is connected to its peers.

    `peers`: the members that it will exchange messages with, which must name it in turn; None: all connect to all. `host`: this node's address on which the other members reach it; by default the one that faces the store. `backend`:
    one of BACKENDS, what carries the bytes: "nccl" is for CUDA tensors. Raise PeerError if not all came within
    `timeout_s`, ValueError for an unknown backend, or settings of NCCL that differ between members.
    """
    if backend not in BACKENDS:
        raise ValueError(f"peer group: backend {backend!r} is not one of {', '.join(sorted(BACKENDS))}")
    deadline = time.monotonic() + timeout_s
    timeout = timedelta(seconds=max(_SHORTEST_WAIT_S, timeout_s))
    store = dist.PrefixStore(name, _connect(address, timeout_s))
    make, device = BACKENDS[backend]
    try:
        control = _gloo(store, rank, size, timeout, host or address.local_host(), lazy=peers is not None)
        if peers is not None:
            _greet(control, rank, peers, deadline)
        if make:
            # A communicator waits for its members without a deadline.
            store.set(f"met/{rank}", json.dumps(_nccl_settings()))
            store.wait([f"met/{member}" for member in range(size)], timeout)
            _require_same_settings(store, size)
        data = make(dist.PrefixStore("data", store), rank, size, timeout) if make else None
    except RuntimeError as error:
        raise PeerError(
            f"member {rank} of {size} did not meet the others at {address.host}:{address.port} "
            f"within {timeout_s:g} s: {_first_line(error)}"
        ) from error
    except ValueError:
        _close_gloo(control, peers if peers is not None else set(range(size)) - {rank})
        raise
    group = PeerGroup(control, name, rank, size, data, device)
    if peers is not None:
        group.connected = set(peers)
    return group


def _nccl_settings() -> dict[str, str]:
    version = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else ""
    return {"NCCL's version": version, **agreed_settings(os.environ)}


def _require_same_settings(store: dist.Store, size: int) -> None:
    """Raise ValueError, in all members, if one has other settings than member 0."""
    first, *others = (json.loads(store.get(f"met/{member}")) for member in range(size))
    for member, settings in enumerate(others, 1):
        if problem := difference(first, settings, "in the trainer (member 0)", f"in member {member}"):
            raise ValueError(f"{problem}: NCCL needs the same in trainer and servers; set it before both start")


def _greet(group: Any, rank: int, peers: Iterable[int], deadline: float) -> None:
    """Connect to some members of a group that connects at the first message."""
    # Connecting waits for the other end. All take the pairs in one order, so that the first open one has both its ends there.
    for first, second in sorted((min(rank, peer), max(rank, peer)) for peer in set(peers)):
        byte = torch.zeros(1, dtype=torch.uint8)
        work = group.send([byte], second, _GREETING_TAG) if rank == first else group.recv([byte], first, _GREETING_TAG)
        work.wait(timedelta(seconds=max(_SHORTEST_WAIT_S, deadline - time.monotonic())))


def meet(store: dist.Store, name: str, rank: int, size: int, *, timeout_s: float, host: str) -> PeerGroup:
    """Return the group `name` in which members connect when they first exchange a message, over gloo only.

    For many members of which each talks to a few: `join` connects every member to every other. `store`: one that all members
    have, and keep. `host`: this node's address on which the others reach it. Raise PeerError if not all came within
    `timeout_s`.
    """
    store, timeout = dist.PrefixStore(name, store), timedelta(seconds=max(_SHORTEST_WAIT_S, timeout_s))
    try:
        group = PeerGroup(_gloo(store, rank, size, timeout, host, lazy=True), name, rank, size)
    except RuntimeError as error:
        raise PeerError(f"member {rank} of {size} did not meet the others: {_first_line(error)}") from error
    group.connected.clear()
    return group


def _connect(address: Address, timeout_s: float) -> dist.Store:
    timeout = timedelta(seconds=max(_SHORTEST_WAIT_S, timeout_s))
    try:
        return dist.TCPStore(address.host, address.port, None, False, timeout, wait_for_workers=False)
    except RuntimeError as error:
        raise PeerError(
            f"no rendezvous store answers at {address.host}:{address.port} within {timeout_s:g} s: {_first_line(error)}"
        ) from error


def _gloo(store: dist.Store, rank: int, size: int, timeout: timedelta, host: str, *, lazy: bool = False) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined] # torch's stub names it Options
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host, lazy_init=lazy)]
    return dist.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    group = dist.ProcessGroupNCCL(store, rank, size, options)
    # Batches between some members use the communicator of all of them. Made without a collective: that would connect
    # every member to neighbors with which it never exchanges bytes.
    group.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
    return group


# Transports other than gloo, and the device of their tensors.
BACKENDS: Mapping[str, tuple[Any, str]] = {"gloo": (None, "cpu"), "nccl": (_nccl, "cuda")}


def _failed(message: Pending, error: RuntimeError) -> PeerError:
    return PeerError(f"{message.what}: {_first_line(error)}")


def _close_gloo(group: Any, peers: Iterable[int]) -> None:
    """Break all connections of this member.

    Connections live as long as any message on them, so dropping the group does not close them. A wait that times out
    does: gloo then breaks all of this member's connections. A connection that is broken already fails at once and tells
    the others nothing, so one wait is not enough.
    """
    for peer in peers:
        with contextlib.suppress(RuntimeError):
            never_sent = group.recv([torch.zeros(1, dtype=torch.uint8)], peer, _NEVER_SENT_TAG)
            never_sent.wait(timedelta(seconds=_SHORTEST_WAIT_S))


def _first_line(error: Exception) -> str:
    """Return the reason without the place in the library's source and its advice."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[[^\]]*\] *", "", line).split(" This is typically")[0][:300]
