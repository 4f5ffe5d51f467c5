"""T-PPO on a real server: responses continue after their windows with new weights; trainer and engine agree on them."""

from __future__ import annotations

import json
from pathlib import Path

from sglang_runs import finish

from tools.prove_resume import require_windows_once, write_recipe

WINDOW = 32


def test_windows_continue_on_a_stock_server(engine_python: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    settings = (f"window.tokens={WINDOW}", "run.total_steps=3", "checkpoint.export_huggingface=false")
    finish(write_recipe(tmp_path, "tppo"), directory, engine_python, *settings)
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [row["rollout/responses_continued"] > 0 for row in rows] == [False, True, True]
    assert all(row["mismatch/abs_logprob_diff_mean"] < 1e-5 for row in rows)
    assert require_windows_once(directory / "samples.jsonl") == 3 * 24
    samples = [json.loads(line) for line in (directory / "samples.jsonl").read_text().splitlines()]
    for sample in samples:
        start, length = sample["window"]["start"], len(sample["response_ids"])
        assert start % WINDOW == 0 and length <= start + WINDOW
        # A window has one version, the one that its step trains.
        assert sample["versions"][-1] == {"start": start, "end": length, "version": sample["train_step"] - 1}
