"""Output of a finished run: summary, metrics, samples, TensorBoard, and a model that plain transformers loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from interruptions import Finished
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from whole_runs import lines_of, run_command

from megatron_dapo.telemetry.metrics import EVALUATION_METRICS, STEP_METRICS
from tools.resume_proof.compare_runs import run_differences

NUM_STEPS, GROUPS, GROUP_SIZE, EVALUATED = 5, 6, 4, [0, 2, 4, 5]


def test_summary_says_what_was_gained(finished: Finished) -> None:
    summary = json.loads((finished.directory / "summary.json").read_text())
    evaluations = {record["train_step"]: record for record in lines_of(finished.directory / "evaluations.jsonl")}
    assert summary["layout"] == "TP2 PP1 CP1 DP1" and summary["stopped"] == "finished"
    assert (summary["train_steps"], summary["optimizer_steps"]) == (NUM_STEPS, NUM_STEPS * GROUPS // 2)
    assert summary["accuracy_before"] == evaluations[0]["eval/avg_at_k"]
    assert summary["accuracy_after"] == evaluations[NUM_STEPS]["eval/avg_at_k"]
    rows = lines_of(finished.directory / "metrics.jsonl")
    times = [row["time/step"] - row["time/evaluate"] - row["time/checkpoint"] for row in rows]
    # What follows a step (here evaluations after steps 2 and 4) is in the row after it.
    assert [row["train_step"] for row in rows if row["time/evaluate"] > 0] == [3, 5]
    assert summary["train_seconds"] == pytest.approx(sum(times), rel=1e-6)
    assert summary["samples_per_s"] == pytest.approx(NUM_STEPS * GROUPS * GROUP_SIZE / sum(times), rel=1e-6)
    assert summary["train_seconds"] < summary["total_seconds"]
    assert summary["extra"]["lost_records"] == 0
    for directory in summary["directories"].values():
        assert Path(directory).exists(), directory
    assert not list(finished.directory.glob("failure*"))


def test_every_step_is_on_record_once_and_complete(finished: Finished) -> None:
    metrics = lines_of(finished.directory / "metrics.jsonl")
    assert [record["train_step"] for record in metrics] == list(range(1, NUM_STEPS + 1))
    for record in metrics:
        assert list(record)[1:] == list(STEP_METRICS) and None not in record.values()
        phases = sum(value for name, value in record.items() if name.startswith("time/") and name != "time/step")
        assert phases == pytest.approx(record["time/step"], rel=1e-6)
        # Sampling, the trainer's forward pass and the packing all speak of the same tokens of the same weights.
        assert record["mismatch/abs_logprob_diff_mean"] < (1e-5 if record["rollout/staleness_max"] == 0 else 0.5)
    evaluations = lines_of(finished.directory / "evaluations.jsonl")
    assert [record["train_step"] for record in evaluations] == EVALUATED
    assert all(list(record)[1:] == list(EVALUATION_METRICS) for record in evaluations)
    assert {path.name for path in (finished.directory / "evaluations").iterdir()} == {
        f"step_{step:06d}.{suffix}" for step in EVALUATED for suffix in ("json", "jsonl")  # results, responses
    }


def test_every_trained_response_is_among_the_samples_once(finished: Finished) -> None:
    samples = lines_of(finished.directory / "samples.jsonl")
    ids = [record["sample_id"] for record in samples]
    assert len(set(ids)) == len(ids) == NUM_STEPS * GROUPS * GROUP_SIZE
    for record in samples:
        assert record["reward"] == pytest.approx(sum(record["reward_parts"].values()))
        versions = [part["version"] for part in record["versions"]]
        assert versions and all(record["train_step"] - 2 <= version < record["train_step"] for version in versions)
    for step in range(1, NUM_STEPS + 1):
        assert sum(record["train_step"] == step for record in samples) == GROUPS * GROUP_SIZE


def test_tensorboard_holds_the_same_numbers(finished: Finished) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(finished.directory / "tensorboard"))
    events.Reload()
    for name in ("actor/loss", "reward/mean", "progress/policy_version"):
        written = {record["train_step"]: record[name] for record in lines_of(finished.directory / "metrics.jsonl")}
        assert {event.step: event.value for event in events.Scalars(name)} == pytest.approx(written, rel=1e-6)


def gathered(directory: Path) -> dict[str, torch.Tensor]:
    """The model in a checkpoint under Hugging Face names, put together by hand from the boxes of all files."""
    shapes = json.loads((directory / "policy.json").read_text())["tensors"]
    model = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
    for file in sorted(directory.glob("policy_*.safetensors")):
        for key, box in load_file(file).items():
            kind, _, rest = key.partition("/")
            if kind == "parameter":
                name, _, ranges = rest.rstrip("]").partition("[")
                model[name][tuple(slice(*map(int, each.split(":"))) for each in ranges.split(", "))] = box
    return model


def test_export_is_the_last_checkpoint_and_plain_transformers_loads_it(finished: Finished) -> None:
    export = finished.directory / "huggingface"
    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    state = model.state_dict()
    checkpoint = finished.directory / "checkpoints" / f"step_{NUM_STEPS:06d}"
    expected = gathered(checkpoint)
    assert state.keys() - expected.keys() <= {"lm_head.weight"}, "all but the tied head"
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name
    resolved = json.loads((finished.directory / "config.json").read_text())
    base = AutoModelForCausalLM.from_pretrained(resolved["config"]["model"]["path"])
    assert all(not torch.equal(base.state_dict()[name], tensor) for name, tensor in expected.items())
    assert base.state_dict().keys() == state.keys()


@pytest.mark.long  # The command is in tests/unit/cli/test_checkpoint.py.
def test_a_checkpoint_exports_to_what_the_run_exported_at_that_step(finished: Finished, tmp_path: Path) -> None:
    checkpoint = finished.directory / "checkpoints" / f"step_{NUM_STEPS:06d}"
    run_command("export", checkpoint, tmp_path / "out")
    exported = finished.directory / "huggingface"
    names = sorted(path.name for path in exported.iterdir())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    assert [name for name in names if (tmp_path / "out" / name).read_bytes() != (exported / name).read_bytes()] == []


def test_evaluating_the_export_alone_gives_the_summary_s_accuracy(
    finished: Finished, recipe: Path, tmp_path: Path
) -> None:
    outcome = run_command(
        "eval", str(recipe), "--model", str(finished.directory / "huggingface"), "--output", str(tmp_path / "e.json")
    )
    assert outcome.code == 0, outcome.text
    summary = json.loads((finished.directory / "summary.json").read_text())
    assert f"avg@2: {summary['accuracy_after']:.4f}" in outcome.text
    of_the_run = json.loads((finished.directory / "evaluations" / f"step_{NUM_STEPS:06d}.json").read_text())
    alone = json.loads((tmp_path / "e.json").read_text())
    assert alone["metrics"] == of_the_run["metrics"] and alone["rates"] == of_the_run["rates"]


@pytest.mark.long  # test_python.py starts a finished run again
def test_a_finished_run_started_again_only_writes_its_end_anew(finished: Finished, tmp_path: Path) -> None:
    directory = tmp_path / "again"
    shutil.copytree(finished.directory, directory)
    (directory / "summary.json").unlink()
    run = finished.run(directory)
    assert run.wait() == 0, run.exit_reason()
    assert next(run_differences(finished.directory, directory), "") == ""
    assert json.loads((directory / "summary.json").read_text())["train_steps"] == NUM_STEPS
