"""Runs in two processes: the loss of the policy or of the critic is NaN on one rank for a step, then for several."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from learners import build, judged_samples, samples

from megatron_dapo.parallel.coordination import Coordination
from megatron_dapo.trainer import critic_learner
from megatron_dapo.trainer.updater import TooManySkips


def run(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the findings of each rank, in rank order. arguments: "recipe", "overrides", and "spoilt", "policy" or "critic"."""
    built = build(arguments["recipe"], arguments["overrides"])
    learner, spoilt = built.learner, arguments["spoilt"]
    models, counters = {"policy": built.actor}, {"policy": learner.counters}
    batch = samples(2, 40)
    if learner.critic is not None:
        models["critic"], counters["critic"] = learner.critic.critic, learner.critic.counters
        batch = judged_samples(2, 40)
    sound = critic_learner.value_loss

    def not_finite(*inputs: Any) -> Any:
        token_loss, metrics = sound(*inputs)
        return token_loss * float("nan"), metrics

    def learn(step: int, spoilt_rank: int | None) -> dict[str, int]:
        """Return how many tensors of each model the step changed."""
        before = {model: state(models[model]) for model in models}
        is_spoilt = dist.get_rank() == spoilt_rank
        given = batch
        if is_spoilt and spoilt == "policy":
            given = [replace(sample, advantages=sample.advantages * float("nan")) for sample in batch]
        # The process stands by for other tests, so the sound loss comes back.
        with patch.object(critic_learner, "value_loss", not_finite if is_spoilt and spoilt == "critic" else sound):
            learner.learn(given, step)
        return {
            model: sum(not torch.equal(tensor, state(models[model])[key]) for key, tensor in before[model].items())
            for model in models
        }

    seen: dict[str, Any] = {"changed": [learn(step, rank) for step, rank in enumerate((None, 1, 0, None))]}
    seen["counters"] = {model: vars(counter).copy() for model, counter in counters.items()}
    try:
        for step in range(4, 10):
            assert learn(step, 1)[spoilt] == 0
    except TooManySkips as error:
        seen["error"] = str(error)
    seen["counters_at_the_end"] = vars(counters[spoilt]).copy()
    return Coordination(dist.group.WORLD).gather(seen)


def state(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_shards().items()}
