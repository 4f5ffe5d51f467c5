"""Replays a dumped rollout batch through only the trainer: no engine or verifier, and bit for bit the same loss."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist

from megatron_dapo.config.loader import LoadedConfig
from megatron_dapo.config.schema import Config
from megatron_dapo.config.validator import require_valid
from megatron_dapo.megatron.parallel_state import initialize_process_group
from megatron_dapo.models.config_json import read_architecture
from megatron_dapo.parallel.coordination import collective_timeout
from megatron_dapo.telemetry.batch_dump import load_batch
from megatron_dapo.trainer.build import build_actor, build_learner
from megatron_dapo.trainer.checkpointing import Checkpoints, RunProgress, RunState
from megatron_dapo.trainer.recorder import Phases
from megatron_dapo.trainer.topology import run_topology

logger = logging.getLogger(__name__)


def run_replay(loaded: LoadedConfig, dump: Path, rank: int, world_size: int) -> None:
    """Train on the dumped batch from the state before it and write the metrics to <dump>/replay.json.

    Every process calls this. The state is the checkpoint of the step before the batch; for the first step, model.path.
    ValueError if that checkpoint is not kept.
    """
    config = loaded.config
    require_valid(config, world_size, read_architecture(config.model.path))
    initialize_process_group(collective_timeout(config.run.wait_timeout_seconds))
    metrics = replay(config, dump)
    if rank == 0:
        (dump / "replay.json").write_text(json.dumps(metrics, indent=1) + "\n", encoding="utf-8")
        logger.info("replayed train step %d: %s", metrics["train_step"], json.dumps(metrics))
    dist.barrier()
    dist.destroy_process_group()


def replay(config: Config, dump: Path) -> dict[str, float]:
    """Return the metrics of the dumped step, including "train_step". Collective; needs the default process group."""
    topology = run_topology(config)
    batch = load_batch(dump)
    train_step = batch.metadata.get("train_step")
    if type(train_step) is not int or train_step < 1:
        raise ValueError(
            f"batch dump {dump}: its train_step is {train_step!r:.100}, not a number from 1 on; dump it again"
        )
    step = train_step - 1
    actor = build_actor(config, topology)
    learner = build_learner(config, actor, topology, Phases())
    if step > 0:  # the first step started from model.path itself
        state = RunState.of(topology, learner, RunProgress(), None)
        Checkpoints.of(config, state, topology.coordination).restore_step(step)
        logger.info("state before train step %d restored: %s", step + 1, asdict(learner.counters))
    gate = config.mismatch_gate if step == 0 else None
    _, result = learner.learn(batch.samples, step, gate)
    return {"train_step": step + 1, **result.metrics}
