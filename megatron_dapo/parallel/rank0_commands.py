"""Work that rank 0 does while the other ranks carry out the commands it sends.

    rank 0                          others
    run_on_rank0(body)              run_on_rank0(body): wait
      body calls command("x")   ->  handlers["x"] on every rank
      report_progress()         ->  the wait continues with a new deadline
    finish                      ->  run_on_rank0 returns

A failure on rank 0 reaches every rank as an error. A rank without a handler for a command ignores it: ranks with only
the critic have no engine, but wait like the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from megatron_dapo.parallel.coordination import Coordination

Result = TypeVar("Result")
Handler = Callable[[dict[str, Any]], None]

_FINISH, _PROGRESS = "finish", "progress"
_REPORT_INTERVAL_S = 5.0  # a broadcast for every finished response would slow rank 0 down


class Rank0Commands:
    """Commands from rank 0; one instance per run on every rank of `coordination`. All ranks with handlers have the
    same."""

    def __init__(self, coordination: Coordination) -> None:
        self.handlers: dict[str, Handler] = {}
        self._coordination = coordination
        self._sent_at = time.monotonic()

    def run_on_rank0(self, body: Callable[[], Result]) -> Result | None:
        """Run `body` on rank 0 while the others wait for its commands; return its result there, None on the others.

        Raise RuntimeError on the others if it fails. A handler that fails must fail on every rank.
        """
        if self._coordination.rank != 0:
            self._serve()
            return None
        try:
            result = body()
        except CommandFailed as failure:
            # The others already know, because they failed in the same command. The error keeps its cause.
            raise failure.error  # noqa: B904
        except BaseException as error:
            self._send({"op": _FINISH, "error": f"{type(error).__name__}: {error}"})
            raise
        self._send({"op": _FINISH, "error": ""})
        return result

    def command(self, op: str, **facts: Any) -> None:
        """Run handler `op` on every rank. Rank 0 calls it inside `run_on_rank0`, in the main thread."""
        assert self._coordination.rank == 0, "rank 0 sends commands; the others serve"
        command = {"op": op, **facts}
        # Send first: a handler may contain collectives, which the other ranks must enter.
        self._send(command)
        try:
            self.handlers[op](command)
        except Exception as error:
            raise CommandFailed(error) from error

    def report_progress(self) -> None:
        """Postpone the deadlines of all ranks. Rank 0 calls it inside `run_on_rank0` whenever a response has finished."""
        self._coordination.progress.mark()
        if time.monotonic() - self._sent_at >= _REPORT_INTERVAL_S:
            self._send({"op": _PROGRESS})

    def _serve(self) -> None:
        while (command := self._send(None))["op"] != _FINISH:
            if handler := self.handlers.get(command["op"]):
                handler(command)
        if command["error"]:
            raise RuntimeError(f"rollout rank 0 stopped: {command['error']}")

    def _send(self, command: dict[str, Any] | None) -> dict[str, Any]:
        """Return rank 0's command on every rank."""
        self._sent_at = time.monotonic()  # every command postpones the others' deadlines
        try:
            return self._coordination.broadcast(command)
        except RuntimeError as error:
            rank, size = self._coordination.rank, self._coordination.size
            raise TimeoutError(f"rank {rank} of {size} waited for rank 0's next command: {error}") from error


class CommandFailed(RuntimeError):
    """A handler failed, on every rank."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error
