"""A checkpoint that another layout has loaded and saved again holds the same state, bit for bit.

`python -m tools.resume_proof.moved_state RECIPE --set a.b=c ...` is one process of torchrun: it builds the run of this recipe,
which loads the newest checkpoint of its directory, and saves it without a step in between.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_dapo.checkpoints.formats.saved_model import SavedModel, model_names
from megatron_dapo.checkpoints.state_difference import compare_states
from megatron_dapo.engines.sglang.ports import reserve_port
from megatron_dapo.launch.local import torchrun_command
from megatron_dapo.run.plan import ONE_NODE_OF_CPUS, make_plan
from tools.resume_proof.compare_runs import document_differences

PACKAGE_ROOT = Path(__file__).resolve().parents[2]


def moved_state_differences(
    recipe: Path, overrides: Sequence[str], layout: str, checkpoint: Path, directory: Path, timeout_s: float
) -> Iterator[str]:
    """Load `checkpoint` in another layout, save it to `directory`, and yield one line for each difference of the two.

    All kinds of tensors (parameters, fp32 main params, moments, steps) of all models are compared bit by bit, and counters,
    prompt stream, replay buffer and unfinished responses value by value.
    """
    moved = directory / "checkpoints" / checkpoint.name
    shutil.copytree(checkpoint, moved)
    plan = make_plan(recipe, [*overrides, 'checkpoint.resume="must"'], layout, directory, ONE_NODE_OF_CPUS)
    sets = [part for override in plan.overrides for part in ("--set", override)]
    port = reserve_port("127.0.0.1")
    command = torchrun_command(plan.num_processes, __name__, [str(recipe), *sets], port.hand_over())
    log = directory.with_suffix(".log")
    path = os.pathsep.join(filter(None, (str(PACKAGE_ROOT), os.environ.get("PYTHONPATH", ""))))
    with open(log, "ab") as output:
        done = subprocess.run(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            timeout=timeout_s,
            check=False,
        )
    if done.returncode:
        yield f"{checkpoint} could not be loaded and saved by {layout}: exit code {done.returncode}, see {log}"
        return
    yield from _differences(checkpoint, moved)


def _differences(first: Path, second: Path) -> Iterator[str]:
    names = [model_names({file.name for file in one.iterdir()}) for one in (first, second)]
    if names[0] != names[1]:
        yield f"{second}: holds {names[1]}, {first} {names[0]}"
        return
    for name in names[0]:
        with SavedModel(first, name) as a, SavedModel(second, name) as b:
            if (
                a.layout == b.layout
                and (first / "manifest.json").read_bytes() == (second / "manifest.json").read_bytes()
            ):
                yield f"{second}: was not saved again"
            for kind in compare_states(a, b):
                if kind.first:
                    yield f"{name} {kind.kind}: {kind.num_different} of {kind.num_elements} elements differ, first {kind.first}"
    yield from document_differences(first, second)


def _save_again(arguments: Sequence[str]) -> None:
    from megatron_dapo.launch.environment import process_environment
    from megatron_dapo.run.worker import load_run, parse_arguments
    from megatron_dapo.trainer.context import RunProcess
    from megatron_dapo.trainer.run import prepared_run

    process = process_environment()
    loaded = load_run(parse_arguments(arguments))
    with prepared_run(loaded, RunProcess(process.rank, process.world_size, "127.0.0.1")) as run:
        run.parts.checkpoints.start_save()
        run.parts.checkpoints.finish_save()


if __name__ == "__main__":
    _save_again(sys.argv[1:])
