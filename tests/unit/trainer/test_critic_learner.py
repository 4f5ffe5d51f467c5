"""The critic's optimizer steps: exact denominators, its own mini-batches, and what happens if little is finished."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from judged_samples import judged
from value_path import FakeCritic, make_config, make_critic_learner

from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.trainer.updater import TooManySkips


def with_targets(name: str, length: int, target: float):
    sample = judged(name, length, target)
    return replace(sample, values=torch.zeros(length), returns=torch.full((length,), target))


def test_values_stand_at_the_state_before_each_token() -> None:
    samples = [judged("0/0", 3, 1.0), judged("0/1", 1, 1.0)]
    values = make_critic_learner(FakeCritic()).values(samples)
    # Token ids are 1, 2, ...; the prompt has two: the state before the first response token ends in token 2, and the state
    # after the response in its last token.
    assert [one.tolist() for one in values] == [pytest.approx([0.2, 0.3, 0.4, 0.5]), pytest.approx([0.2, 0.3])]


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", (sum(0.5 * (v - 1) ** 2 for v in (0.2, 0.3, 0.4)) + 0.5 * 0.8**2) / 4),
        ("sample_mean", (sum(0.5 * (v - 1) ** 2 for v in (0.2, 0.3, 0.4)) / 3 + 0.5 * 0.8**2) / 2),
    ],
)
def test_the_loss_is_normalized_over_the_mini_batch(aggregation: str, expected: float) -> None:
    critic = FakeCritic()
    metrics = make_critic_learner(critic, make_config(critic={"aggregation": aggregation})).learn(
        [with_targets("0/0", 3, 1.0), with_targets("0/1", 1, 1.0)], 0
    )
    assert critic.losses == [pytest.approx(expected)]
    assert metrics["critic/trained_tokens"] == 4 and metrics["critic/optimizer_steps"] == 1


def test_mini_batches_are_its_own_and_the_schedule_counts_train_steps() -> None:
    critic = FakeCritic()
    learner = make_critic_learner(critic, make_config(training={"mini_batch_prompts": 1}))
    learner.learn([with_targets(f"0/{index}", 2, 1.0) for index in range(5)], 1)
    assert [len(names) for names in critic.trained] == [1, 2, 2] and critic.learning_rates == [1e-2] * 3
    assert learner.counters.optimizer_steps == 3


def test_the_learning_rate_reported_is_that_of_the_last_step() -> None:
    critic = FakeCritic()
    optimizer = {"learning_rate": 1e-2, "warmup_steps": 10, "warmup_unit": "optimizer_step"}
    learner = make_critic_learner(critic, make_config(critic={"optimizer": optimizer}))
    for step in range(3):
        metrics = learner.learn([with_targets("0/0", 2, 1.0)], step)
        assert metrics["critic/learning_rate"] == critic.learning_rates[-1] == pytest.approx(1e-3 * (step + 1))


def test_a_step_that_is_not_finite_is_counted() -> None:
    critic = FakeCritic(applies=False, grad_norm=float("nan"))
    learner = make_critic_learner(critic)
    for step in range(2):
        metrics = learner.learn([with_targets("0/0", 2, 1.0)], step)
    assert (learner.counters.optimizer_steps, learner.counters.skipped_steps) == (0, 2)
    assert metrics["critic/skipped_optimizer_steps"] == 2
    critic.applies, critic.grad_norm = True, 1.0
    learner.learn([with_targets("0/0", 2, 1.0)], 2)
    assert learner.counters.consecutive_skips == 0


def test_several_steps_in_a_row_that_are_not_finite_end_the_run() -> None:
    learner = make_critic_learner(FakeCritic(applies=False, grad_norm=float("nan")))
    with pytest.raises(TooManySkips, match="critic: 3 optimizer steps in a row .*max_consecutive_skips is 3"):
        for step in range(3):
            learner.learn([with_targets("0/0", 2, 1.0)], step)
    assert learner.counters.skipped_steps == learner.counters.consecutive_skips == 3


def test_nothing_finished_is_no_step() -> None:
    critic = FakeCritic()
    metrics = make_critic_learner(critic).learn([], 0)
    assert critic.losses == [] and metrics["critic/loss"] == 0.0


def test_every_data_rank_takes_part_where_fewer_are_finished() -> None:
    finished = [with_targets("0/0", 2, 1.0), with_targets("0/1", 1, 1.0)]
    losses, names = [], []
    for rank in range(3):
        critic = FakeCritic(layout=ParallelLayout(3), rank=rank)
        make_critic_learner(critic).learn(finished, 0)
        losses += critic.losses
        names += critic.trained
    assert sorted(map(tuple, names)) == [("",), ("0/0",), ("0/1",)], "one step each, one of them masked"
    assert sum(losses) == pytest.approx((0.5 * 0.8**2 + 0.5 * 0.7**2 + 0.5 * 0.8**2) / 3)


def test_history_keeps_the_newest() -> None:
    learner = make_critic_learner(FakeCritic())
    for step in range(5):
        learner.counters.remember(step / 10, 1.0, length=3)
    assert learner.counters.history == [[0.2, 1.0], [0.3, 1.0], [0.4, 1.0]]


def test_nonfinite_values_are_not_recorded() -> None:
    """A checkpoint holds the history as JSON, which knows no NaN: the run would end with the next one."""
    learner = make_critic_learner(FakeCritic())
    for explained, loss in ((0.1, 1.0), (0.2, float("nan")), (float("-inf"), 1.0), (0.3, float("inf"))):
        learner.counters.remember(explained, loss, length=3)
    assert learner.counters.history == [[0.1, 1.0]]
