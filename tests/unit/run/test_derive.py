"""A configuration that is made from another one is validated like one that was loaded."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_dapo.config import ConfigError, config_from_dict
from megatron_dapo.run.derive import derive, for_evaluation, for_sampling, pretraining_config

TREE = {
    "model": {"path": "/m"},
    "data": {"train_paths": ["/t"], "eval_paths": ["/e"]},
    "algorithm": {"name": "vapo", "loss": {"name": "cispo"}},
    "megatron": {"moe_permute_fusion": True},
}


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"run": {"total_steps": "many"}}, "run.total_steps"),
        ({"filter_group": False}, "filter_group"),
        ({"rollout": {"filter_group": False}}, "rollout.filter_group"),
        ({"algorithm": {"gkl": {"coefficient": None}}}, "algorithm.gkl.coefficient"),
    ],
)
def test_a_wrong_name_or_type_is_refused(changes: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError) as error:
        derive(config_from_dict(TREE), changes)
    assert [violation.path for violation in error.value.violations] == [path]


def test_what_is_not_changed_stays() -> None:
    config = config_from_dict(TREE)
    assert derive(config, {}) == config
    changed = derive(config, {"run": {"total_steps": 7}})
    assert changed.run.total_steps == 7 and changed.run.seed == config.run.seed and changed.algorithm == config.algorithm


def test_runs_of_a_recipe_are_derived_from_it() -> None:
    config = config_from_dict({**TREE, "sglang": {"urls": ["http://host:1"]}})
    held_out = for_evaluation(config)
    assert held_out.data.train_paths == config.data.eval_paths and held_out.critic.path == ""
    assert held_out.sglang.weight_sync_transport == "disk"
    assert for_sampling(config).data.train_paths == config.data.train_paths
    assert pretraining_config(config).run.total_steps == config.value_pretraining.max_steps
