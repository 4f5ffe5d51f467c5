"""The engines of a run from the configuration: started first, connected to the actor once that is built."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from megatron_dapo.bridge.sources import WeightSource
from megatron_dapo.bridge.transports.base import GroupCoordinator
from megatron_dapo.bridge.transports.local import local_weight_sync
from megatron_dapo.config.schema import Config
from megatron_dapo.engines.distributed_embedded import DistributedEmbeddedEngine
from megatron_dapo.engines.embedded import EmbeddedEngine, EmbeddedEngineSettings
from megatron_dapo.megatron.actor import MegatronActor
from megatron_dapo.megatron.model_config import DTYPES
from megatron_dapo.parallel.rank0_commands import Rank0Commands
from megatron_dapo.parallel.rank_set import RankSet
from megatron_dapo.trainer.build_sglang import start_sglang
from megatron_dapo.trainer.driven_engine import Engines
from megatron_dapo.trainer.elsewhere import without_engines

Connect = Callable[[MegatronActor | None], Engines]


def start_engines(config: Config, part: RankSet, commands: Rank0Commands, stack: ExitStack) -> Connect:
    """Begin to start this rank's engines and return what connects them to the actor; `stack` ends them. Collective.

    The ranks of `part`, which hold the policy, have engines; others have none and no actor. Servers come up while the
    actor is built. Engines have no weights before the first `publish`.
    """
    return _STARTERS[config.rollout.engine](config, part, commands, stack)


def _start_embedded(config: Config, part: RankSet, commands: Rank0Commands, stack: ExitStack) -> Connect:
    def connect(actor: MegatronActor | None) -> Engines:
        if actor is None:
            return without_engines(commands)
        assert part.coordination is not None, "ranks with an actor hold the policy"
        engine = DistributedEmbeddedEngine(build_local_engine(config, config.model.path), part.coordination, commands)
        weights = WeightSource(actor, part.rank, part.coordination.group)
        coordinator = GroupCoordinator(part.coordination.group)
        return Engines(engine, local_weight_sync(actor.tensors, engine, part.group, coordinator, weights=weights))

    return connect


_STARTERS: dict[str, Callable[[Config, RankSet, Rank0Commands, ExitStack], Connect]] = {
    "embedded": _start_embedded,
    "sglang": start_sglang,
}


def build_local_engine(config: Config, model_folder: Path) -> EmbeddedEngine:
    """An embedded engine of this process for the architecture of `model_folder`, without weights."""
    settings = EmbeddedEngineSettings(
        max_slots=config.rollout.slots_per_rank,
        max_length=config.longest_sequence,
        dtype=DTYPES[config.model.dtype],
        device="cuda" if torch.cuda.is_available() else "cpu",
    )
    return EmbeddedEngine.from_folder(model_folder, settings, trust_remote_code=config.model.trust_remote_code)
