"""When policy and critic make their optimizer steps of a train step: in turn, or at the same time.

in turn           the same ranks hold both: first the policy, then the critic
at the same time  each has ranks of its own; they make their steps without waiting for each other and then tell all
                  ranks what came of it, so that every rank has the same metrics and counters as in turn
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any, Protocol

from megatron_dapo.trainer.actor_learner import LearnerCounters, LearnResult
from megatron_dapo.trainer.critic_learner import CriticCounters
from megatron_dapo.trainer.topology import RunTopology

LearnPolicy = Callable[[], LearnResult]
LearnCritic = Callable[[], dict[str, float]]
Phase = Callable[[str], AbstractContextManager[object]]


class UpdateOrder(Protocol):
    """Runs both updates; the results of both, the same on every rank."""

    def run(self, policy: LearnPolicy, critic: LearnCritic) -> tuple[LearnResult, dict[str, float]]: ...


class SequentialUpdate:
    """The same ranks do one after the other. What the policy does has phases of its own."""

    def __init__(self, phase: Phase) -> None:
        self._phase = phase

    def run(self, policy: LearnPolicy, critic: LearnCritic) -> tuple[LearnResult, dict[str, float]]:
        """See `UpdateOrder`."""
        result = policy()
        with self._phase("train_critic"):
            return result, critic()


class ConcurrentUpdate:
    """Policy and critic update on ranks of their own. `counters`: of both, on every rank; they are set to what is told.

    The phase of the other's update is the time spent waiting for it. A failure on one side ends its processes, and with
    them the other side's wait.
    """

    def __init__(
        self, world: RunTopology, policy_counters: LearnerCounters, critic_counters: CriticCounters, phase: Phase
    ) -> None:
        assert not world.is_shared, "models in the same processes update in turn"
        self._world = world
        self._policy_counters = policy_counters
        self._critic_counters = critic_counters
        self._phase = phase

    def run(self, policy: LearnPolicy, critic: LearnCritic) -> tuple[LearnResult, dict[str, float]]:
        """See `UpdateOrder`."""
        if self._world.policy.is_member:
            own = _policy_report(policy(), self._policy_counters)
            with self._phase("train_critic"):
                return self._exchange(own, None)
        with self._phase("train_critic"):
            metrics = critic()
        with self._phase("train"):
            return self._exchange(None, {"metrics": metrics, "counters": asdict(self._critic_counters)})

    def _exchange(
        self, policy: dict[str, Any] | None, critic: dict[str, Any] | None
    ) -> tuple[LearnResult, dict[str, float]]:
        """Both reports on every rank; a rank has one of its own or none."""
        policy = self._world.coordination.broadcast(policy, source=self._world.policy.first_rank)
        critic = self._world.coordination.broadcast(critic, source=self._world.critic.first_rank)
        assert policy is not None and critic is not None, "both sides report"
        _set(self._policy_counters, policy["counters"])
        _set(self._critic_counters, critic["counters"])
        return LearnResult(policy["metrics"], policy["num_optimizer_steps"]), critic["metrics"]


def _policy_report(result: LearnResult, counters: LearnerCounters) -> dict[str, Any]:
    return {
        "metrics": {name: float(value) for name, value in result.metrics.items()},
        "num_optimizer_steps": result.num_optimizer_steps,
        "counters": asdict(counters),
    }


def _set(counters: Any, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        setattr(counters, name, value)
