"""Runs in two processes: the critic's loss is NaN on one rank for a step; the policy's is sound."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from not_finite_worker import samples

from megatron_dapo.config.loader import load_config
from megatron_dapo.parallel.collectives import all_gather_json
from megatron_dapo.telemetry.metrics import PHASES
from megatron_dapo.telemetry.phases import PhaseTimer
from megatron_dapo.trainer.build_learner import build_actor, build_learner
from megatron_dapo.trainer.run_world import run_world
from megatron_dapo.types import Judgement, Window


def run(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """What each rank saw, in rank order."""
    overrides = [*arguments["overrides"], "parallel.num_processes=2", "critic.epochs=1"]
    config = load_config(Path(arguments["recipe"]), overrides).config
    world = run_world(config)
    actor = build_actor(config, world)
    learner = build_learner(config, actor, world, PhaseTimer(list(PHASES)).phase)
    judged = [
        replace(sample, judgement=Judgement((-1.0) ** index, index % 2 == 0, Window()))
        for index, sample in enumerate(samples(2, 40))
    ]
    models = {"policy": actor, "critic": learner.critic.critic}
    sound = learner.critic._value_loss

    def spoilt(inputs):
        token_loss, metrics = sound(inputs)
        return token_loss * float("nan"), metrics

    def state(model: Any) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in model.state_shards()[0].items()}

    changed: dict[str, list[int]] = {name: [] for name in models}
    for step, spoilt_rank in enumerate((None, 1, 0, None)):
        before = {name: state(model) for name, model in models.items()}
        learner.critic._value_loss = spoilt if dist.get_rank() == spoilt_rank else sound
        learner.learn(judged, step)
        for name, model in models.items():
            after = state(model)
            changed[name].append(sum(not torch.equal(one, after[key]) for key, one in before[name].items()))
    counters = learner.critic.counters
    return all_gather_json(
        {
            "changed": changed,
            "critic": [counters.optimizer_steps, counters.skipped_steps],
            "policy": [learner.counters.optimizer_steps, learner.counters.skipped_steps],
        }
    )
