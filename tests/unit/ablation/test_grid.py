from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_dapo.ablation.grid import read_grid
from megatron_dapo.ablation.runs import plan_runs, settings_hash
from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.run.plan import ONE_NODE_OF_CPUS
from tests.unit.ablation.conftest import GRID, planned

WriteGrid = Callable[..., Path]


def test_a_variant_is_the_recipe_the_grid_the_variants_before_and_its_own(write_grid: WriteGrid) -> None:
    grid = read_grid(write_grid(), ["rollout.temperature=0.9"])
    config = load_config(grid.variants[1].recipe, grid.variants[1].overrides).config
    assert (config.run.total_steps, config.rollout.group_size) == (4, 4)  # the grid's, the recipe's
    assert (config.algorithm.loss.clip_ratio_high, config.rollout.temperature) == (0.3, 0.9)
    assert [variant.directory for variant in grid.variants] == ["grpo", "clip_higher"]
    assert grid.baseline == "GRPO"


def test_a_variant_takes_the_recipe_of_the_one_before(write_grid: WriteGrid, recipe: Path) -> None:
    (recipe.parent / "other.toml").write_text('base = "recipe.toml"\nrollout.temperature = 0.5')
    text = GRID.replace('name = "GRPO"', 'name = "GRPO"\nrecipe = "other.toml"')
    assert [variant.recipe.name for variant in read_grid(write_grid(text)).variants] == ["other.toml", "other.toml"]


def test_inputs_are_from_the_directory_of_the_grid(write_grid: WriteGrid, tmp_path: Path) -> None:
    grid = read_grid(write_grid(GRID + 'set.data.eval_paths = ["held_out.jsonl"]\n'))
    config = load_config(grid.variants[1].recipe, grid.variants[1].overrides).config
    assert config.data.eval_paths == (tmp_path / "held_out.jsonl",)
    assert grid.variants[1].written["data.eval_paths"] == ["held_out.jsonl"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("seeds =", "seed ="), "seed: expected a known key"),
        (("seeds = [1, 2]", ""), "seeds: expected a value"),
        (("seeds = [1, 2]", "seeds = [1, 1]"), "seeds: expected one or more different numbers"),
        (("seeds = [1, 2]", 'seeds = "1"'), "seeds: expected a valid"),
        (('after = "GRPO"', 'after = "grpo"'), "variants.2.after: expected an earlier variant"),
        (("+ clip-higher", "grpo"), "variants.2.name: expected a unique name"),
        (('name = "GRPO"', 'nmae = "GRPO"'), "variants.1.nmae: expected a known key"),
        (("seeds =", 'baseline = "PPO"\nseeds ='), "baseline: expected one of the variants"),
        (('after = "GRPO"', 'program = "trl.py"'), "variants.2.program: expected a file"),
        (("seeds =", "seeds = ["), "valid TOML"),
    ],
)
def test_what_is_wrong_with_a_grid_is_one_line_each(
    write_grid: WriteGrid, change: tuple[str, str], expected: str
) -> None:
    with pytest.raises(ConfigError) as error:
        read_grid(write_grid(GRID.replace(*change)))
    assert len([line for line in str(error.value).splitlines() if expected in line]) == 1, error.value
    assert "Fix: " in str(error.value)


def test_every_variant_is_checked_before_the_first_run(write_grid: WriteGrid) -> None:
    text = GRID.replace("clip_ratio_high = 0.2", "clip_ratio_hihg = 0.2") + "set.training.mini_batch_prompts = 7\n"
    with pytest.raises(ConfigError) as error:
        planned(write_grid(text))
    lines = str(error.value).splitlines()[1:]
    assert len(lines) == 2  # Both variants fail: the second one has the key as well.
    assert "variant 'GRPO': algorithm.loss.clip_ratio_hihg: expected a known key" in lines[0]
    with pytest.raises(ConfigError, match="variant '\\+ clip-higher': training.mini_batch_prompts: expected"):
        planned(write_grid(GRID + "set.training.mini_batch_prompts = 7\n"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GRID.replace("clip_ratio_high = 0.3", "clip_ratio_high = 0.2"), "other settings than those of 'GRPO'"),
        (GRID + "pretrain_value = true\n", "an algorithm with a critic"),
        (GRID + "set.data.eval_paths = []\nset.data.held_out_share = 0\n", "a held-out evaluation at the end"),
    ],
)
def test_a_variant_that_could_not_be_compared_is_refused(write_grid: WriteGrid, text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        planned(write_grid(text))


def test_runs_are_ordered_by_seed_and_have_seeds_of_their_own(write_grid: WriteGrid) -> None:
    _, runs = planned(write_grid())
    assert [(run.seed, run.variant.name) for run in runs] == [
        (1, "GRPO"), (1, "+ clip-higher"), (2, "GRPO"), (2, "+ clip-higher"),
    ]  # fmt: skip
    configs = [load_config(run.variant.recipe, run.overrides).config for run in runs]
    assert [(config.run.seed, config.data.shuffle_seed) for config in configs] == [(1, 1), (1, 1), (2, 2), (2, 2)]
    assert len({run.settings for run in runs}) == len({run.directory for run in runs}) == 4


def test_settings_are_values_and_contents_not_names_and_places(recipe: Path, tmp_path: Path) -> None:
    def hashed(path: Path, *overrides: str) -> str:
        return settings_hash(load_config(path, overrides).config, {})

    base = hashed(recipe)
    assert hashed(recipe, "run.name=x", "run.output_dir=/elsewhere", "telemetry.progress=false") == base
    assert hashed(recipe, "algorithm.loss.clip_ratio_high=0.25") != base
    assert hashed(recipe, "algorithm.loss.clip_ratio_high=0.28") == base  # the default, spelled out
    moved = tmp_path / "moved"
    moved.mkdir()
    (tmp_path / "own.py").write_text("def reward(sample): return 1.0\n")
    base = hashed(recipe, f"reward.verifier={tmp_path / 'own.py'}:reward")
    for name in ("recipe.toml", "train.jsonl", "heldout.jsonl", "own.py"):
        (moved / name).write_bytes((tmp_path / name).read_bytes())
    (moved / "model").symlink_to(tmp_path / "model")
    assert hashed(moved / "recipe.toml", f"reward.verifier={moved / 'own.py'}:reward") == base
    (moved / "own.py").write_text("def reward(sample): return 0.0\n")
    assert hashed(moved / "recipe.toml", f"reward.verifier={moved / 'own.py'}:reward") != base
    unmoved = hashed(recipe)
    assert hashed(moved / "recipe.toml") == unmoved
    (moved / "train.jsonl").write_text("{}\n{}\n")
    assert hashed(moved / "recipe.toml") != unmoved


def test_variants_share_a_critic_where_its_pretraining_is_the_same(write_grid: WriteGrid) -> None:
    text = GRID.replace("[[variants]]", "[[variants]]\npretrain_value = true").replace(
        "set.run.total_steps = 4",
        'set.run.total_steps = 4\nset.algorithm.name = "vapo"\nset.rollout.filter_groups = false',
    )
    grid, runs = planned(write_grid(text))
    assert runs[0].critic_directory == runs[1].critic_directory != runs[2].critic_directory
    assert runs[0].critic_directory.parent == grid.output_dir / "critics"
    _, other = planned(write_grid(text + "set.rollout.group_size = 8\n"))
    assert other[0].critic_directory == runs[0].critic_directory != other[1].critic_directory


def test_another_commit_works_in_other_directories(write_grid: WriteGrid) -> None:
    path = write_grid()
    first, second = (plan_runs(read_grid(path), ONE_NODE_OF_CPUS, commit)[0] for commit in ("abc", "def"))
    assert first.settings == second.settings and first.directory != second.directory
