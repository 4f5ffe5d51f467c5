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
    finish   Command(op="finish")                                -> CommandReply with the checksums of all parameters

A message holds one or several commands. One `CommandReply` answers it, to its last command or the first one that failed; no
command is carried out after a failure. A transport whose engines load the weights in another way sends
Command(op="adopt", manifest=...) instead.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import torch

from megatron_dapo.bridge.deltas import Delta
from megatron_dapo.bridge.protocol.messages import Command, CommandReply, Manifest
from megatron_dapo.bridge.sync_plan import ExpectedChecksums, SyncPlan
from megatron_dapo.device_thread import device_thread
from megatron_dapo.reshard.execution import Buffers

LOAD_FORMAT = "megatron_dapo.bridge.protocol.weight_loader.load"
Result = TypeVar("Result")
Control = TypeVar("Control", bound="EngineControl", covariant=True)


class EngineControl(Protocol):
    """Control of one engine during a weight sync. Every method returns when the engine is done and raises if it fails."""

    def pause(self) -> None:
        """Stop generating; requests under way come back with what they have, or stay for `resume`."""

    def flush_cache(self) -> None:
        """Drop the KV cache, which the old weights filled."""

    def begin_weight_update(self) -> None:
        """Open an update session, if the engine has them."""

    def end_weight_update(self) -> None:
        """Close the session of `begin_weight_update`."""

    def update_weight_version(self, version: int) -> None:
        """Set the policy version that the engine reports with its responses."""

    def resume(self) -> None:
        """Generate again."""


class ServerControl(EngineControl, Protocol):
    """Control of an engine in separate processes, which take weights as requests: SGLang's endpoints."""

    def update_weights_from_tensor(self, payloads: Sequence[bytes | str], load_format: str | None = None) -> None: ...

    def update_weights_from_disk(self, directory: str) -> None: ...


@dataclass(frozen=True)
class EngineHandles(Generic[Control]):
    """The engines, and the trainer rank that leads each.

    `controls` are those of the engines that this rank leads; the mapping may change when an engine is restarted.
    """

    leaders: Sequence[int]  # engine -> trainer rank
    controls: Mapping[int, Control]

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
    delta: Delta | None = None  # this rank's changes, if only those are sent

    def plan(self, full: SyncPlan) -> SyncPlan:
        """Return the plan of what is sent; `full`: that of a full update."""
        return full if self.delta is None else self.delta.plan

    def manifest(self, full: SyncPlan, engine_rank: int) -> Manifest:
        """Return the manifest for an engine rank."""
        base = None if self.delta is None else self.delta.base
        return self.plan(full).manifest(engine_rank, self.sync_id, self.session, self.version, self.number, base)


@dataclass
class TransferResult:
    """One rank's view of a transfer."""

    expected: ExpectedChecksums
    failures: dict[int, str] = field(default_factory=dict)  # engine -> first reason this rank saw
    replies: dict[int, tuple[CommandReply, ...]] = field(
        default_factory=dict
    )  # each rank's finish, by the engine that this rank leads
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


class Call(Generic[Result]):
    """A call in a separate thread, so that waiting for it has a deadline."""

    def __init__(self, function: Callable[[], Result]) -> None:
        self._function = function
        self._outcome: list[Result] = []
        self._error: BaseException | None = None
        self._done = threading.Event()
        device_thread(self._run, name="engine-call").start()

    def _run(self) -> None:
        try:
            self._outcome.append(self._function())
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


class EngineLoads:
    """The loads of one sync by the engines that this rank leads, each in a thread, when engines load by themselves."""

    def __init__(self, plan: SyncPlan, rank: int, deadline: SyncDeadline) -> None:
        self.result = TransferResult(ExpectedChecksums(plan))
        self._plan, self._rank, self._deadline = plan, rank, deadline
        self._calls: dict[int, Call[tuple[CommandReply, ...]]] = {}

    def start(self, engine: int, load: Callable[[], tuple[CommandReply, ...]]) -> None:
        """Begin the load of an engine, which returns the replies of its ranks."""
        self._calls[engine] = Call(load)

    def count(self, engines: Collection[int], sources: Buffers) -> None:
        """Count this rank's share of what the engines load."""
        for engine_rank in self._plan.destinations(self._rank):
            if engine_rank // self._plan.engines.tensor_parallel in engines:
                self.result.expected.add_plan(engine_rank, self._rank, sources)

    def collect(self, what: str) -> TransferResult:
        """Wait for the loads of `what`, and return their outcomes."""
        result, plan = self.result, self._plan
        for engine, call in self._calls.items():
            try:
                result.replies[engine] = call.result(self._deadline, f"engine {engine}, which loads {what}")
                result.num_bytes[engine] = sum(plan.num_bytes(rank) for rank in plan.ranks_of(engine))
            # An engine can fail with any exception; that must not fail this rank.
            except Exception as error:
                result.fail(engine, reason_of(error))
        return result


def call_within(function: Callable[[], Result], seconds: float, what: str) -> Result:
    """Return `function()`. Raise TimeoutError that names `what` after `seconds`."""
    return Call(function).result(SyncDeadline(seconds), what)


def reason_of(error: BaseException) -> str:
    """Return one line that explains an error to a user."""
    text = str(error) or type(error).__name__
    return text if isinstance(error, (ValueError, TimeoutError, EngineFailure)) else f"{type(error).__name__}: {text}"


def encode_payload(*commands: Command) -> bytes:
    """Return one entry of SGLang's `serialized_named_tensors`: a pickle of [(name, tensor)], the names our commands."""
    return pickle.dumps([(command.encode(), _EmptyTensor()) for command in commands], protocol=4)


class _EmptyTensor:
    """Stand-in that is unpickled as an empty tensor; the loader reads only the names.

    SGLang unpickles with a list of allowed modules. A tensor's own pickle names the function that reads its storage, which
    megatron-core (0.19) replaces, and the server then ends with "Blocked unsafe class loading".
    """

    def __reduce__(self) -> tuple[type[torch.Tensor], tuple[()]]:
        return torch.Tensor, ()


def check_reply(text: str, *commands: Command) -> CommandReply:
    """Return the reply to a message of `commands`.

    Raise ValueError if it answers another message, reports a failure, or does not reach the last command.
    """
    reply = CommandReply.decode(text)
    if not reply.ok and any(reply.id == command.id for command in commands):
        raise ValueError(f"{reply.op}: {reply.message or 'the engine reports a failure without a reason'}")
    if reply.id != commands[-1].id:
        raise ValueError(f"{commands[-1].op}: the engine replies to {reply.id!r}, not to {commands[-1].id!r}")
    return reply
