"""The GPU benchmarks' formulas, and what they say without a GPU; tests/e2e/test_programs.py runs them at a tiny size."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from megatron_dapo.config.loader import load_config
from megatron_dapo.config.schema import Config
from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.models.config_json import read_architecture
from megatron_dapo.plan import memory
from megatron_dapo.plan.cluster import Cluster
from megatron_dapo.precision import misfits


@pytest.fixture(scope="module")
def directory(repository: Path):
    path = repository / "benchmarks" / "gpu"
    sys.path.insert(0, str(path))
    yield path
    sys.path.remove(str(path))


@pytest.fixture(scope="module")
def step(directory):
    return importlib.import_module("step")


def test_models_are_of_the_published_sizes_and_fit_fp8(step) -> None:
    for name, billions in (("1.5b", 1.54), ("3b", 3.09)):
        a = step.architecture_of(name)
        assert a.num_parameters / 1e9 == pytest.approx(billions, abs=0.01)
        assert not misfits("fp8_blockwise", a.linear_sizes(), 1)


PRECISIONS = {
    "bf16": {},
    "bf16_flash": {},
    "fp8_blockwise": {"recipe": "fp8_blockwise"},
    "fp8_param": {"recipe": "fp8_blockwise", "fp8_param": True},
}


def measured(step, repository: Path, tmp_path: Path, benchmark: str, changes) -> tuple[dict, Config, ModelArchitecture]:
    """Return what a benchmark found on an H100, in benchmarks/results, with the configuration and model of it."""
    file = repository / "benchmarks" / "results" / f"gpu_{benchmark}_nvidia_h100_80gb_hbm3.json"
    found = json.loads(file.read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**step.QWEN, **step.MODELS[found["settings"]["model"]]}))
    config = load_config(repository / "examples" / "quickstart" / "quickstart.toml").config
    update = {k: getattr(config, k).model_copy(update=v) for k, v in changes(found["settings"]).items()}
    return found["cases"], config.model_copy(update=update), read_architecture(tmp_path)


@pytest.mark.parametrize("side", PRECISIONS)
def test_the_memory_module_covers_what_a_device_measured(step, repository: Path, tmp_path: Path, side: str) -> None:
    """A train step's peak is at most the computed one, and no less than 0.9 of it."""
    cases, config, architecture = measured(step, repository, tmp_path, "step", lambda settings: {
        "parallel": {"tp_size": 1, "pp_size": 1},
        "model": {"dtype": "bfloat16", "recompute_granularity": settings["recompute"]},
        "training": {"micro_batch_tokens": settings["micro_batch_tokens"]},
        "precision": PRECISIONS[side],
    })  # fmt: skip
    computed = memory.model_memory(config, architecture, processes=1).training
    assert 0.9 < cases[side]["peak_gb"] * 1e9 / computed <= 1.0


def test_the_memory_module_gives_the_cache_that_a_server_had(step, repository: Path, tmp_path: Path) -> None:
    """Tokens of an SGLang server's KV cache, within a hundredth."""
    cases, config, architecture = measured(step, repository, tmp_path, "rollout", lambda settings: {
        "model": {"dtype": "bfloat16"},
        "rollout": {"engine": "sglang"},
        "sglang": {"placement": "disaggregated", "mem_fraction_static": 0.4},
    })  # fmt: skip
    engine = memory.engine_memory(config, architecture, Cluster())
    assert engine.kv_tokens == pytest.approx(cases["alone"]["kv_tokens"], rel=0.01)


def test_flops_are_those_of_every_product(step) -> None:
    """Counted one product at a time for two sequences of 3 and 5 tokens."""
    a = step.architecture_of("tiny")
    heads, dim = a.num_attention_heads, a.head_dim
    forward = 0.0
    for length in (3, 5):
        qkv = 2 * length * a.hidden_size * (heads + 2 * a.num_key_value_heads) * dim
        out = 2 * length * heads * dim * a.hidden_size
        mlp = 3 * 2 * length * a.hidden_size * a.intermediate_size
        attention = 2 * 2 * length * length * heads * dim / 2  # scores and values, the causal half
        forward += a.num_layers * (qkv + out + mlp + attention) + 2 * length * a.hidden_size * a.vocab_size
    assert step.flops_of(a, [3, 5]) == pytest.approx(3 * forward)
