"""summary.json holds the promised keys; the table shows them."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from megatron_dapo.files.durable import HERE
from megatron_dapo.telemetry.summary import RunSummary, read_summary, summary_table, write_summary

SUMMARY = RunSummary(
    name="quickstart",
    layout="TP2 PP1 CP1 DP1",
    stopped="finished",
    train_steps=40,
    optimizer_steps=80,
    accuracy_before=0.31,
    accuracy_after=None,
    train_seconds=201.5,
    total_seconds=260.0,
    samples_per_s=50.81,
    generated_tokens_per_s=4321.0,
    directories={"tensorboard": "runs/quickstart/tensorboard"},
)


def test_keys_and_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "run" / "summary.json"
    write_summary(path, SUMMARY, HERE)
    document = json.loads(path.read_text())
    assert {"accuracy_before", "accuracy_after", "train_seconds", "samples_per_s", "layout"} <= set(document)
    assert read_summary(path) == SUMMARY
    assert [entry.name for entry in path.parent.iterdir()] == ["summary.json"]


def test_table() -> None:
    stream = io.StringIO()
    Console(file=stream, width=120).print(summary_table(SUMMARY))
    for text in (
        "quickstart: finished",
        "TP2 PP1",
        "0.310",
        "not evaluated",
        "3:22",
        "4:20",
        "50.8 samples/s",
        "runs/quickstart/tensorboard",
    ):
        assert text in stream.getvalue(), text


def test_held_out_problems_that_were_trained_on_are_next_to_the_accuracy() -> None:
    def shown(count: float) -> str:
        stream = io.StringIO()
        extra = {"evaluations": {"0": {"eval/trained_problems": count}}}
        Console(file=stream, width=120).print(summary_table(replace(SUMMARY, extra=extra)))
        return stream.getvalue()

    assert "3 of its problems are also trained on" in shown(3.0) and "held-out data" not in shown(0.0)
