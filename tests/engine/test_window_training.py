"""T-PPO on a real server: responses go on behind their windows by new weights, and trainer and engine agree on them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.prove_resume import require_windows_once, write_recipe

RUN_S = 400.0
WINDOW = 32
pytestmark = pytest.mark.timeout(RUN_S + 30)


def test_windows_go_on_in_a_stock_server(engine_python: Path, repository: Path, tmp_path: Path) -> None:
    settings = [
        'rollout.engine="sglang"',
        f'sglang.python="{engine_python}"',
        f"window.tokens={WINDOW}",
        "run.total_steps=3",
        "data.eval_paths=[]",
        "evaluation.interval=0",
        "evaluation.at_start=false",
        "evaluation.at_end=false",
        "checkpoint.export_huggingface=false",
        "mismatch.step0_max_mean_abs=1e-4",
    ]
    folder = tmp_path / "run"
    command = [sys.executable, "-W", "ignore", "-m", "megatron_dapo.cli.main", "train"]
    command += [str(write_recipe(tmp_path, "tppo")), "--layout", "tp2", "--run-folder", str(folder)]
    command += [part for setting in settings for part in ("--set", setting)]
    environment = {**os.environ, "PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_S, check=False)
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-2000:]

    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["rollout/responses_continued"] > 0 for row in rows] == [False, True, True]
    assert all(row["mismatch/abs_logprob_diff_mean"] < 1e-5 for row in rows)
    assert require_windows_once(folder / "samples.jsonl") == 3 * 24
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    for sample in samples:
        start, length = sample["window"]["start"], len(sample["response_ids"])
        assert start % WINDOW == 0 and length <= start + WINDOW
        # A window is of one version, the one its step trains.
        assert sample["versions"][-1] == {"start": start, "end": length, "version": sample["train_step"] - 1}
