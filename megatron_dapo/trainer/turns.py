"""Several runs in one set of processes, on one copy of their base weights: each trains its LoRA adapters, in turns.

    run A   weights A -> engine, generate, train, save | .............................................. | ...
    run B   ......................................... | weights B -> engine, generate, train, save | ...

A turn is one train step with its evaluation and checkpoint. A run has its own optimizer, data, verifiers, counters and random
states, so that it trains as it would by itself, bit for bit. Only frozen weights, process groups, the file process and the
memory of the engine's weights are shared.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_dapo.megatron.state import random_states, set_random_states
from megatron_dapo.telemetry.terminal import marked

if TYPE_CHECKING:
    from types import TracebackType

    from megatron_dapo.bridge.weight_sync import WeightSync
    from megatron_dapo.engines.embedded import EmbeddedEngine
    from megatron_dapo.megatron.actor import MegatronActor
    from megatron_dapo.trainer.recorder import Phases
    from megatron_dapo.trainer.run import PreparedRun

logger = logging.getLogger(__name__)


@dataclass
class SharedBase:
    """What the runs of a process share. `actor` and `engine` are the first run's; its weights are lent to the others."""

    actor: MegatronActor | None = None
    engine: EmbeddedEngine | None = None
    holder: DuePublisher | None = None  # Its weights are in the engine's memory.


class DuePublisher:
    """`Publisher` into weights of an engine that several runs share: a version is brought when the run next generates."""

    def __init__(self, sync: WeightSync, base: SharedBase, phases: Phases) -> None:
        self._sync, self._base, self._phases = sync, base, phases
        self._version = -1

    def publish(self, version: int) -> None:
        """Note that `version` is to be served."""
        self._version = version
        if self._base.holder is self:
            self._base.holder = None

    def bring(self) -> None:
        """Serve this run's version, verified, unless the engine holds it. Collective."""
        if self._base.holder is not self:
            self._base.holder = None
            with self._phases.phase("weight_sync"):
                self._sync.publish(self._version)
            self._base.holder = self


class RunTurn(AbstractContextManager[None]):
    """The time in which the process works for one run: it has the run's random states, and its log lines name the run."""

    def __init__(self, name: str) -> None:
        """The run's random states begin as those of the process."""
        self._name, self._states = name, random_states()
        self._inside: ExitStack | None = None

    def __enter__(self) -> None:
        others = random_states()
        set_random_states(dict(self._states))
        self._inside = ExitStack()
        self._inside.callback(set_random_states, others)
        self._inside.enter_context(marked(self._name))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._inside is not None, "entered"
        if error is not None:
            logger.error("the run failed, and ends those that share its processes: %s", error)
        self._states = random_states()
        self._inside.close()


def take_turns(runs: Sequence[PreparedRun]) -> Iterator[tuple[PreparedRun, str]]:
    """Train the runs, a train step each in turn; yield a run and the reason when it ends. Collective."""
    left = [(run, run.loop.turns(is_settled=len(runs) > 1)) for run in runs]
    while left:
        for run, turns in tuple(left):
            with run.turn:
                reason = next(turns)
            if reason:
                left.remove((run, turns))
                yield run, reason
