from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron_dapo.ablation.grid import read_grid
from megatron_dapo.ablation.runs import plan_runs
from megatron_dapo.config import load_config
from megatron_dapo.run.plan import ONE_NODE_OF_CPUS

DIRECTORY = Path(__file__).resolve().parents[3] / "examples" / "grids"
GRIDS = sorted(path for path in DIRECTORY.glob("*.toml") if "[[variants]]" in path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", GRIDS, ids=lambda path: path.stem)
def test_every_variant_may_run_and_is_compared_by_one_protocol(path: Path) -> None:
    # The pretrained model is downloaded, and servers have an environment of their own: others stand in their place here.
    model = DIRECTORY.parent / "quickstart" / "base_model"
    elsewhere = [f"model.path={model}", f"sglang.python={sys.executable}"] if path.stem.startswith(("smollm2", "lora")) else []
    grid = read_grid(path, elsewhere)
    assert grid.output_dir == Path("runs/ablations") / path.stem and len(grid.seeds) >= 3 and grid.question
    runs = plan_runs(grid, ONE_NODE_OF_CPUS, "abc")
    configs = [load_config(run.variant.recipe, run.overrides).config for run in runs]
    protocols = {
        (c.evaluation.model_copy(update={"interval": 0}), c.evaluation_response_tokens, c.data.eval_paths)
        for c in configs
    }
    assert len(protocols) == 1
    # All variants train on as many responses a step, in several optimizer steps: else clip ranges would mean nothing. The
    # LoRA grid compares the two quickstarts of SmolLM2 and no losses.
    responses = {"lora": 64, "smollm2": 64, "smollm2_sao": 64, "smollm2_gpu": 512}.get(path.stem, 128)
    assert {c.rollout.prompts_per_step * c.rollout.group_size for c in configs} == {responses}
    steps = {c.rollout.prompts_per_step // c.training.mini_batch_prompts for c in configs}
    # SAO's responses have no group: it needs larger mini-batches.
    assert steps == {"lora": {1}, "sao": {2, 4}, "sao_staleness": {2, 4}, "smollm2_sao": {2, 4}}.get(path.stem, {4})
    assert {c.run.max_train_seconds for c in configs} == {{"smollm2": 300.0, "smollm2_gpu": 600.0}.get(path.stem, 0.0)}


def test_the_grid_of_dapos_table_ends_with_dapo() -> None:
    first, *_, last = read_grid(DIRECTORY / "dapo_table1.toml").variants
    grpo, whole = (load_config(variant.recipe, variant.overrides).config for variant in (first, last))
    assert whole.model_dump() == load_config(DIRECTORY / "short.toml").config.model_dump()
    assert not grpo.rollout.filter_groups and not grpo.reward.overlong_punishment.enabled
    assert (grpo.algorithm.loss.clip_ratio_high, grpo.algorithm.loss.aggregation) == (0.2, "sample_mean")
