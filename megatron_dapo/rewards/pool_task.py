"""What is asked of the verifier processes and what they answer: calls, their single answers, and replies."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_dapo.rewards.verifier_process import VerifierProcess


@dataclass
class Job:
    """One call: its answers still to be sent, the replies so far, and the future its caller waits on."""

    pending: deque[Task]
    convert: Callable[[Mapping[str, Any]], Any]
    results: dict[Hashable, Any]
    num_open: int
    future: Future[dict[Hashable, Any]] = field(default_factory=Future)


@dataclass(eq=False)
class Task:
    """One answer."""

    task_id: int
    key: Hashable
    message: bytes
    job: Job | None = None
    holder: VerifierProcess | None = None  # the worker it was last sent to; None while it is pending
    is_done: bool = False


def failure(outcome: str, message: str) -> dict[str, Any]:
    """The reply for a process that gave none."""
    return {"outcome": outcome, "extracted": None, "reward": None, "detail": {"error": message}}


def checked_reply(message: Any, expected_id: int | None) -> Mapping[str, Any]:
    """A reply whose fields have the promised types and which answers the task at hand. ValueError otherwise."""
    if not isinstance(message, dict) or message.get("id") != expected_id or expected_id is None:
        raise ValueError(f"no reply to task {expected_id}")
    checks = (
        message.get("outcome") in ("correct", "wrong", "unparsable", "error"),
        isinstance(message.get("extracted"), (str, type(None))),
        isinstance(message.get("reward"), (int, float, type(None))),
        isinstance(message.get("detail"), dict),
        isinstance(message.get("leaving"), bool),
    )
    if not all(checks):
        raise ValueError("malformed reply")
    return message
