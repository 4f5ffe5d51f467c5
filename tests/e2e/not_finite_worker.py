"""Runs in two processes: the learner of a configuration is fed batches whose loss is NaN on one rank only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from learners import build, samples

from megatron_dapo.parallel.coordination import Coordination
from megatron_dapo.trainer.updater import TooManySkips
from megatron_dapo.types import TrainSample


def spoilt_on(rank: int, clean: list[TrainSample]) -> list[TrainSample]:
    if dist.get_rank() != rank:
        return clean
    return [replace(sample, advantages=sample.advantages * float("nan")) for sample in clean]


def run(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the findings of each rank, in rank order."""
    overrides = [*arguments["overrides"], "parallel.num_processes=2", "training.max_consecutive_skips=3"]
    built = build(arguments["recipe"], overrides)
    actor, learner = built.actor, built.learner
    clean = samples(2, 40)  # one mini-batch of two groups

    def state() -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in actor.state_shards().items()}

    seen: dict[str, Any] = {"changed": []}
    for step, spoilt_rank in enumerate((None, 1, 0, None)):
        before = state()
        learner.learn(clean if spoilt_rank is None else spoilt_on(spoilt_rank, clean), step)
        after = state()
        # Before the first step there are no moments.
        seen["changed"].append(sum(not torch.equal(tensor, after[name]) for name, tensor in before.items()))
    seen["after_recovery"] = vars(learner.counters).copy()
    before = state()
    try:
        for step in range(4, 10):
            learner.learn(spoilt_on(1, clean), step)
        seen["error"] = ""
    except TooManySkips as error:
        seen["error"] = str(error)
    seen["at_the_end"] = vars(learner.counters).copy()
    seen["changed_at_the_end"] = sum(not torch.equal(tensor, state()[name]) for name, tensor in before.items())
    return Coordination(dist.group.WORLD).gather(seen)
