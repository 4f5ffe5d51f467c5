"""Faults of every kind in up to a thousand updates: an engine only ever serves one whole version, and no update outlives
its deadline.

Each run brings a new version to engines that serve the one before, with one fault somewhere on the way; then the
fault is gone, and another sync must bring all engines to the new version. Every byte of every engine that is not paused
is compared at every resumption and after every run.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from message_faults import PAYLOAD_FAULTS, Strike, payload_of, texts_of
from sync_simulation import SimulatedEngine, World, run_concurrently, run_ranks, small_architecture

from megatron_dapo.bridge.protocol import weight_loader
from megatron_dapo.bridge.protocol.arena import Arena, ArenaSpec
from megatron_dapo.bridge.protocol.messages import Bucket, Command, CommandReply
from megatron_dapo.bridge.protocol.receiver import Channel, Receiver
from megatron_dapo.bridge.transports.shared_memory import SharedMemoryTransport
from megatron_dapo.bridge.weight_sync import EngineState, SyncTimeouts
from megatron_dapo.parallel.coordination import CoordinationError
from megatron_dapo.parallel.layout import ParallelLayout

NUM_WORLDS = 8
PATIENT = SyncTimeouts(20, 20, 20, 20, 20, 20, 20)
# For faults in which an engine or a rank stays silent: such an update lasts this long.
# `grace_s` is how long trainer ranks wait for each other: on a busy host one thread among many may be seconds late.
HASTY = SyncTimeouts(meet_s=5, pause_s=0.6, flush_s=0.6, session_s=0.6, transfer_s=1.2, resume_s=0.6, grace_s=1.5)
HASTY_MESSAGE_S = 0.6
LONGEST_HASTY_S = 15.0  # generous: the host may be busy, and a hang would last forever


@dataclass
class Fault:
    """A fault that strikes command number `command` of a sync to one engine rank, once, or the message that carries it."""

    kind: str
    command: int
    rank: int  # an engine rank, or a trainer rank
    random: random.Random
    fired: bool = False


@dataclass
class Truth:
    """The parameters that every version must have in every engine rank."""

    expected: dict[int, list[dict[str, torch.Tensor]]] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)


@dataclass
class EngineStrike(Strike):
    """A fault that strikes a message to a simulated engine."""

    engine: FaultyEngine

    def carry_out(self) -> None:
        reached = [(m, payload_of(texts)) for m, texts in zip(self.engine.models, self.texts) if texts]
        run_concurrently([lambda m=m, p=p: self.engine.load(m, p) for m, p in reached])

    def receiver(self) -> Receiver:
        return weight_loader._state_of(self.engine.models[self.rank]).receiver


class FaultyEngine(SimulatedEngine):
    """A simulated engine whose messages a fault may strike."""

    def __init__(self, world: World, index: int, truth: Truth) -> None:
        super().__init__(world.layout, index)
        self.world, self.index, self.truth = world, index, truth
        self.fault: Fault | None = None
        self.num_commands = 0  # this sync's, in earlier messages
        self.late: list[Callable[[], None]] = []  # messages that arrive after their deadline
        self.num_running = 0  # calls in progress, including those that the trainer gave up on
        self.lock = threading.Lock()

    def resume(self) -> None:
        super().resume()
        self.check("on resuming")

    def check(self, when: str) -> None:
        """Record a violation if the engine serves any byte that is not of its labeled version."""
        if self.is_alive and not self.is_paused and self.version is not None:
            if not self.world.holds(self, self.index, self.truth.expected[self.version]):
                self.truth.violations.append(f"engine {self.index} serves a mixture as version {self.version} {when}")

    def update_weights_from_tensor(self, payloads, load_format=None) -> None:
        with self.lock:
            self.num_running += 1
        try:
            self.strike_or_load(payloads)
        finally:
            with self.lock:
                self.num_running -= 1

    def wait_until_idle(self) -> None:
        """Wait for messages in progress: a server finishes one that the trainer gave up on before it takes the next."""
        deadline = time.monotonic() + 30
        while self.num_running:
            assert time.monotonic() < deadline, "a message is never carried out"
            time.sleep(0.01)

    def strike_or_load(self, payloads) -> None:
        fault, before = self.fault, self.num_commands
        texts = [texts_of(payload) for payload in payloads]
        self.num_commands += len(texts[0])
        if fault is not None and fault.kind in MESSAGE_FAULTS:
            rank = fault.rank % len(texts)
            at = fault.command - before
            if not fault.fired and 0 <= at < len(texts[rank]):
                fault.fired = True
                MESSAGE_FAULTS[fault.kind](EngineStrike(texts, rank, at, fault.random, self))
                return
        super().update_weights_from_tensor(payloads)

    def _call(self, name: str) -> None:
        fault = self.fault
        if fault is not None and fault.kind == "status" and name == fault_call(fault):
            fault.fired = True
            raise RuntimeError(f"HTTP {fault.random.choice((400, 500))}")
        super()._call(name)


CALLS = ("pause", "flush_cache", "begin", "tensor", "end", "version", "resume")


def fault_call(fault: Fault) -> str:
    return CALLS[fault.command % len(CALLS)]


def unheard(strike: EngineStrike) -> None:
    """Send the message to all ranks but one."""
    strike.own.clear()
    strike.carry_out()


def corrupted_bytes(strike: EngineStrike) -> None:
    """Flip one bit of a bucket, or of a parameter if the command has no bucket."""
    command = strike.command
    if command["bucket"] is None:
        corrupted_memory(strike)
        return
    _, chunks = strike.random.choice(sorted(command["bucket"]["chunks"].items()))
    receiver, original = strike.receiver(), strike.receiver().accept

    def accept(sync_id: str, bucket: Bucket, data: torch.Tensor) -> int:
        if bucket.index == command["bucket"]["index"]:
            # The offset of a chunk is that of full updates; a delta has fewer bytes.
            data[chunks[0][0] % data.numel()] ^= 1 << strike.random.randrange(8)
        return original(sync_id, bucket, data)

    receiver.accept = accept
    try:
        strike.carry_out()
    finally:
        del receiver.accept


@contextlib.contextmanager
def around(strike: EngineStrike, before: Callable[[], None], after: Callable[[], None]) -> Iterator[None]:
    """Call `before` and `after` in the struck rank right before and right after it carries out the command."""
    receiver, original, struck = strike.receiver(), strike.receiver().handle, strike.command["id"]

    def handle(command: Command, source: Channel) -> CommandReply:
        if command.id == struck:
            before()
        reply = original(command, source)
        if command.id == struck:
            after()
        return reply

    receiver.handle = handle
    try:
        yield
    finally:
        del receiver.handle


def _nothing() -> None:
    pass


def corrupted_memory(strike: EngineStrike) -> None:
    """Flip one bit of the engine's parameters before or after a command; only before the last, which computes checksums."""

    def flip() -> None:
        parameters = dict(strike.engine.models[strike.rank].named_parameters())
        bits = parameters[strike.random.choice(sorted(parameters))].data.view(-1).view(torch.int32)
        bits[strike.random.randrange(bits.numel())] ^= 1 << strike.random.randrange(31)

    first = strike.command["op"] == "finish" or strike.random.random() < 0.5
    with around(strike, flip, _nothing) if first else around(strike, _nothing, flip):
        strike.carry_out()


def delayed(strike: EngineStrike) -> None:
    """Answer too late; the message is carried out some time later, perhaps when the engine serves again."""
    strike.engine.late.append(strike.carry_out)
    time.sleep(2 * HASTY_MESSAGE_S + HASTY.transfer_s)


def hanging(strike: EngineStrike) -> None:
    """Stop one rank in the middle of the message until its deadline has passed, then let it continue."""
    with around(strike, lambda: time.sleep(2 * HASTY_MESSAGE_S + HASTY.transfer_s), _nothing):
        strike.carry_out()


def killed_engine(strike: EngineStrike) -> None:
    """End all ranks in the middle of the message."""
    for texts in strike.texts:
        del texts[strike.at :]
    strike.carry_out()
    strike.engine.is_alive = False
    raise ConnectionError("connection reset by peer")


def stale_reply(strike: EngineStrike) -> None:
    """Leave a good reply to an earlier message in one rank's reply area."""
    strike.carry_out()
    command = strike.command
    reply = {"id": command["id"] + "0", "op": command["op"], "ok": True}
    _arena(strike.engine, strike.rank, command).write_reply(json.dumps(reply))


def loader_fails(strike: EngineStrike) -> None:
    """Let the receiver of one rank raise an error that it does not expect."""
    receiver = strike.receiver()

    def fail(*_: object) -> None:
        raise MemoryError("out of memory")

    def break_down() -> None:
        receiver.accept = receiver.begin = receiver.finish = fail

    with around(strike, break_down, _nothing):
        strike.carry_out()
    del receiver.accept, receiver.begin, receiver.finish


def _arena(engine: FaultyEngine, rank: int, command: dict) -> Arena:
    """Return the arena as the engine has it mapped: its file may be unlinked."""
    return weight_loader._state_of(engine.models[rank]).mapped.map(ArenaSpec.from_json(command["channel"]["arena"]))


MESSAGE_FAULTS: dict[str, Callable[[EngineStrike], None]] = {
    **PAYLOAD_FAULTS,
    "unheard": unheard,
    "corrupted bytes": corrupted_bytes,
    "corrupted memory": corrupted_memory,
    "delayed": delayed,
    "hanging": hanging,
    "killed engine": killed_engine,
    "stale reply": stale_reply,
    "loader fails": loader_fails,
}
SENDER_FAULTS = ("killed sender", "sender fails")
KINDS = (*MESSAGE_FAULTS, "status", *SENDER_FAULTS)
SILENT = ("unheard", "delayed", "hanging", "killed sender")
# After these the engine must not serve. (A changed digit may have no meaning; memory that changes before its bucket
# arrives is overwritten.)
MUST_FAIL = tuple(
    kind for kind in KINDS if kind not in ("corrupted bytes", "corrupted memory", "corrupted command", "killed sender")
)


class FaultyTransport(SharedMemoryTransport):
    """A transport whose trainer rank dies in a round, or lacks the weights it should send."""

    fault: Fault | None = None

    def _round(self, state, index, sources) -> None:
        fault = self.fault
        if fault is not None and fault.rank % self.node_group.size == self.rank and index == fault.command % 2:
            if fault.kind == "killed sender":
                fault.fired = True
                raise SystemExit
            if fault.kind == "sender fails":
                plan, delta = state.request.plan(self.plan), state.request.delta
                buckets = [b for e in state.engines for r in plan.ranks_of(e) for b in plan.buckets(r)[index:][:1]]
                fault.fired = any(self.rank in bucket.segments for bucket in buckets)
                sources = {}
                if delta is not None:
                    delta.changes.clear()
        super()._round(state, index, sources)


class Trial:
    """Engines and trainer ranks that go through many updates."""

    def __init__(self, number: int, directory: Path, full_interval: int) -> None:
        self.full_interval = full_interval
        tensor_parallel, num_engines = ((2, 1), (1, 2))[number % 2]
        architecture = small_architecture(bool(number % 4 < 2), num_hidden_layers=1, hidden_size=8, vocab_size=67)
        parallel = ParallelLayout(2, tensor=2) if number % 3 else ParallelLayout(2)
        self.world = World(
            architecture,
            parallel,
            tensor_parallel=tensor_parallel,
            num_engines=num_engines,
            bucket_bytes=2048,
            engines_per_node=num_engines if number % 4 < 3 else 1,
        )
        self.directory = directory / str(number)
        self.directory.mkdir()
        self.truth = Truth()
        self.random = random.Random(number)
        self.engines = [FaultyEngine(self.world, e, self.truth) for e in range(num_engines)]
        self.version = 0
        self.fired: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.deltas: Counter[str] = Counter()  # deltas among those that fired
        self.longest_s = 0.0
        self.start_trainer()
        self.recover()

    def num_fired(self) -> int:
        return sum(self.fired.values())

    def start_trainer(self) -> None:
        """Restart the trainer; engines stay as they are."""
        self.version += 1
        session = f"life {self.version}"
        self.updates = self.world.updates(
            self.engines,
            self.directory,
            PATIENT,
            transport_of=FaultyTransport,
            session=session,
            full_interval=self.full_interval,
        )

    def weights(self) -> list[dict[str, torch.Tensor]]:
        weights = self.world.weights(self.version, 1.0 if self.full_interval == 1 else 0.02)
        self.truth.expected[self.version] = self.world.expected(weights)
        return weights

    def recover(self) -> None:
        """Sync without faults, which must bring every engine back."""
        self.set_pace(PATIENT, 20.0)
        weights = self.weights()
        for outcome in run_ranks(2, lambda rank: self.updates[rank].update(self.version, weights[rank]), 60):
            assert not isinstance(outcome, Exception), outcome
            assert outcome.is_complete, outcome.failures
        for index, engine in enumerate(self.engines):
            assert not engine.is_paused and engine.version == self.version
            assert self.world.holds(engine, index, self.truth.expected[self.version])

    def set_pace(self, timeouts: SyncTimeouts, message_s: float) -> None:
        for update in self.updates:
            update.timeouts = timeouts
            update.transport.message_timeout_s, update.transport.grace_s = message_s, timeouts.grace_s

    def run(self, kind: str) -> None:
        """Run one update with one fault, then recover."""
        fault = Fault(
            kind, self.random.randrange(self.world.plan.num_buckets(0) + 2), self.random.randrange(2), self.random
        )
        struck = self.random.choice(self.engines)
        self.version += 1
        weights = self.weights()
        struck.num_commands, struck.fault = 0, fault
        for update in self.updates:
            update.transport.fault = fault if kind in SENDER_FAULTS else None
        silent = kind in SILENT
        self.set_pace(HASTY if silent else PATIENT, HASTY_MESSAGE_S if silent else 20.0)
        start = time.monotonic()
        outcomes = run_ranks(2, lambda rank: self.updates[rank].update(self.version, weights[rank]), 60)
        if silent:
            self.longest_s = max(self.longest_s, time.monotonic() - start)
        struck.fault = None
        for update in self.updates:
            update.transport.fault = None
        self.check_outcomes(kind, fault, struck, outcomes)
        self.restore(outcomes)

    def check_outcomes(self, kind: str, fault: Fault, struck: FaultyEngine, outcomes: list) -> None:
        for engine in self.engines:
            engine.check(f"after {kind!r}")
        self.fired[kind] += fault.fired
        if kind == "killed sender" and fault.fired:
            # One rank is dead: the other gets an error, and no engine serves the new version.
            (survivor,) = [outcome for outcome in outcomes if outcome is not None]
            assert isinstance(survivor, CoordinationError), survivor
            assert all(engine.is_paused for engine in self.engines)
            self.failed[kind] += 1
            return
        first = outcomes[0]
        assert not isinstance(first, Exception), first
        self.deltas[kind] += fault.fired and first.is_delta
        assert {e: (r.state, r.reason) for e, r in first.engines.items()} == {
            e: (r.state, r.reason) for e, r in outcomes[1].engines.items()
        }
        for index, engine in enumerate(self.engines):
            report = first.engines[index]
            if report.state is EngineState.SERVING:
                assert (engine.version, engine.is_paused) == (self.version, False)
                assert self.world.holds(engine, index, self.truth.expected[self.version]), kind
                assert not (engine is struck and fault.fired and kind in MUST_FAIL), f"{kind} was not noticed"
            else:
                assert report.reason and report.state is EngineState.UNSERVED
                # An engine may be unserved because a fault struck it or a trainer rank, or because deadlines are short.
                assert engine is struck or kind in SENDER_FAULTS or kind in SILENT, (kind, report.reason)
        self.failed[kind] += struck.index in first.failures

    def restore(self, outcomes: list) -> None:
        """Restart dead engines and trainers, let late messages arrive, and sync the version to all engines."""
        for index, engine in enumerate(self.engines):
            engine.wait_until_idle()
            late, engine.late = engine.late, []
            if not engine.is_alive:
                self.engines[index] = FaultyEngine(self.world, index, self.truth)
                late = []
            before = self.random.random() < 0.5
            if before:
                _arrive(late)
                late = []
            self.engines[index].late = late
        if any(outcome is None or isinstance(outcome, Exception) for outcome in outcomes):
            self.start_trainer()
        self.recover()
        for engine in self.engines:
            _arrive(engine.late)
            engine.late = []
            engine.check("after a late message")


def _arrive(messages: list[Callable[[], None]]) -> None:
    for message in messages:
        message()


@pytest.mark.slow
@pytest.mark.timeout(1200)  # a thousand take three minutes on two idle cores; a hang meets the limit of its update
@pytest.mark.parametrize(
    ("num_faults", "full_interval"),
    [(100, 3), *(pytest.param(1000, interval, marks=pytest.mark.long) for interval in (1, 3))],
)
def test_faults_of_every_kind(num_faults: int, full_interval: int, tmp_path: Path) -> None:
    trials = [Trial(number, tmp_path, full_interval) for number in range(NUM_WORLDS)]
    errors: list[BaseException] = []

    def live(trial: Trial, number: int) -> None:
        try:
            kinds = itertools.cycle(KINDS[number:] + KINDS[:number])
            # A run whose fault did not fire is not counted.
            while trial.num_fired() < num_faults / NUM_WORLDS:
                trial.run(next(kinds))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=live, args=(t, n), daemon=True) for n, t in enumerate(trials)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()  # bounded: every update has a limit
    if errors:
        raise errors[0]
    assert [violation for trial in trials for violation in trial.truth.violations] == []
    fired = sum((trial.fired for trial in trials), Counter())
    failed = sum((trial.failed for trial in trials), Counter())
    print("fired", dict(fired), "unserved", dict(failed), "longest", max(trial.longest_s for trial in trials))
    assert sum(fired.values()) >= num_faults and min(fired[kind] for kind in KINDS) >= num_faults // 50, fired
    assert all(failed[kind] >= fired[kind] for kind in MUST_FAIL), (fired, failed)
    deltas = sum((trial.deltas for trial in trials), Counter())
    assert (min(deltas[kind] for kind in KINDS if kind != "killed sender") > 0) == (full_interval > 1), deltas
    assert max(trial.longest_s for trial in trials) < LONGEST_HASTY_S
    assert not any(path.is_file() for path in tmp_path.rglob("*")), "arenas are left behind"
