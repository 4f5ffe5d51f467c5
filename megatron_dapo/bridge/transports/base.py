"""Shared parts of the transports and the state machine: requests, results, engines, and agreement with a deadline.

A weight sync is collective: every trainer rank calls a transport's verbs with the same `SyncRequest`.

    transport.begin(request, deadline)     # connect: memory, groups, and the engines' attention
    transport.send(sources)                # every rank writes its chunks
    transport.finish() -> TransferResult   # replies of the engines, with the checksums they read back

Each engine has one leader, the trainer rank that speaks HTTP to it. A failure of an engine is data
(`TransferResult.failures`) and must not keep the other engines from their weights; a failure of a trainer rank is a
`CoordinationError` on all others, within the deadline.

Every transport has each engine rank carry out the same commands:

    begin    Command(op="begin", manifest=plan.manifest(...))
    bucket   Command(op="bucket", bucket=plan.buckets(...)[k]) and its bytes, for every k in order
    finish   Command(op="finish")                                -> Reply with the checksums of all parameters

A message holds one or several commands. One `Reply` answers it, to its last command or to the first one that failed; no
command is carried out after a failure. A transport whose engines load the weights in another way sends
Command(op="adopt", manifest=...) instead.
"""

from __future__ import annotations

import json
import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist

from megatron_dapo.bridge.protocol.messages import Command, Reply
from megatron_dapo.bridge.sync_plan import ExpectedChecksums
from megatron_dapo.parallel.collectives import communication_device
from megatron_dapo.reshard.execution import Buffers

LOAD_FORMAT = "megatron_dapo.bridge.protocol.weight_loader.load"
Result = TypeVar("Result")


class EngineControl(Protocol):
    """Control of one engine. Every method returns when the engine is done and raises if it fails."""

    def pause(self, mode: str) -> None: ...

    def flush_cache(self) -> None: ...

    def begin_weight_update(self) -> None: ...

    def update_weights_from_tensor(
        self, payloads: Sequence[bytes | str], load_format: str | None = None, *, flush_cache: bool = False
    ) -> None: ...

    def update_weights_from_disk(self, directory: str, *, flush_cache: bool = True) -> None: ...

    def end_weight_update(self) -> None: ...

    def update_weight_version(self, version: int) -> None: ...

    def resume(self) -> None: ...


@dataclass(frozen=True)
class EngineHandles:
    """The engines, and the trainer rank that leads each.

    `controls` are those of the engines that this rank leads; the mapping may change when an engine is restarted.
    """

    leaders: Sequence[int]  # engine -> trainer rank
    controls: Mapping[int, EngineControl]

    def led_by(self, rank: int, engines: Sequence[int]) -> tuple[int, ...]:
        return tuple(engine for engine in engines if self.leaders[engine] == rank)


class SyncDeadline:
    """A moment on the monotonic clock that a wait may not pass."""

    def __init__(self, seconds: float) -> None:
        self.at = time.monotonic() + seconds
        self.seconds = seconds

    @property
    def left_s(self) -> float:
        """Seconds left, at least a millisecond: zero means "forever" to many waits."""
        return max(1e-3, self.at - time.monotonic())

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.at


@dataclass(frozen=True)
class SyncRequest:
    """One weight sync, the same on every rank."""

    sync_id: str  # unique
    session: str
    version: int
    engines: tuple[int, ...]
    number: int = 0  # grows from sync to sync of a session


@dataclass
class TransferResult:
    """One rank's view of a transfer."""

    expected: ExpectedChecksums
    failures: dict[int, str] = field(default_factory=dict)  # engine -> first reason this rank saw
    replies: dict[int, tuple[Reply, ...]] = field(default_factory=dict)  # engines this rank leads: finish of each rank
    num_bytes: dict[int, int] = field(default_factory=dict)  # engines this rank leads: copied into parameters
    peak_bytes: int = 0  # largest extra memory for one engine rank

    def fail(self, engine: int, reason: str) -> None:
        self.failures.setdefault(engine, reason)


class Transport(Protocol):
    """Carries the bytes of weight syncs. One object for the run; it may keep connections and memory between syncs.

    All verbs are collective over the trainer's ranks and raise CoordinationError if another rank did not take part.
    """

    def begin(self, request: SyncRequest, deadline: SyncDeadline) -> None:
        """Connect to the engines of the request."""

    def send(self, sources: Buffers) -> None:
        """Bring this rank's share to the engines."""

    def finish(self) -> TransferResult:
        """Collect the engines' replies by the deadline."""

    def close(self) -> None:
        """Stop a sync in progress and release everything kept for the next one."""


def transfer(transport: Transport, request: SyncRequest, sources: Buffers, deadline: SyncDeadline) -> TransferResult:
    """Carry one weight sync through the three verbs. An exception closes the transport, so that no engine waits."""
    try:
        transport.begin(request, deadline)
        transport.send(sources)
        return transport.finish()
    except BaseException:
        transport.close()
        raise


class EngineFailure(RuntimeError):
    """An engine failed a command; the text says how."""


class CoordinationError(RuntimeError):
    """Trainer ranks did not agree in time: one is gone or late."""


class Coordinator(Protocol):
    """Agreement among some trainer ranks, with deadlines. Every rank of the group must call."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def exchange(self, value: Any, what: str, timeout_s: float) -> list[Any]:
        """Return every rank's JSON value, in rank order."""

    def sum(self, values: torch.Tensor, what: str, timeout_s: float) -> torch.Tensor:
        """Return the element-wise sum of int64 vectors of equal length; wraps modulo 2^64."""


class GroupCoordinator:
    """Agreement over a torch.distributed group (None: this process alone); a gloo group, whose waits have deadlines.

    After a failure the group's state is unknown, so every later call fails at once.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._broken = ""
        self._device = torch.device("cpu") if group is None else communication_device(group)

    @property
    def rank(self) -> int:
        return 0 if self._group is None else dist.get_rank(self._group)

    @property
    def size(self) -> int:
        return 1 if self._group is None else dist.get_world_size(self._group)

    def exchange(self, value: Any, what: str, timeout_s: float) -> list[Any]:
        deadline, payload = SyncDeadline(timeout_s), json.dumps(value).encode()
        if self.size == 1:
            return [json.loads(payload)]
        # Most values are short and fit behind their length: one collective instead of two.
        frames = self._gather(_framed(payload, _SHORT_BYTES), what, deadline)
        longest = max(_length(frame) for frame in frames)
        if longest > _SHORT_BYTES - _LENGTH_BYTES:
            frames = self._gather(_framed(payload, _LENGTH_BYTES + longest), what, deadline)
        return [json.loads(frame[_LENGTH_BYTES : _LENGTH_BYTES + _length(frame)]) for frame in frames]

    def _gather(self, own: bytearray, what: str, deadline: SyncDeadline) -> list[bytes]:
        """Return every rank's bytes, equally many."""
        tensor = torch.frombuffer(own, dtype=torch.uint8).to(self._device)
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        self._finish(lambda: dist.all_gather(gathered, tensor, group=self._group, async_op=True), what, deadline)
        return [bytes(frame.tolist()) for frame in gathered]

    def sum(self, values: torch.Tensor, what: str, timeout_s: float) -> torch.Tensor:
        total = values.to(self._device, copy=True)
        if self.size == 1:
            return total
        deadline = SyncDeadline(timeout_s)
        self._finish(lambda: dist.all_reduce(total, group=self._group, async_op=True), what, deadline)
        return total.to(values.device)

    def _finish(self, start: Callable[[], Any], what: str, deadline: SyncDeadline) -> None:
        if self._broken:
            raise CoordinationError(f"{what}: not tried, the trainer's ranks have lost each other ({self._broken})")
        try:
            start().wait(timedelta(seconds=deadline.left_s))
        except RuntimeError as error:
            self._broken = what
            first_line = (str(error).splitlines() or ["no reason given"])[0][:300]
            raise CoordinationError(
                f"{what}: rank {self.rank} of {self.size} waited {deadline.seconds:.1f} s for the others: {first_line}"
            ) from error


_SHORT_BYTES = 1024
_LENGTH_BYTES = 8  # of the length in front, little-endian


def _framed(payload: bytes, num_bytes: int) -> bytearray:
    """Return the length of a payload and as much of it as fits, in exactly `num_bytes`."""
    framed = len(payload).to_bytes(_LENGTH_BYTES, "little") + payload[: num_bytes - _LENGTH_BYTES]
    return bytearray(framed.ljust(num_bytes, b"\0"))


def _length(framed: bytes) -> int:
    return int.from_bytes(framed[:_LENGTH_BYTES], "little")


class Call(Generic[Result]):
    """A call in a thread of its own, so that waiting for it has a deadline."""

    def __init__(self, function: Callable[[], Result]) -> None:
        self._outcome: list[Result] = []
        self._error: BaseException | None = None
        self._done = threading.Event()
        # A new thread would compute on GPU 0, whichever is this rank's.
        gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        threading.Thread(target=self._run, args=(function, gpu), name="engine-call", daemon=True).start()

    def _run(self, function: Callable[[], Result], gpu: int | None) -> None:
        try:
            if gpu is not None:
                torch.cuda.set_device(gpu)
            self._outcome.append(function())
        # Raised again by `result`.
        except BaseException as error:  # noqa: BLE001
            self._error = error
        finally:
            self._done.set()

    def wait(self, seconds: float) -> bool:
        """Return True once the call has ended, well or not."""
        return self._done.wait(seconds)

    def result(self, deadline: SyncDeadline, what: str) -> Result:
        """Return or raise what the call did. Raise TimeoutError at the deadline."""
        if not self.wait(deadline.left_s):
            raise TimeoutError(f"{what} took longer than {deadline.seconds:.1f} s")
        if self._error is not None:
            raise self._error
        return self._outcome[0]


def call_within(function: Callable[[], Result], seconds: float, what: str) -> Result:
    """Return `function()`. Raise TimeoutError that names `what` after `seconds`."""
    return Call(function).result(SyncDeadline(seconds), what)


def reason_of(error: BaseException) -> str:
    """Return one line that explains an error to a user."""
    text = str(error) or type(error).__name__
    return text if isinstance(error, (ValueError, TimeoutError, EngineFailure)) else f"{type(error).__name__}: {text}"


def encode_payload(*commands: Command) -> bytes:
    """Return one entry of SGLang's `serialized_named_tensors`: a pickle of [(name, tensor)], the names our commands."""
    return pickle.dumps([(command.encode(), torch.empty(0)) for command in commands], protocol=4)


def check_reply(text: str, *commands: Command) -> Reply:
    """Return the reply to a message of `commands`.

    Raise ValueError if it answers another message, reports a failure, or does not reach the last command.
    """
    reply = Reply.decode(text)
    if not reply.ok and any(reply.id == command.id for command in commands):
        raise ValueError(f"{reply.op}: {reply.message or 'the engine reports a failure without a reason'}")
    if reply.id != commands[-1].id:
        raise ValueError(f"{commands[-1].op}: the engine replies to {reply.id!r}, not to {commands[-1].id!r}")
    return reply
