"""The GPU benchmarks' formulas, and what they say without a GPU; tests/e2e/test_programs.py runs them at a tiny size."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def directory(repository: Path):
    path = repository / "benchmarks" / "gpu"
    sys.path.insert(0, str(path))
    yield path
    sys.path.remove(str(path))


@pytest.fixture(scope="module")
def step(directory):
    return importlib.import_module("step")


@pytest.fixture(scope="module")
def sync(directory):
    return importlib.import_module("sync")


@pytest.fixture(scope="module")
def head(directory):
    return importlib.import_module("head")


def run(path: Path, *arguments: str) -> dict[str, Any]:
    root = path.parents[2]
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", str(path), "--json", *arguments],
        env={**os.environ, "PYTHONPATH": str(root), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    return json.loads(finished.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["head", "step", "sync"])
def test_without_a_gpu_they_say_so(directory, name) -> None:
    assert "torch sees no CUDA device" in run(directory / f"{name}.py")["skipped"]


def test_models_are_of_the_published_sizes_and_fit_fp8(step) -> None:
    from megatron_dapo.precision import LinearSizes, misfits

    for name, billions in (("1.5b", 1.54), ("3b", 3.09)):
        a = step.architecture_of(name)
        assert a.num_parameters / 1e9 == pytest.approx(billions, abs=0.01)
        sizes = LinearSizes(
            a.hidden_size, a.num_attention_heads, a.num_key_value_heads, a.head_dim, a.intermediate_size
        )
        assert not misfits("fp8_blockwise", sizes, 1)


PRECISIONS = {
    "bf16": {},
    "bf16_flash": {},
    "fp8_blockwise": {"recipe": "fp8_blockwise"},
    "fp8_param": {"recipe": "fp8_blockwise", "fp8_param": True},
}


@pytest.mark.parametrize("side", PRECISIONS)
def test_the_memory_module_covers_what_a_device_measured(step, repository: Path, tmp_path: Path, side: str) -> None:
    """A train step's peak on an H100, in benchmarks/results, is at most the computed one, and no less than 0.9 of it."""
    from megatron_dapo.config import memory
    from megatron_dapo.config.inputs import read_architecture
    from megatron_dapo.config.loader import load_config

    file = repository / "benchmarks" / "results" / "gpu_step_nvidia_h100_80gb_hbm3.json"
    found = json.loads(file.read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**step.QWEN, **step.MODELS[found["settings"]["model"]]}))
    config = load_config(repository / "examples" / "quickstart" / "quickstart.toml").config
    changes = {
        "parallel": {"tp_size": 1, "pp_size": 1},
        "model": {"dtype": "bfloat16", "recompute_granularity": found["settings"]["recompute"]},
        "training": {"micro_batch_tokens": found["settings"]["micro_batch_tokens"]},
        "precision": PRECISIONS[side],
    }
    config = config.model_copy(update={k: getattr(config, k).model_copy(update=v) for k, v in changes.items()})
    computed = memory.model_memory(config, read_architecture(tmp_path), processes=1).training
    assert 0.9 < found["cases"][side]["peak_gb"] * 1e9 / computed <= 1.0


def test_the_memory_module_gives_the_cache_that_a_server_had(step, repository: Path, tmp_path: Path) -> None:
    """Tokens of an SGLang server's KV cache on an H100, in benchmarks/results, within a hundredth."""
    from megatron_dapo.config import memory
    from megatron_dapo.config.cluster import Cluster
    from megatron_dapo.config.inputs import read_architecture
    from megatron_dapo.config.loader import load_config

    file = repository / "benchmarks" / "results" / "gpu_rollout_nvidia_h100_80gb_hbm3.json"
    found = json.loads(file.read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**step.QWEN, **step.MODELS[found["settings"]["model"]]}))
    config = load_config(repository / "examples" / "quickstart" / "quickstart.toml").config
    changes = {
        "model": {"dtype": "bfloat16"},
        "rollout": {"engine": "sglang"},
        "sglang": {"placement": "disaggregated", "mem_fraction_static": 0.4},
    }
    config = config.model_copy(update={k: getattr(config, k).model_copy(update=v) for k, v in changes.items()})
    engine = memory.engine_memory(config, read_architecture(tmp_path), Cluster())
    assert engine.kv_tokens == pytest.approx(found["cases"]["alone"]["kv_tokens"], rel=0.01)


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


def test_lengths_have_a_long_tail(step) -> None:
    work = step.Work(step_tokens=1 << 20, micro_batch_tokens=8192, max_length=8192)
    lengths = sorted(step.draw_lengths(work))
    assert sum(lengths) >= 1 << 20 and max(lengths) <= 8192 and min(lengths) >= 16
    median = lengths[len(lengths) // 2]
    assert 1000 < median < 1800 and lengths[len(lengths) * 95 // 100] > 4 * median


def test_a_side_that_computes_something_else_is_an_error(step) -> None:
    rows = {"bf16": {"first_nll": 10.0}, "fp8_blockwise": {"first_nll": 10.1}}
    assert not dict(step.complaints(rows))
    for wrong in (11.0, float("nan")):
        found = dict(step.complaints({**rows, "fp8_blockwise": {"first_nll": wrong}}))
        assert list(found) == ["fp8_blockwise"] and "of bf16 10.0000" in found["fp8_blockwise"]


def test_speedups_are_over_bf16(step) -> None:
    assert step.speedups({"bf16": {"step_ms": 30.0}, "fp8_blockwise": {"step_ms": 20.0}}) == {"fp8_blockwise": 1.5}
    assert step.speedups({"fp8_blockwise": {"step_ms": 20.0}}) == {}


def test_targets_of_the_head_are_judged_from_what_ran(head) -> None:
    shape = head.SHAPES[0]
    triton = {
        "effective_tflops": 420.0,
        "tflops_with_recompute": 560.0,
        "forward_ms": 15.0,
        "forward_backward_ms": 50.0,
    }
    rows = {head.name_of("triton", shape): triton}
    assert head.verdicts(rows, shape) == {"triton_tflops": True}
    rows[head.name_of("liger", shape)] = {"forward_backward_ms": 49.0}
    rows[head.name_of("te_fp8", shape)] = {"forward_ms": 9.0}
    rows[head.name_of("triton_tuned_kept", shape)] = {"effective_tflops": 540.0}
    assert head.verdicts(rows, shape) == {
        "triton_tflops": True,
        "triton_tuned_kept_tflops": False,
        "triton_not_slower_than_the_best_peer": False,
        "te_fp8_forward_speedup": True,
    }


def test_a_side_of_the_head_with_another_loss_is_an_error(head) -> None:
    rows = {f"{side} 1x2x3": {"loss": loss} for side, loss in (("a", 5.0), ("b", 5.01), ("c", 5.2))}
    assert list(dict(head.complaints(rows))) == ["c 1x2x3"]


def test_figures_of_the_sync(sync) -> None:
    found = sync.figures({"seconds": 2.0, "verified_seconds": 4.0}, num_bytes=8 * 10**9, copy_seconds=0.5)
    assert (found["gb_per_s"], found["verified_gb_per_s"], found["vs_copy"]) == (4.0, 2.0, 4.0)
