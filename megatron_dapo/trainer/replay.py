"""A dumped rollout batch through the trainer alone: no engine, no verifier, the same loss bit for bit."""

from __future__ import annotations

import json
import logging
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist

from megatron_dapo.config.inputs import read_architecture
from megatron_dapo.config.loader import LoadedConfig
from megatron_dapo.config.schema import Config
from megatron_dapo.config.validator import require_valid
from megatron_dapo.megatron.actor import MegatronActor
from megatron_dapo.megatron.parallel_state import initialize_process_group
from megatron_dapo.parallel.coordination import collective_timeout
from megatron_dapo.recovery.checkpoint_store import CheckpointStore
from megatron_dapo.telemetry.batch_dump import load_batch
from megatron_dapo.trainer.actor_critic import ActorCriticLearner
from megatron_dapo.trainer.actor_learner import PolicyLearner
from megatron_dapo.trainer.build_learner import build_actor, build_learner
from megatron_dapo.trainer.checkpointing import Checkpoints, RunProgress
from megatron_dapo.trainer.run import run_state
from megatron_dapo.trainer.topology import RunTopology, run_topology

logger = logging.getLogger(__name__)


def run_replay(loaded: LoadedConfig, folder: Path, rank: int, world_size: int) -> None:
    """Train on the dumped batch from the state before it and write the metrics to <folder>/replay.json. Every process calls it.

    The state is the checkpoint of the step before the batch, or model.path for the first step. Raises ValueError where that
    checkpoint is not kept any more.
    """
    config = loaded.config
    require_valid(config, world_size, read_architecture(config.model.path))
    initialize_process_group(collective_timeout(config.run.wait_timeout_seconds))
    metrics = replay(config, folder)
    if rank == 0:
        (folder / "replay.json").write_text(json.dumps(metrics, indent=1) + "\n", encoding="utf-8")
        logger.info("replayed train step %d: %s", metrics["train_step"], json.dumps(metrics))
    dist.barrier()
    dist.destroy_process_group()


def replay(config: Config, folder: Path) -> dict[str, float]:
    """The metrics of the dumped step, "train_step" among them, in a default process group that exists. Collective."""
    world = run_topology(config)
    batch = load_batch(folder)
    step = int(batch.metadata["train_step"]) - 1
    actor = build_actor(config, world)
    learner = build_learner(config, actor, world, lambda name: nullcontext())
    if step > 0:
        _restore(config, actor, learner, world, step)
    gate = config.mismatch_gate if step == 0 else None
    return {"train_step": step + 1, **learner.learn(batch.samples, step, gate).metrics}


def _restore(
    config: Config,
    actor: MegatronActor | None,
    learner: PolicyLearner | ActorCriticLearner,
    world: RunTopology,
    step: int,
) -> None:
    store = CheckpointStore(config.checkpoint_dir, config.checkpoint.keep)
    if step not in store.steps():
        raise ValueError(
            f"the batch of train step {step + 1} needs the checkpoint of step {step}, but {config.checkpoint_dir} holds {store.steps()}; "
            "dump with checkpoint.interval = 1 and a larger checkpoint.keep, or replay another batch"
        )
    state = run_state(world, actor, learner, RunProgress(), None)
    Checkpoints(store, state, lambda ok: ok).restore_policy(store.open(step))
    logger.info("state before train step %d restored: %s", step + 1, asdict(learner.counters))
