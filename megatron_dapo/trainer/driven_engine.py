"""What the loop needs of the engines of a run, whichever they are: generation driven by rank 0, weights from all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from megatron_dapo.types import Completion, GenerationRequest

Result = TypeVar("Result")


class DrivenEngine(Protocol):
    """A rollout engine on rank 0; the other ranks take part while rank 0 drives."""

    def drive(self, body: Callable[[], Result]) -> Result | None:
        """Run `body` on rank 0 while the other ranks serve; its result on rank 0, None elsewhere. A failure reaches every
        rank."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None: ...

    def poll(self) -> list[Completion]: ...

    def abort(self) -> list[Completion]: ...

    @property
    def num_unfinished(self) -> int: ...

    @property
    def policy_version(self) -> int: ...


class Publisher(Protocol):
    """Brings the trainer's weights into the engines."""

    def publish(self, version: int) -> None:
        """Collective: the current weights become `version`, verified before the first token of it is generated."""


@dataclass(frozen=True)
class Engines:
    """The two sides of a run's engines."""

    engine: DrivenEngine
    publisher: Publisher
