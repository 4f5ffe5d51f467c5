"""Engines that share nothing with the trainer but a file system: a Hugging Face folder, loaded by the stock endpoint.

All ranks write the model as a folder that appears complete or not at all; each engine loads it by its own loader, and is
then asked for the checksums of all its parameters ("adopt"). Reports come back as files beside the folder. The slowest
transport, and the one that asks least of the network.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_dapo.bridge.protocol.receiver import Command, Reply
from megatron_dapo.bridge.sync_plan import ExpectedChecksums, SyncPlan
from megatron_dapo.bridge.transports.base import (
    LOAD_FORMAT,
    Call,
    Coordinator,
    EngineControl,
    EngineHandles,
    SyncDeadline,
    SyncRequest,
    TransferResult,
    check_report,
    encode_payload,
    reason_of,
)
from megatron_dapo.reshard.execution import Buffers

PREFIX = "weights-"

Export = Callable[[Path, Buffers], object]
"""export(folder, sources): all ranks write the model; the folder must not exist before. Collective; raises on every
rank where it fails on one."""


class DiskTransport:
    """`Transport` through a folder that trainer and engines see under the same path.

    Args:
        folder: where versions are written. Only the last one is kept.
        export: how, e.g. `export_to_huggingface` with its other arguments bound.
        coordinator: all trainer ranks.
    """

    def __init__(
        self, plan: SyncPlan, handles: EngineHandles, folder: Path, export: Export, coordinator: Coordinator
    ) -> None:
        self.plan = plan
        self.handles = handles
        self.folder = Path(folder).absolute()
        self.export = export
        self.coordinator = coordinator
        self.rank = coordinator.rank

    def deliver(self, order: SyncRequest, sources: Buffers, deadline: SyncDeadline) -> TransferResult:
        outcome = TransferResult(ExpectedChecksums(self.plan))
        target = self.folder / f"{PREFIX}{order.delivery}"
        if not order.engines:
            return outcome
        if not self._write(order, target, sources, outcome, deadline):
            return outcome
        calls = {
            engine: Call(lambda e=engine: self._load(order, e, target))
            for engine in self.handles.led_by(self.rank, order.engines)
        }
        for engine in order.engines:
            for engine_rank in self.plan.ranks_of(engine):
                outcome.expected.add_plan(engine_rank, self.rank, sources)
        for engine, call in calls.items():
            try:
                outcome.reports[engine] = call.result(deadline, f"engine {engine}, which loads {target}")
                outcome.num_bytes[engine] = sum(self.plan.num_bytes(rank) for rank in self.plan.ranks_of(engine))
            # Whatever an engine's death looks like, it is the engine's failure and not this rank's.
            except Exception as error:
                outcome.fail(engine, reason_of(error))
        if self._all_loaded(order, outcome, deadline) and self.rank == 0:
            self._remove_others(target)
        return outcome

    def close(self) -> None:
        """The last version stays: engines may load it again."""

    def _write(
        self, order: SyncRequest, target: Path, sources: Buffers, outcome: TransferResult, deadline: SyncDeadline
    ) -> bool:
        """Whether the folder is there, on every rank. Where it is not, no engine has been touched."""
        problem = ""
        try:
            self.export(target, sources)
        # The disk may be full or the folder gone: the engines stay unserved, and every rank says why.
        except Exception as error:
            problem = reason_of(error)
        what = f"delivery {order.delivery}, the folder"
        problems = [view for view in self.coordinator.exchange(problem, what, deadline.left_s) if view]
        for engine in order.engines if problems else ():
            outcome.fail(engine, f"{target}: {problems[0]}")
        return not problems

    def _load(self, order: SyncRequest, engine: int, target: Path) -> tuple[Reply, ...]:
        """ValueError that names the engine's rank whose report is missing or bad."""
        control = self.handles.controls[engine]
        control.update_weights_from_disk(str(target))
        commands = [self._command(order, rank, target) for rank in self.plan.ranks_of(engine)]
        paths = [Path(command.channel["path"]) for command in commands]
        try:
            return _adopt(control, commands, paths)
        finally:
            for path in paths:
                path.unlink(missing_ok=True)

    def _command(self, order: SyncRequest, engine_rank: int, target: Path) -> Command:
        return Command(
            id=f"{order.delivery}/{engine_rank}/adopt",
            op="adopt",
            delivery=order.delivery,
            manifest=self.plan.manifest(engine_rank, order.delivery, order.session, order.version, order.number),
            channel={"kind": "file", "path": f"{target}.report-{engine_rank}.json"},
        )

    def _all_loaded(self, order: SyncRequest, outcome: TransferResult, deadline: SyncDeadline) -> bool:
        everyone = self.coordinator.exchange(
            len(outcome.failures), f"delivery {order.delivery}, the loads", deadline.left_s + _GRACE_S
        )
        return not any(everyone)

    def _remove_others(self, target: Path) -> None:
        for path in self.folder.glob(PREFIX + "*"):
            if path.is_dir() and path != target:
                with contextlib.suppress(OSError):
                    shutil.rmtree(path)


_GRACE_S = 5.0  # for ranks whose wait for an engine has just ended at the deadline


def _adopt(control: EngineControl, commands: Sequence[Command], paths: Sequence[Path]) -> tuple[Reply, ...]:
    control.update_weights_from_tensor([encode_payload(command) for command in commands], LOAD_FORMAT)
    reports = []
    for number, (command, path) in enumerate(zip(commands, paths)):
        try:
            reports.append(check_report(path.read_text(encoding="utf-8"), command))
        except FileNotFoundError:
            raise ValueError(
                f"rank {number} of the engine left no report at {path}; does it see that folder?"
            ) from None
        except ValueError as error:
            raise ValueError(f"rank {number} of the engine, {error}") from error
    return tuple(reports)
