"""Updates in turn; at the same time they are tested with processes, in tests/e2e."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from megatron_dapo.parallel.coordination import Coordination
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.parallel.rank_set import RankSet
from megatron_dapo.trainer.actor_learner import LearnerCounters, LearnResult
from megatron_dapo.trainer.critic_learner import CriticCounters
from megatron_dapo.trainer.topology import RunTopology
from megatron_dapo.trainer.update_order import ConcurrentUpdate, SequentialUpdate


def test_in_turn_the_policy_comes_first_and_the_critic_has_the_phase() -> None:
    order: list[str] = []

    @contextmanager
    def phase(name: str):
        order.append(name)
        yield

    def policy() -> LearnResult:
        order.append("policy")
        return LearnResult({"actor/loss": 1.0}, 2)

    def critic() -> dict[str, float]:
        order.append("critic")
        return {"critic/loss": 3.0}

    result, metrics = SequentialUpdate(phase).run(policy, critic)
    assert order == ["policy", "train_critic", "critic"]
    assert result.num_optimizer_steps == 2 and metrics == {"critic/loss": 3.0}


def test_models_in_the_same_processes_cannot_update_at_once() -> None:
    part, layout = RankSet(0, 2, 0, None), ParallelLayout(2)
    world = RunTopology(2, 0, part, part, layout, layout, Coordination())
    assert world.is_shared
    with pytest.raises(AssertionError, match="in turn"):
        ConcurrentUpdate(world, LearnerCounters(), CriticCounters(), lambda name: None)


def test_a_part_of_the_world_numbers_its_ranks_from_0() -> None:
    part = RankSet(2, 3, 4, None)
    assert (list(part.ranks), part.is_member, part.rank) == ([2, 3, 4], True, 2)
    outside = RankSet(2, 3, 1, None)
    assert not outside.is_member
    with pytest.raises(AssertionError, match="rank 1 of the world is none of"):
        assert outside.rank
