"""The smoke run on a GPU, as far as no GPU is needed: its model, its recipe, its engine's interpreter, its check."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import load_file

from megatron_dapo.config import load_config, validate
from megatron_dapo.models.config_json import read_architecture
from tools import make_smoke_model


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("smoke") / "model"
    assert make_smoke_model.main([str(directory), "--size", "small"]) == 0
    return directory


def test_the_recipe_is_valid_for_the_model_on_one_gpu(repository, model) -> None:
    config = load_config(repository / "examples" / "gpu" / "smoke.toml", [f"model.path={model}"]).config
    assert validate(config, world_size=1, architecture=read_architecture(model)) == []
    assert config.precision.recipe == "fp8_blockwise" and config.model.dtype == "bfloat16"
    assert (config.rollout.engine, config.sglang.placement) == ("sglang", "colocated")
    assert config.checkpoint.interval == 1 and config.evaluation.at_end and config.run.total_steps == 3


def test_no_token_has_an_embedding_of_zeros(model) -> None:
    """Norms would multiply its gradient by 1000 each, and random weights sample it."""
    rows = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    assert rows.float().norm(dim=1).min() > 0


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
