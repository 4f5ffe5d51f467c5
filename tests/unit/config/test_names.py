"""The names the schema allows are the names the code has."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from megatron_dapo.algorithms.registry import algorithm_names
from megatron_dapo.config import schema
from megatron_dapo.config.validator import VERIFIER_PRESETS
from megatron_dapo.rewards.verifier import PRESETS

PAIRS = [
    (schema.AdvantageName, "advantage_estimator", ()),
    (schema.PolicyLossName, "policy_loss", ()),
    (schema.Aggregation, "aggregation", ()),
    (schema.KlEstimator, "kl_loss", ()),
    (schema.Correction, "off_policy_method", ("none",)),
    (schema.CorrectionLevel, "off_policy_level", ()),
]


@pytest.mark.parametrize(("names", "kind", "own"), PAIRS, ids=[kind for _, kind, _ in PAIRS])
def test_names_agree(names: Any, kind: str, own: tuple[str, ...]) -> None:
    assert set(get_args(names)) == {*algorithm_names()[kind], *own}


def test_verifier_presets_agree() -> None:
    assert set(VERIFIER_PRESETS) == set(PRESETS)
