"""The smoke run on a GPU, as far as no GPU is needed: its model, its recipe, its engine's interpreter, its check."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_dapo.checkpoints.architecture import ModelArchitecture
from megatron_dapo.checkpoints.huggingface import HFCheckpoint
from megatron_dapo.config import load_config, validate
from megatron_dapo.config.inputs import read_architecture
from megatron_dapo.precision import LinearSizes, has_served_blocks, misfits
from tools import check_smoke, make_smoke_model


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("smoke") / "model"
    assert make_smoke_model.main([str(directory), "--size", "small"]) == 0
    return directory


def test_the_model_is_one_the_actor_trains_and_fp8_multiplies(model) -> None:
    a = ModelArchitecture.from_directory(model)
    with HFCheckpoint(model) as directory:
        directory.check(a)
        assert {spec.dtype for spec in directory.specs.values()} == {torch.bfloat16}
    sizes = LinearSizes(a.hidden_size, a.num_attention_heads, a.num_key_value_heads, a.head_dim, a.intermediate_size)
    assert misfits("fp8_blockwise", sizes, 1) == [] and has_served_blocks(a.head_dim)


def test_the_recipe_is_valid_for_the_model_on_one_gpu(repository, model) -> None:
    config = load_config(repository / "examples" / "gpu" / "smoke.toml", [f"model.path={model}"]).config
    assert validate(config, world_size=1, architecture=read_architecture(model)) == []
    assert config.precision.recipe == "fp8_blockwise" and config.model.dtype == "bfloat16"
    assert (config.rollout.engine, config.sglang.placement) == ("sglang", "colocated")
    assert config.checkpoint.interval == 1 and config.evaluation.at_end and config.run.total_steps == 3


def test_what_the_model_is_not_written_over(model, capsys) -> None:
    assert make_smoke_model.main([str(model)]) == 1 and "exists already" in capsys.readouterr().err
    assert make_smoke_model.main([str(model.parent / "other"), "--size", "huge"]) == 1
    assert "choose one of small, tiny" in capsys.readouterr().err and not (model.parent / "other").exists()


@pytest.fixture
def shown(repository, tmp_path):
    """Return a function that shows the arguments and variables the engine's interpreter would get."""
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho "$PYTHONPATH"\necho "$SGLANG_IS_FLASHINFER_AVAILABLE"\necho "$@"\n')
    fake.chmod(0o755)

    def call(*arguments: str, directory: str = "/opt/sglang") -> subprocess.CompletedProcess[str]:
        names = {"MEGATRON_DAPO_SGLANG_PYTHON": str(fake), "PYTHONPATH": "/package"}
        environment = {
            "PATH": os.environ["PATH"],
            **names,
            **({"MEGATRON_DAPO_SGLANG_DIR": directory} if directory else {}),
        }
        script = repository / "examples" / "gpu" / "engine_python.sh"
        return subprocess.run([str(script), *arguments], env=environment, capture_output=True, text=True, check=False)

    return call


def test_an_unpacked_sglang_is_found_behind_the_package_and_gets_backends_that_are_in_it(shown) -> None:
    path, flashinfer, arguments = shown("-m", "megatron_dapo.engines.sglang.serve", "--port", "1").stdout.splitlines()
    assert path == "/package:/opt/sglang" and flashinfer == "false"
    assert "--port 1 --attention-backend triton --sampling-backend pytorch" in arguments
    named = ("-m", "megatron_dapo.engines.sglang.serve", "--attention-backend", "fa3", "--port", "1")
    assert shown(*named).stdout.splitlines()[2] == f"{' '.join(named)} --sampling-backend pytorch"


def test_other_programs_of_the_interpreter_get_no_arguments(shown) -> None:
    assert shown("-c", "print(1)").stdout.splitlines()[2] == "-c print(1)"


def test_without_the_directory_it_says_what_to_set(shown) -> None:
    done = shown("-V", directory="")
    assert done.returncode != 0 and "MEGATRON_DAPO_SGLANG_DIR" in done.stderr


@pytest.fixture
def finished(tmp_path) -> Path:
    """A run's directory with all that is looked at."""
    rows = [{"train_step": step, "actor/loss": 0.1, "actor/grad_norm": 0.5} for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "evaluations.jsonl").write_text(json.dumps({"train_step": 3, "eval/avg_at_k": 0.0}))
    for name in ("step_000002", "step_000003"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "huggingface").mkdir()
    save_file({"a": torch.zeros(2)}, tmp_path / "huggingface" / "model.safetensors")
    return tmp_path


def test_a_finished_smoke_run_is_good(finished, capsys) -> None:
    assert check_smoke.main([str(finished)]) == 0
    assert "exported: 1 tensors" in capsys.readouterr().out


def _without(name: str):
    return lambda directory: (directory / name).unlink()


def _metrics(**fields: float | None):
    def change(directory: Path) -> None:
        rows = [{"train_step": step, "actor/loss": 0.1, "actor/grad_norm": 0.5, **fields} for step in (1, 2, 3)]
        (directory / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))

    return change


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (_without("metrics.jsonl"), "metrics.jsonl is not there"),
        (_without("evaluations.jsonl"), "evaluations.jsonl is not there"),
        (_without("huggingface/model.safetensors"), "no exported weights"),
        (_metrics(train_step=1), "metrics of the steps [1, 1, 1], expected 1 to 3"),
        (_metrics(**{"actor/loss": float("nan")}), "actor/loss is [nan, nan, nan]"),
        (_metrics(**{"actor/loss": None}), "actor/loss is [None, None, None]"),
        (_metrics(**{"actor/grad_norm": 0.0}), "nothing was trained"),
        (lambda directory: (directory / "checkpoints" / "step_000002").rmdir(), "expected those of two steps"),
        (
            lambda directory: (directory / "evaluations.jsonl").write_text(json.dumps({"train_step": 2})),
            "no evaluation at step 3, only [2]",
        ),
    ],
)
def test_missing_facts_are_named(finished, capsys, change, what) -> None:
    change(finished)
    assert check_smoke.main([str(finished)]) == 1
    assert what in capsys.readouterr().err
