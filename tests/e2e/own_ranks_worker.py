"""Runs in three processes: the policy at TP2, the critic in a separate process. Two steps, the second with a loss of
the critic that is not a number."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from learners import build, judged_samples

from megatron_dapo.megatron.parallel_state import join_as_nonmember
from megatron_dapo.parallel.coordination import Coordination
from megatron_dapo.trainer import critic_learner
from megatron_dapo.trainer.topology import RunTopology


def run(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the findings of each rank, in rank order."""
    built = build(arguments["recipe"], arguments["overrides"])
    actor, learner = built.actor, built.learner
    model = actor or learner.local_critic
    assert model is not None and (actor is None) != (learner.local_critic is None), "a rank holds one of the two"
    judged = judged_samples(2, 40)
    intervals: list[tuple[float, float]] = []
    model.train_step = meeting(model.train_step, intervals)
    first = learner.learn(judged, 0)[1]
    sound = critic_learner.value_loss
    # The process stands by for other tests, so the sound loss comes back.
    with patch.object(critic_learner, "value_loss", sound if learner.local_critic is None else spoilt(sound)):
        second = learner.learn(judged, 1)[1]
    return Coordination(dist.group.WORLD).gather(
        {
            "rank": model.rank,
            "layout": model.layout.describe(),
            "intervals": intervals,
            "metrics": [first.metrics, second.metrics],
            "policy": asdict(learner.policy.counters),
            "critic": asdict(learner.critic.counters),
            "groups_not_mine": refusal(built.world),
        }
    )


def meeting(train_step: Callable[..., Any], intervals: list[tuple[float, float]]) -> Callable[..., Any]:
    """The step, with a collective of all processes: it would hang if one model waited for the other's."""

    def run(*arguments: Any, **options: Any) -> Any:
        start = time.monotonic()
        dist.barrier()
        result = train_step(*arguments, **options)
        dist.barrier()
        intervals.append((start, time.monotonic()))
        return result

    return run


def spoilt(value_loss: Callable[..., Any]) -> Callable[..., Any]:
    def loss(section: Any, inputs: Any) -> Any:
        token_loss, metrics = value_loss(section, inputs)
        return token_loss * float("nan"), metrics

    return loss


def refusal(world: RunTopology) -> str:
    """A process that belongs to a part cannot stand aside while that part builds."""
    part, layout = (
        (world.policy, world.policy_layout) if world.policy.is_member else (world.critic, world.critic_layout)
    )
    try:
        join_as_nonmember(layout, part)
    except AssertionError as error:
        return str(error)
    return ""
