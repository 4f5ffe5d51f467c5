"""The names a config may use, by kind."""

from __future__ import annotations

from megatron_dapo.algorithms.advantages import ADVANTAGE_ESTIMATORS
from megatron_dapo.algorithms.aggregation import AGGREGATIONS
from megatron_dapo.algorithms.kl import KL_ESTIMATORS, KL_LOSSES
from megatron_dapo.algorithms.length_adaptive_lambda import LAMBDA_RULES
from megatron_dapo.algorithms.off_policy import LEVELS, OFF_POLICY_METHODS
from megatron_dapo.algorithms.policy_loss import POLICY_LOSSES
from megatron_dapo.algorithms.value_loss import VALUE_LOSSES


def algorithm_names() -> dict[str, tuple[str, ...]]:
    """Kind -> the names registered for it, in the order of their tables."""
    tables = {
        "advantage_estimator": ADVANTAGE_ESTIMATORS,
        "policy_loss": POLICY_LOSSES,
        "aggregation": AGGREGATIONS,
        "kl_estimator": KL_ESTIMATORS,
        "kl_loss": KL_LOSSES,
        "off_policy_method": OFF_POLICY_METHODS,
        "off_policy_level": LEVELS,
        "value_loss": VALUE_LOSSES,
        "lambda_rule": LAMBDA_RULES,
    }
    return {kind: tuple(table) for kind, table in tables.items()}
