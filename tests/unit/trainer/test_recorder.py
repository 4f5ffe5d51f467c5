"""Records of responses in samples.jsonl, and the verdict on the run after an evaluation."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from megatron_dapo.algorithms.group_advantages import EstimatedBatch
from megatron_dapo.config import config_from_dict
from megatron_dapo.telemetry.metrics import EVALUATION_METRICS, STEP_METRICS
from megatron_dapo.trainer.recorder import Recorder
from megatron_dapo.types import Completion, Group, Prompt, Score, ScoredSample, TrainSample, VersionRange


def a_group() -> tuple[Group, list[TrainSample]]:
    completion = Completion("0/0", (5, 6), (-1.0, -1.0), "stop", (VersionRange(0, 2, 0),))
    scored = ScoredSample("0/0", completion, "text", Score(1.0, 1.0, "correct"), {"verifier": 1.0})
    group = Group("0", Prompt("p", (), (1,), "7"), (scored,), 0, 1)
    sample = TrainSample("0/0", 0, torch.tensor([1, 5, 6]), 1, torch.ones(2), torch.full((2,), 0.5), torch.zeros(2))
    return group, [sample]


def a_recorder(output_dir: Path, **telemetry: object) -> Recorder:
    tree = {
        "run": {"output_dir": str(output_dir)},
        "model": {"path": "m"},
        "data": {"train_paths": ["t"]},
        "telemetry": {"tensorboard": False, "progress": False, **telemetry},
    }
    return Recorder(config_from_dict(tree), 0, -1)


def test_a_response_is_written_with_its_advantage(tmp_path: Path) -> None:
    recorder = a_recorder(tmp_path)
    group, samples = a_group()
    recorder.batch(1, [group], EstimatedBatch(samples, samples, shown_advantages={"0/0": -0.25}))
    recorder.close()
    assert json.loads((tmp_path / "samples.jsonl").read_text())["advantage"] == -0.25


def test_the_group_whose_rewards_differ_most_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = a_recorder(tmp_path, show_completions=2)
    groups = []
    for number, rewards in enumerate(((1.0, 1.0), (1.0, -1.0))):
        messages = ({"role": "user", "content": f"Same words.\nProblem {number}"},)
        scored = [
            ScoredSample(
                f"{number}/{index}",
                Completion(f"{number}/{index}", (5, 6), (-1.0, -1.0), "stop", (VersionRange(0, 2, 0),)),
                f"response {number}{index}",
                Score(float(reward > 0), reward, "correct" if reward > 0 else "wrong"),
                {"verifier": reward},
            )
            for index, reward in enumerate(rewards)
        ]
        groups.append(Group(str(number), Prompt(f"p{number}", messages, (1,), "7"), tuple(scored), 0, 1))
    for step in (1, 2):
        recorder.batch(step, groups, EstimatedBatch([], []))
    recorder.close()
    shown = capsys.readouterr().err
    assert shown.count("step ") == 1 and "step 2: Problem 1 [expected: 7]" in shown and "Same words" not in shown
    rows = [line.split() for line in shown.splitlines() if "response 1" in line]
    assert rows == [["best", "1.00", "correct", "response", "10"], ["worst", "-1.00", "wrong", "response", "11"]]


def evaluated(recorder: Recorder, scores: dict[int, float]) -> None:
    """Make the steps of a run with an evaluation after some of them."""
    for step in range(1, max(scores) + 1):
        metrics = dict.fromkeys(STEP_METRICS, 0.5) | {"progress/optimizer_steps": 2.0 * step}
        recorder.step(step, metrics)
        if step in scores:
            score = scores[step]
            bounds = {"eval/avg_at_k_low": score - 0.01, "eval/avg_at_k_high": score + 0.01}
            recorder.evaluation(step, {**dict.fromkeys(EVALUATION_METRICS, score), **bounds})
    recorder.close()


@pytest.mark.parametrize("progress", [False, True])
def test_an_evaluation_is_compared_with_the_references(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, progress: bool
) -> None:
    table = tmp_path / "published.csv"
    table.write_text("optimizer_step,eval/avg_at_k\n0,0.0\n20,0.4\n")
    evaluated(a_recorder(tmp_path / "first"), {2: 0.1, 4: 0.2, 6: 0.3})
    recorder = a_recorder(tmp_path / "second", references=[str(table), str(tmp_path / "first")], progress=progress)
    with caplog.at_level(logging.INFO):
        evaluated(recorder, {2: 0.1, 4: 0.1, 6: 0.05})
    verdicts = [line for line in caplog.messages if "track" in line]
    assert len(verdicts) == 6
    assert verdicts[0].startswith(f"{table}: on track at optimizer step 4: eval/avg_at_k 0.1, reference 0.08")
    # 0.24 and 0.16 on the table's line; 0.3 and 0.2 in the other run.
    assert verdicts[-2].startswith(f"{table}: off track since optimizer step 8: eval/avg_at_k 0.05, reference 0.24")
    assert verdicts[-1].startswith(f"{tmp_path / 'first'}: off track since train step 4: eval/avg_at_k 0.05")


def test_a_reference_that_cannot_be_read_ends_the_run_before_it_starts(tmp_path: Path) -> None:
    table = tmp_path / "published.csv"
    table.write_text("time,eval/avg_at_k\n0,0.0\n")
    with pytest.raises(ValueError, match="no step column"):
        a_recorder(tmp_path / "run", references=[str(table)])
