"""VAPO with real servers: a critic in a separate process, and models that offload for the server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sglang_runs import finish

from tools.prove_resume import write_recipe

WAYS = {
    "own process, by memory": ("critic.parallel.num_processes=1",),
    "offloaded": ('model.offload="all"', 'critic.offload="all"', 'sglang.placement="disaggregated"'),
}


@pytest.mark.long  # test_window_training.py trains with a critic in a separate process
@pytest.mark.parametrize("way", WAYS)
def test_servers_serve_the_trained_weights(way: str, engine_python: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    settings = (
        "sglang.weight_sync_bucket_mb=1",
        "sglang.parity_interval=1",
        "run.total_steps=2",
        "optimizer.warmup_steps=0",
    )
    finish(write_recipe(tmp_path, "vapo"), directory, engine_python, *settings, *WAYS[way])
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2 and all(row["mismatch/abs_logprob_diff_mean"] < 1e-5 for row in rows)
    assert all(row["actor/grad_norm"] > 0 and row["critic/grad_norm"] > 0 for row in rows)
    assert (directory / "huggingface" / "model.safetensors").is_file()
