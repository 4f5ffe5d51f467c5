"""Records of responses in samples.jsonl."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from megatron_dapo.algorithms.group_advantages import EstimatedBatch
from megatron_dapo.config import config_from_dict
from megatron_dapo.trainer.recorder import Recorder
from megatron_dapo.types import Completion, Group, Prompt, Score, ScoredSample, TrainSample, VersionRange


def a_group() -> tuple[Group, list[TrainSample]]:
    completion = Completion("0/0", (5, 6), (-1.0, -1.0), "stop", (VersionRange(0, 2, 0),))
    scored = ScoredSample("0/0", completion, "text", Score(1.0, 1.0, "correct"), {"verifier": 1.0})
    group = Group("0", Prompt("p", (), (1,), "7"), (scored,), 0, 1)
    sample = TrainSample("0/0", 0, torch.tensor([1, 5, 6]), 1, torch.ones(2), torch.full((2,), 0.5), torch.zeros(2))
    return group, [sample]


def test_a_response_is_written_with_its_advantage(tmp_path: Path) -> None:
    tree = {
        "run": {"output_dir": str(tmp_path)},
        "model": {"path": "m"},
        "data": {"train_paths": ["t"]},
        "telemetry": {"tensorboard": False, "progress": False},
    }
    recorder = Recorder(config_from_dict(tree), 0, -1)
    group, samples = a_group()
    recorder.batch(1, [group], EstimatedBatch(samples, samples, shown_advantages={"0/0": -0.25}))
    recorder.close()
    assert json.loads((tmp_path / "samples.jsonl").read_text())["advantage"] == -0.25
