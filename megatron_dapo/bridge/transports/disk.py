"""Transport to engines that share only a file system with the trainer.

All ranks write the model as a Hugging Face checkpoint directory that appears complete or not at all. Each engine loads it
by its own stock endpoint and then replies with the checksums of all its parameters ("adopt"). Replies come back as files
next to the directory. The slowest transport, and the least demanding one.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from megatron_dapo.bridge.protocol.messages import Command, CommandReply
from megatron_dapo.bridge.sync_plan import SyncPlan
from megatron_dapo.bridge.transports.base import (
    LOAD_FORMAT,
    EngineHandles,
    EngineLoads,
    ServerControl,
    SyncDeadline,
    SyncRequest,
    TransferResult,
    check_reply,
    encode_payload,
    reason_of,
)
from megatron_dapo.parallel.coordination import Coordination
from megatron_dapo.reshard.execution import Buffers

PREFIX = "weights-"
_GRACE_S = 5.0  # The wait of other ranks for an engine may have just ended at the deadline.


class DiskTransport:
    """`Transport` through a directory that trainer and engines see under the same path.

    Args:
        directory: of the versions written. Only the last one is kept.
        export: export(directory, sources) writes the model into a directory that does not exist yet. Collective; raises
            on every rank if it fails on one.
        coordination: all trainer ranks.
    """

    def __init__(
        self,
        plan: SyncPlan,
        handles: EngineHandles[ServerControl],
        directory: Path,
        export: Callable[[Path, Buffers], object],
        coordination: Coordination,
    ) -> None:
        self.plan = plan
        self.handles = handles
        self.directory = Path(directory).absolute()  # servers have another working directory
        self.export = export
        self.coordination = coordination
        self.rank = coordination.rank

    def begin(self, request: SyncRequest, deadline: SyncDeadline) -> None:
        """Prepare the result; engines hear of the sync once the directory is complete."""
        self._request, self._deadline = request, deadline
        self._target = self.directory / f"{PREFIX}{request.sync_id}"
        self._loads = EngineLoads(self.plan, self.rank, deadline)

    def send(self, sources: Buffers) -> None:
        """Write the directory, then have the engines of this rank load it while the checksums are computed."""
        request = self._request
        if not request.engines or not self._write(sources):
            return
        target = self._target
        for engine in self.handles.led_by(self.rank, request.engines):
            self._loads.start(engine, partial(self._load, engine, request, target))
        self._loads.count(request.engines, sources)

    def finish(self) -> TransferResult:
        """Collect the replies. Rank 0 removes older versions once every engine has loaded this one."""
        request, result = self._request, self._loads.collect(str(self._target))
        what = f"weight sync {request.sync_id}, the loads"
        has_failed = self.coordination.merge(bool(result.failures), any, what, self._deadline.left_s + _GRACE_S)
        if request.engines and not has_failed and self.rank == 0:
            self._remove_others()
        return result

    def close(self) -> None:
        """Keep the last version: engines may load it again."""

    def _write(self, sources: Buffers) -> bool:
        """Export; return True if the directory is complete. If not, no engine has been touched."""
        problem = ""
        try:
            self.export(self._target, sources)
        # A full disk or a missing directory: the engines stay unserved, and every rank says why.
        except Exception as error:
            problem = reason_of(error)
        what = f"weight sync {self._request.sync_id}, the directory"
        first = self.coordination.merge(
            problem, lambda views: next(filter(None, views), ""), what, self._deadline.left_s
        )
        for engine in self._request.engines if first else ():
            self._loads.result.fail(engine, f"{self._target}: {first}")
        return not first

    def _load(self, engine: int, request: SyncRequest, target: Path) -> tuple[CommandReply, ...]:
        """Load and verify one engine, in a thread. Raise ValueError that names the rank whose reply is missing or bad."""
        control = self.handles.controls[engine]
        control.update_weights_from_disk(str(target))
        commands = [self._command(rank, request, target) for rank in self.plan.ranks_of(engine)]
        paths = [Path(command.channel["path"]) for command in commands]
        try:
            # The stock endpoint says that it loaded, not what: the checksums do.
            control.update_weights_from_tensor([encode_payload(command) for command in commands], LOAD_FORMAT)
            return tuple(_reply(n, command, path) for n, (command, path) in enumerate(zip(commands, paths)))
        finally:
            for path in paths:
                path.unlink(missing_ok=True)

    def _command(self, engine_rank: int, request: SyncRequest, target: Path) -> Command:
        manifest = request.manifest(self.plan, engine_rank)
        channel = {"kind": "file", "path": f"{target}.reply-{engine_rank}.json"}
        return Command(f"{request.sync_id}/{engine_rank}/adopt", "adopt", request.sync_id, manifest, channel=channel)

    def _remove_others(self) -> None:
        for path in self.directory.glob(PREFIX + "*"):
            if path.is_dir() and path != self._target:
                with contextlib.suppress(OSError):
                    shutil.rmtree(path)


def _reply(number: int, command: Command, path: Path) -> CommandReply:
    try:
        return check_reply(path.read_text(encoding="utf-8"), command)
    except FileNotFoundError:
        raise ValueError(f"rank {number} of the engine left no reply at {path}; check that it sees the path") from None
    except ValueError as error:
        raise ValueError(f"rank {number} of the engine, {error}") from error
