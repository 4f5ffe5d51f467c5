"""Policy and critic together: the order of their updates, and the samples of each."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from judged_samples import judged
from value_path import FakeCritic, FakePolicy, make_config, make_critic_learner, make_policy_learner

from megatron_dapo.algorithms.group_advantages import EstimatedBatch
from megatron_dapo.algorithms.length_adaptive_lambda import FixedLambda
from megatron_dapo.algorithms.stop_rule import StopRule
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.parallel.rank_set import RankSet
from megatron_dapo.telemetry.metrics import STEP_METRICS
from megatron_dapo.trainer.actor_learner import MismatchError
from megatron_dapo.trainer.critic_learner import CriticCounters
from megatron_dapo.trainer.learner import ActorCriticLearner, ConcurrentUpdate
from megatron_dapo.trainer.offload import DeviceModels
from megatron_dapo.trainer.recorder import Phases
from megatron_dapo.trainer.topology import RunTopology
from megatron_dapo.trainer.updater import StepCounters

LAMBDA = FixedLambda(0.95)


def make(
    policy: FakePolicy,
    critic: FakeCritic,
    reference: FakePolicy | None = None,
    /,
    stop_rule: StopRule | None = None,
    **sections: dict[str, Any],
) -> ActorCriticLearner:
    sections["algorithm"] = {"name": "vapo", **sections.get("algorithm", {})}
    config, phases = make_config(**sections), Phases()
    return ActorCriticLearner(
        make_policy_learner(policy, config, reference),
        make_critic_learner(critic, config),
        config,
        LAMBDA,
        phases,
        DeviceModels({}, phases),
        stop_rule=stop_rule,
    )


def batch():
    return [judged("0/0", 3, 1.0), judged("0/1", 2, -1.0), judged("1/0", 4, 1.0)]


def test_both_are_trained_once_and_every_metric_is_in_the_schema() -> None:
    policy, critic = FakePolicy(), FakeCritic()
    _, result = make(policy, critic).learn(batch(), 0)
    assert (policy.num_steps, critic.num_steps, result.num_optimizer_steps) == (1, 1, 1)
    assert set(result.metrics) <= set(STEP_METRICS)
    assert {name for name in STEP_METRICS if name.startswith("critic/")} <= set(result.metrics)


def test_records_show_the_critics_values_of_a_response() -> None:
    expected = {one.sample_id: pytest.approx(float(one.advantages.mean())) for one in make_estimates().policy_samples}
    shown = make_estimates().shown_advantages
    assert shown == expected and any(shown.values())


def test_the_policy_stands_still_while_the_critic_warms_up() -> None:
    policy, critic = FakePolicy(), FakeCritic()
    learner = make(policy, critic, critic={"warmup_train_steps": 2})
    metrics = [learner.learn(batch(), step)[1].metrics for step in range(3)]
    assert (policy.num_steps, critic.num_steps) == (1, 3)
    assert set(metrics[0]) == set(metrics[2]), "a step has the same metrics either way"


def test_the_policys_warm_up_begins_when_the_policy_does() -> None:
    policy = FakePolicy()
    learner = make(policy, FakeCritic(), critic={"warmup_train_steps": 2}, optimizer={"warmup_steps": 2})
    for step in range(5):
        learner.learn(batch(), step)
    assert policy.learning_rates == pytest.approx([0.5e-3, 1e-3, 1e-3])


def test_the_gate_holds_while_the_policy_stands_still() -> None:
    learner = make(FakePolicy(), FakeCritic(), stop_rule=StopRule())
    samples = batch()
    samples[0].rollout_logprobs.fill_(-3.0)
    with pytest.raises(MismatchError):
        learner.learn(samples, 0, mismatch_gate=0.01)


def test_correct_responses_are_also_learned_by_heart() -> None:
    policy = FakePolicy()
    metrics = make(policy, FakeCritic(), algorithm={"positive_example_coefficient": 0.1}).learn(batch(), 0)[1].metrics
    without = make(FakePolicy(), FakeCritic()).learn(batch(), 0)[1].metrics
    # Every token has log-prob -1; the weights of correct responses' tokens sum to the coefficient.
    assert metrics["actor/positive_nll"] == pytest.approx(1.0) and without["actor/positive_nll"] == 0.0
    assert metrics["actor/loss"] - without["actor/loss"] == pytest.approx(0.1, abs=1e-6)


def test_all_tokens_of_a_rollout_weigh_the_same_where_asked() -> None:
    """T-PPO's normalization: sum / tokens of the rollout x mini-batches; here mini-batches of 1 and 2 responses."""
    losses = {}
    for aggregation in ("token_mean", "rollout_token_mean"):
        policy = FakePolicy()
        windows = {"name": "tppo", "loss": {"name": "ppo_clip", "aggregation": aggregation}}
        learner = make(policy, FakeCritic(), algorithm=windows, training={"mini_batch_prompts": 1})
        losses[aggregation] = learner.learn(batch(), 0)[1].metrics["actor/loss"]
        assert policy.num_steps == 2
    estimated = make_estimates().policy_samples
    tokens = [float(sample.advantages.sum()) for sample in estimated]
    counts = [3, 2, 4]
    assert losses["rollout_token_mean"] == pytest.approx(-sum(tokens) / sum(counts), abs=1e-6)
    parts = [-tokens[0] / counts[0], -(tokens[1] + tokens[2]) / (counts[1] + counts[2])]
    assert losses["token_mean"] == pytest.approx(sum(parts) / 2, abs=1e-6)


def make_estimates() -> EstimatedBatch:
    learner = make(FakePolicy(), FakeCritic())
    return learner.estimate_advantages(learner.score(batch()))


def test_an_alarm_names_the_step_and_both_numbers(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        make(FakePolicy(), FakeCritic(), critic={"explained_variance_alarm": 0.9}).learn(batch(), 4)
    assert "train step 5: the critic explains" in caplog.text and "0.9" in caplog.text


def test_equal_returns_are_no_reason_for_an_alarm_and_no_step_of_the_history(caplog: pytest.LogCaptureFixture) -> None:
    """The first windows of a run: the few responses that are finished are all wrong."""
    learner = make(FakePolicy(), FakeCritic(), critic={"explained_variance_alarm": 0.9})
    with caplog.at_level(logging.INFO):
        metrics = learner.learn([judged("0/0", 3, -1.0), judged("0/1", 2, -1.0)], 4)[1].metrics
    assert metrics["critic/explained_variance"] == 0.0 and learner.critic.counters.history == []
    assert "all returns are equal" in caplog.text and "the critic explains" not in caplog.text


def test_convergence_is_asked_of_the_history() -> None:
    learner = make(FakePolicy(), FakeCritic(), stop_rule=StopRule(2, math.inf, math.inf))
    assert not learner.has_converged()
    learner.learn(batch(), 0)
    learner.learn(batch(), 1)
    assert learner.has_converged()


def test_kl_is_taken_off_the_rewards() -> None:
    class Reference(FakePolicy):
        def _outputs(self, micro_batch):
            outputs = super()._outputs(micro_batch)
            outputs.logprobs -= 0.25
            return outputs

    learner = make(FakePolicy(), FakeCritic(), Reference(), algorithm={"kl_reward_coefficient": 0.5})
    # k1 = log pi - log pi_ref = 0.25 a token, so the penalty of a response is 0.125 a token to go.
    plain = make(FakePolicy(), FakeCritic()).learn([judged("0/0", 3, 1.0)], 0)[1].metrics
    shaped = learner.learn([judged("0/0", 3, 1.0)], 0)[1].metrics
    assert plain["critic/return_mean"] - shaped["critic/return_mean"] == pytest.approx(0.125 * (3 + 2 + 1) / 3)
    assert bool(torch.isfinite(torch.tensor(shaped["actor/loss"])))


def test_models_on_the_same_ranks_need_no_exchange() -> None:
    ranks, layout = RankSet(0, 2, 0, None), ParallelLayout(2)
    topology = RunTopology(2, 0, ranks, ranks, layout, layout, None)
    assert topology.is_shared
    with pytest.raises(AssertionError, match="one after the other"):
        ConcurrentUpdate(topology, StepCounters(), CriticCounters(), Phases())


def test_the_critic_trains_before_the_policy() -> None:
    """The critic is on the device already, after the values; the policy stays there for the weight sync."""
    learner, order = make(FakePolicy(), FakeCritic()), []
    learner.critic.critic.train_step = noted(learner.critic.critic.train_step, "critic", order)
    learner.policy.actor.train_step = noted(learner.policy.actor.train_step, "policy", order)
    learner.learn(batch(), 0)
    assert order == ["critic", "policy"]


def noted(function: Any, name: str, order: list[str]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        order.append(name)
        return function(*args, **kwargs)

    return call
