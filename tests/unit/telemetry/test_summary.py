"""summary.json holds the promised keys; the table shows them."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from megatron_dapo.files.durable import HERE
from megatron_dapo.telemetry.summary import RunSummary, next_steps, read_summary, summary_table, write_summary
from tests.made_runs import make_run

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


def test_the_table_compares_begin_and_end_and_counts_what_was_cut(tmp_path: Path) -> None:
    rows = {
        step: {"reward/mean": step / 10, "rollout/truncated_share": 0.25, "rollout/groups_trained": 4.0}
        for step in range(1, 11)
    }
    config = {"rollout__group_size": 8, "rollout__max_response_tokens": 24}
    run = make_run(tmp_path / "run", 10, rows=rows, **config)
    stream = io.StringIO()
    Console(file=stream, width=120).print(summary_table(replace(SUMMARY, accuracy_after=0.45), run))
    for text in (
        "0.310 -> 0.450 (+0.140)",
        "0.150 -> 0.950",  # means of the first and the last two steps
        "8 of the last step's 32 responses, at 24 tokens",
    ):
        assert text in stream.getvalue(), text


def test_next_steps_name_only_what_the_run_has_left() -> None:
    whole = replace(SUMMARY, accuracy_after=0.4, directories={"report": "runs/a/report.html", "huggingface": "runs/a/huggingface"})
    assert next_steps(whole, Path("own.toml"), Path("base")) == [
        "open runs/a/report.html",
        "python -c \"from transformers import AutoModelForCausalLM as M; M.from_pretrained('runs/a/huggingface')\"",
        "megatron-dapo demo runs/a",
        "megatron-dapo eval own.toml --model runs/a/huggingface --against base",
    ]
    assert next_steps(SUMMARY, Path("own.toml"), Path("base")) == []
