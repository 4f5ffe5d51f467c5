"""The names the schema allows are the names the code has."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from megatron_dapo.algorithms.aggregation import AGGREGATIONS
from megatron_dapo.algorithms.kl import KL_ESTIMATORS
from megatron_dapo.algorithms.length_adaptive_lambda import LAMBDA_RULES
from megatron_dapo.algorithms.registry import algorithm_names
from megatron_dapo.algorithms.value_loss import VALUE_LOSSES
from megatron_dapo.config import critic_schema, schema
from megatron_dapo.config.validator import VERIFIER_PRESETS
from megatron_dapo.ops.head.choice import AUTO, IMPLEMENTATIONS
from megatron_dapo.rewards.verifier import PRESETS
from megatron_dapo.trainer.learner import OVER_ROLLOUT

PAIRS = [
    (schema.AdvantageName, "advantage_estimator", ()),
    (schema.PolicyLossName, "policy_loss", ()),
    (schema.Aggregation, "aggregation", (OVER_ROLLOUT,)),
    (schema.KlEstimator, "kl_loss", ()),
    (schema.Correction, "off_policy_method", ("none",)),
    (schema.CorrectionLevel, "off_policy_level", ()),
]


@pytest.mark.parametrize(("names", "kind", "own"), PAIRS, ids=[kind for _, kind, _ in PAIRS])
def test_names_agree(names: Any, kind: str, own: tuple[str, ...]) -> None:
    assert set(get_args(names)) == {*algorithm_names()[kind], *own}


def test_names_of_the_value_path_agree() -> None:
    assert set(get_args(critic_schema.LambdaRuleName)) == set(LAMBDA_RULES)
    assert set(get_args(critic_schema.ValueLossName)) == set(VALUE_LOSSES)
    assert set(get_args(critic_schema.ValueAggregation)) < set(AGGREGATIONS)
    assert set(get_args(schema.RewardKlEstimator)) == set(KL_ESTIMATORS)


def test_names_of_the_log_prob_head_agree() -> None:
    assert set(get_args(schema.LogprobImplementation)) == {AUTO, *IMPLEMENTATIONS}


def test_verifier_presets_agree() -> None:
    assert set(VERIFIER_PRESETS) == set(PRESETS)
