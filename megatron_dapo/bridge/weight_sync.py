"""The weight sync: a new policy version in all engines: pause, flush, transfer, verify, and only then serve.

    SERVING -> PAUSED -> FLUSHED -> TRANSFERRING -> VERIFIED -> SERVING (the new version)
                    any failure or a missed deadline -> UNSERVED

A sync is collective over the trainer's ranks; each engine is controlled by its leader. An engine that fails stays
paused and leaves the sync; the others continue. It serves again only after a separate, complete sync
(`update_engines`), and after a restart if it is dead. If a trainer rank is gone or late, the sync ends on all other
ranks with CoordinationError and no engine resumes. Every rank learns the state of every engine.

Verified means, for each rank of the engine, that every element of every parameter was written exactly once, and that
the checksum of every parameter, read back from the engine's memory, equals the sum of what the trainer's ranks wrote.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any

import torch

from megatron_dapo.bridge.deltas import Delta, Deltas
from megatron_dapo.bridge.sources import WeightSource
from megatron_dapo.bridge.sync_plan import SyncPlan, checksums_digest
from megatron_dapo.bridge.transports.base import (
    Call,
    EngineControl,
    EngineFailure,
    EngineHandles,
    SyncDeadline,
    SyncRequest,
    TransferResult,
    Transport,
    call_within,
    reason_of,
    transfer,
)
from megatron_dapo.parallel.coordination import Coordination
from megatron_dapo.reshard.execution import Buffers

logger = logging.getLogger(__name__)

DIFFERENT = "its parameters differ from the trainer's"


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

    meet_s: float = 600.0  # entry of all trainer ranks
    pause_s: float = 60.0
    flush_s: float = 60.0
    session_s: float = 60.0  # beginning and ending a newer server's update session
    transfer_s: float = 600.0  # all buckets and the verification inside the engine
    resume_s: float = 60.0  # the new version's label, and serving again
    grace_s: float = 10.0  # extra time that ranks wait for each other, beyond an engine's deadline


@dataclass
class EngineSyncReport:
    """Outcome of a weight sync for one engine."""

    state: EngineState
    version: int | None = None  # served from now on; None if nothing may be served
    reason: str = ""  # cause of an unserved engine
    num_bytes: int = 0  # copied into its parameters; known for engines led by this rank, on rank 0 for all
    seconds: dict[str, float] = field(default_factory=dict)  # step -> seconds, for the same engines


@dataclass(frozen=True)
class SyncReport:
    """Outcome of one weight sync, with the same states and reasons on every rank."""

    version: int
    engines: Mapping[int, EngineSyncReport]  # engines that took part
    peak_bytes: int  # largest extra memory the transport took for one engine rank
    seconds: float  # this rank's
    is_delta: bool = False  # only changes were sent

    @property
    def is_complete(self) -> bool:
        return not self.failures

    @property
    def failures(self) -> dict[int, str]:
        """Engine -> reason it is unserved."""
        return {e: report.reason for e, report in self.engines.items() if report.state is not EngineState.SERVING}

    def describe(self) -> str:
        """Return one line for a log."""
        good, how = len(self.engines) - len(self.failures), "only changes" if self.is_delta else "full"
        sent = f"{how}, {sum(report.num_bytes for report in self.engines.values()) / 1e6:.2f} MB, {self.seconds:.2f} s"
        text = f"version {self.version}: {good} of {len(self.engines)} engines serve it ({sent})"
        return text + "".join(f"; engine {engine} does not: {reason}" for engine, reason in self.failures.items())


class WeightSync:
    """Drives all engines of a run through weight syncs. Collective: every trainer rank has one and makes the same calls.

        sync = WeightSync(plan, handles, transport, coordination)
        report = sync.update(version, actor.named_local_parameters())
        if not report.is_complete: ...   # restart report.failures, then sync.update_engines(engines, version, parameters)

    Args:
        coordination: all trainer ranks.
        session: name of this trainer process; versions must not decrease within it. Rank 0's name is used.
        release_cache: called on every rank between the transfer and the engines' wake-up, if they share devices with
            the trainer.
        weights: this rank's weights, for `publish`.
        keeps_cache: the engines' running requests keep their keys and values; nothing is flushed.
        full_interval: every so many updates are full; those between send what changed (`bridge.deltas`).
    """

    def __init__(
        self,
        plan: SyncPlan,
        handles: EngineHandles[EngineControl],
        transport: Transport,
        coordination: Coordination,
        timeouts: SyncTimeouts | None = None,
        session: str | None = None,
        release_cache: Callable[[], None] | None = None,
        weights: WeightSource | None = None,
        keeps_cache: bool = False,
        full_interval: int = 1,
    ) -> None:
        if len(handles.leaders) != plan.num_engines:
            raise ValueError(f"weight sync: leaders of {len(handles.leaders)} engines, the plan has {plan.num_engines}")
        self.plan = plan
        self.handles = handles
        self.transport = transport
        self.coordination = coordination
        self.timeouts = timeouts or SyncTimeouts()
        # Engines start with weights that no sync has verified.
        self.states = dict.fromkeys(range(plan.num_engines), EngineState.UNSERVED)
        self.versions: dict[int, int | None] = dict.fromkeys(range(plan.num_engines))
        self._session = session or secrets.token_hex(8)
        self._release_cache = release_cache
        self._weights = weights
        self.keeps_cache = keeps_cache
        self._deltas = Deltas(plan, coordination.rank, full_interval) if full_interval > 1 else None
        self._agreed = False  # True once the ranks' plans were found equal; a plan never changes

    @property
    def serving(self) -> tuple[int, ...]:
        """Engines that may generate."""
        return tuple(engine for engine, state in self.states.items() if state is EngineState.SERVING)

    def publish(self, version: int) -> None:
        """Bring the current weights into all engines as `version`. Raise RuntimeError if one is left unserved."""
        assert self._weights is not None, "publish needs a weight sync with weights"
        report = self.update(version, self._weights.current())
        if not report.is_complete:
            raise RuntimeError(f"weight sync: {report.describe()}")

    def update(self, version: int, sources: Buffers) -> SyncReport:
        """Bring `version` into all engines. Raise CoordinationError if trainer ranks lose each other."""
        return self.update_engines(range(self.plan.num_engines), version, sources)

    def update_engines(self, engines: Sequence[int], version: int, sources: Buffers) -> SyncReport:
        """Bring `version` into some engines (restarted ones), the same on every rank.

        Raise ValueError if `version` is older than one that any engine serves: all engines serve one policy.
        """
        start = time.perf_counter()
        engines = tuple(sorted(engines))  # the same order on every rank
        self._check_version(version)
        request = self._agree(engines, version)
        request = replace(request, delta=self._delta(engines, sources))
        reports = {engine: EngineSyncReport(self.states[engine]) for engine in engines}
        try:
            self._prepare(reports)
            result = self._transfer(request, reports, sources)
            self._verify(reports, version, result)
            self._serve(reports, version)
        except BaseException:
            # Ranks have lost each other, or this one is exiting, so the engines' contents are unknown.
            for engine in engines:
                self.states[engine], self.versions[engine] = EngineState.UNSERVED, None
            if self._deltas is not None:
                self._deltas.forget()
            raise
        for engine, report in reports.items():
            self.states[engine], self.versions[engine] = report.state, report.version
        if self._deltas is not None:
            self._deltas.advance(version, request.delta, sources)
        seconds = time.perf_counter() - start
        outcome = SyncReport(version, reports, result.peak_bytes, seconds, is_delta=request.delta is not None)
        # Whether few enough weights change to send only those is worth a line on rank 0, which knows the bytes.
        is_news = self._deltas is not None and self.coordination.rank == 0
        logger.log(logging.INFO if is_news else logging.DEBUG, "weight sync: %s", outcome.describe())
        return outcome

    # Steps

    def _delta(self, engines: tuple[int, ...], sources: Buffers) -> Delta | None:
        """Return this rank's changes if only those are sent, by all ranks. They must fit into the memory for them."""
        if self._deltas is None or not self._deltas.is_due(self.versions[engine] for engine in engines):
            return None
        delta = self._deltas.compare(sources)
        misfits = torch.tensor([not delta.fits()], dtype=torch.int64)
        is_sent = not int(self.coordination.sum(misfits, "the size of a delta", self.timeouts.meet_s))
        return delta if is_sent else None

    def _prepare(self, reports: dict[int, EngineSyncReport]) -> None:
        """Pause, flush and open a session on each engine, through its leader."""
        timeouts = self.timeouts

        def steps(control: EngineControl, report: EngineSyncReport) -> None:
            # The engine returns unfinished responses, to be continued later, or keeps them (sglang.update_pause).
            _step(report, "pause", timeouts.pause_s, control.pause)
            report.state = EngineState.PAUSED
            if not self.keeps_cache:
                _step(report, "flush", timeouts.flush_s, control.flush_cache)
                report.state = EngineState.FLUSHED
            _step(report, "begin", 3 * timeouts.session_s, lambda: _begin_session(control))
            report.state = EngineState.TRANSFERRING

        # Three calls: a session that fails to begin is ended and begun again.
        seconds = timeouts.pause_s + timeouts.flush_s + 3 * timeouts.session_s
        self._each(reports, EngineState.TRANSFERRING, steps, seconds)
        self._share(reports, EngineState.TRANSFERRING, "pausing the engines", seconds)

    def _transfer(self, request: SyncRequest, reports: dict[int, EngineSyncReport], sources: Buffers) -> TransferResult:
        """Transfer all bytes and collect the engines' replies."""
        start = time.perf_counter()
        alive = self._in_state(reports, EngineState.TRANSFERRING)
        request = replace(request, engines=alive)
        result = transfer(self.transport, request, sources, SyncDeadline(self.timeouts.transfer_s))
        for engine, reason in result.failures.items():
            _drop(reports[engine], reason)
        for engine, num_bytes in result.num_bytes.items():
            reports[engine].num_bytes = num_bytes
        for engine in self.handles.led_by(self.coordination.rank, alive):
            reports[engine].seconds["transfer"] = time.perf_counter() - start
        if self._release_cache is not None:
            # Release before the exchange that precedes every engine's resume: KV caches then need the memory.
            self._release_cache()
        self._share(reports, EngineState.TRANSFERRING, "the transfer", self.timeouts.transfer_s)
        return result

    def _verify(self, reports: dict[int, EngineSyncReport], version: int, result: TransferResult) -> None:
        """Compare the checksums the engines read back with the sums of what all ranks wrote.

        One number covers all parameters of an engine rank. If it differs for an engine, the ranks add up each
        parameter's checksum to name those that differ.
        """
        alive = self._in_state(reports, EngineState.TRANSFERRING)
        ranks = [rank for engine in alive for rank in self.plan.ranks_of(engine)]
        total = self.coordination.sum(result.expected.digests(ranks), "the checksums", self.timeouts.grace_s)
        expected = dict(zip(ranks, total.tolist()))
        for engine in self.handles.led_by(self.coordination.rank, alive):
            problem = self._difference(engine, version, result, expected)
            if problem:
                _drop(reports[engine], problem)
        self._share(reports, EngineState.VERIFIED, "the comparison of checksums", 0.0)
        suspects = [engine for engine in alive if reports[engine].reason == DIFFERENT]
        if not suspects:
            return
        ranks = [rank for engine in suspects for rank in self.plan.ranks_of(engine)]
        total = self.coordination.sum(result.expected.vector(ranks), "the parameters' checksums", self.timeouts.grace_s)
        named = result.expected.named(ranks, total)
        for engine in self.handles.led_by(self.coordination.rank, suspects):
            reports[engine].reason = self._different_parameters(engine, result, named)
        self._share(reports, EngineState.VERIFIED, "the names of parameters that differ", 0.0)

    def _serve(self, reports: dict[int, EngineSyncReport], version: int) -> None:
        """Close the session, label the version, and resume generation."""
        timeouts = self.timeouts

        def steps(control: EngineControl, report: EngineSyncReport) -> None:
            _step(report, "end", timeouts.session_s, control.end_weight_update)
            _step(report, "label", timeouts.resume_s, lambda: control.update_weight_version(version))
            _step(report, "resume", timeouts.resume_s, control.resume)
            report.state, report.version = EngineState.SERVING, version

        alive = {e: report for e, report in reports.items() if report.state is EngineState.VERIFIED}
        seconds = timeouts.session_s + 2 * timeouts.resume_s
        self._each(alive, EngineState.SERVING, steps, seconds)
        self._share(reports, EngineState.SERVING, "resuming the engines", seconds)
        for report in reports.values():
            report.version = version if report.state is EngineState.SERVING else None

    def _difference(self, engine: int, version: int, result: TransferResult, expected: Mapping[int, int]) -> str:
        """Describe the first problem of an engine's final replies; "" if there is none."""
        replies = result.replies.get(engine, ())
        size = self.plan.engines.tensor_parallel
        if len(replies) != size:
            return f"{len(replies)} of its {size} ranks replied at the end"
        for number, (rank, reply) in enumerate(zip(self.plan.ranks_of(engine), replies)):
            if reply.version != version:
                return f"its rank {number} holds version {reply.version} and not {version}"
            if reply.checksums.keys() != set(self.plan.parameter_names(rank)) or (
                checksums_digest(reply.checksums) != expected[rank]
            ):
                return DIFFERENT
        return ""

    def _different_parameters(
        self, engine: int, result: TransferResult, expected: Mapping[int, Mapping[str, int]]
    ) -> str:
        """Name the parameters of the first engine rank whose checksums differ."""
        for number, (rank, reply) in enumerate(zip(self.plan.ranks_of(engine), result.replies[engine])):
            wrong = sorted(
                name
                for name in expected[rank].keys() | reply.checksums.keys()
                if expected[rank].get(name) != reply.checksums.get(name)
            )
            if wrong:
                return (
                    f"{len(wrong)} of {len(expected[rank])} parameters of its rank {number} differ from the trainer's: "
                    f"{', '.join(wrong[:3])}"
                )
        return DIFFERENT

    def _each(
        self,
        reports: Mapping[int, EngineSyncReport],
        goal: EngineState,
        steps: Callable[[EngineControl, EngineSyncReport], None],
        seconds: float,
    ) -> None:
        """Run `steps` for every engine this rank leads, all at once; drop those that do not reach `goal`."""
        mine = self.handles.led_by(self.coordination.rank, tuple(reports))
        # Each thread gets a copy, so that one that misses its deadline cannot change the report later.
        drafts = {e: EngineSyncReport(reports[e].state, seconds=dict(reports[e].seconds)) for e in mine}
        calls = {e: Call(partial(steps, self.handles.controls[e], drafts[e])) for e in mine}
        # Every step has a deadline whose error names it; this one only catches a thread that overran all of them.
        deadline = SyncDeadline(seconds + 0.5 * self.timeouts.grace_s)
        for engine, call in calls.items():
            report, draft = reports[engine], drafts[engine]
            try:
                call.result(deadline, f"engine {engine}")
                assert draft.state is goal, f"engine {engine} ended its steps in state {draft.state}"
                report.state, report.version = draft.state, draft.version
            # An engine can fail with any exception, which must not end the sync for the others.
            except Exception as error:
                _drop(report, reason_of(error))
            report.seconds = dict(draft.seconds)

    def _share(self, reports: dict[int, EngineSyncReport], reached: EngineState, what: str, seconds: float) -> None:
        """Tell every rank which engines failed, on whichever rank; the others have `reached` a state.

        Only failures go to all ranks. In the end, leaders' measurements reach the ranks of the tree's top group, where
        rank 0 logs them. Another rank may still be busy for `seconds` when this one is done.
        """
        rank = self.coordination.rank
        led = self.handles.led_by(rank, tuple(reports))
        is_end = reached is EngineState.SERVING
        own_failures = {e: [e not in led, report.reason] for e, report in reports.items() if report.reason}
        own_measured = {
            e: [report.num_bytes, {step: round(seconds, 4) for step, seconds in report.seconds.items()}]
            for e, report in reports.items()
            if e in led and is_end
        }
        merged = self.coordination.merge(
            [own_failures, own_measured],
            _first_failures,
            what,
            seconds + 2 * self.timeouts.grace_s,
            down=lambda both: [both[0], {}],
        )
        # JSON keys are strings.
        failures, measured = ({int(engine): value for engine, value in part.items()} for part in merged)
        for engine, report in reports.items():
            if engine in failures:
                report.state, report.version, report.reason = EngineState.UNSERVED, None, failures[engine][1]
            else:
                report.state = reached
            report.num_bytes, report.seconds = measured.get(engine, (report.num_bytes, report.seconds))

    def _in_state(self, reports: Mapping[int, EngineSyncReport], state: EngineState) -> tuple[int, ...]:
        return tuple(engine for engine, report in reports.items() if report.state is state)

    def _check_version(self, version: int) -> None:
        newest = max((served for served in self.versions.values() if served is not None), default=None)
        if newest is not None and version < newest:
            raise ValueError(
                f"weight sync: version {version} is older than version {newest}, which engines serve; versions must not go "
                "backwards"
            )

    def _agree(self, engines: tuple[int, ...], version: int) -> SyncRequest:
        """Return the request of this sync. Raise ValueError on every rank if ranks ask for different things."""
        plan = "" if self._agreed else self.plan.digest.hex()
        # Use a clock, not a counter: numbers keep growing even if this process makes a new `WeightSync`.
        own = [[self.coordination.rank, version, list(engines), plan], [self._session, time.monotonic_ns()], None]
        first, named, other = self.coordination.merge(
            own, _first_difference, "the start of a weight sync", self.timeouts.meet_s
        )
        if other is not None:
            _, first_version, first_engines, first_plan = first
            rank, its_version, its_engines, its_plan = other
            if its_plan != first_plan:
                raise ValueError(f"weight sync: ranks 0 and {rank} have different plans; start all with one config")
            raise ValueError(
                f"weight sync: rank 0 sends version {first_version} to engines {first_engines}, rank {rank} "
                f"version {its_version} to engines {its_engines}"
            )
        self._agreed = True
        self._session, number = named
        # Unique even if a restarted trainer reuses an earlier session name.
        return SyncRequest(f"{self._session}-{number:x}", self._session, version, engines, number)


def _first_difference(views: Sequence[Sequence[Any]]) -> list[Any]:
    """Combine (request, name, request of the first rank that differs) of some ranks into the first rank's view of them."""
    first, named, other = views[0]
    for view in views[1:]:
        if other is None:
            other = view[0] if view[0][1:] != first[1:] else view[2]
    return [first, named, other]


def _first_failures(views: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Combine ranks' (failures, measurements) by engine; an engine's failure is its leader's, or else the first."""
    failures: dict[str, Any] = {}
    measured: dict[str, Any] = {}
    for its_failures, its_measured in views:
        measured.update(its_measured)
        for engine, (is_hearsay, reason) in its_failures.items():
            if engine not in failures or (failures[engine][0] and not is_hearsay):
                failures[engine] = [is_hearsay, reason]
    return [failures, measured]


def _drop(report: EngineSyncReport, reason: str) -> None:
    if report.state is not EngineState.UNSERVED or not report.reason:  # the first reason is the cause
        report.state, report.version, report.reason = EngineState.UNSERVED, None, reason


def _begin_session(control: EngineControl) -> None:
    """Open an update session; first end one left open by a failed sync, perhaps that of a dead trainer."""
    try:
        control.begin_weight_update()
    # The error matters only if the second try fails too.
    except Exception:
        with contextlib.suppress(Exception):
            control.end_weight_update()
        control.begin_weight_update()


def _step(report: EngineSyncReport, name: str, seconds: float, action: Callable[[], None]) -> None:
    """Call an engine with a deadline; record the time in the report, and name the step in an error."""
    start = time.perf_counter()
    try:
        call_within(action, seconds, name)
    except TimeoutError:
        raise
    except Exception as error:
        raise EngineFailure(f"{name}: {reason_of(error)}") from error
    finally:
        report.seconds[name] = time.perf_counter() - start
