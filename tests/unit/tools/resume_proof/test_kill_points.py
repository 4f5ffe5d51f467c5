"""The phase of a kill and the checkpoint of a restart are read from names and messages that the package has today."""

from __future__ import annotations

import ast
import logging
from pathlib import Path

import pytest

import megatron_dapo
from megatron_dapo.trainer.checkpointing import RESUMED
from tools.resume_proof.kill_points import PHASES, START_OR_END, phase_of, resumed_from

PACKAGE = Path(megatron_dapo.__file__).parent


def stack(*frames: tuple[str, str]) -> str:
    """The stack that faulthandler writes, innermost frame first."""
    return "".join(f'  File "{PACKAGE / file}", line 60 in {function}\n' for file, function in frames)


def test_the_phase_is_the_innermost_work() -> None:
    loop = (("trainer/loop.py", "_save"), ("trainer/run.py", "run_training"))
    assert phase_of(stack(("checkpoints/save.py", "finish"), *loop)) == "checkpoint commit"
    assert phase_of(stack(("megatron/optimizer.py", "guarded_step"), ("trainer/updater.py", "step"), *loop)) == (
        "optimizer step"
    )
    assert phase_of(stack(*loop)) == "loop"
    assert phase_of(stack(("trainer/run.py", "run_training"))) == START_OR_END


@pytest.mark.parametrize("name, file, functions", PHASES, ids=[name for name, *_ in PHASES])
def test_every_function_of_a_phase_is_in_the_package(name: str, file: str, functions: tuple[str, ...]) -> None:
    tree = ast.parse((PACKAGE / file).read_text(encoding="utf-8"))
    assert {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)} >= set(functions)
    for function in functions:
        assert phase_of(stack((file, function))) == name


def test_the_checkpoint_of_a_restart_is_the_one_that_the_trainer_logs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        logging.getLogger("trainer").info(RESUMED, Path("/runs/x/checkpoints/step_000003"))
    assert resumed_from(f"rank 0: {caplog.text}step 4/5\n") == "step_000003"
    assert resumed_from("step 1/5\n") == ""
