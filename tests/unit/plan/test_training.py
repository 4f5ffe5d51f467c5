"""Seconds of training against a measured step, and how they follow from sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_dapo.models.config_json import parse_architecture
from megatron_dapo.plan.device import GPUS
from megatron_dapo.plan.training import LOG_PROBS, Batch, Model, Pass, add, pass_seconds, update_seconds
from tests.unit.config.architectures import QWEN_32B
from tests.unit.plan.models import QWEN_1_5B, run_of

H100 = GPUS["H100"]


def config_of(**sections: Any) -> Any:
    return run_of(training={"micro_batch_tokens": 8192}, **sections)


def model_of(config: Any, document: Any = QWEN_1_5B, processes: int = 1, **more: Any) -> Model:
    return Model(config, parse_architecture(document), processes, H100, 8, **more)


def measured(repository: Path) -> dict[str, Any]:
    file = repository / "benchmarks" / "results" / "gpu_step_nvidia_h100_80gb_hbm3.json"
    return json.loads(file.read_text(encoding="utf-8"))


@pytest.mark.parametrize(("side", "recipe"), [("bf16", ""), ("fp8_blockwise", "fp8_blockwise")])
def test_a_step_takes_what_a_device_took(repository: Path, side: str, recipe: str) -> None:
    """65,687 tokens in 39 sequences on an H100, in benchmarks/results, within a tenth."""
    found = measured(repository)
    # Lengths as step.py draws them: a mean square of twice the mean's.
    sequences, tokens = found["num_sequences"], found["tokens"]
    batch = Batch(sequences, tokens, 2 * tokens**2 / sequences, 8192)
    config = config_of(precision={"recipe": recipe} if recipe else {})
    model = model_of(config)
    seconds = sum(add(pass_seconds(model, batch, Pass.of(config)), update_seconds(model)).values())
    assert seconds == pytest.approx(found["cases"][side]["step_ms"] / 1e3, rel=0.1)


BATCH = Batch(512, 512 * 5000.0, 512 * 4e7, 20480)


def seconds_of(kind: Pass | None = None, processes: int = 16, **parallel: Any) -> dict[str, float]:
    config = config_of(parallel={"tp_size": 4, "sequence_parallel": True, **parallel})
    return pass_seconds(model_of(config, QWEN_32B, processes), BATCH, kind or Pass.of(config))


def test_a_forward_pass_is_a_third_of_a_step_and_full_recomputation_a_third_more() -> None:
    train, forward = seconds_of(), seconds_of(LOG_PROBS)
    assert 0.28 < forward["products"] / train["products"] < 1 / 3
    config = config_of(model={"recompute_granularity": "full"})
    again = seconds_of(Pass.of(config))
    assert 1.28 < again["products"] / train["products"] < 4 / 3
    assert seconds_of(Pass.of(config_of(model={"recompute_granularity": "selective"})))["products"] < again["products"]


def test_stages_have_a_bubble_and_chunks_halve_it() -> None:
    assert "bubble" not in seconds_of()
    plain, chunks = seconds_of(pp_size=4), seconds_of(pp_size=4, vpp_size=2)
    assert 0 < chunks["bubble"] == pytest.approx(plain["bubble"] / 2)


def test_a_data_rank_is_never_faster_than_the_longest_sequence() -> None:
    many, more = seconds_of(processes=2048)["products"], seconds_of(processes=4096)["products"]
    assert more == pytest.approx(many), "512 sequences on 512 and on 1,024 ranks"


def test_ranks_of_other_nodes_are_slower() -> None:
    inside = model_of(config_of(parallel={"tp_size": 1}), QWEN_32B, 8)
    outside = model_of(config_of(parallel={"tp_size": 1}), QWEN_32B, 16)
    assert update_seconds(outside)["data_ranks"] > 4 * update_seconds(inside)["data_ranks"]
    assert update_seconds(outside)["optimizer"] < update_seconds(inside)["optimizer"]
