"""What transports and the state machine share: the orders, the outcome, engines, and agreement with a deadline.

A delivery is collective: every trainer rank calls `Transport.deliver` with the same `SyncRequest`. Each engine has one
leader, the trainer rank that speaks HTTP to it. A failure of an engine is data (`TransferResult.failures`) and must not keep
the other engines from their weights; a failure of a trainer rank is a `CoordinationError` on all others, within the
deadline.

What a transport does for each engine rank, in this order, whatever carries the bytes:

    begin    Command(op="begin", manifest=plan.manifest(...))
    bucket   Command(op="bucket", bucket=plan.buckets(...)[k].header) + its bytes, for every k in order
    finish   Command(op="finish")                                  -> Reply with the checksums of all parameters

A message holds one or several commands and is answered by one Reply, on its last command or on the first one that
failed: none is carried out behind that. A transport that has the weights loaded in another way sends
Command(op="adopt", manifest=...) instead. A Reply whose id is not the last command's, or none, is a failure.
`expected` sums what this rank wrote; the state machine adds it up over ranks and compares.
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

from megatron_dapo.bridge.protocol.receiver import Command, Reply
from megatron_dapo.bridge.sync_plan import ExpectedChecksums
from megatron_dapo.parallel.collectives import communication_device
from megatron_dapo.reshard.execution import Buffers

LOAD_FORMAT = "megatron_dapo.bridge.protocol.weight_loader.load"
Result = TypeVar("Result")


class EngineControl(Protocol):
    """What an update needs of a server. Every method returns when it is done and raises where it is not."""

    def pause(self, mode: str) -> None: ...

    def flush_cache(self) -> None: ...

    def begin_weight_update(self) -> None: ...

    def update_weights_from_tensor(
        self, payloads: Sequence[bytes | str], load_format: str | None = None, *, flush_cache: bool = False
    ) -> None: ...

    def update_weights_from_disk(self, folder: str, *, flush_cache: bool = True) -> None: ...

    def end_weight_update(self) -> None: ...

    def update_weight_version(self, version: int) -> None: ...

    def resume(self) -> None: ...


@dataclass(frozen=True)
class EngineHandles:
    """The engines and who speaks to them.

    `controls` are those of the engines that this rank leads; the mapping may change when an engine is restarted.
    """

    leaders: Sequence[int]  # engine -> trainer rank
    controls: Mapping[int, EngineControl]

    def led_by(self, rank: int, engines: Sequence[int]) -> tuple[int, ...]:
        return tuple(engine for engine in engines if self.leaders[engine] == rank)


class SyncDeadline:
    """A moment on the monotonic clock that may not be passed."""

    def __init__(self, seconds: float) -> None:
        self.at = time.monotonic() + seconds
        self.seconds = seconds

    @property
    def left_s(self) -> float:
        """Seconds that are left, at least a millisecond: zero means "for ever" to many waits."""
        return max(1e-3, self.at - time.monotonic())

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.at


@dataclass(frozen=True)
class SyncRequest:
    """One delivery, the same on every rank."""

    delivery: str  # unique
    session: str
    version: int
    engines: tuple[int, ...]
    number: int = 0  # grows from delivery to delivery of a session


@dataclass
class TransferResult:
    """What one rank knows after `Transport.deliver`."""

    expected: ExpectedChecksums
    failures: dict[int, str] = field(default_factory=dict)  # engine -> first reason this rank saw
    reports: dict[int, tuple[Reply, ...]] = field(default_factory=dict)  # engines this rank leads: finish of each rank
    num_bytes: dict[int, int] = field(default_factory=dict)  # engines this rank leads: copied into parameters
    peak_bytes: int = 0  # largest extra memory for one engine rank

    def fail(self, engine: int, reason: str) -> None:
        self.failures.setdefault(engine, reason)


class Transport(Protocol):
    """Carries out deliveries. One object for the run; it may keep connections and memory between deliveries."""

    def deliver(self, order: SyncRequest, sources: Buffers, deadline: SyncDeadline) -> TransferResult:
        """Brings this rank's share to all engines of the order, and has them verify. Collective.

        Returns by the deadline; raises CoordinationError where another trainer rank did not take part.
        """

    def close(self) -> None: ...


class EngineFailure(RuntimeError):
    """An engine did not do what it was told; the text says it all."""


class CoordinationError(RuntimeError):
    """Trainer ranks did not come to an agreement in time: one is gone or late."""


class Coordinator(Protocol):
    """Agreement among some trainer ranks, each with a deadline. Every rank of the group must call."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def exchange(self, value: Any, what: str, timeout_s: float) -> list[Any]:
        """Every rank's JSON value, in rank order."""

    def sum(self, values: torch.Tensor, what: str, timeout_s: float) -> torch.Tensor:
        """Element-wise sum of int64 vectors of equal length; wraps modulo 2^64."""


class GroupCoordinator:
    """Agreement over a torch.distributed group; a gloo group, whose waits have deadlines.

    After a failure the group's state is unknown, so every later call fails at once.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._broken = ""
        self._device = communication_device(group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self._group)

    @property
    def size(self) -> int:
        return dist.get_world_size(self._group)

    def exchange(self, value: Any, what: str, timeout_s: float) -> list[Any]:
        deadline = SyncDeadline(timeout_s)
        payload = _json_bytes(value)
        # Short values, which most are, fit behind their length: one meeting instead of two.
        chunks = self._gather(_framed(payload, _SHORT_BYTES), what, deadline)
        longest = max(_length(chunk) for chunk in chunks)
        if longest > _SHORT_BYTES - _LENGTH_BYTES:
            chunks = self._gather(_framed(payload, _LENGTH_BYTES + longest), what, deadline)
        return [json.loads(chunk[_LENGTH_BYTES : _LENGTH_BYTES + _length(chunk)]) for chunk in chunks]

    def _gather(self, own: bytearray, what: str, deadline: SyncDeadline) -> list[bytes]:
        """Every rank's bytes, equally many."""
        tensor = torch.frombuffer(own, dtype=torch.uint8).to(self._device)
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        self._finish(lambda: dist.all_gather(gathered, tensor, group=self._group, async_op=True), what, deadline)
        return [bytes(chunk.tolist()) for chunk in gathered]

    def sum(self, values: torch.Tensor, what: str, timeout_s: float) -> torch.Tensor:
        total = values.to(self._device, copy=True)
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


def _json_bytes(value: Any) -> bytes:
    return json.dumps(value).encode()


_SHORT_BYTES = 1024
_LENGTH_BYTES = 8  # of the length in front, little-endian


def _framed(payload: bytes, num_bytes: int) -> bytearray:
    """The length of a payload and as much of it as fits, in exactly `num_bytes`."""
    framed = len(payload).to_bytes(_LENGTH_BYTES, "little") + payload[: num_bytes - _LENGTH_BYTES]
    return bytearray(framed.ljust(num_bytes, b"\0"))


def _length(framed: bytes) -> int:
    return int.from_bytes(framed[:_LENGTH_BYTES], "little")


class Call(Generic[Result]):
    """A call in a thread of its own, so that waiting for it has a deadline. Nobody waits for one that is given up."""

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
        # Carried to whoever waits.
        except BaseException as error:  # noqa: BLE001
            self._error = error
        finally:
            self._done.set()

    def wait(self, seconds: float) -> bool:
        """Whether it has ended, well or not."""
        return self._done.wait(seconds)

    def result(self, deadline: SyncDeadline, what: str) -> Result:
        """What the call returned or raised; TimeoutError at the deadline."""
        if not self.wait(deadline.left_s):
            raise TimeoutError(f"{what} took longer than {deadline.seconds:.1f} s")
        if self._error is not None:
            raise self._error
        return self._outcome[0]


def call_within(function: Callable[[], Result], seconds: float, what: str) -> Result:
    """`function()`, given up after `seconds`: TimeoutError that says what was waited for."""
    return Call(function).result(SyncDeadline(seconds), what)


def reason_of(error: BaseException) -> str:
    """One line for people."""
    text = str(error) or type(error).__name__
    return text if isinstance(error, (ValueError, TimeoutError, EngineFailure)) else f"{type(error).__name__}: {text}"


def encode_payload(*commands: Command) -> bytes:
    """One entry of SGLang's `serialized_named_tensors`: the stock pickle of [(name, tensor)], the names our commands."""
    return pickle.dumps([(command.encode(), torch.empty(0)) for command in commands], protocol=4)


def check_report(text: str, *commands: Command) -> Reply:
    """The report on a message of `commands`. ValueError where it belongs to another message, says that a command
    failed, or does not reach the last one."""
    report = Reply.decode(text)
    if not report.ok and any(report.id == command.id for command in commands):
        raise ValueError(f"{report.op}: {report.message or 'the engine reports a failure without a reason'}")
    if report.id != commands[-1].id:
        raise ValueError(f"{commands[-1].op}: the engine reports on {report.id!r}, not on {commands[-1].id!r}")
    return report
