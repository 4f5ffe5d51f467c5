"""A worker that fails ends, whatever its records do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

RECIPE = """
[model]
path = "{directory}/no_model"
[data]
train_paths = ["{directory}/no_data.jsonl"]
[run]
output_dir = "{directory}/run"
"""
FAIL = """
import sys
from megatron_dapo.launch import worker
worker._REPORT_S = 1.5
worker.main([sys.argv[1]])
"""


def test_a_failure_whose_record_cannot_be_written_ends_the_process(tmp_path: Path) -> None:
    """A FIFO without a reader stands in for a hung file system: opening it to write blocks."""
    recipe, run = tmp_path / "recipe.toml", tmp_path / "run"
    recipe.write_text(RECIPE.format(directory=tmp_path))
    run.mkdir()
    os.mkfifo(run / "failure_rank_0.tmp")
    done = subprocess.run(
        [sys.executable, "-c", FAIL, str(recipe)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1 and "rank 0 failed" in done.stderr and "no_model" in done.stderr
    assert not (run / "failure.json").exists()
