"""Runs in two processes: the critic's loss is NaN on one rank for a step; the policy's is sound."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from learners import build, judged_samples

from megatron_dapo.parallel.coordination import Coordination
from megatron_dapo.trainer import critic_learner
from megatron_dapo.trainer.updater import TooManySkips


def run(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the findings of each rank, in rank order."""
    overrides = [
        *arguments["overrides"],
        "parallel.num_processes=2",
        "critic.epochs=1",
        "training.max_consecutive_skips=3",
    ]
    built = build(arguments["recipe"], overrides)
    learner, judged = built.learner, judged_samples(2, 40)
    models = {"policy": built.actor, "critic": learner.critic.critic}
    sound = critic_learner.value_loss

    def spoilt(section, inputs):
        token_loss, metrics = sound(section, inputs)
        return token_loss * float("nan"), metrics

    def state(model: Any) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in model.state_shards().items()}

    changed: dict[str, list[int]] = {name: [] for name in models}
    for step, spoilt_rank in enumerate((None, 1, 0, None)):
        before = {name: state(model) for name, model in models.items()}
        with patch.object(critic_learner, "value_loss", spoilt if dist.get_rank() == spoilt_rank else sound):
            learner.learn(judged, step)
        for name, model in models.items():
            after = state(model)
            changed[name].append(sum(not torch.equal(one, after[key]) for key, one in before[name].items()))
    counters = learner.critic.counters
    seen = {
        "changed": changed,
        "critic": [counters.optimizer_steps, counters.skipped_steps],
        "policy": [learner.counters.optimizer_steps, learner.counters.skipped_steps],
        "error": "",
    }
    # The process stands by for other tests, so the sound loss comes back.
    with patch.object(critic_learner, "value_loss", spoilt if dist.get_rank() == 1 else sound):
        try:
            for step in range(4, 10):
                learner.learn(judged, step)
        except TooManySkips as error:
            seen["error"] = str(error)
    return Coordination(dist.group.WORLD).gather(seen)
