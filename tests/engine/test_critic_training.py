"""VAPO with real servers: beside a critic on a process of its own, and with models that leave the device for the server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.prove_resume import write_recipe

RUN_S = 400.0
pytestmark = pytest.mark.timeout(RUN_S + 30)

WAYS = {
    "own process, by memory": ("critic.parallel.num_processes=1",),
    "own process, by peers": ("critic.parallel.num_processes=1", 'sglang.transport="peer"'),
    "offloaded": ('model.offload="all"', 'critic.offload="all"', 'sglang.placement="disaggregated"'),
}


@pytest.mark.parametrize("way", WAYS)
def test_servers_serve_what_is_trained(way: str, engine_python: Path, repository: Path, tmp_path: Path) -> None:
    settings = [
        'rollout.engine="sglang"',
        f'sglang.python="{engine_python}"',
        "sglang.bucket_mb=1",
        "sglang.parity_interval=1",
        "run.total_steps=2",
        "optimizer.warmup_steps=0",
        "data.eval_paths=[]",
        "evaluation.interval=0",
        "evaluation.at_start=false",
        "evaluation.at_end=false",
        "mismatch.step0_max_mean_abs=1e-4",
        *WAYS[way],
    ]
    folder = tmp_path / "run"
    command = [sys.executable, "-W", "ignore", "-m", "megatron_dapo.cli.main", "train"]
    command += [str(write_recipe(tmp_path, "vapo")), "--layout", "tp2", "--run-folder", str(folder)]
    command += [part for setting in settings for part in ("--set", setting)]
    environment = {**os.environ, "PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_S, check=False)
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-2000:]

    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2 and all(row["mismatch/abs_logprob_diff_mean"] < 1e-5 for row in rows)
    assert all(row["actor/grad_norm"] > 0 and row["critic/grad_norm"] > 0 for row in rows)
    assert (folder / "huggingface" / "model.safetensors").is_file()
