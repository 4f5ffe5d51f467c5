"""One rollout batch trained under layouts of policy and critic that have nothing in common: the same step every time.

That each model's values and gradients are those of transformers is tests/distributed's; here it is the whole path:
values that travel from the critic's layout to the policy's, advantages, and both updates.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launcher import run_distributed, target_in
from whole_runs import NO_EVALUATION, run_command, sets, train

from tools.prove_resume import write_recipe

WORKER = target_in(str(Path(__file__).with_name("value_layouts_worker.py")), "run")
NUM_PROCESSES = 4
ALGORITHMS = ("vapo", "tppo")
# parallel.* and critic.parallel.*: the critic in the policy's processes, or in the last ones alone.
LAYOUTS = {
    "dp4": ({}, {"tp_size": 2}),
    "tp2sp": ({"tp_size": 2, "sequence_parallel": "true"}, {"pp_size": 2, "tp_size": 1}),
    "cp2": ({"cp_size": 2}, {"tp_size": 2, "cp_size": 1}),
    "tp2pp2": ({"tp_size": 2, "pp_size": 2}, {"tp_size": 2, "pp_size": 1, "cp_size": 2}),
    "dp3 and one process": ({}, {"num_processes": 1, "tp_size": 1}),
    "tp2 and two processes": ({"tp_size": 2}, {"num_processes": 2, "tp_size": 2}),
    "dp2 and two stages": ({}, {"num_processes": 2, "tp_size": 1, "pp_size": 2}),
    "pp2 and two parts of a sequence": ({"pp_size": 2}, {"num_processes": 2, "pp_size": 1, "cp_size": 2}),
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
    *NO_EVALUATION,
)
Steps = dict[str, dict[str, float]]


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """A recipe of each algorithm and the first rollout batch of its run."""
    return {name: _dump(tmp_path_factory.mktemp(name), name) for name in ALGORITHMS}


def _dump(directory: Path, algorithm: str) -> tuple[Path, Path]:
    recipe = write_recipe(directory, algorithm)
    outcome = train(recipe, directory / "run", "tp1", *WHOLE_STEP, "telemetry.dump_batches=1")
    assert outcome.code == 0, outcome.text
    return recipe, directory / "run" / "batches" / "step_000001"


@pytest.fixture(scope="module")
def steps(dumped: dict[str, tuple[Path, Path]]) -> dict[str, Steps]:
    """The dumped step of each algorithm under every pair of layouts; one start of processes for all."""
    cases = [
        {"recipe": str(recipe), "overrides": [*WHOLE_STEP, *_layouts(policy, critic)], "batch": str(batch)}
        for recipe, batch in dumped.values()
        for policy, critic in LAYOUTS.values()
    ]
    found = iter(run_distributed(WORKER, NUM_PROCESSES, cases))
    return {algorithm: {pair: next(found) for pair in LAYOUTS} for algorithm in ALGORITHMS}


def _layouts(policy: dict[str, int | str], critic: dict[str, int]) -> list[str]:
    return [
        f"{section}.{name}={size}"
        for section, sizes in (("parallel", policy), ("critic.parallel", critic))
        for name, size in sizes.items()
    ]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.long
def test_every_pair_of_layouts_makes_the_same_step(
    algorithm: str, dumped: dict[str, tuple[Path, Path]], steps: dict[str, Steps], tmp_path: Path
) -> None:
    reference = _replayed_by_command(*dumped[algorithm], tmp_path)
    assert reference["actor/grad_norm"] > 0 and reference["critic/grad_norm"] > 0
    assert steps[algorithm].keys() == LAYOUTS.keys()
    for pair, step in steps[algorithm].items():
        for name in COMPARED:
            # A mean near 0 of numbers near 1 is compared on their scale.
            assert step[name] == pytest.approx(reference[name], rel=RELATIVE, abs=1e-6), f"{pair}: {name}"


def _replayed_by_command(recipe: Path, batch: Path, directory: Path) -> dict[str, float]:
    """The metrics of the step in one process."""
    overrides = sets(WHOLE_STEP)
    outcome = run_command(
        "replay", str(recipe), str(batch), "--layout", "tp1", "--output-dir", str(directory), *overrides
    )
    assert outcome.code == 0, outcome.text
    return json.loads((batch / "replay.json").read_text())
