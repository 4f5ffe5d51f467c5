"""Rank 0 of a group runs something that only it can see through; the others take part where it asks them to.

    rank 0                       others
    run_on_rank0(body)                  run_on_rank0(body): wait
      body calls command("x") -> handlers["x"] on every rank
    finish                    -> drive returns

A failure on rank 0 reaches every rank as an error. The deadline of every wait is the timeout the group was created with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch.distributed as dist

from megatron_dapo.parallel.collectives import broadcast_json

Result = TypeVar("Result")
Handler = Callable[[dict[str, Any]], None]

FINISH = "finish"


class Rank0Commands:
    """Every rank of `group` (None: the default one) has one with the same handlers."""

    def __init__(self, handlers: Mapping[str, Handler], group: dist.ProcessGroup | None = None) -> None:
        assert FINISH not in handlers, f"{FINISH!r} ends the drive; choose another name"
        self._handlers = dict(handlers)
        self._group = group
        self._rank = dist.get_rank(group)

    def run_on_rank0(self, body: Callable[[], Result]) -> Result | None:
        """`body()` on rank 0 while the others wait for its commands; its result there, None elsewhere.

        RuntimeError on the others where it fails. A handler that fails must do so on every rank alike.
        """
        if self._rank != 0:
            self._serve()
            return None
        try:
            result = body()
        except CommandFailed as failure:
            # The others know already: they failed in the same command. The error keeps its own cause.
            raise failure.error  # noqa: B904
        except BaseException as error:
            self._announce({"op": FINISH, "error": f"{type(error).__name__}: {error}"})
            raise
        self._announce({"op": FINISH, "error": ""})
        return result

    def command(self, op: str, **facts: Any) -> None:
        """Run handler `op` on every rank; rank 0 calls it inside `run_on_rank0`."""
        assert self._rank == 0, "rank 0 of the group leads; the others serve"
        command = {"op": op, **facts}
        self._announce(command)
        try:
            self._handlers[op](command)
        except Exception as error:
            raise CommandFailed(error) from error

    def _serve(self) -> None:
        while (command := self._announce(None))["op"] != FINISH:
            self._handlers[command["op"]](command)
        if command["error"]:
            raise RuntimeError(f"rollout rank 0 stopped: {command['error']}")

    def _announce(self, command: dict[str, Any] | None) -> dict[str, Any]:
        try:
            return broadcast_json(command, 0, self._group)
        except RuntimeError as error:
            raise TimeoutError(f"rank {self._rank} waited for rank 0's next command: {error}") from error


class CommandFailed(RuntimeError):
    """A handler failed, on every rank."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error
