"""Planned against measured figures of a run on a device that the plan knows."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from megatron_dapo.config import config_from_dict
from megatron_dapo.plan.cluster import Cluster
from megatron_dapo.plan.comparison import PlannedRun, comparison_line, known_gpu
from megatron_dapo.telemetry.metrics import STEP_METRICS
from megatron_dapo.trainer.recorder import Recorder
from tests.unit.config.architectures import write_model
from tests.unit.plan.models import QWEN_1_5B


def config_of(directory: Path) -> Any:
    tree = {
        "run": {"output_dir": str(directory / "run")},
        "model": {"path": str(write_model(directory / "model", QWEN_1_5B)), "dtype": "bfloat16", "offload": "all"},
        "data": {"train_paths": ["t"]},
        "rollout": {"engine": "sglang"},
        "sglang": {"placement": "colocated", "mem_fraction_static": 0.5},
        "telemetry": {"tensorboard": False, "progress": False},
    }
    return config_from_dict(tree)


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA GeForce RTX 4090", None),
        ("", None),
    ],
)
def test_devices_are_known_by_name(name: str, gpu: str | None) -> None:
    found = known_gpu(name)
    assert (found.name if found else None) == gpu


def test_an_early_step_is_compared_with_the_plan(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(tmp_path)
    assert PlannedRun.of(config, 8, Cluster(gpus_per_node=0), "") is None
    planned = PlannedRun.of(config, 8, Cluster(), "NVIDIA H100 80GB HBM3")
    assert planned is not None
    metrics = dict.fromkeys(STEP_METRICS, 1.0) | {"rollout/response_tokens_mean": 100.0, "time/step": 12.0}
    recorder = Recorder(config, 0, -1, planned=planned)
    with caplog.at_level(logging.INFO):
        for step in (1, 2, 3):
            recorder.step(step, metrics)
    recorder.close()
    (line,) = [record.message for record in caplog.records if "planned / measured" in record.message]
    document = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert document["train_step"] == 2 and line == f"train step 2: {document['line']}"
    planned_seconds, measured = document["step"]
    assert 0 < planned_seconds < 1000 and measured == 10, "without evaluation and checkpoint"
    assert list(document["seconds"]) == ["generate", "log_probs", "train", "offload", "weight_update"]
    assert comparison_line(document) == document["line"]


def test_more_tokens_take_longer(tmp_path: Path) -> None:
    planned = PlannedRun.of(config_of(tmp_path), 8, Cluster(), "NVIDIA H100")
    assert planned is not None
    metrics = dict.fromkeys(STEP_METRICS, 1.0)
    short, long = (
        planned.against(metrics | {"rollout/response_tokens_mean": mean}, 0)["step"][0] for mean in (50.0, 500.0)
    )
    assert 1.5 * short < long
