"""A new version into all engines: paused, flushed, delivered, verified, served. Or not served at all.

    SERVING -> PAUSED -> FLUSHED -> TRANSFERRING -> VERIFIED -> SERVING (the new version)
                    any failure or deadline passed -> UNSERVED

Collective over the trainer's ranks; each engine's leader speaks HTTP to it. An engine that fails stays paused and
leaves the update; the others go on. It serves again only after a whole delivery of its own has been verified
(`redeliver`), or it is restarted and then delivered to. A trainer rank that is gone or late ends the update on all
other ranks with CoordinationError; no engine is resumed then. Every rank gets the same SyncReport.

Verified means, for each rank of the engine: its ledger has counted every element of every parameter exactly once, and
the checksum of every parameter, read back from the engine's memory, equals the sum of what the trainer's ranks wrote.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any

from megatron_dapo.bridge.sync_plan import SyncPlan
from megatron_dapo.bridge.transports.base import (
    Call,
    CoordinationError,
    Coordinator,
    EngineControl,
    EngineFailure,
    EngineHandles,
    SyncDeadline,
    SyncRequest,
    TransferResult,
    Transport,
    call_within,
    reason_of,
)
from megatron_dapo.reshard.execution import Buffers

__all__ = [
    "CoordinationError",
    "EngineControl",
    "EngineSyncReport",
    "EngineState",
    "WeightSync",
    "EngineHandles",
    "Transport",
    "SyncReport",
    "SyncTimeouts",
]

logger = logging.getLogger(__name__)


class EngineState(str, Enum):
    SERVING = "serving"
    PAUSED = "paused"
    FLUSHED = "flushed"
    TRANSFERRING = "transferring"
    VERIFIED = "verified"
    UNSERVED = "unserved"


@dataclass(frozen=True)
class SyncTimeouts:
    """Deadlines of the states, in seconds."""

    meet_s: float = 600.0  # until all trainer ranks have come to an update
    pause_s: float = 60.0
    flush_s: float = 60.0
    session_s: float = 60.0  # begin and end of the update session of newer servers
    transfer_s: float = 600.0  # all buckets and the verification inside the engine
    resume_s: float = 60.0  # new version's label, and serving again
    grace_s: float = 10.0  # how much longer ranks wait for each other than an engine may take

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"update timeouts: {name} = {value}, must be above 0")


@dataclass
class EngineSyncReport:
    """What became of one engine."""

    state: EngineState
    version: int | None = None  # served from now on; None where nothing may be served
    reason: str = ""  # why it is unserved
    num_bytes: int = 0  # copied into its parameters
    seconds: dict[str, float] = field(default_factory=dict)  # by step


@dataclass(frozen=True)
class SyncReport:
    """One update, the same on every rank."""

    version: int
    engines: Mapping[int, EngineSyncReport]  # those that took part
    peak_bytes: int  # largest extra memory the transport took for one engine rank
    seconds: float  # on this rank

    @property
    def is_complete(self) -> bool:
        return all(report.state is EngineState.SERVING for report in self.engines.values())

    @property
    def failures(self) -> dict[int, str]:
        """engine -> why it is unserved."""
        return {e: report.reason for e, report in self.engines.items() if report.state is not EngineState.SERVING}

    def describe(self) -> str:
        """One line for people."""
        good = [engine for engine, report in self.engines.items() if report.state is EngineState.SERVING]
        text = f"version {self.version}: {len(good)} of {len(self.engines)} engines serve it ({self.seconds:.2f} s)"
        return text + "".join(f"; engine {engine} does not: {reason}" for engine, reason in self.failures.items())


class WeightSync:
    """Drives all engines of a run through updates. Collective: every trainer rank has one and calls the same.

        update = WeightSync(plan, handles, transport, coordinator)
        report = update.update(version, actor.named_local_parameters())
        if not report.is_complete: ...   # restart report.failures, then update.redeliver(engines, version, parameters)

    Args:
        coordinator: all trainer ranks.
        session: name of this life of the trainer; versions must not go backwards within it. Rank 0's is taken.
        release_cache: called on every rank between the transfer and the engines' wake-up, if they share devices with
            the trainer.
    """

    def __init__(
        self,
        plan: SyncPlan,
        handles: EngineHandles,
        transport: Transport,
        coordinator: Coordinator,
        timeouts: SyncTimeouts | None = None,
        session: str | None = None,
        release_cache: Callable[[], None] | None = None,
    ) -> None:
        if len(handles.leaders) != plan.num_engines:
            raise ValueError(
                f"engine update: leaders of {len(handles.leaders)} engines, the plan has {plan.num_engines}"
            )
        self.plan = plan
        self.handles = handles
        self.transport = transport
        self.coordinator = coordinator
        self.timeouts = timeouts or SyncTimeouts()
        self.states = dict.fromkeys(range(plan.num_engines), EngineState.UNSERVED)
        self.versions: dict[int, int | None] = dict.fromkeys(range(plan.num_engines))
        self._session = session or secrets.token_hex(8)
        self._release_cache = release_cache
        self._agreed = False

    @property
    def serving(self) -> tuple[int, ...]:
        """Engines that may be asked for generations."""
        return tuple(engine for engine, state in self.states.items() if state is EngineState.SERVING)

    def update(self, version: int, sources: Buffers) -> SyncReport:
        """Brings `version` into all engines. CoordinationError where trainer ranks lose each other."""
        return self.redeliver(range(self.plan.num_engines), version, sources)

    def redeliver(self, engines: Sequence[int], version: int, sources: Buffers) -> SyncReport:
        """Brings `version` into some engines (restarted ones), the same on every rank. ValueError where `version` is
        older than one that any engine serves: all engines serve one policy."""
        start = time.perf_counter()
        engines = tuple(sorted(engines))
        self._check_version(version)
        order = self._agree(engines, version)
        reports = {engine: EngineSyncReport(self.states[engine]) for engine in engines}
        try:
            self._prepare(reports)
            delivered = self._transfer(order, reports, sources)
            self._verify(reports, version, delivered)
            self._serve(reports, version)
        except BaseException:
            # Ranks have lost each other, or this one is ending: nobody knows what the engines hold.
            for engine in engines:
                self._drop(reports[engine], "the update was not brought to an end")
                self.states[engine], self.versions[engine] = EngineState.UNSERVED, None
            raise
        for engine, report in reports.items():
            self.states[engine], self.versions[engine] = report.state, report.version
        result = SyncReport(version, reports, delivered.peak_bytes, time.perf_counter() - start)
        logger.info("weights: %s", result.describe())
        return result

    # Steps

    def _prepare(self, reports: dict[int, EngineSyncReport]) -> None:
        """Pause, flush and begin, each engine by its leader."""
        timeouts = self.timeouts

        def steps(engine: int, control: EngineControl, report: EngineSyncReport) -> None:
            _step(report, "pause", timeouts.pause_s, lambda: control.pause("abort"))
            report.state = EngineState.PAUSED
            _step(report, "flush", timeouts.flush_s, control.flush_cache)
            report.state = EngineState.FLUSHED
            _step(report, "begin", 3 * timeouts.session_s, lambda: _begin_session(control))
            report.state = EngineState.TRANSFERRING

        seconds = timeouts.pause_s + timeouts.flush_s + 3 * timeouts.session_s
        self._each(reports, EngineState.TRANSFERRING, steps, seconds)
        self._share(reports, "pausing the engines", seconds)

    def _transfer(self, order: SyncRequest, reports: dict[int, EngineSyncReport], sources: Buffers) -> TransferResult:
        """All bytes, and the engines' own reports."""
        start = time.perf_counter()
        alive = self._in_state(reports, EngineState.TRANSFERRING)
        order = replace(order, engines=alive)
        delivered = self.transport.deliver(order, sources, SyncDeadline(self.timeouts.transfer_s))
        for engine, reason in delivered.failures.items():
            self._drop(reports[engine], reason)
        for engine, num_bytes in delivered.num_bytes.items():
            reports[engine].num_bytes = num_bytes
        for engine in self.handles.led_by(self.coordinator.rank, alive):
            reports[engine].seconds["transfer"] = time.perf_counter() - start
        if self._release_cache is not None:
            self._release_cache()  # before the exchange that every engine's resume waits for: KV caches come back then
        self._share(reports, "the transfer", self.timeouts.transfer_s)
        return delivered

    def _verify(self, reports: dict[int, EngineSyncReport], version: int, delivered: TransferResult) -> None:
        """Compares the checksums the engines read back with the sums of what all ranks wrote."""
        alive = self._in_state(reports, EngineState.TRANSFERRING)
        ranks = [rank for engine in alive for rank in self.plan.ranks_of(engine)]
        own = delivered.expected.vector(ranks)
        total = self.coordinator.sum(own, "the checksums", self.timeouts.grace_s)
        expected = delivered.expected.named(ranks, total)
        for engine in self.handles.led_by(self.coordinator.rank, alive):
            problem = self._difference(engine, version, delivered, expected)
            if problem:
                self._drop(reports[engine], problem)
            else:
                reports[engine].state = EngineState.VERIFIED
        self._share(reports, "the verdict", 0.0)

    def _serve(self, reports: dict[int, EngineSyncReport], version: int) -> None:
        """End of the session, the version's label, and generation again."""
        timeouts = self.timeouts

        def steps(engine: int, control: EngineControl, report: EngineSyncReport) -> None:
            _step(report, "end", timeouts.session_s, control.end_weight_update)
            _step(report, "label", timeouts.resume_s, lambda: control.update_weight_version(version))
            _step(report, "resume", timeouts.resume_s, control.resume)
            report.state, report.version = EngineState.SERVING, version

        alive = {e: report for e, report in reports.items() if report.state is EngineState.VERIFIED}
        seconds = timeouts.session_s + 2 * timeouts.resume_s
        self._each(alive, EngineState.SERVING, steps, seconds)
        self._share(reports, "resuming the engines", seconds)

    # Parts of steps

    def _difference(
        self, engine: int, version: int, delivered: TransferResult, expected: Mapping[int, Mapping[str, int]]
    ) -> str:
        """What is wrong with an engine's final reports; "" where nothing is."""
        reports = delivered.reports.get(engine, ())
        size = self.plan.engines.tensor_parallel
        if len(reports) != size:
            return f"{len(reports)} of its {size} ranks reported at the end"
        for number, (rank, report) in enumerate(zip(self.plan.ranks_of(engine), reports)):
            if report.version != version:
                return f"its rank {number} holds version {report.version} and not {version}"
            wrong = sorted(
                name
                for name in expected[rank].keys() | report.checksums.keys()
                if expected[rank].get(name) != report.checksums.get(name)
            )
            if wrong:
                return (
                    f"{len(wrong)} of {len(expected[rank])} parameters of its rank {number} differ from the trainer's: "
                    f"{', '.join(wrong[:3])}"
                )
        return ""

    def _each(
        self,
        reports: Mapping[int, EngineSyncReport],
        goal: EngineState,
        steps: Callable[[int, EngineControl, EngineSyncReport], None],
        seconds: float,
    ) -> None:
        """Runs `steps` for every engine this rank leads, all at once; those that do not reach `goal` are dropped."""
        mine = self.handles.led_by(self.coordinator.rank, tuple(reports))
        # A copy for the thread: one that is given up must not change the verdict later.
        drafts = {
            engine: EngineSyncReport(reports[engine].state, seconds=dict(reports[engine].seconds)) for engine in mine
        }
        calls = {e: Call(lambda e=e: steps(e, self.handles.controls[e], drafts[e])) for e in mine}
        deadline = SyncDeadline(seconds + 0.5 * self.timeouts.grace_s)
        for engine, call in calls.items():
            report, draft = reports[engine], drafts[engine]
            try:
                call.result(deadline, f"engine {engine}")
                assert draft.state is goal, f"engine {engine} ended its steps in state {draft.state}"
                report.state, report.version = draft.state, draft.version
            # Whatever an engine's failure looks like, it must not end the update of the others.
            except Exception as error:
                self._drop(report, reason_of(error))
            report.seconds = dict(draft.seconds)

    def _drop(self, report: EngineSyncReport, reason: str) -> None:
        if report.state is not EngineState.UNSERVED or not report.reason:
            report.state, report.version, report.reason = EngineState.UNSERVED, None, reason

    def _share(self, reports: dict[int, EngineSyncReport], what: str, seconds: float) -> None:
        """Every rank learns what each leader knows of its engines; a failure that any rank saw counts. `seconds`: how
        long another rank may still be busy when this one is done."""
        known: dict[str, dict[str, Any]] = {str(engine): asdict(report) for engine, report in reports.items()}
        everyone = self.coordinator.exchange(known, what, seconds + 2 * self.timeouts.grace_s)
        for engine, report in reports.items():
            views = [view[str(engine)] for view in everyone]
            lead = views[self.handles.leaders[engine]]
            report.state, report.version = EngineState(lead["state"]), lead["version"]
            report.num_bytes, report.seconds = lead["num_bytes"], lead["seconds"]
            report.reason = next((view["reason"] for view in (lead, *views) if view["reason"]), "")
            if report.reason:
                report.state, report.version = EngineState.UNSERVED, None

    def _in_state(self, reports: Mapping[int, EngineSyncReport], state: EngineState) -> tuple[int, ...]:
        return tuple(engine for engine, report in reports.items() if report.state is state)

    def _check_version(self, version: int) -> None:
        newest = max((served for served in self.versions.values() if served is not None), default=None)
        if newest is not None and version < newest:
            raise ValueError(
                f"engine update: version {version} is older than version {newest}, which engines serve; versions must "
                "not go backwards"
            )

    def _agree(self, engines: tuple[int, ...], version: int) -> SyncRequest:
        """The order of this delivery. ValueError on every rank where ranks ask for different things."""
        plan = "" if self._agreed else self.plan.digest.hex()
        own = [version, list(engines), plan, self._session, time.monotonic_ns()]
        everyone = self.coordinator.exchange(own, "the start of an update", self.timeouts.meet_s)
        for rank, (its_version, its_engines, its_plan, _, _) in enumerate(everyone):
            if its_plan != everyone[0][2]:
                raise ValueError(f"engine update: ranks 0 and {rank} have different plans; start all with one config")
            if (its_version, its_engines) != (everyone[0][0], everyone[0][1]):
                raise ValueError(
                    f"engine update: rank 0 delivers version {everyone[0][0]} to engines {everyone[0][1]}, rank {rank} "
                    f"version {its_version} to engines {its_engines}"
                )
        self._agreed, self._session, number = True, *everyone[0][3:]
        # Unique also where a later life of the trainer takes the name of an earlier one.
        delivery = f"{self._session}-{number:x}"
        return SyncRequest(delivery, self._session, version, engines, number)


def _begin_session(control: EngineControl) -> None:
    """Opens an update session; one that a failed update, perhaps of a trainer long dead, left open is ended first."""
    try:
        control.begin_weight_update()
    # Which error it was matters only where the second try fails too.
    except Exception:
        with contextlib.suppress(Exception):
            control.end_weight_update()
        control.begin_weight_update()


def _step(report: EngineSyncReport, name: str, seconds: float, action: Callable[[], None]) -> None:
    """One call to an engine with its deadline; its time goes into the report, and its name into an error."""
    start = time.perf_counter()
    try:
        call_within(action, seconds, name)
    except TimeoutError:
        raise
    except Exception as error:
        raise EngineFailure(f"{name}: {reason_of(error)}") from error
    finally:
        report.seconds[name] = time.perf_counter() - start
