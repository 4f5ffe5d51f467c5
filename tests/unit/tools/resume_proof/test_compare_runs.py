"""The comparison of runs sees every kind of difference, and only those that no clock explains."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tools.resume_proof.compare_runs import checkpoint_steps, is_clocked, moved_differences, run_differences


def write_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A small run directory."""
    directory = tmp_path / "first"
    for step in (1, 2):
        checkpoint = directory / "checkpoints" / f"step_{step:06d}"
        checkpoint.mkdir(parents=True)
        save_file(
            {"exp_avg/a": torch.tensor([1.0, 2.0]), "parameter/a": torch.tensor([0.0])},
            checkpoint / "rank_0.safetensors",
        )
        write_json(checkpoint / "run.json", {"progress": {"train_step": step, "train_seconds": 5.0}})
        write_json(checkpoint / "collector.json", {"buffer": {"groups": [{"logprobs": [-0.25, -0.5]}]}})
        write_json(checkpoint / "manifest.json", {"hash": step})
    metrics = [{"train_step": step, "actor/loss": 0.5, "time/step": 1.0} for step in (1, 2)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in metrics))
    (directory / "samples.jsonl").write_text(json.dumps({"train_step": 1, "sample_id": "0/0"}) + "\n")
    write_json(directory / "huggingface" / "config.json", {"hidden_size": 8})
    return directory


@pytest.fixture
def other(run: Path) -> Path:
    return Path(shutil.copytree(run, run.with_name("second")))


def test_a_copy_is_the_same_run(run: Path, other: Path) -> None:
    assert list(run_differences(run, other)) == []
    assert checkpoint_steps(run / "checkpoints") == [1, 2]


def test_clocks_memory_and_an_older_checkpoint_do_not_count(run: Path, other: Path) -> None:
    shutil.rmtree(other / "checkpoints" / "step_000001")
    last = other / "checkpoints" / "step_000002"
    write_json(last / "run.json", {"progress": {"train_step": 2, "train_seconds": 9.0}})
    write_json(last / "manifest.json", {"hash": "another"})
    (other / "metrics.jsonl").write_text(
        (run / "metrics.jsonl").read_text().replace('"time/step": 1.0', '"time/step": 3.0')
    )
    assert list(run_differences(run, other)) == []
    assert is_clocked("memory/host_rss_mib") and not is_clocked("throughput/generated_tokens")
    assert is_clocked("episodes/waiting_seconds_mean") and not is_clocked("episodes/turns_mean")


def one_bit(directory: Path) -> None:
    file = directory / "checkpoints" / "step_000002" / "rank_0.safetensors"
    tensors = load_file(file)
    tensors["exp_avg/a"].view(torch.int32)[1] ^= 1
    save_file(tensors, file)


def negative_zero(directory: Path) -> None:
    file = directory / "checkpoints" / "step_000001" / "rank_0.safetensors"
    save_file({**load_file(file), "parameter/a": torch.tensor([-0.0])}, file)


def replace_in(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        text = (directory / name).read_text()
        assert old in text
        (directory / name).write_text(text.replace(old, new))

    return change


def step_twice(directory: Path) -> None:
    file = directory / "metrics.jsonl"
    file.write_text(file.read_text() + file.read_text().splitlines()[-1] + "\n")


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a bit of a moment": (one_bit, "step_000002/rank_0.safetensors: exp_avg/a"),
    "the sign of a zero": (negative_zero, "step_000001/rank_0.safetensors: parameter/a"),
    "a counter": (
        replace_in("checkpoints/step_000002/run.json", '"train_step": 2', '"train_step": 3'),
        "step_000002/run.json: progress: train_step",
    ),
    "a log-prob in the buffer": (
        replace_in("checkpoints/step_000002/collector.json", "-0.5", "-0.5000000000000001"),
        "collector.json: buffer: groups[0]: logprobs[1]",
    ),
    "the last checkpoint": (lambda directory: shutil.rmtree(directory / "checkpoints" / "step_000002"), "the last one"),
    "a metric": (replace_in("metrics.jsonl", "0.5", "0.25"), "metrics.jsonl line 1 (step 1): actor/loss"),
    "a step twice": (step_twice, "metrics.jsonl: records of steps [1, 2] and [1, 2, 2]"),
    "another sample": (replace_in("samples.jsonl", "0/0", "0/1"), "samples.jsonl line 1 (step 1): sample_id"),
    "no samples": (lambda directory: (directory / "samples.jsonl").unlink(), "samples.jsonl: in one run only"),
    "the export": (replace_in("huggingface/config.json", "8", "9"), "huggingface/config.json: other bytes"),
    "no export": (lambda directory: shutil.rmtree(directory / "huggingface"), "huggingface: files"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_other_difference_is_found(change: str, run: Path, other: Path) -> None:
    apply, place = CHANGES[change]
    apply(other)
    for first, second in ((run, other), (other, run)):
        assert list(run_differences(first, second)), change
    assert place in next(run_differences(run, other))


def test_in_another_layout_records_are_equal_up_to_the_checkpoint_and_counted_behind_it(run: Path, other: Path) -> None:
    metrics = other / "metrics.jsonl"
    first, second = metrics.read_text().splitlines(keepends=True)
    metrics.write_text(first + second.replace("0.5", "0.25"))
    assert list(moved_differences(1, run, other)) == []
    assert "metrics.jsonl line 2 (step 2): actor/loss" in next(moved_differences(2, run, other))
    metrics.write_text(first + second + second)
    assert next(moved_differences(1, run, other)).startswith("metrics.jsonl: ")
