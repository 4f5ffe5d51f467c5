"""Publishing of policy versions while no collector generates."""

from __future__ import annotations

from megatron_dapo.rollout.async_collector import AsyncCollector
from megatron_dapo.trainer.driven_engine import Publisher


class PausingPublisher:
    """Publishes while nothing is generated. `rollout` exists on rank 0."""

    def __init__(self, publisher: Publisher, rollout: AsyncCollector | None) -> None:
        self._publisher = publisher
        self._rollout = rollout

    def publish(self, version: int) -> None:
        """See `Publisher`."""
        if self._rollout is not None:
            self._rollout.before_update()
        self._publisher.publish(version)
        if self._rollout is not None:
            self._rollout.after_update(version)
