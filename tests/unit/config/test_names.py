"""The names the schema allows are the names the code has."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from megatron_dapo.algorithms.advantages import ADVANTAGES, STD_CONVENTIONS
from megatron_dapo.algorithms.aggregation import AGGREGATIONS
from megatron_dapo.algorithms.kl import KL_ESTIMATORS, KL_LOSSES
from megatron_dapo.algorithms.length_adaptive_lambda import LAMBDA_RULES
from megatron_dapo.algorithms.off_policy import LEVELS, OFF_POLICY_METHODS
from megatron_dapo.algorithms.policy_loss import POLICY_LOSSES
from megatron_dapo.algorithms.value_loss import VALUE_LOSSES
from megatron_dapo.config import algorithm_schema, loss_schema, model_schema
from megatron_dapo.config.reward_schema import BUILT_IN_PARTS, GOLD_PRESETS, VERIFIER_PRESETS, RewardConfig
from megatron_dapo.config.schema import union_names
from megatron_dapo.config.validator import SELECTION_METRICS
from megatron_dapo.ops.lm_head.select import AUTO, IMPLEMENTATIONS
from megatron_dapo.rewards.verifiers.verifier import PRESETS, SET_PRESETS
from megatron_dapo.trainer.build_rollout import reward_addends
from megatron_dapo.trainer.metrics import evaluation_metrics

PAIRS = [
    (algorithm_schema.GrpoStd, STD_CONVENTIONS, ()),
    (loss_schema.Aggregation, AGGREGATIONS, ()),
    (algorithm_schema.KlEstimator, KL_LOSSES, ()),
    (algorithm_schema.Correction, OFF_POLICY_METHODS, ("none",)),
    (algorithm_schema.CorrectionLevel, LEVELS, ()),
]


@pytest.mark.parametrize(("names", "table", "own"), PAIRS)
def test_names_agree(names: Any, table: Mapping[str, Any], own: tuple[str, ...]) -> None:
    assert set(get_args(names)) == {*table, *own}


@pytest.mark.parametrize(("section", "table"), [("algorithm.advantage", ADVANTAGES), ("algorithm.loss", POLICY_LOSSES)])
def test_members_of_a_union_agree(section: str, table: Mapping[str, Any]) -> None:
    assert union_names(section) == tuple(table)


def test_names_of_the_value_path_agree() -> None:
    assert set(get_args(algorithm_schema.LambdaRuleName)) == set(LAMBDA_RULES)
    assert set(get_args(algorithm_schema.ValueLossName)) == set(VALUE_LOSSES)
    assert set(get_args(algorithm_schema.ValueAggregation)) < set(AGGREGATIONS)
    assert set(get_args(algorithm_schema.RewardKlEstimator)) == set(KL_ESTIMATORS)


def test_names_of_the_log_prob_head_agree() -> None:
    assert set(get_args(model_schema.LogprobImplementation)) == {AUTO, *IMPLEMENTATIONS}


def test_verifier_presets_agree() -> None:
    assert set(VERIFIER_PRESETS) == {*PRESETS, *SET_PRESETS} and set(GOLD_PRESETS) == set(PRESETS)


def test_parts_of_a_reward_agree() -> None:
    on = {"enabled": True}
    reward = RewardConfig(overlong_punishment=on, perplexity_penalty=on, format={"reward": 0.1})
    assert set(BUILT_IN_PARTS) == {"verifier", *reward_addends(reward)}


def test_metrics_of_an_evaluation_agree() -> None:
    value = SimpleNamespace(value=0.5, low=0.4, high=0.6)
    result = SimpleNamespace(
        protocol=SimpleNamespace(num_samples=4),
        headline=value,
        metrics={"pass@4": value, "cons@4": value},
        rates={"truncation_rate": 0.0, "mean_response_tokens": 7.0},
        sources=(),
    )
    assert set(evaluation_metrics(result, 1.0)) == {*SELECTION_METRICS, "eval/seconds", "eval/trained_problems"}
