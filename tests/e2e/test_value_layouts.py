"""One rollout batch trained under layouts of policy and critic that have nothing in common: the same step every time.

That each model's values and gradients are those of transformers is tests/distributed's; here it is the whole path:
values that travel from the critic's layout to the policy's, advantages, and both updates.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from whole_runs import NO_EVALUATION, run_command, sets, train

from tools.prove_resume import write_recipe

pytestmark = pytest.mark.timeout(500)

# Layout of the policy, and that of the critic: in the same processes, or in some of its own.
LAYOUTS = {
    "dp2": ("dp2", {"tensor": 2}),
    "tp2sp": ("tp2sp", {"pipeline": 2, "tensor": 1}),
    "cp2": ("cp2", {"tensor": 2, "context": 1}),
    "tp2pp2": ("tp2pp2", {"tensor": 2, "pipeline": 1, "context": 2}),
    "tp2 and one process": ("tp2", {"num_processes": 1, "tensor": 1}),
    "tp2 and two processes": ("tp2", {"num_processes": 2, "tensor": 2}),
    "dp2 and two stages": ("dp2", {"num_processes": 2, "tensor": 1, "pipeline": 2}),
    "pp2 and two parts of a sequence": ("pp2", {"num_processes": 2, "pipeline": 1, "context": 2}),
}
# What a step of one optimizer step each comes to; norms are over all parameters of all ranks.
COMPARED = (
    "actor/loss",
    "actor/grad_norm",
    "actor/entropy",
    "actor/positive_nll",
    "advantage/mean",
    "advantage/std",
    "critic/loss",
    "critic/grad_norm",
    "critic/explained_variance",
    "critic/value_mean",
    "critic/return_mean",
)
RELATIVE = 1e-5
# In a window of 64 tokens some responses come to their end and some do not.
WHOLE_STEP = (
    "training.mini_batch_prompts=6",
    "critic.epochs=1",
    "run.total_steps=1",
    "optimizer.warmup_steps=0",
    "window.tokens=64",
)


@pytest.fixture(scope="module", params=["vapo", "tppo"])
def dumped(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A recipe and the first rollout batch of its run."""
    folder = tmp_path_factory.mktemp(request.param)
    recipe = write_recipe(folder, request.param)
    outcome = train(recipe, folder / "run", "tp1", *WHOLE_STEP, "telemetry.dump_batches=1", *NO_EVALUATION)
    assert outcome.code == 0, outcome.text
    return recipe, folder / "run" / "batches" / "step_000001"


def test_every_pair_of_layouts_makes_the_same_step(dumped: tuple[Path, Path], tmp_path: Path) -> None:
    recipe, batch = dumped
    steps = {"tp1": replayed(recipe, batch, "tp1", {}, tmp_path)}
    steps |= {name: replayed(recipe, batch, *pair, tmp_path / name) for name, pair in LAYOUTS.items()}
    reference = steps["tp1"]
    assert reference["actor/grad_norm"] > 0 and reference["critic/grad_norm"] > 0
    for pair, step in steps.items():
        for name in COMPARED:
            # A mean near 0 of numbers near 1 is compared on their scale.
            assert step[name] == pytest.approx(reference[name], rel=RELATIVE, abs=1e-6), f"{pair}: {name}"


def replayed(recipe: Path, batch: Path, layout: str, critic: dict[str, int], folder: Path) -> dict[str, float]:
    """The metrics of the dumped step under these layouts."""
    copy = shutil.copytree(batch, folder / f"batch-{layout}")
    overrides = [f"critic.parallel.{name}={size}" for name, size in critic.items()]
    outcome = run_command(
        "replay", str(recipe), str(copy), "--layout", layout, "--run-folder", str(folder / layout),
        *sets([*WHOLE_STEP, *overrides, *NO_EVALUATION]),
    )  # fmt: skip
    assert outcome.code == 0, outcome.text
    return json.loads((copy / "replay.json").read_text())
