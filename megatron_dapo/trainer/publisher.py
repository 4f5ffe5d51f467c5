"""From the trainer's weights to the engines': resharded in memory, verified, and only then a new version."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from megatron_dapo.bridge.replica_sync import ReplicaSync
from megatron_dapo.engines.distributed_embedded import DistributedEmbeddedEngine


class EmbeddedPublisher:
    """Publishes policy versions to engines inside the trainer's processes: every rank holds shards and an engine."""

    def __init__(
        self, sync: ReplicaSync, parameters: Callable[[], Mapping[str, torch.Tensor]], engine: DistributedEmbeddedEngine
    ) -> None:
        self._sync = sync
        self._parameters = parameters
        self._engine = engine

    def publish(self, version: int) -> None:
        """Bring the current weights into the engines and declare them `version`. A mismatch of checksums raises before that."""
        sources = {name: tensor.detach() for name, tensor in self._parameters().items()}
        destinations = self._engine.parameters_by_name()
        self._sync.execute(sources, destinations)
        self._sync.verify(sources, destinations)
        self._engine.set_policy_version(version)
