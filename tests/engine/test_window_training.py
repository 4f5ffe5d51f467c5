"""T-PPO on a real server: responses continue after their windows with new weights, trainer and engine agree on them. The
critic has a separate process, and weights come by point-to-point. Windows that overlap are of two policies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sglang_runs import finish

from tools.prove_resume import write_recipe
from tools.resume_proof.compare_runs import require_windows_once

WINDOW = 32


@pytest.mark.long  # test_generation.py continues windows on a server, test_training.py is a whole run on one
def test_windows_continue_on_a_stock_server(engine_python: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    settings = (
        f"window.tokens={WINDOW}",
        "critic.parallel.num_processes=1",
        'sglang.weight_sync_transport="p2p"',
        "sglang.weight_sync_bucket_mb=1",
        "sglang.parity_interval=1",
        "run.total_steps=2",
        "optimizer.warmup_steps=0",
        "checkpoint.export_huggingface=false",
    )
    finish(write_recipe(tmp_path, "tppo"), directory, engine_python, *settings)
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [row["rollout/responses_continued"] > 0 for row in rows] == [False, True]
    assert all(row["mismatch/abs_logprob_diff_mean"] < 1e-5 for row in rows)
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    assert rows[-1]["critic/grad_norm"] > 0, "responses that ended in their second window train the critic"
    assert require_windows_once(directory / "samples.jsonl") == 2 * 24
    samples = [json.loads(line) for line in (directory / "samples.jsonl").read_text().splitlines()]
    for sample in samples:
        start, length = sample["window"]["start"], len(sample["response_ids"])
        assert start % WINDOW == 0 and length <= start + WINDOW
        # A window has one version, the one that its step trains.
        assert sample["versions"][-1] == {"start": start, "end": length, "version": sample["train_step"] - 1}


@pytest.mark.long  # tests/unit/rollout/test_windows_ahead.py has the collector with every engine's timing
def test_windows_are_generated_while_those_before_are_trained(engine_python: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    settings = ("run.total_steps=4", "optimizer.warmup_steps=0", "checkpoint.export_huggingface=false", "sglang.weight_sync_bucket_mb=1")
    finish(write_recipe(tmp_path, "windows"), directory, engine_python, *settings)
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    ages = [row["rollout/token_staleness_mean"] for row in rows]
    assert ages[0] == 0 and all(0 < age <= 1 for age in ages[1:]), "all but the first windows were begun by the policy before"
    assert max(row["rollout/token_staleness_max"] for row in rows) == 1
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    finished = [row["window/finished_share"] > 0 for row in rows]
    assert [row["critic/grad_norm"] > 0 for row in rows] == finished and any(finished), "the critic learns from finished responses"
    assert require_windows_once(directory / "samples.jsonl") == 4 * 24
