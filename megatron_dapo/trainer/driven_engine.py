"""What the loop needs of the engines of a run, whichever they are: generation driven by rank 0, weights from all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from megatron_dapo.engines.base import CollectiveEngine


class Publisher(Protocol):
    """Brings the trainer's weights into the engines."""

    def publish(self, version: int) -> None:
        """Collective: the current weights become `version`, verified before the first token of it is generated."""


class ServedModels(Protocol):
    """Servers whose log-probs can be compared with the trainer's."""

    @property
    def num_servers(self) -> int: ...

    def prompt_logprobs(self, server: int) -> Callable[[Sequence[int]], Sequence[float]] | None:
        """Log-probs of all tokens but the first at temperature 1, on rank 0; None elsewhere."""


@dataclass(frozen=True)
class Engines:
    """The sides of a run's engines. `served`: where they are other processes than the trainer's."""

    engine: CollectiveEngine
    publisher: Publisher
    served: ServedModels | None = None
    recover: Callable[[], bool] | None = None  # rank 0, while it waits for a collecting thread
    sleep: Callable[[], None] | None = None  # collective: give memory back until the next version is published
    # Collective: inside it the trainer holds the values servers multiply by, where those are others than its own.
    as_served: Callable[[], AbstractContextManager[None]] | None = None
