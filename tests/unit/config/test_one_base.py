"""Recipes that may train their adapters together on one base: what they have in common, a line for each difference."""

from __future__ import annotations

import pytest

from megatron_dapo.config.one_base import require_one_base
from megatron_dapo.config.schema import Config
from tests.unit.config.small import make


def tenant(name: str, overrides: str = "") -> Config:
    return make(f"model.lora.rank=8 run.name={name} run.output_dir=runs/{name} {overrides}")


def test_adapters_of_one_base_choose_rank_rate_data_and_lengths() -> None:
    own = "model.lora.rank=2 model.lora.alpha=4 optimizer.learning_rate=1e-3 run.seed=5 rollout.group_size=6 run.total_steps=7"
    require_one_base([tenant("one"), tenant("two", own), tenant("three")])
    require_one_base([make("rollout.engine=sglang")])  # one run shares nothing


@pytest.mark.parametrize(
    ("other", "overrides", "line"),
    [
        ("two", "model.lora.rank=0", "two: model.lora.rank = 0: full training changes the weights that the others share"),
        ("two", "model.dtype=bfloat16", "two: model.dtype = 'bfloat16', and one has 'float32'; adapters of one base have the same"),
        ("two", "parallel.tp_size=2", "two: parallel.tp_size = 2, and one has 1; adapters of one base have the same"),
        ("two", "run.deterministic=true", "two: run.deterministic = True, and one has False; adapters of one base have the same"),
        ("two", "megatron.overlap_grad_reduce=true", "two: megatron.overlap_grad_reduce = True, and one has its default"),
        ("two", "model.allow_random_init=true run.seed=1", "two: run.seed = 1, and one has its default"),
        ("two", "model.offload=all", 'two: model.offload = "all" would move the weights of the others'),
        ("two", "algorithm.name=vapo", 'two: algorithm.name = "vapo" trains a critic'),
        ("two", "rollout.engine=sglang", 'two: rollout.engine = "sglang": only the embedded engine takes turns'),
        ("two", "checkpoint.memory_copies=node", 'two: checkpoint.memory_copies = "node": copies in memory are of one run'),
        ("two", "run.output_dir=runs/one", "one and two write to "),
        ("one", "run.output_dir=runs/two", 'run.name = "one" is the name of two runs'),
        ("two", 'telemetry.trackers=["wandb"]', "one and two: wandb follows one run a process"),
        ("two", "telemetry.prometheus_port=9100", "one and two: telemetry.prometheus_port = 9100 twice"),
    ],
)
def test_each_difference_that_one_base_does_not_allow_is_one_line(other: str, overrides: str, line: str) -> None:
    with pytest.raises(ValueError) as problem:
        require_one_base([tenant("one", 'telemetry.prometheus_port=9100 telemetry.trackers=["wandb"]'), tenant(other, overrides)])
    assert [text for text in str(problem.value).splitlines() if text.startswith(f"  - {line}")], problem.value
