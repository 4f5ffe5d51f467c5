"""Everything that is wrong is said before any process starts; what runs is what the flags say."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dapo.cli.description import describe
from megatron_dapo.config import ConfigError
from megatron_dapo.run.plan import ONE_NODE_OF_CPUS, Machines, make_plan
from tests.unit.cli.conftest import recipe  # noqa: F401


def violated(
    recipe: Path, *overrides: str, layout: str | None = None, machines: Machines = ONE_NODE_OF_CPUS
) -> set[str]:
    with pytest.raises(ConfigError) as error:
        make_plan(recipe, overrides, layout, None, machines)
    return {violation.path for violation in error.value.violations}


def test_flags_decide(recipe: Path, tmp_path: Path) -> None:
    plan = make_plan(recipe, ["run.total_steps=3"], "tp2pp2", tmp_path / "out", ONE_NODE_OF_CPUS)
    assert plan.layout.describe() == "TP2 PP2 CP1 DP1" and plan.layout.world_size == 4
    config = plan.loaded.config
    assert (config.run.total_steps, config.run.output_dir, config.parallel.num_processes) == (3, tmp_path / "out", 4)
    again = make_plan(recipe, plan.overrides, None, None, ONE_NODE_OF_CPUS)
    assert again.loaded.config == config


def test_lines_hold_the_resolved_numbers(recipe: Path) -> None:
    text = "\n".join(describe(make_plan(recipe, [], None, None, ONE_NODE_OF_CPUS)))
    for part in (
        "TP1",
        "8 prompts x 4 responses, 4 optimizer steps of 8 responses",
        "from 80 (0) to 112 tokens (-1)",
        "[0.8, 1.28]",
        "7 train",
    ):
        assert part in text


def test_files_model_layout_and_values_are_refused_together(recipe: Path) -> None:
    found = violated(recipe, "data.train_paths=['gone.jsonl']", "training.mini_batch_prompts=3", layout="tp4pp3")
    assert found == {"data.train_paths", "training.mini_batch_prompts", "parallel.tp_size", "parallel.pp_size"}


def test_missing_model_does_not_hide_the_rest(recipe: Path) -> None:
    assert violated(recipe, "model.path=nowhere", "rollout.top_k=1") == {"model.path", "rollout.top_k"}


def test_positions_of_the_model_are_known(recipe: Path) -> None:
    assert violated(recipe, "rollout.max_response_tokens=449", "training.micro_batch_tokens=1024") == {
        "rollout.max_response_tokens"
    }


def test_more_processes_than_accelerators(recipe: Path) -> None:
    with pytest.raises(ConfigError, match="processes = 4, num_nodes = 1, gpus_per_node = 2"):
        make_plan(recipe, [], "tp2dp2", None, Machines(1, 2))
    assert make_plan(recipe, [], "tp2dp2", None, Machines(1, 4)).layout.data == 2
    assert make_plan(recipe, [], "tp2dp2", None, Machines()).layout.data == 2


def test_an_outside_launcher_decides_the_world(recipe: Path) -> None:
    launched = Machines(num_nodes=1, num_tasks=8)
    assert make_plan(recipe, ["parallel.tp_size=2"], None, None, launched).layout.data == 4
    assert violated(recipe, "parallel.tp_size=2", machines=Machines(num_nodes=1, num_tasks=3)) == {"parallel.tp_size"}
